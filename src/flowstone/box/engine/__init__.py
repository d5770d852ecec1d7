"""The engine: indexes, keys, formats, statements, transactions, read views, constraints."""
