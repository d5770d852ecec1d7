"""What log files mean: their rows with the schema as of each row, and with what was withdrawn left out.

Joins `xlog/` (files), `box/` (schema) and `replication/` (what is settled) into one stream of `Piece`s, from which the
commands print, the player replays and the pipeline plans. It reads files through `Outside` and changes nothing.
"""
