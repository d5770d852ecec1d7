"""Who may do what: users and roles, what is granted to them, and the checks that statements ask for.

Filled from the rows of `_user` and `_priv`. Roles hand on what they have, roles of roles too; answers are kept
until a row changes, so that a check in front of every statement costs a look-up.
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
"""Users and roles up to here, and `super`, cannot be dropped."""

USER_MAX: Final = 32
"""BOX_USER_MAX of real servers: users and roles together."""


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
"""Servers keep 16 bits of what `_priv` says."""

ENTITY: Final = None
"""In the place of an object's id: all objects of the type. `_priv` writes an empty string."""

ObjectKey = tuple[str, int | str | None]
"""Type and id of an object."""

UNIVERSE: Final[ObjectKey] = ("universe", 0)


class User(msgspec.Struct, frozen=True):
    """A row of `_user`. `password_hash` is hash_of_hash of the password; None: nobody can log in with one."""

    id: int
    owner: int
    name: str
    is_role: bool = False
    password_hash: bytes | None = None

    def __repr__(self) -> str:
        return f"<{'role' if self.is_role else 'user'} {self.id} {self.name!r}>"


class Access:
    """Users, roles and grants of one box. Knows guest and admin before any row is read, as servers do."""

    def __init__(self) -> None:
        self._users = {GUEST: User(GUEST, ADMIN, "guest"), ADMIN: User(ADMIN, ADMIN, "admin")}
        self._by_name = {user.name: user for user in self._users.values()}
        self._granted: dict[int, dict[ObjectKey, int]] = {}
        self._space_owners: dict[int, int] = {}
        self._effective: dict[int, dict[ObjectKey, int]] = {}
        self._allowed: dict[tuple[int, int], int] = {}

    # --- users and grants, as the rows say ---

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
        """Makes `privilege` all that is granted on the object; 0 takes it away."""
        granted = self._granted.setdefault(grantee, {})
        granted.pop((object_type, object_id), None)
        if privilege:
            granted[object_type, object_id] = privilege & ALL
        self.forget()

    def put_owner(self, space_id: int, owner: int | None) -> None:
        """Notes who owns a space; owners may read and write it without a grant. None: the space is gone."""
        self._space_owners.pop(space_id, None)
        if owner is not None and owner != ADMIN:
            self._space_owners[space_id] = owner
        self._allowed.clear()

    def forget(self) -> None:
        """Drops the answers kept so far."""
        self._effective.clear()
        self._allowed.clear()

    # --- look-ups ---

    def user(self, user: int | str) -> User:
        """The user or role of this id or name."""
        found = self.find(user)
        if found is None:
            raise errors.NoSuchUser(f"User '{user}' is not found")
        return found

    def find(self, user: int | str) -> User | None:
        return self._users.get(user) if isinstance(user, int) else self._by_name.get(user)

    def login(self, name: str) -> User:
        """The user, never a role, who wants to open a session as `name`; AccessDenied without the right to."""
        user = self._by_name.get(name)
        if user is None or user.is_role:
            raise errors.NoSuchUser(f"User '{name}' is not found")
        if not self.universal(user.id) & Privilege.SESSION:
            raise denied(Privilege.SESSION, "universe", "", user.name)
        return user

    @property
    def users(self) -> tuple[User, ...]:
        """Users and roles, by id."""
        return tuple(self._users[user_id] for user_id in sorted(self._users))

    def granted(self, grantee: int) -> dict[ObjectKey, int]:
        """What the rows of `_priv` give to `grantee` itself."""
        return dict(self._granted.get(grantee, {}))

    def roles(self, grantee: int) -> list[int]:
        """Roles granted to the user or role itself, in the order of their ids."""
        granted = self._granted.get(grantee, {})
        return sorted(
            object_id
            for (object_type, object_id), privilege in granted.items()
            if object_type == "role" and isinstance(object_id, int) and privilege & Privilege.EXECUTE
        )

    def grantees(self, role: int) -> list[int]:
        """Users and roles that the role is granted to."""
        return [user_id for user_id in sorted(self._granted) if role in self.roles(user_id)]

    # --- what somebody may ---

    def universal(self, user: int) -> int:
        """Privileges on the universe."""
        return self.on(user, UNIVERSE)

    def on(self, user: int, key: ObjectKey) -> int:
        """Privileges on exactly this object, or entity, own and through roles."""
        effective = self._effective.get(user)
        if effective is None:
            effective = self._effective[user] = self._collect(user)
        return effective.get(key, 0)

    def allows(self, user: int, space_id: int) -> int:
        """All that `user` may do with the space: a mask of `Privilege`; 0 for who lacks USAGE."""
        allowed = self._allowed.get((user, space_id))
        if allowed is None:
            allowed = self._privileges(user, "space", space_id, self._space_owners.get(space_id, ADMIN))
            self._allowed[user, space_id] = allowed
        return allowed

    def can_see(self, user: int, object_type: str, object_id: int, privilege: int, owner: int) -> bool:
        """Whether system views show the object: to its owner, and to who has one of the privileges on it."""
        if owner == user:
            return True
        held = self.universal(user) | self.on(user, (object_type, ENTITY)) | self.on(user, (object_type, object_id))
        return bool(held & privilege)

    # --- checks ---

    def check(
        self, user: int, privilege: int, object_type: str, object_id: int | None, owner: int | None, name: str
    ) -> None:
        """Raises AccessDenied where a statement on a space, function or sequence needs more than `user` has."""
        wanted = privilege | Privilege.USAGE
        if not wanted & ~self._privileges(user, object_type, object_id, owner):
            return
        user_name = self.user(user).name
        if not self.universal(user) & Privilege.USAGE and object_type != "function":
            raise denied(Privilege.USAGE, "universe", "", user_name)
        raise denied(privilege, object_type, name, user_name)

    def check_universe(self, user: int, privilege: int, object_type: str = "universe", name: str = "") -> None:
        """Raises AccessDenied unless `privilege` is granted on everything; says it of the object where one is named."""
        missing = (privilege | Privilege.USAGE) & ~self.universal(user)
        if missing:
            raise denied(missing, object_type, name, self.user(user).name)

    def check_ddl(
        self, user: int, name: str, object_id: int | None, owner: int, object_type: str, privilege: int
    ) -> None:
        """Raises AccessDenied where a change of the schema needs more than `user` has.

        Owners may change what they own, but creating, and granting what one does not own, takes a privilege.
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
        """Raises RoleLoop where the role already has, through others, what it shall be granted to."""
        reached, layer = {grantee}, [grantee]
        while layer:
            layer = [user for member in layer for user in self.grantees(member) if user not in reached]
            reached.update(layer)
        if role in reached:
            names = self.user(role).name, self.user(grantee).name
            raise errors.RoleLoop(f"Granting role '{names[0]}' to role '{names[1]}' would create a loop")

    def _collect(self, user: int) -> dict[ObjectKey, int]:
        """Grants of the user and of all roles that it has, or-ed."""
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
            return 0  # USAGE on one object is no USAGE, not even for its owner
        if owner == user:
            return ALL
        return above if object_id is ENTITY else above | self.on(user, (object_type, object_id))


def denied(privilege: int, object_type: str, name: str, user_name: str) -> errors.TarantoolError:
    """The error AccessDenied, with its text and the three fields that its class has on the wire."""
    lowest = Privilege(privilege & -privilege)
    access_type = (lowest.name or "Any").capitalize()
    message = f"{access_type} access to {object_type} '{name}' is denied for user '{user_name}'"
    fields = {"object_type": object_type, "object_name": name, "access_type": access_type}
    record = ErrorRecord(type="AccessDeniedError", file="flowstone", line=0, message=message, code=42, fields=fields)
    return errors.AccessDenied(message, stack=ErrorStack((record,)))
