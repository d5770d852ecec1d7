"""Rows and values as text: JSON, YAML, Lua and tables. Knows nothing of what rows mean."""
