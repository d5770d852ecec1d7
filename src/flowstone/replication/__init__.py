"""Pure state machines of replication: the vclock, the settled position, the rows that speak about the log.

Events go in, actions come out. Nothing here opens files or sockets, reads a clock, or draws a random number.
"""
