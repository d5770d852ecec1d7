"""Clients of live servers: connections, replay of logs, and hints about missing rights."""
