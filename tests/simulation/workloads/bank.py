"""A bank: transfers between accounts are transactions that read before they write; reads cover all accounts at once.
Accounts are in two spaces, so many transfers change both.

Only for dialects with client transactions: 2.6 has no streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.checkers.bank import OPENED, State, Transfer
from tests.simulation.conversation import Conversation
from tests.simulation.plan import Plan
from tests.simulation.replica_set import SPACES

if TYPE_CHECKING:
    from tests.simulation.clients import Client

CURRENT_ID, SAVINGS_ID = SPACES["bank"].id, SPACES["savings"].id
SAVINGS: Final = (1, 4)
ACCOUNTS: Final = range(5)
BALANCE: Final = 10
AMOUNT_MAX: Final = 5


def _space_of(account: int) -> int:
    return SAVINGS_ID if account in SAVINGS else CURRENT_ID


class Bank:
    name = "bank"

    def __init__(self, plan: Plan) -> None:
        assert plan.dialect != "2.6", "the dialect has no transactions for clients"

    async def prepare(self, client: Client, member: str) -> None:
        async def open_accounts(member: Conversation) -> None:
            async with member.transaction() as transaction:
                for account in ACCOUNTS:
                    await transaction.replace(_space_of(account), (account, BALANCE, OPENED))

        opening = dict.fromkeys(ACCOUNTS, BALANCE)
        opened = await client.perform(member, self.name, "open", None, opening, open_accounts)
        assert opened is not None, member
        assert opened.is_ok, str(opened)

    async def write(self, client: Client, member: str) -> None:
        source, target = client.random.sample(ACCOUNTS, 2)
        transfer = Transfer(client.new_value(), source, target)
        wanted = client.random.randint(1, AMOUNT_MAX)

        async def move(member: Conversation) -> None:
            async with member.transaction() as transaction:
                for account in (transfer.source, transfer.target):
                    row = await transaction.get(_space_of(account), account)
                    assert row is not None, "accounts stay"
                    transfer.found[account] = State(row[1], row[2])
                    await client.think()
                transfer.amount = min(wanted, transfer.found[transfer.source].balance)
                for account in (transfer.source, transfer.target):
                    await transaction.replace(_space_of(account), (account, *transfer.left(account)))

        await client.perform(member, self.name, "transfer", None, transfer, move)

    async def read(self, client: Client, member: str) -> None:
        await self.read_all(client, member)

    async def read_all(self, client: Client, member: str) -> bool:
        async def read(member: Conversation) -> dict[int, State]:
            rows = await member.read(CURRENT_ID, SAVINGS_ID)
            return {account: State(balance, mark) for account, balance, mark in rows}

        operation = await client.perform(member, self.name, "read", None, None, read)
        return operation is not None and operation.is_ok
