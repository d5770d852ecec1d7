"""The scenarios of Tarantool's own replication tests that a node must pass, one test or more for each."""
