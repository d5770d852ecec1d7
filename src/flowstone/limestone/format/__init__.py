"""Bytes of Limestone: entries and files of a data directory, messages of the replication protocol."""
