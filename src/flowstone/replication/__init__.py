"""Pure state machines of replication: applier, relay, limbo, elections, membership, settled position.

Events go in, actions come out. Nothing here opens a file or a socket, reads a clock or generates a random number:
`node/` runs the machines and passes in the time and the randomness.
"""
