"""Users, roles and privileges: box.schema.user.* and box.schema.role.*, with the results and errors of schema.lua."""

from __future__ import annotations

import base64
from typing import Any, Final

from flowstone.box.access import ADMIN, ALL, SUPER, SYSTEM_USER_ID_MAX, Privilege
from flowstone.box.ddl import schema_rows as rows
from flowstone.box.ddl.sequence_functions import drop_function, drop_sequence
from flowstone.box.ddl.space_functions import drop_space
from flowstone.box.ddl.stored_forms import illegal
from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.auth import METHOD, hash_of_hash

_NAMED: Final = tuple(privilege for privilege in Privilege if privilege < Privilege.GRANT)
"""Privileges that can be granted by name, in order of their bits."""

_GRANTABLE: Final[dict[str, int]] = {
    "universe": 0xFFFFFFFF,
    "space": 0xFFFFFFFF ^ (Privilege.SESSION | Privilege.GRANT | Privilege.REVOKE),
    "sequence": Privilege.READ
    | Privilege.WRITE
    | Privilege.USAGE
    | Privilege.CREATE
    | Privilege.ALTER
    | Privilege.DROP,
    "function": Privilege.EXECUTE | Privilege.USAGE | Privilege.CREATE | Privilege.DROP,
    "role": Privilege.EXECUTE | Privilege.USAGE | Privilege.CREATE | Privilege.DROP,
    "user": Privilege.CREATE | Privilege.ALTER | Privilege.DROP,
}
"""Privileges that apply to each type of object, as a mask."""

# --- users ----------------------------------------------------------------------------------------


def create_user(
    txn: BoxTransaction, name: str, *, password: str | None = None, if_not_exists: bool = False, time: int = 0
) -> None:
    """Create a user. `time` is the current Unix time; 2.11 stores when a password was set."""
    if _find(txn, name) is not None:
        if if_not_exists:
            return
        raise errors.UserExists(f"User '{name}' already exists")
    auth = {} if password is None else _auth(password)
    uid = _insert_user(txn, name, "user", auth, time)
    grant(txn, uid, "public")
    grant(txn, uid, "alter", "user", uid)
    # Only admin may grant privileges on the universe.
    with rows.as_admin(txn):
        grant(txn, uid, "session,usage", "universe", if_not_exists=True)


def user_exists(txn: BoxTransaction, name: str) -> bool:
    return _find(txn, name, "user") is not None


def passwd(txn: BoxTransaction, password: str, user: str | int | None = None, *, time: int = 0) -> None:
    """Set the password of `user`; None means the current user, who needs no privilege for it."""
    if user is None:
        uid = txn.user
        with rows.as_admin(txn):
            _set_password(txn, uid, password, time)
        return
    _set_password(txn, _user_id(txn, user), password, time)


def drop_user(txn: BoxTransaction, name: str | int, *, if_exists: bool = False) -> None:
    """Drop the user and all objects that it owns."""
    uid = _find(txn, name, "user")
    if uid is None:
        if if_exists:
            return
        raise errors.NoSuchUser(f"User '{name}' is not found")
    if uid <= SYSTEM_USER_ID_MAX:
        raise errors.DropUser(f"Failed to drop user or role '{name}': the user or the role is a system")
    if uid == txn.user:
        raise errors.DropUser(f"Failed to drop user or role '{name}': the user is active in the current session")
    _drop(txn, uid)


def user_info(txn: BoxTransaction, user: str | int | None = None) -> list[list[str]]:
    """Return a list per object: the names of the user's privileges, and the type and name of the object."""
    return _info(txn, txn.user if user is None else _user_id(txn, user))


def enable_user(txn: BoxTransaction, user: str | int) -> None:
    grant(txn, user, "session,usage", "universe", if_not_exists=True)


def disable_user(txn: BoxTransaction, user: str | int) -> None:
    revoke(txn, user, "session,usage", "universe", if_exists=True)


def _insert_user(txn: BoxTransaction, name: str, kind: str, auth: dict[str, str], time: int) -> int:
    extra: tuple[Any, ...] = () if txn.box.dialect is Dialect.V2_6 else ((), time if kind == "user" else 0)
    if not isinstance(name, str):
        raise illegal("name should be a string")
    return rows.auto_increment(txn, "_user", txn.user, name, kind, auth, *extra)


def _set_password(txn: BoxTransaction, uid: int, password: str, time: int) -> None:
    operations: list[tuple[Any, ...]] = [("=", 5, _auth(password))]
    if txn.box.dialect is not Dialect.V2_6:
        operations += [("=", 6, ()), ("=", 7, time)]
    rows.update(txn, "_user", (uid,), *operations)


def _auth(password: str) -> dict[str, str]:
    if not isinstance(password, str):
        raise illegal("options parameter 'password' should be of type string")
    return {METHOD: base64.b64encode(hash_of_hash(password)).decode()}


def _find(txn: BoxTransaction, user: str | int, kind: str | None = None) -> int | None:
    """Return the id of a user or role that the current user can see, or None."""
    row = rows.get(txn, "_vuser", user, index=rows.BY_NAME if isinstance(user, str) else 0)
    if row is None or kind not in (None, row[3]):
        return None
    found: int = row[0]
    return found


def _user_id(txn: BoxTransaction, user: str | int) -> int:
    uid = _find(txn, user, "user")
    if uid is None:
        raise errors.NoSuchUser(f"User '{user}' is not found")
    return uid


def _drop(txn: BoxTransaction, uid: int) -> None:
    for row in rows.select(txn, "_vspace", uid, index=rows.BY_OWNER):
        drop_space(txn, row[0])
    for row in rows.select(txn, "_vfunc", uid, index=rows.BY_OWNER):
        drop_function(txn, row[0])
    for row in rows.select(txn, "_vpriv", "role", uid, index=2):
        _revoke(txn, row[1], row[1], uid)
    for row in rows.select(txn, "_vsequence", uid, index=rows.BY_OWNER):
        drop_sequence(txn, row[0])
    user = rows.get(txn, "_vuser", uid)
    if user is not None and user[3] == "user":
        with rows.as_admin(txn):
            _revoke(txn, uid, uid, "session,usage", "universe", if_exists=True)
    for row in rows.select(txn, "_vpriv", uid):
        with rows.as_admin(txn):
            _revoke(txn, uid, uid, row[4], row[2], row[3])
    rows.delete(txn, "_user", uid)


# --- roles ----------------------------------------------------------------------------------------


def create_role(txn: BoxTransaction, name: str, *, if_not_exists: bool = False) -> None:
    if _find(txn, name) is not None:
        if if_not_exists:
            return
        raise errors.RoleExists(f"Role '{name}' already exists")
    _insert_user(txn, name, "role", {}, 0)


def role_exists(txn: BoxTransaction, name: str) -> bool:
    return _find(txn, name, "role") is not None


def drop_role(txn: BoxTransaction, name: str | int, *, if_exists: bool = False) -> None:
    uid = _find(txn, name, "role")
    if uid is None:
        if if_exists:
            return
        raise errors.NoSuchRole(f"Role '{name}' is not found")
    if uid <= SYSTEM_USER_ID_MAX or uid == SUPER:
        raise errors.DropUser(f"Failed to drop user or role '{name}': the user or the role is a system")
    _drop(txn, uid)


def role_info(txn: BoxTransaction, role: str | int) -> list[list[str]]:
    return _info(txn, _role_id(txn, role))


def grant_role(
    txn: BoxTransaction,
    role: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_not_exists: bool = False,
    grantor: str | int | None = None,
) -> None:
    """Grant `role` a privilege, or another role."""
    uid = _role_id(txn, role)
    _check_role_privilege(privilege)
    _grant(txn, uid, role, privilege, object_type, object_name, if_not_exists=if_not_exists, grantor=grantor)


def revoke_role(
    txn: BoxTransaction,
    role: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_exists: bool = False,
) -> None:
    uid = _role_id(txn, role)
    _check_role_privilege(privilege)
    _revoke(txn, uid, role, privilege, object_type, object_name, if_exists=if_exists)


def _role_id(txn: BoxTransaction, role: str | int) -> int:
    uid = _find(txn, role, "role")
    if uid is None:
        raise errors.NoSuchRole(f"Role '{role}' is not found")
    return uid


def _check_role_privilege(privilege: str | int) -> None:
    text = str(privilege).lower()
    if "session" in text or "usage" in text:
        raise errors.Grant("Incorrect grant arguments: system privilege can not be granted to role")


# --- privileges -----------------------------------------------------------------------------------


def grant(
    txn: BoxTransaction,
    user: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_not_exists: bool = False,
    grantor: str | int | None = None,
) -> None:
    """Grant `user` a privilege on an object; without a name, on all objects of the type.

    Without a type, `privilege` is the name of a role to grant.
    """
    uid = _user_id(txn, user)
    _grant(txn, uid, user, privilege, object_type, object_name, if_not_exists=if_not_exists, grantor=grantor)


def revoke(
    txn: BoxTransaction,
    user: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_exists: bool = False,
) -> None:
    _revoke(txn, _user_id(txn, user), user, privilege, object_type, object_name, if_exists=if_exists)


class _Subject:
    """Privilege and object of a grant, with the short forms resolved."""

    def __init__(
        self, txn: BoxTransaction, privilege: str | int, object_type: str | None, object_name: str | int | None
    ) -> None:
        if object_name is None and object_type is None:
            object_type, object_name, privilege = "role", privilege, "execute"
        self.privilege = privilege
        self.object_type = object_type or ""
        self.object_name: str | int = "" if object_name is None else object_name
        self.bits = privilege_bits(privilege, self.object_type, txn.box.dialect)
        self.object_id = _object_id(txn, self.object_type, self.object_name)

    @property
    def is_role(self) -> bool:
        return self.object_type == "role" and self.object_name != "" and self.privilege == "execute"


def _grant(
    txn: BoxTransaction,
    uid: int,
    name: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_not_exists: bool = False,
    grantor: str | int | None = None,
) -> None:
    subject = _Subject(txn, privilege, object_type, object_name)
    grantor_id = txn.user if grantor is None else _find(txn, grantor)
    row = rows.get(txn, "_vpriv", uid, subject.object_type, subject.object_id)
    before = 0 if row is None else row[4]
    if before | subject.bits != before:
        rows.replace(txn, "_priv", grantor_id, uid, subject.object_type, subject.object_id, before | subject.bits)
    elif not if_not_exists:
        if subject.is_role:
            raise errors.RoleGranted(f"User '{name}' already has role '{subject.object_name}'")
        what = subject.object_name if subject.object_type == "universe" else f" '{subject.object_name}'"
        raise errors.PrivGranted(f"User '{name}' already has {subject.privilege} access on {subject.object_type}{what}")


def _revoke(
    txn: BoxTransaction,
    uid: int,
    name: str | int,
    privilege: str | int,
    object_type: str | None = None,
    object_name: str | int | None = None,
    *,
    if_exists: bool = False,
) -> None:
    subject = _Subject(txn, privilege, object_type, object_name)
    row = rows.get(txn, "_vpriv", uid, subject.object_type, subject.object_id)
    if row is None or not row[4] & subject.bits:
        if if_exists:
            return
        if row is None and subject.is_role:
            raise errors.RoleNotGranted(f"User '{name}' does not have role '{subject.object_name}'")
        raise errors.PrivNotGranted(
            f"User '{name}' does not have {subject.privilege} access on {subject.object_type} '{subject.object_name}'"
        )
    left = row[4] & ~subject.bits
    if left:
        rows.replace(txn, "_priv", row[0], uid, subject.object_type, subject.object_id, left)
    else:
        rows.delete(txn, "_priv", uid, subject.object_type, subject.object_id)


def privilege_bits(privilege: str | int, object_type: str, dialect: Dialect) -> int:
    """Return the bits of the privileges; raise UnsupportedPriv if they do not apply to the type of object."""
    grantable = _GRANTABLE.get(str(object_type))
    if grantable is None:
        raise errors.UnknownSchemaObject(f"Unknown object type '{object_type}'")
    bits = privilege if isinstance(privilege, int) else _parse(str(privilege).lower(), dialect)
    if not bits or bits & grantable != bits:
        raise errors.UnsupportedPriv(f"Unsupported {object_type} privilege '{privilege}'")
    return bits


def _parse(text: str, dialect: Dialect) -> int:
    names = {(privilege.name or "").lower(): privilege.value for privilege in _NAMED}
    if dialect is Dialect.V2_6:
        # 2.6 searches for the names anywhere in the text.
        return sum(bit for name, bit in names.items() if name in text)
    words = [word for word in "".join(c if c.isalpha() else " " for c in text).split() if word]
    return 0 if any(word not in names for word in words) else sum(names[word] for word in dict.fromkeys(words))


def privilege_names(bits: int) -> str:
    return ",".join((privilege.name or "").lower() for privilege in _NAMED if bits & privilege)


def _object_id(txn: BoxTransaction, object_type: str, name: str | int) -> int | str:
    if not isinstance(name, str | int):
        raise illegal("wrong object name type")
    if object_type == "universe":
        return 0
    if name == "":
        return ""
    if object_type == "space":
        if name not in (txn.box.spaces if isinstance(name, int) else txn.box.names):
            raise errors.NoSuchSpace(f"Space '{name}' does not exist")
        return txn.space(name).id
    view = {"function": "_vfunc", "sequence": "_vsequence"}.get(object_type, "_vuser")
    row = rows.get(txn, view, name, index=rows.BY_NAME if isinstance(name, str) else 0)
    if row is None or (view == "_vuser" and row[3] != object_type):
        error, kind = {
            "function": (errors.NoSuchFunction, "Function '{}' does not exist"),
            "sequence": (errors.NoSuchSequence, "Sequence '{}' does not exist"),
            "role": (errors.NoSuchRole, "Role '{}' is not found"),
            "user": (errors.NoSuchUser, "User '{}' is not found"),
        }[object_type]
        raise error(kind.format(name))
    object_id: int = row[0]
    return object_id


def _info(txn: BoxTransaction, uid: int) -> list[list[str]]:
    return [
        [privilege_names(row[4] & ALL), row[2], _object_name(txn, row[2], row[3])]
        for row in rows.select(txn, "_vpriv", uid)
    ]


def _object_name(txn: BoxTransaction, object_type: str, object_id: int | str) -> str:
    if object_type == "universe" or object_id == "":
        return ""
    view = {"space": "_vspace", "sequence": "_vsequence", "function": "_vfunc"}.get(object_type, "_vuser")
    # Servers show the name even if the object is not visible to the user.
    user, txn.user = txn.user, ADMIN
    try:
        row = rows.get(txn, view, object_id)
    finally:
        txn.user = user
    return "" if row is None else str(row[2])
