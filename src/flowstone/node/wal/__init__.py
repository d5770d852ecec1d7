"""The write-ahead log of a node: journal, recovery, checkpoints, garbage collection."""
