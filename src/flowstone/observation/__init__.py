"""A replica set seen from outside: the reports of its members, combined, and the findings about them.

Works with every server that answers CALL of `box.info`: nodes and real Tarantool of any version. Nothing here changes
a member on its own; commands that do so use `query.py`. `cli/` and `web/` display the results.
"""
