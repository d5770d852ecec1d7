"""Running instances and their connections, on asyncio. This package executes what `replication/` and `box/` decide.


Protocol rules live in those pure packages. Disk, network and clock are used only through the `Outside` that is passed
in.
"""
