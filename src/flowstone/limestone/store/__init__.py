"""The datastore: a data directory in use, its log channels, epochs, snapshots, blobs and compaction."""
