"""Rows and values as text: JSON, YAML, Lua and tables. This package does not interpret rows.

CSV and Parquet are not text of rows: `columns/` decodes rows into Arrow batches, and `cli/logs/cat.py` writes these.
"""
