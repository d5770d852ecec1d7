"""Chaos: replica sets of real processes on loopback, clients that write continuously, and faults of every kind.

`python -m tests.chaos --seconds 60 [--seed 1] [--set elections|dialect-2.6]` starts a set, injects faults for that
long, heals the set, and checks all promises. The seed determines the faults; their timing depends on the machine.
"""
