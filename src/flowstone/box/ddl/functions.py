"""The schema functions of the API: box.schema.*, space:create_index() and others.

Each function executes, in one transaction, the statements on system spaces that a real server's Lua layer executes
(schema.lua of 2.6.0 and 2.11.9), so that they are logged, replicated and rejected in the same way. `alter.py` applies
the changed rows. If a statement fails, the caller has to roll back the statements before it.
"""

from __future__ import annotations

from flowstone.box.ddl.access_functions import (
    create_role,
    create_user,
    disable_user,
    drop_role,
    drop_user,
    enable_user,
    grant,
    grant_role,
    passwd,
    revoke,
    revoke_role,
    role_exists,
    role_info,
    user_exists,
    user_info,
)
from flowstone.box.ddl.sequence_functions import (
    alter_sequence,
    create_function,
    create_sequence,
    current_value,
    drop_function,
    drop_sequence,
    function_exists,
    next_value,
    reset_sequence,
    set_value,
)
from flowstone.box.ddl.space_functions import (
    alter_index,
    create_index,
    create_space,
    drop_index,
    drop_space,
    format_space,
    rename_index,
    rename_space,
    truncate,
)

__all__ = [
    "alter_index",
    "alter_sequence",
    "create_function",
    "create_index",
    "create_role",
    "create_sequence",
    "create_space",
    "create_user",
    "current_value",
    "disable_user",
    "drop_function",
    "drop_index",
    "drop_role",
    "drop_sequence",
    "drop_space",
    "drop_user",
    "enable_user",
    "format_space",
    "function_exists",
    "grant",
    "grant_role",
    "next_value",
    "passwd",
    "rename_index",
    "rename_space",
    "reset_sequence",
    "revoke",
    "revoke_role",
    "role_exists",
    "role_info",
    "set_value",
    "truncate",
    "user_exists",
    "user_info",
]
