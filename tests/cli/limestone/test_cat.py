"""The limestone cat command: every entry with its place, filters, rows, JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowstone.limestone.format import names
from tests.cli.conftest import Command
from tests.limestone import damage, recorded
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec
from tests.limestone.tsurugi.generator import SHORT, GeneratedDatabase
from tests.limestone.tsurugi.recorded import log_of, selected

REAL = recorded.HERE / "dirs-master/before"


def listed(flowstone: Command, *arguments: object) -> list[str]:
    done = flowstone("limestone", "cat", *map(str, arguments))
    assert done.code == 0
    assert done.errors == []
    return done.text.splitlines()


def test_entries_equal_the_recorded_listing(flowstone: Command) -> None:
    text = (recorded.HERE / "dirs-master/before.txt").read_text()
    found = {line.split()[1]: line.split() for line in listed(flowstone, REAL) if line.startswith("pwal_0000 ")}
    section = text.split("== pwal_0000 ")[1].split("==")[0].splitlines()[1:]
    assert len(section) == len(found)
    for line in section:
        offset, name, *_ = line.split()
        fields = dict(word.split("=", 1) for word in line.split(" | ")[0].split()[2:] if "=" in word)
        shown = found[offset]
        assert shown[2] == name
        told = dict(word.split("=", 1) for word in shown[3:])
        for field in ("storage", "key", "value", "epoch"):
            if field in fields:
                assert told[field] == fields[field]


def test_json_lines_have_all_fields(flowstone: Command) -> None:
    found = [json.loads(line) for line in listed(flowstone, "--json", "--storage", "3", "--encoding", "text", REAL)]
    assert found[0] == {
        "file": "pwal_0000",
        "offset": 187,
        "type": "normal_with_blob",
        "epoch": 3,
        "durable": True,
        "storage": 3,
        "version": [3, 1],
        "key": "kb",
        "value": "with-one-blob",
        "blobs": [1],
    }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ([], 30),
        (["--no-markers"], 13 + 3),
        (["--storage", "1"], 6),
        (["--storage", "1", "--storage", "2", "--markers"], 6 + 2 + 14),
        (["--epoch", "2"], 2 + 1 + 2 + 3),
        (["--epoch", "3-4", "--no-markers"], 3 + 3),
        (["--epoch", "5-", "--no-markers"], 3),
        (["--epoch", "-1"], 5),
        (["--file", "pwal_0001"], 12),
        (["--file", "epoch"], 5),
        (["--file", "data/snapshot"], 1),
    ],
)
def test_filters_select_entries(flowstone: Command, arguments: list[str], count: int) -> None:
    assert len(listed(flowstone, *arguments, REAL)) == count


def test_ignored_entries_are_marked_and_can_be_hidden(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX)
    lines = listed(flowstone, directory)
    assert [line for line in lines if " void " in line] == lines[6:]
    assert listed(flowstone, "--durable", directory) == lines[:6]
    assert listed(flowstone, "--durable", directory / "pwal_0000") == lines[:6]


def test_rows_equal_those_of_a_cursor(flowstone: Command) -> None:
    expected = recorded.rows((recorded.HERE / "dirs-master/before.rows.txt").read_text())
    found = [json.loads(line) for line in listed(flowstone, "--rows", "--json", REAL)]
    assert [(row["storage"], bytes.fromhex(row["key"]), bytes.fromhex(row["value"])) for row in found] == expected
    assert listed(flowstone, "--rows", "--storage", "4", "--encoding", "base64", REAL) == [
        "storage=4 version=4,3 key=dDI= value=YWZ0ZXItdHJ1bmNhdGU="
    ]


def test_running_store_is_read_up_to_its_durable_epoch(flowstone: Command, tmp_path: Path) -> None:
    from flowstone.limestone import Datastore

    with Datastore(str(tmp_path / "data")) as store:
        channel = store.create_channel()
        store.ready()
        for epoch in (1, 2):
            store.switch_epoch(epoch)
            channel.begin_session()
            channel.add_entry(1, b"%d" % epoch, b"", (epoch, 1))
            channel.end_session()
        channel.begin_session()
        assert listed(flowstone, "--rows", tmp_path / "data") == ["storage=1 version=1,1 key=31 value="]
        shown = listed(flowstone, "--no-markers", "--durable", tmp_path / "data")
        assert [line.split()[2:4] for line in shown] == [["normal_entry", "epoch=1"]]
        channel.end_session()


def test_text_is_readable_and_unambiguous(flowstone: Command, tmp_path: Path) -> None:
    from flowstone.limestone.format.entries import Entry
    from tests.limestone.store.test_compaction import session, set_key

    entries: list[Entry] = [
        set_key("grün".encode(), b'with "spaces"', 5),
        set_key(b"\xff\x00", b"back\\slash", 5, 2),
    ]
    directory = damage.write(tmp_path / "data", b"")
    (directory / "pwal_0000").write_bytes(session(5, *entries))
    lines = listed(flowstone, "--encoding", "text", "--no-markers", directory)
    assert [line.split(" ", 5)[5] for line in lines] == [
        'version=5,1 key=grün value="with \\"spaces\\""',
        "version=5,2 key=\\xff\\x00 value=back\\\\slash",
    ]


def test_damage_is_reported_after_all_readable_entries(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.ENTRY[:-1])
    (directory / "pwal_0001").write_bytes(damage.CLEAN + b"\x55")
    done = flowstone("limestone", "cat", directory)
    assert done.code == 1
    assert len(done.text.splitlines()) == 12
    size = len(damage.CLEAN)
    assert done.errors == [
        f"flowstone: pwal_0000: incomplete entry at byte {size}",
        f"flowstone: pwal_0001: invalid entry at byte {size}",
    ]


def test_damaged_epoch_file_hides_only_durability(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(b"garbage!!")
    done = flowstone("limestone", "cat", directory)
    assert (done.code, len(done.text.splitlines())) == (0, 6)
    assert done.errors[0].startswith("warning: ")
    assert flowstone("limestone", "cat", "--durable", directory).code == 1
    assert flowstone("limestone", "cat", "--rows", directory).code == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([REAL / "nosuch"], "no such file or directory"),
        (["--file", "nosuch", REAL], "has no file nosuch"),
        (["--file", "epoch", REAL / "epoch"], "is a file; omit --file"),
        (["--epoch", "x", REAL], "is not an epoch or a range"),
        (["--epoch", "9-5", REAL], "is an empty range"),
        (["--epoch", "-", REAL], "is not an epoch or a range"),
        (["--rows", "--file", "epoch", REAL], "--rows covers all files and epochs"),
        (["--rows", "--epoch", "5", REAL], "--rows covers all files and epochs"),
    ],
)
def test_usage_error_is_one_line(flowstone: Command, arguments: list[object], word: str) -> None:
    refused = flowstone("limestone", "cat", *map(str, arguments))
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert word in refused.errors[0]


@pytest.mark.parametrize("option", ["--json", "--rows", "--durable"])
def test_invalid_data_directory_is_rejected_as_by_inspect(flowstone: Command, tmp_path: Path, option: str) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "program.py").write_bytes(b"")
    refused = flowstone("limestone", "cat", option, tmp_path)
    assert (refused.code, refused.text) == (2, "")
    assert refused.errors == flowstone("limestone", "inspect", tmp_path).errors
    (tmp_path / "pwal_0000").write_bytes(damage.CLEAN)
    assert flowstone("limestone", "cat", tmp_path).code == 0, "logs without a manifest can be listed"


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / "pwal_0000").write_bytes(damage.CLEAN * 3000)
    command = [sys.executable, "-m", "flowstone.cli", "limestone", "cat", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"pwal_0000 0 marker_begin")
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


def test_rows_of_tables_are_shown_with_names_and_types(flowstone: Command) -> None:
    log = log_of("basic")
    lines = listed(flowstone, "--typed", "--rows", "--table", "t_ck", log)
    assert lines[0] == 'table=t_ck k1= k2=-5 v1=30 k3=9999.99 k4=1960-06-15 k5="z  " v2='
    assert lines[2].endswith("v2=null")
    objects = [json.loads(line) for line in listed(flowstone, "--typed", "--rows", "--json", log)]
    counts = {name: sum(each["table"] == name for each in objects) for name in selected("basic")}
    assert counts == {name: len(rows) for name, rows in selected("basic").items()}
    values = next(each["row"] for each in objects if each["row"].get("c_varchar20") == "hello")
    assert (values["c_dec10_3"], values["c_bin4"], values["c_time"]) == (
        "1234567.891",
        "01020304",
        "12:34:56.123456789",
    )
    assert any(each["row"].get("c_float8") == "nan" for each in objects)


def test_entries_of_tables_are_shown_with_names_and_types(flowstone: Command, tmp_path: Path) -> None:
    database = GeneratedDatabase(str(tmp_path / "log"))
    columns = (ColumnSpec("id", "int4", nullable=False), ColumnSpec("text", "character"), ColumnSpec("b", "blob"))
    table = TableSpec("t", columns, ("id",))
    database.create(table, 2)
    database.create(TableSpec("u", columns, ("id",)), 3, version=77)
    database.upsert("t", [{"id": 1, "text": "two words", "b": 7}, {"id": 2, "text": "null", "b": None}])
    database.upsert("u", [{"id": 1, "text": None, "b": None}])
    database.commit()
    database.delete("t", [{"id": 1}])
    database.damage("t", b"\x80\0\0\x09", b"\x01")
    database.commit()
    lines = [line.split(" ", 2)[2] for line in listed(flowstone, "--typed", database.path)]
    unknown = f"storage={3 << 32} version=1,{SHORT + 5} key=80000001 value=7f7f"
    damaged = f"storage={2 << 32} version=2,{SHORT + 7} key=80000009 value=01"
    no_mark = "column 'text', byte 0: 0xfe is no mark of a nullable column"
    assert lines == [
        'normal_entry epoch=1 table=t id=1 text="two words" b=7',
        'normal_entry epoch=1 table=t id=2 text="null" b=null',
        f'normal_entry epoch=1 {unknown} problem="metadata version 77 is not supported"',
        "remove_entry epoch=2 table=t id=1",
        f'normal_entry epoch=2 table=t {damaged} problem="{no_mark}"',
    ]
    assert len(listed(flowstone, "--table", "t", "--epoch", "2", database.path)) == 2
    done = flowstone("limestone", "cat", "--typed", "--rows", "--table", "nothing", database.path)
    assert (done.code, done.errors[-1]) == (1, "flowstone: no table 'nothing'; tables of the log: t")
