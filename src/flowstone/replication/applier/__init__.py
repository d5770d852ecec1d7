"""The replica's side of the protocol: states, messages, checks of received rows."""
