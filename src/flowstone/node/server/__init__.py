"""The IPROTO server of a node: listener, sessions, batches of requests, procedures, watchers."""
