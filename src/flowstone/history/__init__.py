"""The content of log files: their rows with the schema in force at each row, optionally without rolled back rows.

Combines `xlog/` (files), `box/` (schema) and `replication/` (settled transactions) into one stream of `Piece`s, which
commands print, the player replays and the pipeline plans from. Reads files through `Outside` and never changes them.
"""
