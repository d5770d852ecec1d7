"""Tests of the log file format."""
