"""Repeat the calls that made a recorded directory: its sessions in the order of their epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowstone.limestone.format.entries import Entry, EntryType, decode_all
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore

Session = tuple[int, int, list[Entry]]
"""Epoch, channel, entries."""


def sessions(directory: Path, *, after: Path | None = None) -> list[Session]:
    """Return the sessions of all log files by epoch and channel.

    `after`: omit the sessions that this directory has.
    """
    found: list[Session] = []
    for channel, path in enumerate(sorted(directory.glob("pwal_????"))):
        skipped = (after / path.name).stat().st_size if after is not None and (after / path.name).exists() else 0
        found += [(epoch, channel, entries) for epoch, entries in _snippets(path.read_bytes()[skipped:], path)]
    return sorted(found, key=lambda session: session[:2])


def _snippets(data: bytes, path: Path) -> Iterator[tuple[int, list[Entry]]]:
    entries: list[Entry] = []
    for token in decode_all(data, str(path)):
        if isinstance(token, Entry):
            entries.append(token)
        elif token.type is EntryType.MARKER_BEGIN:
            entries = []
        else:
            yield token.epoch, entries


def add(channel: AsyncLogChannel, entry: Entry) -> None:
    """Make the call that writes this entry."""
    storage_id, version = entry.storage_id, entry.version
    match entry.type:
        case EntryType.REMOVE:
            channel.remove_entry(storage_id, entry.key, version)
        case EntryType.CLEAR_STORAGE:
            channel.truncate_storage(storage_id, version)
        case EntryType.ADD_STORAGE:
            channel.add_storage(storage_id, version)
        case EntryType.REMOVE_STORAGE:
            channel.remove_storage(storage_id, version)
        case _:
            channel.add_entry(storage_id, entry.key, entry.value, version, entry.blob_ids)


async def replay(store: AsyncDatastore, channels: list[AsyncLogChannel], made: list[Session], last_epoch: int) -> None:
    """Write all sessions, and switch to every epoch up to the one after the last."""
    first = made[0][0]
    for epoch in range(first, last_epoch + 1):
        await store.switch_epoch(epoch)
        for _, number, entries in (session for session in made if session[0] == epoch):
            await channels[number].begin_session()
            for entry in entries:
                add(channels[number], entry)
            await channels[number].end_session()
