"""box.schema.* and sequences by CALL: arguments, results and errors of a real server."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.node.server.procedures_schema import PROCEDURES
from tests.node.conversations import Conversation
from tests.node.instances import make_instance


@pytest.fixture
def client() -> Conversation:
    return Conversation(make_instance())


async def test_spaces_are_created_and_dropped(client: Conversation) -> None:
    format = ({"name": "id", "type": "unsigned"},)
    space, outcome = await client.call("box.schema.space.create", "a", {"format": format})
    assert (space["id"], space["name"], outcome) == (512, "a", "created")
    _, outcome = await client.call("box.schema.create_space", "a", {"if_not_exists": True})
    assert outcome == "not created"
    (index,) = await client.call("box.schema.index.create", 512, "pk", {})
    assert (index["name"], index["type"]) == ("pk", "TREE")
    assert await client.call("box.schema.space.format", 512) == (format,)
    await client.call("box.schema.space.format", 512, ())
    await client.call("box.schema.index.rename", 512, 0, "primary")
    await client.call("box.schema.index.alter", 512, 0, {"parts": ((1, "unsigned"),)})
    await client.call("box.schema.index.drop", 512, 0)
    await client.call("box.schema.space.rename", 512, "b")
    await client.call("box.schema.space.drop", 512)
    assert "b" not in client.instance.box.names
    await client.call("box.schema.space.drop", 512, "b", {"if_exists": True})


async def test_users_and_roles_are_created_granted_and_dropped(client: Conversation) -> None:
    await client.call("box.schema.user.create", "u", {"password": "p"})
    await client.call("box.schema.user.create", "u", {"if_not_exists": True})
    assert await client.call("box.schema.user.exists", "u") == (True,)
    await client.call("box.schema.role.create", "r")
    await client.call("box.schema.role.grant", "r", "read", "universe")
    await client.call("box.schema.user.grant", "u", "r")
    await client.call("box.schema.user.grant", "u", "r", None, None, {"if_not_exists": True})
    assert ("execute", "role", "r") in (await client.call("box.schema.user.info", "u"))[0]
    assert await client.call("box.schema.role.info", "r") == ((("read", "universe", ""),),)
    await client.call("box.schema.user.revoke", "u", "r")
    await client.call("box.schema.user.revoke", "u", "r", None, None, {"if_exists": True})
    await client.call("box.schema.role.revoke", "r", "read", "universe")
    await client.call("box.schema.user.disable", "u")
    await client.call("box.schema.user.enable", "u")
    assert await client.call("box.schema.role.exists", "r") == (True,)
    await client.call("box.schema.role.drop", "r")
    await client.call("box.schema.user.drop", "u")
    assert await client.call("box.schema.user.exists", "u") == (False,)


async def test_passwords_can_be_set_for_others_and_oneself(client: Conversation) -> None:
    await client.call("box.schema.user.create", "u", {"password": "p"})
    await client.call("box.schema.user.passwd", "u", "other")
    user = Conversation(client.instance)
    await user.log_in("u", "other")
    await client.call("box.schema.user.grant", "u", "execute", "universe")
    await user.call("box.schema.user.passwd", "own")
    await user.log_in("u", "own")
    assert await client.call("box.schema.user.password", "p2") == ("iQYwgJKYaKXf7BhZbslRkY3CbbU=",)
    with pytest.raises(errors.ProcLua, match="Usage"):
        await client.call("box.schema.user.passwd")


async def test_functions_are_created_and_can_be_granted(client: Conversation) -> None:
    await client.call("box.schema.func.create", "f", {"setuid": True})
    assert await client.call("box.schema.func.exists", "f") == (True,)
    assert client.instance.box.functions["f"].is_setuid
    await client.call("box.schema.func.drop", "f")
    await client.call("box.schema.func.drop", "f", {"if_exists": True})
    assert await client.call("box.schema.func.exists", "f") == (False,)


async def test_sequences_return_increasing_numbers(client: Conversation) -> None:
    (sequence,) = await client.call("box.schema.sequence.create", "s", {"min": 5})
    assert (sequence["start"], sequence["step"], sequence["uid"]) == (5, 1, 1)
    with pytest.raises(errors.SequenceNotStarted):
        await client.call("box.sequence.s:current")
    assert await client.call("box.sequence.s:next") == (5,)
    assert await client.call("box.sequence.s:next") == (6,)
    await client.call("box.sequence.s:set", 10)
    assert await client.call("box.sequence.s:current") == (10,)
    await client.call("box.sequence.s:alter", {"step": 2})
    assert await client.call("box.sequence.s:next") == (12,)
    await client.call("box.sequence.s:reset")
    await client.call("box.schema.sequence.alter", "s", {"step": 1})
    assert await client.call("box.sequence.s:next") == (5,)
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.sequence.s:nothing")
    await client.call("box.sequence.s:drop")
    await client.call("box.schema.sequence.drop", "s", {"if_exists": True})
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.sequence.s:next")


@pytest.mark.parametrize(
    ("name", "arguments", "code", "text"),
    [
        ("box.schema.space.create", (5,), 1, "Illegal parameters, name should be a string"),
        ("box.schema.space.create", (), 1, "Illegal parameters, name should be a string"),
        ("box.schema.space.create", ("b", {"nosuch": 1}), 1, "Illegal parameters, unexpected option 'nosuch'"),
        (
            "box.schema.space.create",
            ("b", {"engine": 1}),
            1,
            "Illegal parameters, options parameter 'engine' should be of type string",
        ),
        ("box.schema.space.create", ("_space",), 10, "Space '_space' already exists"),
        ("box.schema.space.create", ("b", 5), 1, "Illegal parameters, options should be a table"),
        ("box.schema.space.drop", (9999,), 36, "Space '#9999' does not exist"),
        ("box.schema.space.drop", ("x",), 1, "Illegal parameters, space_id should be a number"),
        ("box.schema.user.create", ("guest",), 46, "User 'guest' already exists"),
        (
            "box.schema.user.create",
            ("u", {"password": 5}),
            1,
            "Illegal parameters, options parameter 'password' should be of type string",
        ),
        ("box.schema.user.create", ("u", {"passwd": "x"}), 1, "Illegal parameters, unexpected option 'passwd'"),
        ("box.schema.user.drop", ("u",), 45, "User 'u' is not found"),
        (
            "box.schema.user.drop",
            ("admin",),
            44,
            "Failed to drop user or role 'admin': the user or the role is a system",
        ),
        ("box.schema.user.grant", ("guest", "nosuch", "space", "_space"), 98, "Unsupported space privilege 'nosuch'"),
        ("box.schema.user.grant", ("guest", "read", "space", "none"), 36, "Space 'none' does not exist"),
        ("box.schema.user.grant", ("guest", "read", "nosuch", "b"), 49, "Unknown object type 'nosuch'"),
        ("box.schema.user.revoke", ("guest", "super"), 92, "User 'guest' does not have role 'super'"),
        (
            "box.schema.role.grant",
            ("public", "session", "universe"),
            88,
            "Incorrect grant arguments: system privilege can not be granted to role",
        ),
        ("box.schema.role.drop", ("r",), 82, "Role 'r' is not found"),
        ("box.schema.func.drop", ("f",), 51, "Function 'f' does not exist"),
        ("box.schema.sequence.drop", ("s",), 145, "Sequence 's' does not exist"),
    ],
)
async def test_wrong_arguments_are_rejected_like_on_a_real_server(
    client: Conversation, name: str, arguments: Any, code: int, text: str
) -> None:
    with pytest.raises(TarantoolError) as caught:
        await client.call(name, *arguments)
    assert (caught.value.code, caught.value.message) == (code, text)


@pytest.mark.parametrize("argument", [{}, (1,), None, True, 1.5, -1, "", {"a": (1,)}, 2**64 - 1])
async def test_arguments_of_any_type_are_errors_with_codes(client: Conversation, argument: Any) -> None:
    for name in PROCEDURES:
        for arguments in ((argument,), (argument, argument), ("guest", argument, argument), (512, argument, argument)):
            response = await client.response(RequestType.CALL, {0x22: name, 0x21: arguments})
            assert response is not None
            assert response.type != 0x8000, f"{name}{arguments}: {response.error()}"
