"""box.info, box.cfg, box.stat, box.snapshot, box.ctl.*, box.backup.* and box.session.* for CALL.

Clients read fields by CALL too, because there is no EVAL: `box.info.vclock` returns that field, and `box.cfg` without
arguments returns all options. `built_in` returns the built-in procedures of all modules.
"""

from __future__ import annotations

from typing import Any

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.node.info import box_info, replication_anon
from flowstone.node.instance import Instance
from flowstone.node.server import procedures_schema, procedures_space
from flowstone.node.server.mode_waiters import wait_read_only
from flowstone.node.server.procedures import Call, Outcome, Procedure, Procedures, Results, value
from flowstone.node.statistics import box_stat, box_stat_net, free_space

_INFO, _CFG = "box.info.", "box.cfg."


def built_in() -> Procedures:
    """Return all built-in procedures."""
    table = {**PROCEDURES, **procedures_schema.PROCEDURES}
    return Procedures(table, (find_part, procedures_space.find_method, procedures_schema.find_method))


def find_part(instance: Instance, name: str) -> Procedure | None:
    """Return a procedure for a field of box.info or box.cfg; None if there is no such field."""
    if name.startswith(_INFO):
        info = box_info(instance)
        part = name.removeprefix(_INFO)
        return (lambda call: value(info[part])) if part in info else None
    if name.startswith(_CFG):
        options = _options(instance)
        option = name.removeprefix(_CFG)
        return (lambda call: value(options[option])) if option in options else None
    return None


def _options(instance: Instance) -> dict[str, Any]:
    """Return the options that box.cfg shows."""
    return instance.configuration.shown(instance.box.dialect)


def _info(call: Call) -> Outcome:
    return value(box_info(call.instance))


def _replication_anon(call: Call) -> Outcome:
    return value(replication_anon(call.instance))


def _gc(call: Call) -> Outcome:
    return value(call.instance.files.gc_info())


def _stat(call: Call) -> Outcome:
    return value(box_stat(call.instance))


def _stat_net(call: Call) -> Outcome:
    return value(box_stat_net(call.instance))


async def _disk_usage(call: Call) -> Results:
    return value(await free_space(call.instance))


def _empty(call: Call) -> Outcome:
    return value({})


def _cfg(call: Call) -> Outcome:
    """Return the options; with a table as argument, set the options in the table."""
    options = call.options(0)
    if not options:
        return value(_options(call.instance))
    if call.instance.reload is None:
        raise errors.Unsupported("This instance does not support changing options by CALL")
    return _reload(call.instance.reload(options))


async def _reload(applied: Any) -> Results:
    await applied
    return []


async def _snapshot(call: Call) -> Results:
    await call.instance.files.snapshot()
    return value("ok")


def _backup_start(call: Call) -> Outcome:
    checkpoint = call.get(0)
    if checkpoint is None:
        checkpoint = 0
    if not isinstance(checkpoint, int) or isinstance(checkpoint, bool) or checkpoint < 0:
        raise errors.IllegalParams("Illegal parameters, checkpoint index should be a non-negative number")
    return value(call.instance.files.start_backup(checkpoint))


def _backup_stop(call: Call) -> Outcome:
    call.instance.files.stop_backup()
    return []


# --- box.ctl ---


def _waiting(*, is_read_only: bool) -> Procedure:
    """Return a procedure that waits until the instance is read-only, or is writable; its argument is the timeout."""

    async def wait(call: Call) -> Results:
        seconds = call.get(0)
        if seconds is not None and (not isinstance(seconds, int | float) or isinstance(seconds, bool)):
            raise errors.IllegalParams("Illegal parameters, timeout should be a number")
        await wait_read_only(call.instance, is_read_only, seconds)
        return []

    return wait


def _is_recovery_finished(call: Call) -> Outcome:
    return value(call.instance.status != "loading")


async def _promote(call: Call) -> Results:
    _check_has_terms(call)
    await call.instance.elections.promote()
    return []


async def _demote(call: Call) -> Results:
    _check_has_terms(call)
    await call.instance.elections.demote()
    return []


def _check_has_terms(call: Call) -> None:
    if call.instance.box.dialect is Dialect.V2_6:
        raise errors.NoSuchProc(f"Procedure '{call.name}' is not defined")


async def _clear_synchro_queue(call: Call) -> Results:
    """Clear the queue in dialect 2.6; since 2.8 this is an alias of promote."""
    if call.instance.box.dialect is not Dialect.V2_6:
        return await _promote(call)
    await call.instance.queue.clear()
    return []


# --- box.session ---


def _session_id(call: Call) -> Outcome:
    return value(call.session.id)


def _session_user(call: Call) -> Outcome:
    return value(call.instance.box.access.user(call.session.user).name)


def _session_uid(call: Call) -> Outcome:
    return value(call.session.user)


def _session_euid(call: Call) -> Outcome:
    return value(call.user)


def _session_sync(call: Call) -> Outcome:
    return value(call.sync)


def _session_type(call: Call) -> Outcome:
    return value("binary")


def _session_peer(call: Call) -> Outcome:
    return value(call.session.peer)


def _broadcast(call: Call) -> Outcome:
    """Set the value of a key for its watchers. Keys of the server are reserved, so that they cannot be forged."""
    key = call.text(0, "key")
    if key.startswith(("box.", "internal.")):
        raise errors.IllegalParams("Illegal parameters, key prefixes box. and internal. are reserved")
    call.watchers.broadcast(key, call.get(1))
    return []


def _is_in_txn(call: Call) -> Outcome:
    return value(call.transaction is not None)


PROCEDURES: dict[str, Procedure] = {
    "box.info": _info,
    "box.info.gc": _gc,
    "box.info.replication_anon": _replication_anon,
    "box.info.sql": _empty,
    "box.info.vinyl": _empty,
    "box.info.memory": _empty,
    "box.cfg": _cfg,
    "box.stat": _stat,
    "box.stat.net": _stat_net,
    "box.snapshot": _snapshot,
    "box.backup.start": _backup_start,
    "box.backup.stop": _backup_stop,
    "box.ctl.wait_rw": _waiting(is_read_only=False),
    "box.ctl.wait_ro": _waiting(is_read_only=True),
    "box.ctl.is_recovery_finished": _is_recovery_finished,
    "box.ctl.promote": _promote,
    "box.ctl.demote": _demote,
    "box.ctl.clear_synchro_queue": _clear_synchro_queue,
    "flowstone.disk_usage": _disk_usage,
    "box.session.id": _session_id,
    "box.session.user": _session_user,
    "box.session.uid": _session_uid,
    "box.session.euid": _session_euid,
    "box.session.sync": _session_sync,
    "box.session.type": _session_type,
    "box.session.peer": _session_peer,
    "box.broadcast": _broadcast,
    "box.is_in_txn": _is_in_txn,
}
