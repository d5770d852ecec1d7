"""Synchronous replication of a node: the driver of the limbo, elections, promotion, linearizable reads."""
