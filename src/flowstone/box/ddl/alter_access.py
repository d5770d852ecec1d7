"""DDL on `_user`, `_priv`, `_func` and `_collation`: users, privileges, functions and collations."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from flowstone.box import system
from flowstone.box.access import ADMIN, ALL, GUEST, PUBLIC, SUPER, SYSTEM_USER_ID_MAX, USER_MAX, Privilege, User, denied
from flowstone.box.ddl.definition_checks import check_identifier, check_name_length, check_options
from flowstone.box.ddl.system_rows import has_grants, has_rows
from flowstone.box.engine.collation import OPTIONS, CollationError, read_collation
from flowstone.box.engine.function import FunctionDefinition, check_function, read_function
from flowstone.iproto import errors
from flowstone.iproto.auth import METHOD, SCRAMBLE_SIZE, hash_of_hash

if TYPE_CHECKING:
    from flowstone.box.engine.transaction import BoxTransaction

Row = tuple[Any, ...] | None
Undo = Callable[[], None] | None

OBJECT_TYPES: Final = ("universe", "space", "function", "user", "role", "sequence", "collation")
_LOCALE_MAX: Final = 1024

# --- _user ----------------------------------------------------------------------------------------


def change_user(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    row = old or new
    assert row is not None
    access, is_checked = transaction.box.access, not transaction.box.is_recovering
    before = access.find(row[0])
    if new is None:
        if before is None:
            return None
        if is_checked:
            _check_drop(transaction, before)
        access.remove_user(before.id)
        return lambda: access.put_user(before)
    user = read_user(new)
    if is_checked:
        _check_user(transaction, before, user)
    access.put_user(user)
    return lambda: access.remove_user(user.id) if before is None else access.put_user(before)


def _check_user(transaction: BoxTransaction, before: User | None, user: User) -> None:
    access = transaction.box.access
    kind = "role" if (before or user).is_role else "user"
    if before is None:
        access.check_ddl(transaction.user, user.name, user.id, user.owner, kind, Privilege.CREATE)
        if len(access.users) >= USER_MAX:
            raise errors.UserMax(f"A limit on the total number of users has been reached: {USER_MAX}")
    else:
        # Users may change their own row, to set their password.
        access.check_ddl(transaction.user, user.name, user.id, user.id, kind, Privilege.ALTER)


def _check_drop(transaction: BoxTransaction, user: User) -> None:
    kind = "role" if user.is_role else "user"
    transaction.box.access.check_ddl(transaction.user, user.name, user.id, user.owner, kind, Privilege.DROP)
    if user.id <= SYSTEM_USER_ID_MAX or user.id == SUPER:
        raise errors.DropUser(f"Failed to drop user or role '{user.name}': the user or the role is a system")
    owned = (
        (system.SPACE_ID, 1),
        (system.FUNC_ID, 1),
        (system.SEQUENCE_ID, 1),
        (system.PRIV_ID, 1),
        (system.PRIV_ID, 0),
    )
    if any(has_rows(transaction, space_id, index_id, user.id) for space_id, index_id in owned) or (
        transaction.box.access.grantees(user.id)
    ):
        raise errors.DropUser(f"Failed to drop user or role '{user.name}': the user has objects")


def read_user(row: tuple[Any, ...]) -> User:
    """Return the user or role that a tuple of `_user` defines."""
    user_id, owner, name, kind = row[:4]
    text = "Failed to create user '{}': {}"
    check_name_length(name, errors.CreateUser, text, "user name is too long")
    if kind not in ("user", "role"):
        raise errors.CreateUser(text.format(name, "unknown user type"))
    check_identifier(name)
    auth = row[4] if len(row) > 4 else None
    if auth and kind == "role":
        raise errors.CreateRole(f"Failed to create role '{name}': authentication data can not be set for a role")
    return User(user_id, owner, name, kind == "role", _password_hash(user_id, name, auth))


def _password_hash(user_id: int, name: str, auth: Any) -> bytes | None:
    text = "Failed to create user '{}': {}"
    if auth is None or isinstance(auth, tuple):
        return None
    if not isinstance(auth, dict):
        reason = "invalid password format, use box.schema.user.passwd() to reset password"
        raise errors.CreateUser(text.format(name, reason))
    stored = next((value for key, value in auth.items() if str(key).lower() == METHOD), None)
    if not stored:
        return None
    try:
        password_hash = base64.b64decode(str(stored), validate=True)
    except binascii.Error:
        password_hash = b""
    if len(password_hash) != SCRAMBLE_SIZE:
        raise errors.CreateUser(text.format(name, "invalid user password"))
    if user_id == GUEST and password_hash != hash_of_hash(""):
        raise errors.GuestUserPassword("Setting password for guest user has no effect")
    return password_hash


# --- _priv ----------------------------------------------------------------------------------------


def change_privilege(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    row = new or old
    assert row is not None
    access = transaction.box.access
    _, grantee, object_type, object_id, privilege = row[:5]
    # Since 3.0 some types of objects are identified by name.
    target = None if object_id == "" else object_id
    if not transaction.box.is_recovering:
        if object_type not in OBJECT_TYPES:
            raise errors.UnknownSchemaObject(f"Unknown object type '{object_type}'")
        _check_grant(transaction, row, Privilege.REVOKE if new is None else Privilege.GRANT)
        if grantee == ADMIN and object_type == "universe" and (new is None or privilege & ALL != ALL):
            raise errors.Grant("Incorrect grant arguments: can't revoke universe from the admin user")
    access.put_grant(grantee, object_type, target, 0 if new is None else privilege)
    before = 0 if old is None else old[4]
    return lambda: access.put_grant(grantee, object_type, target, before)


def _target(object_id: Any) -> int | None:
    """Return the id of the object; None for a privilege on all objects of a type."""
    if object_id == "":
        return None
    if type(object_id) is not int:
        raise errors.FieldType("Tuple field 4 type does not match one required by operation: expected unsigned")
    return object_id


def _check_grant(transaction: BoxTransaction, row: tuple[Any, ...], action: Privilege) -> None:
    """Check that grantor and grantee exist, and that the grantor may grant or revoke (`action`) the privilege."""
    access = transaction.box.access
    grantor, grantee = access.user(row[0]), access.user(row[1])
    object_type, target = row[2], _target(row[3])
    name, owner = _named(transaction, object_type, target)
    access.check_ddl(transaction.user, name, target, grantor.id, object_type, action)
    _check_exists(transaction, object_type, target, owner)
    # Every user may grant the role `public`.
    is_public = object_type == "role" and target == PUBLIC and row[4] == Privilege.EXECUTE
    if grantor.id not in (owner, ADMIN) and not is_public:
        raise denied(action, object_type, name, grantor.name)
    if object_type == "role" and target is not None:
        access.check_role(target, grantee.id)
    if not row[4] & ALL:
        raise errors.Grant("Incorrect grant arguments: the grant tuple has no privileges")


def _named(transaction: BoxTransaction, object_type: str, target: int | None) -> tuple[str, int | None]:
    """Return name and owner of the object: admin for the universe and whole types, None if it does not exist."""
    box = transaction.box
    if target is None or object_type == "universe":
        return "", ADMIN
    if object_type == "space" and target in box.spaces:
        definition = box.spaces[target].definition
        return definition.name, definition.owner
    if object_type == "function" and (function := _function(transaction, target)) is not None:
        return function.name, function.owner
    if object_type == "sequence" and target in box.sequences:
        return box.sequences[target].definition.name, box.sequences[target].definition.owner
    if object_type in ("role", "user") and (user := box.access.find(target)) is not None:
        return user.name, user.owner
    return "", None


def _check_exists(transaction: BoxTransaction, object_type: str, target: int | None, owner: int | None) -> None:
    if object_type in ("role", "user") and target is not None:
        user = transaction.box.access.find(target)
        if user is None or user.is_role != (object_type == "role"):
            name = user.name if user is not None else target
            if object_type == "role":
                raise errors.NoSuchRole(f"Role '{name}' is not found")
            raise errors.NoSuchUser(f"User '{name}' is not found")
    if owner is None:
        if object_type == "space":
            raise errors.NoSuchSpace(f"Space '{target}' does not exist")
        if object_type == "function":
            raise errors.NoSuchFunction(f"Function '{target}' does not exist")
        if object_type == "sequence":
            raise errors.NoSuchSequence(f"Sequence '{target}' does not exist")


# --- _func ----------------------------------------------------------------------------------------


def change_function(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    box = transaction.box
    functions = box.functions
    if new is None:
        assert old is not None
        return _drop_function(transaction, read_function(old))
    if not box.is_recovering:
        check_function(new)
    function = read_function(new)
    before = None if old is None else read_function(old)
    if before is not None and before != function and not box.is_recovering:
        raise errors.Unsupported("function does not support alter")
    if before is None and not box.is_recovering:
        box.access.check_ddl(transaction.user, function.name, function.id, function.owner, "function", Privilege.CREATE)
    if before is not None:
        functions.pop(before.name, None)
    functions[function.name] = function

    def undo() -> None:
        del functions[function.name]
        if before is not None:
            functions[before.name] = before

    return undo


def _drop_function(transaction: BoxTransaction, function: FunctionDefinition) -> Undo:
    box = transaction.box
    if not box.is_recovering:
        box.access.check_ddl(transaction.user, function.name, function.id, function.owner, "function", Privilege.DROP)
        for is_used, reason in (
            (has_grants(transaction, "function", function.id), "function has grants"),
            (has_rows(transaction, system.FUNC_INDEX_ID, 1, function.id), "function has references"),
            (function.language == "SQL_BUILTIN", "function is SQL built-in"),
            (_is_called(transaction, function), "function is referenced by constraint"),
        ):
            if is_used:
                # Real servers report the id of the owner here, too.
                raise errors.DropFunction(f"Can't drop function {function.owner}: {reason}")
    box.functions.pop(function.name, None)
    return lambda: box.functions.update({function.name: function})


def _is_called(transaction: BoxTransaction, function: FunctionDefinition) -> bool:
    """Return True if a constraint of some space calls the function."""
    spaces = transaction.box.spaces.values() if transaction.box.dialect.has_constraints else ()
    return any(check.function_id == function.id for space in spaces for check in space.definition.checks)


def _function(transaction: BoxTransaction, function_id: int) -> FunctionDefinition | None:
    functions = transaction.box.functions.values()
    return next((function for function in functions if function.id == function_id), None)


# --- _collation -----------------------------------------------------------------------------------


def change_collation(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    box = transaction.box
    if new is None:
        assert old is not None
        return _drop_collation(transaction, old)
    if not box.is_recovering:
        if old is not None:
            raise errors.Unsupported("collation does not support alter")
        _check_collation(new)
        box.access.check_ddl(transaction.user, new[1], new[0], new[2], "collation", Privilege.CREATE)
    collation = read_collation(new)
    if not box.is_recovering and not collation.is_binary:
        try:
            collation.open()
        except CollationError as error:
            raise errors.CantCreateCollation(f"Failed to initialize collation: {error.message}.") from error
    before = box.collations.get(collation.id)
    box.collations[collation.id] = collation

    def undo() -> None:
        del box.collations[collation.id]
        if before is not None:
            box.collations[collation.id] = before

    return undo


def _drop_collation(transaction: BoxTransaction, row: tuple[Any, ...]) -> Undo:
    box = transaction.box
    if not box.is_recovering:
        if row[0] == 0:
            raise errors.DropCollation("Can't drop collation none : system collation")
        box.access.check_ddl(transaction.user, row[1], row[0], row[2], "collation", Privilege.DROP)
    before = box.collations.pop(row[0], None)
    return lambda: None if before is None else box.collations.update({before.id: before})


def _check_collation(row: tuple[Any, ...]) -> None:
    _, name, _, kind, locale, options = row[:6]
    text = "Failed to initialize collation: {1}."
    check_name_length(name, errors.CantCreateCollation, text, "collation name is too long")
    check_identifier(name)
    if kind.upper() not in ("ICU", "BINARY"):
        raise errors.CantCreateCollation(text.format("", "unknown collation type"))
    if len(locale) > _LOCALE_MAX:
        raise errors.CantCreateCollation(text.format("", "collation locale is too long"))
    if locale:
        check_identifier(locale)
    known = dict.fromkeys(OPTIONS, "enum")
    check_options(options, known, errors.WrongCollationOptions, "Wrong collation options (field {}): {}", 5)
    for option, choices in OPTIONS.items():
        if option in options and options[option].lower() not in choices:
            expected = " | ".join(choice.upper() for choice in choices)
            reason = f"ICU wrong {option} option setting, expected {expected}"
            raise errors.CantCreateCollation(text.format("", reason))
