"""The lane: a compiled executor of statements on user spaces, for batches of requests and of rows."""
