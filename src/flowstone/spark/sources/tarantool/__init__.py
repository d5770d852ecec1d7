"""Source and writer `tarantool`: live servers."""
