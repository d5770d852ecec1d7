"""`flowstone serve`: options, checks, process, HTTP."""
