"""The common part of the workloads of a run. Each is a space and the operations of clients on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from tests.simulation.history import Operation

if TYPE_CHECKING:
    from tests.simulation.clients import Client


class Workload(Protocol):
    """One kind of load. `write` and `read` are one operation each, on the named member."""

    name: str

    async def prepare(self, client: Client, member: str) -> None:
        """Create the rows that the first operation needs."""
        ...

    async def write(self, client: Client, member: str) -> None: ...

    async def read(self, client: Client, member: str) -> None: ...

    async def read_all(self, client: Client, member: str) -> bool:
        """Read everything; return True if that succeeded."""
        ...


class Keyed(ABC):
    """A workload with a few keys; a client reads one of them."""

    keys: ClassVar[range]

    @abstractmethod
    async def read_key(self, client: Client, member: str, key: int) -> Operation | None: ...

    async def read(self, client: Client, member: str) -> None:
        await self.read_key(client, member, client.random.choice(self.keys))

    async def read_all(self, client: Client, member: str) -> bool:
        for key in self.keys:
            operation = await self.read_key(client, member, key)
            if operation is None or not operation.is_ok:
                return False
        return True
