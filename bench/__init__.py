"""Benchmarks against real peers: both run in the same run, and ratios are printed."""
