"""Users, roles and their privileges, with the error messages of the real server."""

from __future__ import annotations

import pytest

from flowstone.box.access import ADMIN, ALL, GUEST, PUBLIC, SUPER, Access, Privilege, User
from flowstone.iproto import errors

BOB, CLERKS, CHIEFS = 32, 33, 34
SPACE, OTHER = 512, 513


@pytest.fixture
def access() -> Access:
    """Return the users after bootstrap, bob with usage, and two roles, of which CHIEFS has CLERKS."""
    access = Access()
    access.put_user(User(PUBLIC, ADMIN, "public", is_role=True))
    access.put_user(User(SUPER, ADMIN, "super", is_role=True))
    access.put_user(User(BOB, ADMIN, "bob"))
    access.put_user(User(CLERKS, ADMIN, "clerks", is_role=True))
    access.put_user(User(CHIEFS, ADMIN, "chiefs", is_role=True))
    access.put_grant(SUPER, "universe", 0, 0xFFFFFFFF)
    access.put_grant(GUEST, "universe", 0, 24)
    access.put_grant(BOB, "universe", 0, 24)
    access.put_grant(CHIEFS, "role", CLERKS, Privilege.EXECUTE)
    access.put_grant(CLERKS, "space", SPACE, Privilege.READ)
    return access


def test_admin_has_all_privileges_before_any_row_is_read() -> None:
    access = Access()
    assert access.allows(ADMIN, SPACE) == ALL
    access.check(ADMIN, Privilege.WRITE, "space", SPACE, ADMIN, "s")
    assert access.allows(GUEST, SPACE) == 0


def test_privileges_are_inherited_through_nested_roles_and_revoked_with_them(access: Access) -> None:
    assert not access.allows(BOB, SPACE) & Privilege.READ
    access.put_grant(BOB, "role", CHIEFS, Privilege.EXECUTE)
    assert access.allows(BOB, SPACE) & Privilege.READ
    assert not access.allows(BOB, SPACE) & Privilege.WRITE
    access.put_grant(CHIEFS, "role", CLERKS, 0)
    assert not access.allows(BOB, SPACE) & Privilege.READ


def test_super_role_grants_all_privileges(access: Access) -> None:
    access.put_grant(BOB, "role", SUPER, Privilege.EXECUTE)
    assert access.allows(BOB, SPACE) == ALL


def test_grant_on_all_spaces_applies_to_each(access: Access) -> None:
    access.put_grant(BOB, "space", None, Privilege.WRITE)
    assert access.allows(BOB, OTHER) & Privilege.WRITE
    access.check(BOB, Privilege.WRITE, "space", OTHER, ADMIN, "other")


def test_owner_needs_no_privilege_except_usage(access: Access) -> None:
    access.put_owner(SPACE, BOB)
    assert access.allows(BOB, SPACE) == ALL
    access.check(BOB, Privilege.WRITE, "space", SPACE, BOB, "s")
    access.put_grant(BOB, "universe", 0, 0)
    assert access.allows(BOB, SPACE) == 0
    with pytest.raises(errors.AccessDenied) as caught:
        access.check(BOB, Privilege.WRITE, "space", SPACE, BOB, "s")
    assert caught.value.message == "Usage access to universe '' is denied for user 'bob'"


def test_denials_have_the_text_and_fields_of_the_real_server(access: Access) -> None:
    with pytest.raises(errors.AccessDenied) as caught:
        access.check(GUEST, Privilege.READ, "space", SPACE, ADMIN, "x")
    assert caught.value.message == "Read access to space 'x' is denied for user 'guest'"
    assert caught.value.stack is not None
    (record,) = caught.value.stack.errors
    assert (record.type, record.code) == ("AccessDeniedError", 42)
    assert record.fields == {"object_type": "space", "object_name": "x", "access_type": "Read"}
    with pytest.raises(errors.AccessDenied, match="Execute access to function 'f' is denied for user 'guest'"):
        access.check(GUEST, Privilege.EXECUTE, "function", 1, ADMIN, "f")
    with pytest.raises(errors.AccessDenied, match="Execute access to universe '' is denied for user 'guest'"):
        access.check_universe(GUEST, Privilege.EXECUTE)
    with pytest.raises(errors.AccessDenied, match="Execute access to function 'nope' is denied for user 'guest'"):
        access.check_universe(GUEST, Privilege.EXECUTE, "function", "nope")


def test_dropped_user_is_unknown(access: Access) -> None:
    access.remove_user(BOB)
    access.put_grant(BOB, "universe", 0, 0)
    with pytest.raises(errors.NoSuchUser, match="User '32' is not found"):
        access.check(BOB, Privilege.READ, "space", SPACE, ADMIN, "s")
    with pytest.raises(errors.NoSuchUser, match="User 'bob' is not found"):
        access.user("bob")


def test_roles_and_users_without_session_cannot_log_in(access: Access) -> None:
    assert access.login("bob").id == BOB
    with pytest.raises(errors.NoSuchUser):
        access.login("clerks")
    access.put_grant(BOB, "universe", 0, int(Privilege.USAGE))
    with pytest.raises(errors.AccessDenied, match="Session access to universe '' is denied for user 'bob'"):
        access.login("bob")


def test_ddl_requires_ownership_or_a_privilege(access: Access) -> None:
    with pytest.raises(errors.AccessDenied, match="Create access to space 's' is denied for user 'bob'"):
        access.check_ddl(BOB, "s", SPACE, BOB, "space", Privilege.CREATE)
    access.check_ddl(BOB, "s", SPACE, BOB, "space", Privilege.DROP)
    with pytest.raises(errors.AccessDenied, match="Drop access to space 's' is denied for user 'bob'"):
        access.check_ddl(BOB, "s", SPACE, ADMIN, "space", Privilege.DROP)
    access.put_grant(BOB, "space", SPACE, Privilege.DROP)
    access.check_ddl(BOB, "s", SPACE, ADMIN, "space", Privilege.DROP)
    access.put_grant(BOB, "space", None, Privilege.CREATE)
    access.check_ddl(BOB, "s", SPACE, BOB, "space", Privilege.CREATE)


def test_role_cycle_is_rejected(access: Access) -> None:
    access.check_role(CLERKS, CHIEFS)
    with pytest.raises(errors.RoleLoop, match="Granting role 'chiefs' to role 'clerks' would create a loop"):
        access.check_role(CHIEFS, CLERKS)


def test_repr_of_a_user_contains_no_password() -> None:
    assert "secret" not in repr(User(1, 1, "a", password_hash=b"secret"))


def test_system_views_show_objects_owned_or_usable_by_the_user(access: Access) -> None:
    mask = Privilege.READ | Privilege.WRITE
    assert not access.can_see(BOB, "space", SPACE, mask, ADMIN)
    assert access.can_see(BOB, "space", SPACE, mask, BOB)
    access.put_grant(BOB, "space", SPACE, Privilege.WRITE)
    assert access.can_see(BOB, "space", SPACE, mask, ADMIN)
