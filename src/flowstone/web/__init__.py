"""What a browser and a probe are shown: the dashboard and its feed, metrics for Prometheus, health.

Served by `server.py` behind `guard.py`: read-only, on loopback unless told otherwise, and then with a token. Nodes are
read through `observation/`, and none is written to. Needs the extra `web` (starlette, uvicorn, prometheus-client).
"""
