"""The members of a replica set: who is registered, quorums, and the choice of a peer to join."""
