"""Findings: what is wrong with a replica set or a directory, why, and what to do about it."""
