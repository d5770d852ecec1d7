"""Users, roles and privileges: permitted actions and error messages; the views of the schema; AUTH."""

from __future__ import annotations

from tests.conformance.case import (
    ALL,
    PRIMARY,
    SPACE,
    Request,
    Space,
    call,
    create_index,
    create_sequence,
    create_space,
    create_user,
    delete,
    drop_space,
    grant,
    group,
    insert,
    replace,
    request,
    select,
    tree,
    truncate,
    update,
    upsert,
)
from tests.conformance.target import password_hash

READ, WRITE, EXECUTE, SESSION, USAGE, CREATE, DROP, ALTER = 1, 2, 4, 8, 16, 32, 64, 128
ALICE, BOB, ROLE = 40, 41, 42

TWO = Space([PRIMARY, tree((1, "string"), name="s", unique=False)], [[1, "one"], [2, "two"]])


def by(user: str, *requests: Request) -> list[Request]:
    return [each.by(user) for each in requests]


guest = group(
    "guest without rights",
    TWO,
    {
        "PING": request(64).by("guest"),
        "SELECT": select([1]).by("guest"),
        "INSERT": insert([3, "x"]).by("guest"),
        "INSERT of a wrong tuple": insert(["x"]).by("guest"),
        "REPLACE": replace([1, "x"]).by("guest"),
        "DELETE": delete([1]).by("guest"),
        "UPDATE": update([1], ["=", 1, "x"]).by("guest"),
        "UPSERT": upsert([1, "x"], ["=", 1, "x"]).by("guest"),
        "SELECT by an unknown index": select([1], index=7).by("guest"),
        "SELECT from an unknown space": select([1], space=999).by("guest"),
        "CALL of an unknown function": call("nothing").by("guest"),
        "CREATE of a space": create_space(600, "mine", owner=0).by("guest"),
        "CREATE of a space for admin": create_space(600, "mine").by("guest"),
        "CREATE of an index": create_index([[0, "unsigned"]], id=5, name="x").by("guest"),
        "DROP of a space": drop_space().by("guest"),
        "truncate": truncate().by("guest"),
        "a new user": create_user(50, "eve").by("guest"),
        "a privilege for itself": grant(0, "universe", 0, READ).by("guest"),
        "_space": select([280], space=280).by("guest"),
        "_user": select([], space=304).by("guest"),
        "_cluster": select([], space=320).by("guest"),
        "_schema": select(["version"], space=272).by("guest"),
        "_vspace shows no user space": select([512], space=281).by("guest"),
        "_vindex shows no user space": select([512], space=289).by("guest"),
        "_vspace shows": select([], ALL, space=281).by("guest"),
        "_vindex shows": select([], ALL, space=289).by("guest"),
        "_vuser shows": select([], ALL, space=305).by("guest"),
        "_vpriv shows": select([], ALL, space=313).by("guest"),
        "_vfunc shows": select([], ALL, space=297).by("guest"),
        "_vsequence shows": select([], ALL, space=286).by("guest"),
        "_vcollation shows": select([], ALL, space=277, limit=5).by("guest"),
        "_vspace by name": select(["test"], space=281, index=2).by("guest"),
        "_session_settings": select([], ALL, space=380).by("guest"),
        "_truncate": select([], space=330).by("guest"),
        "_collation": select([1], space=276).by("guest"),
    },
)

views = group(
    "view",
    TWO,
    {
        "of spaces, by admin": select([512], space=281),
        "of spaces by name": select(["test"], space=281, index=2),
        "of spaces from an id": select([512], 5, space=281),
        "of spaces, the last ones": select([], 4, space=281, limit=2),
        "of indexes": select([512], space=289),
        "of indexes by name": select([512, "s"], space=289, index=2),
        "of users": select([], ALL, space=305),
        "of users by name": select(["admin"], space=305, index=2),
        "of privileges of guest": select([0], space=313, index=0),
        "of functions": select([], ALL, space=297, limit=3),
        "with an unknown index": select([], space=281, index=9),
        "with offset and limit": select([], ALL, space=281, offset=2, limit=2),
        "with a key too long": select([1, 2], space=281),
        "with a key of a wrong type": select(["x"], space=281),
    },
)

WITH_ALICE = [
    create_user(ALICE, "alice", password_hash("alice")),
    grant(ALICE, "universe", 0, SESSION | USAGE),
    grant(ALICE, "role", 2, EXECUTE),
]

alice = group(
    "user with rights",
    TWO,
    {
        "none yet": by("alice", select([1]), insert([3, "x"])),
        "to read a space": [grant(ALICE, "space", SPACE, READ), *by("alice", select([1]), insert([3, "x"]))],
        "to write a space": [grant(ALICE, "space", SPACE, WRITE), *by("alice", select([1]), insert([3, "x"]))],
        "to write, DELETE and UPDATE": [
            grant(ALICE, "space", SPACE, WRITE),
            *by("alice", delete([1]), update([2], ["=", 1, "x"]), upsert([2], ["=", 1, "y"])),
        ],
        "to read all spaces": [grant(ALICE, "space", "", READ), *by("alice", select([1]), select([280], space=280))],
        "to read the universe": [
            grant(ALICE, "universe", 0, SESSION | USAGE | READ),
            *by("alice", select([1]), insert([3, "x"]), select([280], space=280)),
        ],
        "to write the universe": [
            grant(ALICE, "universe", 0, SESSION | USAGE | WRITE),
            *by("alice", insert([3, "x"]), select([3])),
        ],
        "taken back": [
            grant(ALICE, "space", SPACE, READ),
            select([1]).by("alice"),
            delete([ALICE, "space", SPACE], space=312),
            select([1]).by("alice"),
        ],
        "to see what is granted": [
            grant(ALICE, "space", SPACE, READ),
            *by("alice", select([512], space=281), select([512], space=289), select([], ALL, space=313)),
        ],
        "by a role": [
            create_user(ROLE, "readers", type="role"),
            grant(ROLE, "space", SPACE, READ),
            grant(ALICE, "role", ROLE, EXECUTE),
            *by("alice", select([1]), insert([3, "x"])),
        ],
        "by a role in a role": [
            create_user(ROLE, "readers", type="role"),
            create_user(43, "outer", type="role"),
            grant(ROLE, "space", SPACE, READ),
            grant(43, "role", ROLE, EXECUTE),
            grant(ALICE, "role", 43, EXECUTE),
            select([1]).by("alice"),
        ],
        "by the role super": [
            grant(ALICE, "role", 31, EXECUTE),
            *by("alice", select([1]), insert([3, "x"]), create_space(600, "mine", owner=ALICE), drop_space(600)),
        ],
        "to create spaces": [
            grant(ALICE, "universe", 0, SESSION | USAGE | CREATE),
            grant(ALICE, "space", 280, WRITE),
            *by("alice", create_space(600, "mine", owner=ALICE), select([], space=600)),
        ],
        "to create spaces, for another owner": [
            grant(ALICE, "universe", 0, SESSION | USAGE | CREATE),
            grant(ALICE, "space", 280, WRITE),
            create_space(600, "mine").by("alice"),
        ],
        "to write _space, but not to create": [
            grant(ALICE, "space", 280, WRITE),
            create_space(600, "mine", owner=ALICE).by("alice"),
        ],
        "to write _index, but not to alter": [
            grant(ALICE, "space", 288, WRITE),
            create_index([[0, "unsigned"]], id=5, name="x").by("alice"),
        ],
        "to drop by _space alone": [grant(ALICE, "space", 280, WRITE), drop_space().by("alice")],
        "to truncate": [
            grant(ALICE, "space", 330, WRITE),
            truncate().by("alice"),
            grant(ALICE, "space", SPACE, WRITE),
            truncate().by("alice"),
        ],
        "of an owner": [
            create_space(600, "mine", owner=ALICE),
            create_index([[0, "unsigned"]], space=600),
            *by("alice", insert([1], space=600), select([1], space=600), delete([1], space=600)),
            *by("alice", select([600], space=281), select([600], space=289)),
        ],
        "to execute a function": [
            grant(ALICE, "function", 1, EXECUTE),
            call("nothing").by("alice"),
        ],
        "without usage": [
            grant(ALICE, "space", SPACE, READ),
            grant(ALICE, "universe", 0, SESSION),
            select([1]).by("alice"),
        ],
        "without anything on the universe, open already": [
            select([1]).by("alice"),
            delete([ALICE, "universe", 0], space=312),
            *by("alice", select([1]), request(64)),
        ],
        "then dropped": [
            request(64).by("alice"),
            delete([ALICE, "universe", 0], space=312),
            delete([ALICE, "role", 2], space=312),
            delete([ALICE], space=304),
            *by("alice", request(64), select([1])),
        ],
    },
    before=WITH_ALICE,
)

users = group(
    "definition of a user",
    [],
    {
        "plain": [create_user(50, "eve"), select([50], space=304)],
        "a role": create_user(50, "crew", type="role"),
        "with a password": create_user(50, "eve", password_hash("alice")),
        "with a taken name": create_user(50, "admin"),
        "with a taken id": create_user(1, "eve"),
        "without a name": create_user(50, ""),
        "with a line break in the name": create_user(50, "a\nb"),
        "of an unknown type": create_user(50, "eve", type="god"),
        "with an unknown owner": create_user(50, "eve", owner=999),
        "a role with a password": create_user(50, "crew", password_hash("alice"), type="role"),
        "with a broken password": insert([50, 1, "eve", "user", {"chap-sha1": "short"}], space=304),
        "with a password that is no text": insert([50, 1, "eve", "user", {"chap-sha1": 5}], space=304),
        "with an unknown method": insert([50, 1, "eve", "user", {"rot13": "x"}], space=304),
        "with a method that is no text": insert([50, 1, "eve", "user", {1: "x"}], space=304),
        "with auth that is no map": insert([50, 1, "eve", "user", "x"], space=304),
        "without auth": insert([50, 1, "eve", "user"], space=304),
        "with a name of 65001 characters": create_user(50, "n" * 65001),
        "drop guest": delete([0], space=304),
        "drop admin": delete([1], space=304),
        "drop public": delete([2], space=304),
        "drop super": delete([31], space=304),
        "drop an owner of spaces": [
            create_user(50, "eve"),
            create_space(600, "mine", owner=50),
            delete([50], space=304),
        ],
        "drop one with privileges": [
            create_user(50, "eve"),
            grant(50, "space", 280, READ),
            delete([50], space=304),
        ],
        "drop": [create_user(50, "eve"), delete([50], space=304), select([50], space=304)],
        "a password for guest": update([0], ["=", 4, {"chap-sha1": password_hash("alice")}], space=304),
        "an empty password for guest": update([0], ["=", 4, {"chap-sha1": password_hash("bob")}], space=304),
        "rename": [create_user(50, "eve"), update([50], ["=", 2, "eva"], space=304)],
    },
)

privileges = group(
    "definition of a privilege",
    TWO,
    {
        "on a space": [grant(ALICE, "space", SPACE, READ | WRITE), select([ALICE], space=312)],
        "on an unknown space": grant(ALICE, "space", 999, READ),
        "on an unknown function": grant(ALICE, "function", 999, EXECUTE),
        "on an unknown sequence": grant(ALICE, "sequence", 999, READ),
        "on an unknown role": grant(ALICE, "role", 999, EXECUTE),
        "on a user as a role": grant(ALICE, "role", 0, EXECUTE),
        "on an unknown user": grant(ALICE, "user", 999, ALTER),
        "on a user": grant(ALICE, "user", 0, ALTER),
        "of an unknown type": grant(ALICE, "stone", 0, READ),
        "for an unknown user": grant(999, "space", SPACE, READ),
        "by an unknown user": grant(ALICE, "space", SPACE, READ, grantor=999),
        "by another user": grant(ALICE, "space", SPACE, READ, grantor=0),
        "of nothing": grant(ALICE, "space", SPACE, 0),
        "of unknown bits": grant(ALICE, "space", SPACE, 2**20),
        "on the universe": grant(ALICE, "universe", 0, READ),
        "a role to itself": [create_user(ROLE, "r", type="role"), grant(ROLE, "role", ROLE, EXECUTE)],
        "roles in a circle": [
            create_user(ROLE, "r", type="role"),
            create_user(43, "s", type="role"),
            grant(ROLE, "role", 43, EXECUTE),
            grant(43, "role", ROLE, EXECUTE),
        ],
        "on all spaces": grant(ALICE, "space", "", READ),
        "on all functions": grant(ALICE, "function", "", EXECUTE),
        "with an id that is text": grant(ALICE, "space", "test", READ),
        "that keeps the space": [grant(ALICE, "space", SPACE, READ), drop_space()],
        "on a sequence": [create_sequence(9, "s"), grant(ALICE, "sequence", 9, READ)],
        "with too few fields": insert([1, ALICE, "space"], space=312),
    },
    before=WITH_ALICE,
)

SALTLESS = b"\0" * 20

authentication = group(
    "AUTH",
    [],
    {
        "of an unknown user": request(7, user_name="nobody", tuple=["chap-sha1", SALTLESS]).by("guest"),
        "with a wrong password": request(7, user_name="alice", tuple=["chap-sha1", SALTLESS]).by("guest"),
        "with a short scramble": request(7, user_name="alice", tuple=["chap-sha1", b"x"]).by("guest"),
        "with a scramble that is a number": request(7, user_name="alice", tuple=["chap-sha1", 5]).by("guest"),
        "with an unknown method": request(7, user_name="alice", tuple=["rot13", SALTLESS]).by("guest"),
        "with a method that is no text": request(7, user_name="alice", tuple=[5, SALTLESS]).by("guest"),
        "without a scramble": request(7, user_name="alice", tuple=["chap-sha1"]).by("guest"),
        "with an empty tuple": request(7, user_name="alice", tuple=[]).by("guest"),
        "as guest without a password": request(7, user_name="guest", tuple=[]).by("guest"),
        "as guest with a wrong scramble": request(7, user_name="guest", tuple=["chap-sha1", SALTLESS]).by("guest"),
        "without a user": request(7, tuple=["chap-sha1", SALTLESS]).by("guest"),
        "without a tuple": request(7, user_name="alice").by("guest"),
        "as a role": request(7, user_name="super", tuple=["chap-sha1", SALTLESS]).by("guest"),
        "with an empty name": request(7, user_name="", tuple=["chap-sha1", SALTLESS]).by("guest"),
        "without anything": request(7).by("guest"),
        "with a name that is no text": request(7, user_name=5, tuple=[]).by("guest"),
        "that works": select([], space=304).by("alice"),
        "with an empty password": [
            create_user(BOB, "bob", password_hash("bob")),
            grant(BOB, "universe", 0, SESSION | USAGE),
            request(64).by("bob"),
        ],
        "failed keeps the user": [
            *by("alice", request(7, user_name="alice", tuple=["chap-sha1", SALTLESS]), select([1], space=281, limit=1)),
        ],
    },
    before=WITH_ALICE,
)

CASES = [*guest, *views, *alice, *users, *privileges, *authentication]
