"""`flowstone demo`."""
