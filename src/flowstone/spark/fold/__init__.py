"""Folding of changes into states, as Spark jobs."""
