"""Tests of the file format."""
