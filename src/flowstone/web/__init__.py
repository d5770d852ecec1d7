"""The HTTP side: the dashboard and its feed, metrics for Prometheus, and health checks.

`server.py` serves applications through `guard.py`: read-only, on loopback by default, and with a token on any other
address. Servers are queried through `observation/`; nothing here writes to them. Requires the extra `web` (starlette,
uvicorn, prometheus-client).
"""
