"""One table of cases, run against the real Tarantool 2.6 and against a node; and the real clients against a node."""
