"""A replica set seen from outside: what its members say of themselves, put side by side, and what is wrong with it.

Works with every server that answers CALL of `box.info`: nodes, and real Tarantool of any version. Nothing here writes
to a member by itself: commands with effect do, through `asking.py`. How it is shown is for `cli/` and `web/`.
"""
