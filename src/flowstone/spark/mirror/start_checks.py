"""The checks before a mirror starts. All of them run before any file is created, and none needs Spark.

A rejected start leaves no lake, no spool, and above all no tuple that a mask must hide.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowstone.archive.definitions_file import DefinitionRow, DefinitionsFile
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema, SchemaTracker
from flowstone.columns.column_types import WrongType
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, UriError, means_a_path, parse_members, with_login
from flowstone.lake.masks import WrongMask
from flowstone.outside import production
from flowstone.outside.disk import DIRECTORY_MODE, AlreadyLocked
from flowstone.spark.index.log import Log
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.lake import Lake
from flowstone.spark.lake import LakeProgress as Saved
from flowstone.spark.mirror.choice import names
from flowstone.spark.mirror.field_types import FieldTypes
from flowstone.spark.mirror.sources import DirectorySource, MirrorBusy
from flowstone.spark.sources.tarantool.spool import facts_of

if TYPE_CHECKING:
    from flowstone.spark.mirror.mirror_run import MirrorOptions

Source = Sequence[Uri] | str | DirectorySource
"""The members of a replica set, or a directory, which may already be open."""


class WrongPlace(FlowstoneError):
    """The sources, the lake, the spool or the catalog cannot be used as given."""


class OtherSettings(FlowstoneError):
    """The settings do not match the settings that the lake was created with."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A source whose replica set is known.

    `definitions` come from a live source. They are None for a directory, and for a live source that is unreachable. The
    mirror waits for such a source.
    """

    source: Sequence[Uri] | DirectorySource
    replicaset_uuid: str
    definitions: tuple[DefinitionRow, ...] | None = None

    @property
    def name(self) -> str:
        source = self.source
        return source.name if isinstance(source, DirectorySource) else ",".join(each.address for each in source)


def parse_source(text: str, username: str | None = None, password: str | None = None) -> Source:
    """Return the directory that `text` names, or the members of the replica set, separated by commas.

    Members without a user get the login of the arguments. Raise WrongPlace or UriError if `text` is neither.
    """
    if os.path.isdir(text):
        return text
    if means_a_path(text):
        raise WrongPlace(f"{text}: no such directory", hint="specify an archive, a log directory, or host:port")
    try:
        members = parse_members(text)
    except UriError as error:
        if "@" in text or "?" in text:
            raise  # the message below could show part of a password
        raise WrongPlace(f"{text!r} is neither an existing directory nor an address (host:port)") from error
    return [with_login(member, username, password) for member in members]


def check_start(sources: Sequence[Source], lake: str, options: MirrorOptions) -> list[Source]:
    """Raise the error that would stop a mirror of these sources; return the sources, with directories open.

    A lake in an object store is not checked here: only the mirror itself can read its progress, which decides whether a
    source may be unreachable.
    """
    if not is_local(lake):
        return list(sources)
    saved: Mapping[str, Saved] = {}
    if os.path.isdir(local_path(lake)):
        with lake_lock(lake):
            saved = Lake.open(lake).progress
    return [origin.source for origin in origins_of(sources, lake, options, saved)]


def origins_of(
    sources: Sequence[Source], lake: str, options: MirrorOptions, saved: Mapping[str, Saved]
) -> list[Origin]:
    """Identify the sources. Raise an error if they or the options do not match the progress saved in the lake."""
    for each in saved.values():
        _check_settings(each.settings, options.settings, lake)
    effective_types(options, saved, lake)
    origins: list[Origin] = []
    for source in sources:
        origin = origin_of(source, list(saved), is_raw=options.raw)
        if any(origin.replicaset_uuid == other.replicaset_uuid for other in origins):
            raise WrongPlace(f"{origin.name} belongs to the same replica set as another source")
        origins.append(origin)
    strange = sorted(saved.keys() - {origin.replicaset_uuid for origin in origins})
    if strange:
        raise OtherSettings(
            f"{lake} also has rows of replica set {strange[0]}, but no source belongs to it",
            hint="specify all sources of the lake, or another lake",
        )
    _check_excluded(origins, lake, options, saved)
    tables = [SpaceDefinition(number, name) for each in saved.values() for number, name in each.tables.items()]
    for given in options.resync:
        if not any(names(given, table) for table in tables):
            raise OtherSettings(
                f"--resync {given}: {lake} has no table of such a space",
                hint=f"tables: {', '.join(sorted(table.name for table in tables)) or 'none'}",
            )
    for origin in origins:
        if options.changes and isinstance(origin.source, DirectorySource) and not origin.source.index.has_times:
            raise OtherSettings(
                f"cannot keep the changes of {origin.name}: a Limestone log has no order of the writes of a key",
                hint="omit --changes",
            )
        if origin.replicaset_uuid not in saved:
            _check_beginning(origin, options)
    return origins


def origin_of(source: Source, known: Sequence[str], *, is_raw: bool = False) -> Origin:
    """Identify the replica set of a source. If no member answers, it is the only replica set known to the lake."""
    if isinstance(source, str):
        source = DirectorySource(source, is_raw=is_raw)
    if isinstance(source, DirectorySource):
        return Origin(source, source.replicaset_uuid)
    try:
        facts = facts_of(source)
    except FlowstoneError:
        if len(known) == 1:
            return Origin(source, known[0])
        raise
    return Origin(source, facts.replicaset_uuid, facts.definitions)


def _check_excluded(origins: Sequence[Origin], lake: str, options: MirrorOptions, saved: Mapping[str, Saved]) -> None:
    """Check that every excluded space exists in a source, or did when the lake was created, and has no table yet.

    Names cannot be checked while a source is unreachable, nor for a lake whose settings lack them: an older release
    that did not save them created it, and the space may have been dropped since.
    """
    excluded = options.choice.excluded
    if not excluded:
        return
    schemas, is_away = [schema_of(each.definitions) for each in saved.values()], False
    for origin in origins:
        if isinstance(origin.source, DirectorySource):
            schemas += _schemas_in(origin.source.index, is_history=options.history)
        elif origin.definitions is not None:
            schemas.append(schema_of(origin.definitions))
        else:
            is_away = True
    accepted = {name for each in saved.values() for name in each.settings.get("excluded", "").split(",")}
    if not is_away and all("excluded" in each.settings for each in saved.values()):
        options.choice.check_excluded(schemas, accepted)
    new = [each for each in excluded if str(each) not in accepted]
    for each in saved.values():
        for space_id, name in each.tables.items():
            if any(names(one, SpaceDefinition(space_id, name)) for one in new):
                raise OtherSettings(
                    f"space {name!r} cannot be excluded: it already has a table in {lake}",
                    hint="omit --exclude, or mirror into a new lake",
                )


def _schemas_in(index: Log, *, is_history: bool) -> tuple[Schema, Schema]:
    """Return the definitions that a first load starts with, and the newest ones."""
    snapshot = first_snapshot(index, is_history=is_history)
    first = index.schema_at(snapshot.vclock if snapshot is not None else index.earliest).schema
    return first, index.schema_at(index.settled).schema


def _check_beginning(origin: Origin, options: MirrorOptions) -> None:
    """Check that the choice and the masks fit the spaces of the first load."""
    if isinstance(origin.source, DirectorySource):
        index = origin.source.index
        if options.history and not index.has_times:
            raise OtherSettings(
                f"cannot keep a history of {index.directory}: the log of Limestone has no times",
                hint="omit --history",
            )
        first, newest = _schemas_in(index, is_history=options.history)
    else:
        assert origin.definitions is not None, "a new source has answered"
        newest = first = schema_of(origin.definitions)
    options.choice.check(newest)
    for mask in options.masking.masks:
        # A misspelled name would silently mask nothing.
        if newest.get(mask.space) is None:
            raise WrongMask(f"--mask: no space {mask.space!r}", hint="specify an existing space")
    options.field_types.check({space.name: space for space in newest}, "--type")
    for space in options.choice.spaces_of(first, {}).values():
        options.masking.of(space)
        options.choice.columns_of(space)


def _check_settings(settings: Mapping[str, str], ours: Mapping[str, str], lake: str) -> None:
    options = {
        "history": "--history",
        "mask_fingerprint": "--mask or --mask-salt",
        "columns": "--columns",
        "types": "--unsigned-as, --decimal-scale or --strings-as",
        "raw": "--raw",
    }
    for name, words in options.items():
        if settings.get(name, "") != ours[name]:
            raise OtherSettings(
                f"{lake} was created with different {words}",
                hint="use the same options as then, or mirror into a new lake",
            )


def effective_types(options: MirrorOptions, saved: Mapping[str, Saved], lake: str) -> FieldTypes:
    """Return the declared types of the lake: saved types, new types, and the types of `--retype`.

    Raise OtherSettings for a new type of a space that has a table, and WrongType for a `--retype` of anything else.
    """
    known, tables, spaces = FieldTypes(), set[str](), dict[str, SpaceDefinition]()
    for each in saved.values():
        known |= FieldTypes.from_setting(each.settings.get("field_types", ""))
        tables |= set(each.tables.values())
        spaces |= {space.name: space for space in schema_of(each.definitions) if space.name in each.tables.values()}
    for place in options.field_types.types.keys() & options.retype.types.keys():
        raise WrongType(f"{'.'.join(place)} is given by both --type and --retype", hint="omit --type")
    if options.retype and not saved:
        raise WrongType(f"--retype: {lake} has no tables yet", hint="use --type for a new lake")
    options.retype.check(spaces, "--retype")
    for space, name, kind in options.field_types:
        present = known.types.get((space, name))
        if present != kind and (present is not None or space in tables):
            raise OtherSettings(
                f"{lake} was created with {'no declared type' if present is None else present} for {space}.{name}",
                hint=f"change the type with --retype '{space}.{name}={kind}', or omit --type",
            )
    return known | options.field_types | options.retype


def keeps_changes(options: MirrorOptions, saved: Mapping[str, Saved]) -> bool:
    """Return the option if it is given, else what the lake does."""
    if options.changes is not None:
        return options.changes
    return any(each.settings.get("changes") == "true" for each in saved.values())


def schema_of(rows: Sequence[DefinitionRow]) -> Schema:
    """Return the schema that rows of `_space` and `_index` define."""
    tracker = SchemaTracker()
    DefinitionsFile({}, "", "", tuple(rows)).apply_to(tracker)
    return tracker.schema


def first_snapshot(index: Log, *, is_history: bool) -> SnapshotFile | None:
    """Return the newest settled snapshot, or for a history the oldest; None if the log is complete without one.

    Raise DataLoss if the log starts later and there is no snapshot.
    """
    settled = [each for each in index.snapshots if each.vclock <= index.settled]
    if not settled:
        if index.earliest:
            raise DataLoss(
                f"{index.directory}: logs start at {index.earliest}, and there is no snapshot to start from",
                hint="mirror a directory with a snapshot",
            )
        return None
    return settled[0] if is_history else settled[-1]


# --- directories ---


def is_local(path: str) -> bool:
    """Return True if a lake is in the local file system."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> str:
    return path.removeprefix("file://")


@contextmanager
def lake_lock(lake: str) -> Iterator[None]:
    """Allow one mirror per lake. A local lake is locked; elsewhere only the state in the tables protects it."""
    if not is_local(lake):
        yield
        return
    directory = local_path(lake)
    with made(directory):
        try:
            lock = production().disk.lock(directory)
        except AlreadyLocked as error:
            raise MirrorBusy(
                f"lake {lake} is in use by another mirror", hint="stop the other mirror, or use another lake"
            ) from error
        try:
            yield
        finally:
            lock.release()


@contextmanager
def made(*directories: str, is_private: bool = False) -> Iterator[None]:
    """Create missing directories, outer ones first. After an error in the block, remove the new directories that are
    empty.

    Only the owner may read private directories. Existing directories keep their mode.
    """
    new = [each for each in directories if not os.path.isdir(each)]
    for each in new:
        os.makedirs(each, mode=DIRECTORY_MODE if is_private else 0o777, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in reversed(new):
            with suppress(OSError):  # in use, or already gone
                os.rmdir(each)
        raise
