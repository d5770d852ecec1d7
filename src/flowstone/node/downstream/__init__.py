"""Replication to downstreams: relays, and the server side of joins."""
