"""Logs as planned by Spark jobs: which bytes of which files have the changes between two settled positions."""
