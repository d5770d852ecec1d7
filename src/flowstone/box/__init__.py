"""The in-memory engine: spaces and indexes, schema, statements, transactions and access rights.

Pure: nothing here opens a file or a socket, reads a clock, or draws a random number.
"""
