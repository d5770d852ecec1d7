"""Peers that lie: masters to our replicas, replicas to our masters, files to whoever reads them.

A lie is one row of a table (`master_lies.py`, `join_lies.py`, `replica_lies.py`): how it is told, and what its victim
must say about it. `liar.py` has the good manners around a lie, `stage.py` the victim, the honest replica that follows
it, and what must be true afterwards: the reason can be read, the node serves, and nothing of the lie was kept.
"""
