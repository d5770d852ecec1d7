"""Benchmarks against the real peers: both run in the same run, and ratios are what is printed."""
