"""Replication from a datastore to its replicas."""
