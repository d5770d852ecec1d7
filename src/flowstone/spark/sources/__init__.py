"""Data sources for Spark: options, offsets, the columns they return, and how slices of a log become batches."""
