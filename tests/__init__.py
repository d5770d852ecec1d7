"""Flowstone's tests. Each package of `src/flowstone` has its mirror here."""
