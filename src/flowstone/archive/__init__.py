"""A log that is received and kept: log files, index, images, manifest; and spools, which keep rows until read.

`archive.py` runs an archive. Its appliers pass rows to `archive_sink.py`, which writes them to the log
(`archive_log.py`) or to a snapshot (`received_snapshot.py`); `store.py` owns the directory. `archive_log.py` decides
when a log file ends.
"""
