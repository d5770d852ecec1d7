"""Malicious peers: masters against our replicas, replicas against our masters, files against their readers.

A lie is one row of a table (`master_lies.py`, `join_lies.py`, `replica_lies.py`): its bytes, and the expected error of
its victim. `liar.py` has the valid protocol steps around a lie; `stage.py` has the victim, its honest replica, and the
final checks: the reason is readable, the node serves, and no part of the lie was stored.
"""
