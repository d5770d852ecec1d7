"""What the workloads of a run have in common. Each is a space, and what clients do with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from tests.simulation.history import Operation

if TYPE_CHECKING:
    from tests.simulation.clients import Client


class Workload(Protocol):
    """One kind of load. `write` and `read` are one operation each, on the member named."""

    name: str

    async def prepare(self, client: Client, member: str) -> None:
        """Makes what has to be there before the first operation."""
        ...

    async def write(self, client: Client, member: str) -> None: ...

    async def read(self, client: Client, member: str) -> None: ...

    async def read_all(self, client: Client, member: str) -> bool:
        """Everything there is; whether that could be read."""
        ...


class Keyed(ABC):
    """How those read that have a few keys, of which a client looks at one."""

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
