"""Findings: what is wrong with a replica set or a directory, why, and what to do about it.

`finding.py` has the kinds. Each other module makes findings from one kind of input:

- from what all members report: `connection_findings.py` (missing links), `queue_findings.py` (quorums and the queue),
  `disk_findings.py`, `lag_findings.py` (every other member that lacks rows)
- from the error of one link: `link_causes.py`; `conflict.py` finds the tuples of a duplicate key
- from directories of log files: `directory_findings.py`, `expelled_directory.py`; `fork.py` compares two directories,
  `overlap.py` a directory with live members

`observation/explanation.py` calls the modules for live members, and itself makes the findings about unreachable
members, two processes that run as one member, and clock skew.
"""
