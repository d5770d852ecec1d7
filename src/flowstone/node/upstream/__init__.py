"""Replication from upstreams: appliers, and the rows that they apply to the box of a node."""
