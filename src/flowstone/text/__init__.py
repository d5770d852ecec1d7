"""Rows and values as text: JSON, YAML, Lua and tables. This package does not interpret rows."""
