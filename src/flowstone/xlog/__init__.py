"""The file format: rows, blocks, files and directories of `.xlog` and `.snap`, read and written.

Relies on `iproto/` for rows and on `outside/` for every byte that is read or written. This package treats transactions
and vclocks as numbers, and does not interpret spaces or rows.
"""
