"""Options of a running server: what `box.cfg` shows, without passwords, and checked changes of them.

Values are checked by the table of `node/configuration.py`, like a configuration file, before anything is sent. A real
server has further options, and checks them itself. This module reads; the caller sends the changes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowstone.client import rights
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import AccessDenied, TarantoolError
from flowstone.iproto.uri import UriError, parse_members
from flowstone.node.configuration import OPTIONS, configure
from flowstone.observation.query import Asking

NEEDS_RESTART: Final = "change it where the member is configured, and restart the member"
HIDDEN: Final = "<hidden>"
"""Shown instead of a value that may contain a password and cannot be parsed."""

REPLICATION: Final = "replication"

OPTIONS_LUA: Final = """
local uri = require('uri')
local shown
local function shown_uri(text)
    local parsed = uri.parse_many ~= nil and uri.parse_many(text) or {uri.parse(text)}
    if parsed == nil or #parsed == 0 then return '<hidden>' end
    local texts = {}
    for _, one in ipairs(parsed) do
        if one.params == nil then one.query = nil end
        table.insert(texts, (uri.format(one)))
    end
    return table.concat(texts, ',')
end
function shown(value)
    if type(value) == 'table' then
        if value.uri ~= nil then return shown(value.uri) end
        local copy = {}
        for key, inner in pairs(value) do
            if not tostring(key):find('password') then copy[key] = shown(inner) end
        end
        return copy
    end
    local is_uri = type(value) == 'string' and (value:find('@') or value:find('password')) ~= nil
    if is_uri then return shown_uri(value) end
    return value
end
return shown(box.cfg)
"""
"""Returns the options of a real server. Passwords in URIs and parameters never leave the server."""

AGAIN_LUA: Final = """
local given, quorum = box.cfg.replication, box.cfg.replication_connect_quorum
if given == nil or given == '' or type(given) == 'table' and next(given) == nil then return false end
box.cfg{replication = {}}
local is_set, problem = pcall(box.cfg, {replication = given})
if not is_set then
    -- 2.6 refuses the value if too few of the members answer.
    pcall(box.cfg, {replication_connect_quorum = 0})
    is_set, problem = pcall(box.cfg, {replication = given})
    pcall(box.cfg, {replication_connect_quorum = quorum == nil and box.NULL or quorum})
end
if not is_set then error('replication is empty now, set it from the configuration: ' .. tostring(problem)) end
return true
"""
"""Sets `replication` of a real server to an empty list, then to its value again: a server ignores an unchanged value.

Returns false if the server has no upstreams.
"""


class OptionRefused(FlowstoneError):
    """An option is unknown, cannot change at run time, or has a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class OptionChange:
    """One option to set: the value to send, and the values before and after as they may be shown."""

    name: str
    value: Any
    before: Any
    after: Any

    @property
    def is_new(self) -> bool:
        return bool(self.before != self.after)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The options that a server shows; `values` is None if the user may not read them."""

    is_flowstone: bool
    values: Mapping[str, Any] | None

    def change(self, name: str, text: str) -> OptionChange:
        """Return the change of one option to the value that `text` means; raise OptionRefused if it is not allowed.

        An empty text stands for the option's default.
        """
        option = OPTIONS.get(name)
        if option is None:
            if self.is_flowstone:
                raise OptionRefused(f"unknown option {name}", hint=self.near(name))
            value = _plain(text)
            return OptionChange(name, value, self._before(name), without_password(value))
        value = option.parse(text)
        try:
            accepted = option.accept(value)
        except TarantoolError as error:
            raise OptionRefused(error.message, hint=error.hint) from None
        before, after = self._before(name), _listed(option.shown(accepted))
        if not self.is_flowstone:
            after = without_password(_listed(value))  # a real server shows a value as it was given
        # A secret value is not shown, so it cannot be compared.
        if not option.is_dynamic and (option.is_secret or before != after):
            raise OptionRefused(f"option {name} cannot be changed at run time", hint=NEEDS_RESTART)
        return OptionChange(name, value, before, after)

    def check(self, changes: Iterable[OptionChange]) -> None:
        """Raise OptionRefused if the changes contradict each other or other options of a node.

        A real server has options that the table does not know, and checks them itself.
        """
        if not self.is_flowstone or self.values is None:
            return
        try:
            now = configure({name: value for name, value in self.values.items() if name in OPTIONS})
            now.changed({change.name: change.value for change in changes if change.is_new})
        except TarantoolError as error:
            raise OptionRefused(error.message, hint=error.hint) from None

    def shown(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the values of `names`, or of all options, by name; None for a known option that is not set."""
        values = self.values or {}
        if not names:
            return dict(sorted(values.items()))
        for name in names:
            if name not in values and name not in OPTIONS:
                raise OptionRefused(f"unknown option {name}", hint=self.near(name))
        return {name: values.get(name) for name in names}

    def near(self, name: str) -> str | None:
        """Return the hint for an unknown option."""
        known = {*OPTIONS} if self.is_flowstone else {*OPTIONS, *(self.values or ())}
        found = difflib.get_close_matches(name.replace("-", "_").lower(), sorted(known), 1)
        return f"did you mean {found[0]}?" if found else None

    def _before(self, name: str) -> Any:
        return None if self.values is None else self.values.get(name)


async def read_options(asking: Asking) -> LiveOptions:
    """Return the options of a server, without passwords. Raise the server's error if it cannot be queried."""
    info = await asking.call("box.info")
    is_flowstone = isinstance(info, Mapping) and info.get("package") == "Flowstone"
    try:
        found = await (asking.call("box.cfg") if is_flowstone else asking.evaluate(OPTIONS_LUA))
    except AccessDenied:
        return LiveOptions(is_flowstone, None)
    if not isinstance(found, Mapping):
        raise FlowstoneError(f"unexpected answer from {asking.uri.address}: box.cfg is not a table")
    return LiveOptions(is_flowstone, {str(name): _listed(value) for name, value in found.items()})


def may_not_read(asking: Asking) -> FlowstoneError:
    """Return the error for a user who may not read the options."""
    hint = rights.to_watch(asking.uri.user)
    return FlowstoneError(f"the user may not read the options of {asking.uri.address}", hint=hint)


def without_password(value: Any) -> Any:
    """Return a value for display: URIs without their passwords, HIDDEN for a text with an @ that is not a URI."""
    if isinstance(value, list | tuple):
        return [without_password(one) for one in value]
    if isinstance(value, dict):
        return {key: without_password(one) for key, one in value.items() if "password" not in str(key)}
    if not isinstance(value, str) or ("@" not in value and "password" not in value):
        return value
    try:
        return ",".join(uri.shown for uri in parse_members(value))
    except UriError:
        return HIDDEN


_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


def _plain(text: str) -> Any:
    """Return the value of an option that only the server knows: a boolean, a number, or text; None for the default."""
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    return {"true": True, "false": False, "": None}.get(text, text)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


async def replicate_again(asking: Asking, options: LiveOptions, *, timeout: float) -> None:
    """Let a server retry the upstreams that it has given up. The passwords of its upstreams do not change."""
    if options.is_flowstone:
        assert options.values is not None
        await asking.call("box.cfg", {REPLICATION: options.values.get(REPLICATION)}, timeout=timeout)
        return
    await asking.evaluate(AGAIN_LUA, timeout=timeout)
