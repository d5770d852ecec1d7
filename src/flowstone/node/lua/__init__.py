"""Lua, with the extra `flowstone[lua]`: functions of `_func`, EVAL, and the API of box for them.

`host.py` runs requests, `runtime.py` owns the LuaJIT state and its limits, `box_functions.py` and `value_functions.py`
are what Lua may call, and the `.lua` files are what user code sees. Nothing else imports `lupa`. A node imports this
package at the first request for Lua. The simulator runs no Lua: slices end by real time.
"""
