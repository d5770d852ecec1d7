"""The other log: Limestone's data directory, log channels, epochs and replication, as Tsurugi writes and speaks them.

Relies on `outside/` for every byte that is read, written or sent. Knows nothing of Tarantool.
"""
