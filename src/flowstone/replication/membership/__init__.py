"""The members of a replica set: registration, quorums, and the choice of a peer to join."""
