"""Rows as typed Arrow columns, decoded in bulk without a Python object per row."""
