"""Elections: the state machine of one member."""
