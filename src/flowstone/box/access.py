"""Access control: users, roles, their privileges, and the access checks of statements.

Filled from the rows of `_user` and `_priv`. Privileges are inherited through roles and roles of roles. The effective
privileges are cached until a row changes, so that a check before each statement costs one lookup.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final

import msgspec

from flowstone.iproto import errors
from flowstone.iproto.extensions import ErrorRecord, ErrorStack

GUEST: Final = 0
ADMIN: Final = 1
PUBLIC: Final = 2
SUPER: Final = 31

SYSTEM_USER_ID_MAX: Final = PUBLIC
"""Users and roles with ids up to this one, and `super`, cannot be dropped."""

USER_MAX: Final = 32
"""Largest number of users and roles together (BOX_USER_MAX of real servers)."""


class Privilege(IntFlag):
    """Bits of `_priv.privilege`."""

    READ = 1
    WRITE = 2
    EXECUTE = 4
    SESSION = 8
    USAGE = 16
    CREATE = 32
    DROP = 64
    ALTER = 128
    REFERENCE = 256
    TRIGGER = 512
    INSERT = 1024
    UPDATE = 2048
    DELETE = 4096
    GRANT = 8192
    REVOKE = 16384


ALL: Final = 0xFFFF
"""All privileges: servers store 16 bits of `_priv.privilege`."""

ENTITY: Final = None
"""In place of an object id: all objects of a type. `_priv` stores an empty string for it."""

ObjectKey = tuple[str, int | str | None]
"""Type and id of an object."""

UNIVERSE: Final[ObjectKey] = ("universe", 0)


class User(msgspec.Struct, frozen=True):
    """A row of `_user`. `password_hash` is hash_of_hash of the password; None: no login with a password."""

    id: int
    owner: int
    name: str
    is_role: bool = False
    password_hash: bytes | None = None

    def __repr__(self) -> str:
        return f"<{'role' if self.is_role else 'user'} {self.id} {self.name!r}>"


class Access:
    """Users, roles and grants of one box. Like servers, it has guest and admin before any row is read."""

    def __init__(self) -> None:
        self._users = {GUEST: User(GUEST, ADMIN, "guest"), ADMIN: User(ADMIN, ADMIN, "admin")}
        self._by_name = {user.name: user for user in self._users.values()}
        self._granted: dict[int, dict[ObjectKey, int]] = {}
        self._space_owners: dict[int, int] = {}
        self._effective: dict[int, dict[ObjectKey, int]] = {}
        self._allowed: dict[tuple[int, int], int] = {}

    # --- users and grants, from the rows ---

    def put_user(self, user: User) -> None:
        self.remove_user(user.id)
        self._users[user.id] = user
        self._by_name[user.name] = user

    def remove_user(self, user_id: int) -> None:
        user = self._users.pop(user_id, None)
        if user is not None and self._by_name.get(user.name) is user:
            del self._by_name[user.name]
        self.forget()

    def put_grant(self, grantee: int, object_type: str, object_id: int | str | None, privilege: int) -> None:
        """Set the privileges of `grantee` on the object to `privilege`; 0 revokes all."""
        granted = self._granted.setdefault(grantee, {})
        granted.pop((object_type, object_id), None)
        if privilege:
            granted[object_type, object_id] = privilege & ALL
        self.forget()

    def put_owner(self, space_id: int, owner: int | None) -> None:
        """Set the owner of a space, who needs no grants on it; None if the space was dropped."""
        self._space_owners.pop(space_id, None)
        if owner is not None and owner != ADMIN:
            self._space_owners[space_id] = owner
        self._allowed.clear()

    def forget(self) -> None:
        """Clear the caches of effective privileges."""
        self._effective.clear()
        self._allowed.clear()

    # --- lookups ---

    def user(self, user: int | str) -> User:
        """Return the user or role with this id or name; raise NoSuchUser if it does not exist."""
        found = self.find(user)
        if found is None:
            raise errors.NoSuchUser(f"User '{user}' is not found")
        return found

    def find(self, user: int | str) -> User | None:
        return self._users.get(user) if isinstance(user, int) else self._by_name.get(user)

    def login(self, name: str) -> User:
        """Return the user, not a role, to open a session as `name`; raise AccessDenied without SESSION."""
        user = self._by_name.get(name)
        if user is None or user.is_role:
            raise errors.NoSuchUser(f"User '{name}' is not found")
        if not self.universal(user.id) & Privilege.SESSION:
            raise denied(Privilege.SESSION, "universe", "", user.name)
        return user

    @property
    def users(self) -> tuple[User, ...]:
        """All users and roles, in order of their ids."""
        return tuple(self._users[user_id] for user_id in sorted(self._users))

    def granted(self, grantee: int) -> dict[ObjectKey, int]:
        """Return the privileges granted to `grantee` directly, not through roles."""
        return dict(self._granted.get(grantee, {}))

    def roles(self, grantee: int) -> list[int]:
        """Return the roles granted directly to the user or role, in order of their ids."""
        granted = self._granted.get(grantee, {})
        return sorted(
            object_id
            for (object_type, object_id), privilege in granted.items()
            if object_type == "role" and isinstance(object_id, int) and privilege & Privilege.EXECUTE
        )

    def grantees(self, role: int) -> list[int]:
        """Return the users and roles to which the role is granted directly."""
        return [user_id for user_id in sorted(self._granted) if role in self.roles(user_id)]

    # --- effective privileges ---

    def universal(self, user: int) -> int:
        """Return the user's privileges on the universe."""
        return self.on(user, UNIVERSE)

    def on(self, user: int, key: ObjectKey) -> int:
        """Return the privileges on exactly this object or entity, granted directly or through roles."""
        effective = self._effective.get(user)
        if effective is None:
            effective = self._effective[user] = self._collect(user)
        return effective.get(key, 0)

    def allows(self, user: int, space_id: int) -> int:
        """Return all privileges of `user` on the space, as a mask; 0 if the user lacks USAGE."""
        allowed = self._allowed.get((user, space_id))
        if allowed is None:
            allowed = self._privileges(user, "space", space_id, self._space_owners.get(space_id, ADMIN))
            self._allowed[user, space_id] = allowed
        return allowed

    def can_see(self, user: int, object_type: str, object_id: int, privilege: int, owner: int) -> bool:
        """Return True if system views show the object: to its owner and to users with one of the privileges on it."""
        if owner == user:
            return True
        held = self.universal(user) | self.on(user, (object_type, ENTITY)) | self.on(user, (object_type, object_id))
        return bool(held & privilege)

    # --- checks ---

    def check(
        self, user: int, privilege: int, object_type: str, object_id: int | None, owner: int | None, name: str
    ) -> None:
        """Raise AccessDenied if `user` lacks `privilege` for a statement on a space, function or sequence."""
        wanted = privilege | Privilege.USAGE
        if not wanted & ~self._privileges(user, object_type, object_id, owner):
            return
        user_name = self.user(user).name
        if not self.universal(user) & Privilege.USAGE and object_type != "function":
            raise denied(Privilege.USAGE, "universe", "", user_name)
        raise denied(privilege, object_type, name, user_name)

    def check_universe(self, user: int, privilege: int, object_type: str = "universe", name: str = "") -> None:
        """Raise AccessDenied unless `user` has `privilege` on the universe; the error names the object, if given."""
        missing = (privilege | Privilege.USAGE) & ~self.universal(user)
        if missing:
            raise denied(missing, object_type, name, self.user(user).name)

    def check_ddl(
        self, user: int, name: str, object_id: int | None, owner: int, object_type: str, privilege: int
    ) -> None:
        """Raise AccessDenied if `user` lacks `privilege` for a change of the schema.

        Owners may change their objects without a privilege. Creating objects requires one in any case.
        """
        missing = (privilege | Privilege.USAGE) & ~self.universal(user)
        if missing:
            missing &= ~self.on(user, (object_type, ENTITY))
        is_owner = owner == user or user == ADMIN
        if not missing or (is_owner and not missing & (Privilege.USAGE | Privilege.CREATE)):
            return
        if missing & Privilege.USAGE:
            raise denied(Privilege.USAGE, "universe", "", self.user(user).name)
        if object_id is not ENTITY:
            missing &= ~self.on(user, (object_type, object_id))
        if missing:
            raise denied(missing, object_type, name, self.user(user).name)

    def check_role(self, role: int, grantee: int) -> None:
        """Raise RoleLoop if granting `role` to `grantee` would create a cycle of roles."""
        reached, layer = {grantee}, [grantee]
        while layer:
            layer = [user for member in layer for user in self.grantees(member) if user not in reached]
            reached.update(layer)
        if role in reached:
            names = self.user(role).name, self.user(grantee).name
            raise errors.RoleLoop(f"Granting role '{names[0]}' to role '{names[1]}' would create a loop")

    def _collect(self, user: int) -> dict[ObjectKey, int]:
        """Return the union of the privileges of the user and of all its roles."""
        effective: dict[ObjectKey, int] = {UNIVERSE: ALL} if user == ADMIN else {}
        waiting, seen = [user], {user}
        while waiting:
            grantee = waiting.pop()
            for key, privilege in self._granted.get(grantee, {}).items():
                effective[key] = effective.get(key, 0) | privilege
            for role in self.roles(grantee):
                if role not in seen:
                    seen.add(role)
                    waiting.append(role)
        return effective

    def _privileges(self, user: int, object_type: str, object_id: int | None, owner: int | None) -> int:
        above = self.universal(user) | self.on(user, (object_type, ENTITY))
        if not above & Privilege.USAGE:
            return 0  # USAGE on a single object does not count, not even for its owner
        if owner == user:
            return ALL
        return above if object_id is ENTITY else above | self.on(user, (object_type, object_id))


def denied(privilege: int, object_type: str, name: str, user_name: str) -> errors.TarantoolError:
    """Return the error AccessDenied, with its text and the three extra fields that it has on the wire."""
    lowest = Privilege(privilege & -privilege)
    access_type = (lowest.name or "Any").capitalize()
    message = f"{access_type} access to {object_type} '{name}' is denied for user '{user_name}'"
    fields = {"object_type": object_type, "object_name": name, "access_type": access_type}
    record = ErrorRecord(type="AccessDeniedError", file="flowstone", line=0, message=message, code=42, fields=fields)
    return errors.AccessDenied(message, stack=ErrorStack((record,)))
