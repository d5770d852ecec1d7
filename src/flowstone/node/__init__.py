"""Running instances and their conversations, on asyncio: what `replication/` and `box/` decide happens here.

Protocol rules live in the pure rooms below; the world is reached only through the `Outside` handed in.
"""
