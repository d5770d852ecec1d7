"""Chaos: replica sets of real processes on loopback, clients that write all the time, and everything that can go wrong.

`python -m tests.chaos --seconds 60 [--seed 1] [--set elections|dialect-2.6]` makes a set, breaks it for so long, heals
it, and says whether all that was promised held. Which faults come is in the seed; when they hit, the machine decides.
"""
