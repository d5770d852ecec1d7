"""The pure in-memory engine: system spaces, schema, update operations, and what the node issues add.

Tuples, definitions and changes to them, as values. Nothing here opens files or sockets, reads a clock, or draws
a random number.
"""
