"""box.schema.*, box.sequence.NAME:* and box.func.NAME:call for CALL.

Each procedure calls a function of `box/ddl/functions.py` in one transaction. This module converts arguments and
results.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.engine.sequence import Sequence
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import auth, errors
from flowstone.node.instance import Instance
from flowstone.node.server.procedures import Call, Outcome, Procedure, Results, value
from flowstone.node.server.procedures_space import describe_index, stored_format

Change = Callable[[Call, BoxTransaction], Results]

_METHOD = re.compile(r"box\.sequence\.([^.:]+):(\w+)")


def _changing(change: Change) -> Procedure:
    """Return a procedure that changes the schema."""

    def run(call: Call) -> Outcome:
        return call.writing(partial(_tried, change, call))

    return run


def _asking(question: Change) -> Procedure:
    """Return a procedure that only reads."""

    def run(call: Call) -> Outcome:
        return _tried(question, call, call.reading())

    return run


def _tried(change: Change, call: Call, transaction: BoxTransaction) -> Results:
    try:
        return change(call, transaction)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        # Clients send arguments of any type; wrong types are found only where the arguments are used.
        raise errors.IllegalParams(f"Illegal parameters, invalid arguments for {call.name}") from error


def _now(call: Call) -> int:
    return int(call.instance.outside.clock.wall())


# --- spaces and indexes ---


def _create_space(call: Call, transaction: BoxTransaction) -> Results:
    space, outcome = ddl.create_space(transaction, call.text(0, "name"), **call.options(1))
    return value(_describe_space(space, transaction.box), outcome)


def _describe_space(space: EngineSpace, box: Box) -> dict[str, Any]:
    """Return the fields of the Lua object of a space that can be sent."""
    definition = space.definition
    return {
        "id": definition.id,
        "name": definition.name,
        "engine": definition.engine,
        "field_count": definition.field_count,
        "is_local": definition.is_local,
        "temporary": definition.is_temporary,
        "is_sync": definition.is_sync,
        "enabled": bool(space.indexes),
        "index": {index.definition.name: describe_index(index, box) for index in space.indexes.values()},
    }


def _drop_space(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_space(transaction, call.number(0, "space_id"), if_exists=bool(call.options(2).get("if_exists")))
    return []


def _rename_space(call: Call, transaction: BoxTransaction) -> Results:
    ddl.rename_space(transaction, call.number(0, "space_id"), call.text(1, "space_name"))
    return []


def _format_space(call: Call, transaction: BoxTransaction) -> Results:
    space = transaction.space(call.number(0, "id"))
    if call.get(1) is None:
        return value(stored_format(transaction, space))
    ddl.format_space(transaction, space.id, call.get(1))
    return []


def _create_index(call: Call, transaction: BoxTransaction) -> Results:
    index, _ = ddl.create_index(transaction, call.number(0, "space_id"), call.text(1, "name"), **call.options(2))
    return value(describe_index(index, transaction.box))


def _drop_index(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_index(transaction, call.number(0, "space_id"), call.number(1, "index_id"))
    return []


def _rename_index(call: Call, transaction: BoxTransaction) -> Results:
    ddl.rename_index(transaction, call.number(0, "space_id"), call.number(1, "index_id"), call.text(2, "name"))
    return []


def _alter_index(call: Call, transaction: BoxTransaction) -> Results:
    ddl.alter_index(transaction, call.number(0, "space_id"), call.get(1), **call.options(2))
    return []


# --- users, roles, privileges ---


def _create_user(call: Call, transaction: BoxTransaction) -> Results:
    ddl.create_user(transaction, call.text(0, "name"), **_only(call.options(1), USER_OPTIONS), time=_now(call))
    return []


USER_OPTIONS = {"password": "string", "if_not_exists": "boolean"}


def _only(options: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Return `options`; raise IllegalParams for an unknown option or a wrong type."""
    for name, given in options.items():
        if name not in known:
            raise errors.IllegalParams(f"Illegal parameters, unexpected option '{name}'")
        if not isinstance(given, str if known[name] == "string" else bool):
            raise errors.IllegalParams(
                f"Illegal parameters, options parameter '{name}' should be of type {known[name]}"
            )
    return options


def _flag(call: Call, number: int, name: str) -> dict[str, bool]:
    return {name: bool(_only(call.options(number), {name: "boolean"}).get(name))}


def _drop_user(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_user(transaction, call.get(0), **_flag(call, 1, "if_exists"))
    return []


def _user_exists(call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.user_exists(transaction, call.get(0)))


def _user_info(call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.user_info(transaction, call.get(0)))


def _passwd(call: Call, transaction: BoxTransaction) -> Results:
    """Set a password: the caller's with one argument, another user's with two arguments."""
    if call.get(0) is None:
        raise errors.ProcLua("Usage: box.schema.user.passwd([user,] password)")
    if call.get(1) is None:
        ddl.passwd(transaction, call.text(0, "password"), time=_now(call))
    else:
        ddl.passwd(transaction, call.text(1, "password"), call.get(0), time=_now(call))
    return []


def _password(call: Call) -> Outcome:
    return value(base64.b64encode(auth.hash_of_hash(call.text(0, "password"))).decode())


def _enable_user(call: Call, transaction: BoxTransaction) -> Results:
    ddl.enable_user(transaction, call.get(0))
    return []


def _disable_user(call: Call, transaction: BoxTransaction) -> Results:
    ddl.disable_user(transaction, call.get(0))
    return []


def _granting(grant: Callable[..., None], is_there: str) -> Change:
    """Return a procedure that grants or revokes; its arguments are user, privileges, object type and name, options."""

    def change(call: Call, transaction: BoxTransaction) -> Results:
        options = call.options(4)
        flag = {is_there: True} if options.get(is_there) else {}
        grantor = {"grantor": options["grantor"]} if "grantor" in options and is_there == "if_not_exists" else {}
        grant(transaction, call.get(0), call.get(1), call.get(2), call.get(3), **flag, **grantor)
        return []

    return change


def _create_role(call: Call, transaction: BoxTransaction) -> Results:
    ddl.create_role(transaction, call.text(0, "name"), **_flag(call, 1, "if_not_exists"))
    return []


def _drop_role(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_role(transaction, call.get(0), **_flag(call, 1, "if_exists"))
    return []


def _role_exists(call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.role_exists(transaction, call.get(0)))


def _role_info(call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.role_info(transaction, call.get(0)))


# --- functions and sequences ---


def _create_function(call: Call, transaction: BoxTransaction) -> Results:
    ddl.create_function(transaction, call.text(0, "name"), **{**call.options(1), "time": _now(call)})
    return []


def _drop_function(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_function(transaction, call.get(0), **_flag(call, 1, "if_exists"))
    return []


def _function_exists(call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.function_exists(transaction, call.get(0)))


def _create_sequence(call: Call, transaction: BoxTransaction) -> Results:
    return value(_describe_sequence(ddl.create_sequence(transaction, call.text(0, "name"), **call.options(1))))


def _describe_sequence(sequence: Sequence) -> dict[str, Any]:
    definition = sequence.definition
    return {
        "id": definition.id,
        "uid": definition.owner,
        "name": definition.name,
        "step": definition.step,
        "min": definition.min,
        "max": definition.max,
        "start": definition.start,
        "cache": definition.cache,
        "cycle": definition.cycle,
    }


def _alter_sequence(call: Call, transaction: BoxTransaction) -> Results:
    ddl.alter_sequence(transaction, call.get(0), **call.options(1))
    return []


def _drop_sequence(call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_sequence(transaction, call.get(0), **_flag(call, 1, "if_exists"))
    return []


def find_method(instance: Instance, name: str) -> Procedure | None:
    """Return the method of an existing sequence; None if there is none."""
    match = _METHOD.fullmatch(name)
    if match is None or not any(known.definition.name == match[1] for known in instance.box.sequences.values()):
        return None
    method = _METHODS.get(match[2])
    if method is None:
        return None
    change, only_reads = method
    return (_asking if only_reads else _changing)(partial(change, match[1]))


def _next(name: str, call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.next_value(transaction, name))


def _current(name: str, call: Call, transaction: BoxTransaction) -> Results:
    return value(ddl.current_value(transaction, name))


def _set(name: str, call: Call, transaction: BoxTransaction) -> Results:
    ddl.set_value(transaction, name, call.number(0, "value"))
    return []


def _reset(name: str, call: Call, transaction: BoxTransaction) -> Results:
    ddl.reset_sequence(transaction, name)
    return []


def _alter(name: str, call: Call, transaction: BoxTransaction) -> Results:
    ddl.alter_sequence(transaction, name, **call.options(0))
    return []


def _drop(name: str, call: Call, transaction: BoxTransaction) -> Results:
    ddl.drop_sequence(transaction, name)
    return []


_METHODS: dict[str, tuple[Callable[[str, Call, BoxTransaction], Results], bool]] = {
    "next": (_next, False),
    "current": (_current, True),
    "set": (_set, False),
    "reset": (_reset, False),
    "alter": (_alter, False),
    "drop": (_drop, False),
}

PROCEDURES: dict[str, Procedure] = {
    "box.schema.space.create": _changing(_create_space),
    "box.schema.create_space": _changing(_create_space),
    "box.schema.space.drop": _changing(_drop_space),
    "box.schema.space.rename": _changing(_rename_space),
    "box.schema.space.format": _changing(_format_space),
    "box.schema.index.create": _changing(_create_index),
    "box.schema.index.drop": _changing(_drop_index),
    "box.schema.index.rename": _changing(_rename_index),
    "box.schema.index.alter": _changing(_alter_index),
    "box.schema.user.create": _changing(_create_user),
    "box.schema.user.drop": _changing(_drop_user),
    "box.schema.user.exists": _asking(_user_exists),
    "box.schema.user.info": _asking(_user_info),
    "box.schema.user.passwd": _changing(_passwd),
    "box.schema.user.password": _password,
    "box.schema.user.enable": _changing(_enable_user),
    "box.schema.user.disable": _changing(_disable_user),
    "box.schema.user.grant": _changing(_granting(ddl.grant, "if_not_exists")),
    "box.schema.user.revoke": _changing(_granting(ddl.revoke, "if_exists")),
    "box.schema.role.create": _changing(_create_role),
    "box.schema.role.drop": _changing(_drop_role),
    "box.schema.role.exists": _asking(_role_exists),
    "box.schema.role.info": _asking(_role_info),
    "box.schema.role.grant": _changing(_granting(ddl.grant_role, "if_not_exists")),
    "box.schema.role.revoke": _changing(_granting(ddl.revoke_role, "if_exists")),
    "box.schema.func.create": _changing(_create_function),
    "box.schema.func.drop": _changing(_drop_function),
    "box.schema.func.exists": _asking(_function_exists),
    "box.schema.sequence.create": _changing(_create_sequence),
    "box.schema.sequence.alter": _changing(_alter_sequence),
    "box.schema.sequence.drop": _changing(_drop_sequence),
}
