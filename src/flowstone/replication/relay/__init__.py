"""The master's side of the protocol."""
