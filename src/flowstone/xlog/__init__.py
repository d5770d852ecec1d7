"""The file format: rows, blocks, files and directories of `.xlog` and `.snap`, read and written.

Relies on `iproto/` for rows and on `outside/` for every byte that is read or written. Knows transactions and
vclocks as numbers; never knows what a space is or what a row means.
"""
