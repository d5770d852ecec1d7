"""Procedures in Python that run in a transaction, with the rights of their caller: what `flowstone serve --procedures`
loads.

A procedure is a function, plain or async, whose first parameter is a `ProcedureCall`. The node checks the arguments
against the annotations of the other parameters, begins a transaction with the rights that a stored function would have
(those of the caller, or of the owner of a function with `setuid`), and commits it when the procedure returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from flowstone.iproto import errors
from flowstone.node.spaces import TransactionSpace
from flowstone.node.transactions import Transaction

if TYPE_CHECKING:
    from flowstone.node.server.procedures import Call

F = TypeVar("F", bound=Callable[..., Any])

_OWN_TRANSACTION = "__flowstone_transaction__"


class ProcedureCall:
    """One CALL of a procedure: its transaction, its caller, and messages to the client.

    Example:
        def sell(call: flowstone.ProcedureCall, product: int, count: int) -> int:
            stock = call.space("products").update(product, [("-", "stock", count)])
            call.push("reserved")
            return stock["stock"]
    """

    def __init__(self, call: Call, transaction: Transaction | None) -> None:
        self._call = call
        self._transaction = transaction

    @property
    def user(self) -> str:
        """The name of the user who calls."""
        return self._call.instance.box.access.user(self._call.session.user).name

    @property
    def session_id(self) -> int:
        """The number of the connection."""
        return self._call.session.id

    def space(self, space: str | int) -> TransactionSpace:
        """Return the space with this name or id, inside the transaction of the call.

        Raises:
            TarantoolError: The space does not exist (error 36, ER_NO_SUCH_SPACE), or the procedure runs without a
                transaction.
        """
        interactive = self._call.transaction
        if interactive is not None:
            return TransactionSpace(interactive, interactive.space(space).id)
        if self._transaction is None:
            raise errors.NoTransaction("No active transaction")
        return self._transaction.space(space)

    def transaction(self, isolation: str = "default", *, timeout: float | None = None) -> Transaction:
        """Return a transaction with the rights of the call, for `async with`; for procedures that run without one.

        Raises:
            TarantoolError: The call has a transaction already (error 79, ER_ACTIVE_TRANSACTION).
        """
        if self._transaction is not None or self._call.transaction is not None:
            raise errors.ActiveTransaction("Operation is not permitted when there is an active transaction ")
        return Transaction(self._call.instance, isolation, timeout=timeout, user=self._call.user)

    def push(self, value: Any) -> None:
        """Send a value to the client before the result, as `box.session.push()` does."""
        self._call.push(value)


def procedure(*, transaction: bool = True) -> Callable[[F], F]:
    """Return a decorator for a function of a module that `--procedures` loads.

    Args:
        transaction: Run the procedure in a transaction, which is the default without the decorator. False is for
            procedures that wait for other systems, or that begin their own transactions (`ProcedureCall.transaction`).

    Example:
        @flowstone.procedure(transaction=False)
        async def refresh(call: flowstone.ProcedureCall) -> int:
            prices = await fetch_prices()
            async with call.transaction() as transaction:
                for product, price in prices.items():
                    transaction.space("products").update(product, [("=", "price", price)])
            return len(prices)
    """

    def decorate(function: F) -> F:
        setattr(function, _OWN_TRANSACTION, transaction)
        return function

    return decorate


class PythonProcedure:
    """A function that is called with a `ProcedureCall` and checked arguments."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._has_transaction = getattr(function, _OWN_TRANSACTION, True)
        self._signature = inspect.signature(function)
        hints = get_type_hints(function)
        parameters = list(self._signature.parameters.values())[1:]
        self._types = [
            (parameter.name, hints.get(parameter.name, Any))
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]

    async def __call__(self, call: Call) -> Any:
        """Run the procedure and return its result; commit its transaction, or roll it back if it fails."""
        arguments = self._checked(call.arguments)
        if call.transaction is not None:
            return await self._run_in_stream(call, arguments)
        if not self._has_transaction:
            return await _result(self._function(ProcedureCall(call, None), *arguments))
        async with Transaction(call.instance, "default", user=call.user) as transaction:
            return await _result(self._function(ProcedureCall(call, transaction), *arguments))

    async def _run_in_stream(self, call: Call, arguments: list[Any]) -> Any:
        """Run the procedure as a part of the transaction of the stream, which the client commits."""
        transaction = call.transaction
        assert transaction is not None
        savepoint = transaction.savepoint()
        try:
            return await _result(self._function(ProcedureCall(call, None), *arguments))
        except BaseException:
            transaction.rollback_to(savepoint)
            raise

    def _checked(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the arguments, converted to the annotated types; raise IllegalParams if one does not fit."""
        try:
            self._signature.bind(None, *arguments)
        except TypeError as error:
            raise errors.IllegalParams(f"Illegal parameters, {self.name}: {error}") from None
        checked = list(arguments)
        for number, ((name, kind), value) in enumerate(zip(self._types, arguments, strict=False)):
            if kind is Any:
                continue
            try:
                checked[number] = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise errors.IllegalParams(f"Illegal parameters, {self.name}: argument '{name}': {error}") from None
        return checked


async def _result(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned
