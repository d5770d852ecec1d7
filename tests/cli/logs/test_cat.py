"""`flowstone cat`: every option, every format, and every error."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pyarrow import parquet

from flowstone.outside.disk import SystemDisk
from tests.cli.conftest import Command
from tests.history.logs import Log

LOG = "00000000000000000000.xlog"


@pytest.fixture
def lsns(flowstone: Command) -> Any:
    """Return the LSNs of replica 1's rows after a selection."""

    def command(*arguments: str | Path) -> list[int]:
        shown = flowstone("cat", "--format=json", *arguments)
        assert shown.code == 0
        headers = [json.loads(line)["HEADER"] for line in shown.out.splitlines()]
        return [header["lsn"] for header in headers if header.get("replica_id") == 1]

    return command


def test_from_is_inclusive_and_to_is_exclusive(lsns: Any, shop: Path) -> None:
    assert lsns("--from", "4", "--to", "7", shop) == [4, 5, 6]


def test_timestamp_is_exclusive_and_accepted_in_both_forms(lsns: Any, tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(5):
        log.insert(512, number)  # at 1001.0, 1002.0 and so on
    log.writer.close()
    assert lsns("--timestamp", "1003", log.path) == [1, 2]
    assert lsns("--timestamp", "1970-01-01T00:16:43.0001Z", log.path) == [1, 2, 3]
    assert lsns("--timestamp", "1970-01-01T02:16:43+02:00", log.path) == [1, 2]


def test_spaces_are_selected_by_id_or_name(lsns: Any, shop: Path) -> None:
    assert lsns("--space", "orders", shop) == lsns("--space", "514", shop) == [3, 6]
    assert lsns("--space", "orders", "--space", "512", shop) == [2, 3, 6, 8, 11, 12]


def test_replicas_are_selected_by_id(flowstone: Command, shop: Path) -> None:
    shown = flowstone("cat", "--format=json", "--replica", "0", shop / LOG)
    assert [json.loads(line)["HEADER"]["type"] for line in shown.out.splitlines()] == ["RAFT"]


def test_system_spaces_are_shown_on_request(flowstone: Command, shop: Path) -> None:
    snapshot = shop / "00000000000000000000.snap"
    assert b"_space" not in flowstone("cat", "--format=json", snapshot).out
    assert flowstone("cat", "--format=json", "--show-system", snapshot).out.count(b'"space":"_space"') == 3
    assert flowstone("cat", "--format=json", "--space=_index", snapshot).out.count(b"\n") == 3


def test_subdirectories_are_read_on_request(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "deep" / "shop")
    refused = flowstone("cat", tmp_path)
    assert (refused.code, refused.out) == (2, b"")
    assert refused.errors[0].endswith("look into subdirectories with --recursive")
    assert flowstone("cat", "-r", tmp_path).out == flowstone("cat", shop).out


def test_settled_omits_rolled_back_transactions_and_those_after_them(flowstone: Command, lsns: Any, shop: Path) -> None:
    assert lsns("--settled", shop) == [1, 2, 3, 4, 5, 9, 10, 11, 12, 13]
    assert flowstone("cat", "--settled", shop).errors == ["note: 3 rows skipped (all spaces): rolled back"]


def test_settled_omits_pending_transactions(flowstone: Command, tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1)
    log.write((31, {2: 0, 3: 0, 0x53: 2}))  # type: ignore[arg-type]
    log.insert(512, 2, flags=6)
    log.writer.close()
    shown = flowstone("cat", "--settled", "--format=json", log.path)
    assert shown.out.count(b"\n") == 2
    assert shown.errors == ["note: 1 row withheld (all spaces): neither confirmed nor rolled back in this log"]


def test_json_has_names_on_request(flowstone: Command, shop: Path) -> None:
    rows = [json.loads(line) for line in flowstone("cat", "--format=json", "--names", shop).out.splitlines()]
    assert rows[0]["BODY"]["tuple"] == {"id": 1, "name": "Ada", "city": "London"}
    plain = [json.loads(line) for line in flowstone("cat", "--format=json", shop).out.splitlines()]
    assert plain[0]["BODY"]["tuple"] == [1, "Ada", "London"]


def test_yaml_may_omit_names(flowstone: Command, shop: Path) -> None:
    assert '  tuple: [1, "Ada", "London"]\n' in flowstone("cat", "--no-names", shop).text


def test_a_table_puts_brackets_around_transactions(flowstone: Command, shop: Path) -> None:
    lines = flowstone("cat", "--format=table", shop / LOG).text.splitlines()
    assert lines[0].split() == ["lsn", "time", "replica", "type", "space", "data"]
    assert "".join(line[0] for line in lines[1:]) == "---┌└-┌└---"
    assert lines[2].endswith("PROMOTE  -         replica_id: 0, lsn: 0, term: 2")


def test_table_of_one_space_has_a_column_per_field(flowstone: Command, shop: Path) -> None:
    text = flowstone("cat", "--format=table", "--space=products", "--columns=lsn,id,name,price", shop).text
    assert [line.lstrip("- ").split() for line in text.splitlines()][:3] == [
        ["lsn", "id", "name", "price"],
        ["11", "1", "lamp", "19.90"],
        ["12", "2", "desk", "149.00"],
    ]


@pytest.mark.parametrize("options", [(), ("--space=plain",)])
def test_a_table_shows_fields_without_names_by_their_numbers(
    flowstone: Command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    log = Log(tmp_path)
    log.create_space(512, "plain")
    log.insert(512, 20, "flow")
    log.delete(512, 20)
    log.writer.close()
    *_, inserted, deleted = flowstone("cat", "--format=table", *options, log.path).text.splitlines()
    one, two = ('1: 20 2: "flow"', "1: 20") if options else ('{1: 20, 2: "flow"}', "{1: 20}")
    assert inserted.endswith(f" {one}")
    assert deleted.endswith(f" {two}")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_of_one_space_has_typed_columns(flowstone: Command, shop: Path) -> None:
    rows = table(flowstone("cat", "--format=csv", "--space=products", shop).text)
    assert rows[0]["name"] == "lamp"
    assert rows[0]["price"] == "19.90"
    assert (rows[2]["_type"], rows[2]["id"], rows[2]["name"]) == ("UPDATE", "1", "")
    assert json.loads(rows[2]["_operations"]) == [["-", 3, 1]]
    assert json.loads(rows[2]["_key"]) == [1]


def test_csv_of_several_spaces_has_a_json_column(flowstone: Command, shop: Path) -> None:
    rows = table(flowstone("cat", "--format=csv", shop).text)
    assert (rows[0]["space_id"], rows[0]["space"]) == ("512", "customers")
    assert json.loads(rows[0]["tuple"]) == [1, "Ada", "London"]
    assert rows[4]["type"] == "RAFT"


def test_columns_are_selected_by_name(flowstone: Command, shop: Path) -> None:
    shown = flowstone("cat", "--format=csv", "--space=products", "--columns=name,_lsn", shop)
    assert shown.text.splitlines()[:2] == ['"name","_lsn"', '"lamp",11']


def test_decimals_become_numbers_with_a_scale(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    output = tmp_path / "products.parquet"
    done = flowstone("cat", "--format=parquet", "--space=products", "--decimal-scale=2", "-o", output, shop)
    assert (done.code, done.out) == (0, b"")
    read = parquet.read_table(output)
    assert str(read.schema.field("price").type) == "decimal128(38, 2)"
    assert read.num_rows == 6


@pytest.mark.parametrize(("kind", "shown"), [("decimal", "18446744073709551615"), ("double", "1.8446744073709552e+19")])
def test_large_unsigned_numbers_get_the_requested_type(
    flowstone: Command, tmp_path: Path, kind: str, shown: str
) -> None:
    log = Log(tmp_path)
    log.create_space(512, "big", ("id", "unsigned"))
    log.insert(512, 2**64 - 1)
    log.writer.close()
    refused = flowstone("cat", "--format=csv", "--space=big", log.path)
    assert refused.code == 1
    assert "field 'id'" in refused.errors[0]
    assert "--unsigned-as=decimal" in refused.errors[0]
    rows = table(flowstone("cat", "--format=csv", "--space=big", "--unsigned-as", kind, log.path).text)
    assert rows[0]["id"] == shown


def test_strings_that_are_not_utf8_can_be_shown_as_bytes(flowstone: Command, tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "t", ("id", "unsigned"), ("s", "string"))
        log.insert(512, 1, "\udcff")
    refused = flowstone("cat", "--format=csv", "--space=t", log.path)
    assert refused.code == 1
    assert refused.errors[0].endswith("is not UTF-8; choose --strings-as=binary")
    output = tmp_path / "t.parquet"
    chosen = ("--format=parquet", "--space=t", "--strings-as=binary", "-o", output)
    assert flowstone("cat", *chosen, log.path).code == 0
    assert parquet.read_table(output).column("s").to_pylist() == [b"\xff"]


def test_generic_parquet_has_every_row_and_the_names_of_spaces(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    output = tmp_path / "all.parquet"
    assert flowstone("cat", "--format=parquet", "--show-system", "--output", output, shop).code == 0
    read = parquet.read_table(output)
    assert read.num_rows == 27
    assert "_space" in read.column("space").to_pylist()


def test_columns_added_later_are_null_before(flowstone: Command, tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"))
    log.insert(512, 1)
    fields = [{"name": "id", "type": "unsigned"}, {"name": "note", "type": "string"}]
    log.write((3, {0x10: 280, 0x21: [512, 1, "t", "memtx", 0, {}, fields]}))  # type: ignore[arg-type]
    log.insert(512, 2, "x")
    log.writer.close()
    output = tmp_path / "t.parquet"
    assert flowstone("cat", "--format=parquet", "--space=t", "-o", output, log.path).code == 0
    assert parquet.read_table(output).select(["id", "note"]).to_pylist() == [
        {"id": 1, "note": None},
        {"id": 2, "note": "x"},
    ]


def test_column_that_changes_its_type_is_rejected_with_advice(flowstone: Command, tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("v", "string"))
    log.insert(512, 1, "x")
    fields = [{"name": "id", "type": "unsigned"}, {"name": "v", "type": "boolean"}]
    log.write((3, {0x10: 280, 0x21: [512, 1, "t", "memtx", 0, {}, fields]}))  # type: ignore[arg-type]
    log.insert(512, 2, True)
    log.writer.close()
    refused = flowstone("cat", "--format=csv", "--space=t", log.path)
    assert (refused.code, refused.out) == (1, b"")
    (said,) = refused.errors
    assert said.startswith("flowstone: column 'v' is string in one definition of the space and bool in another; ")
    assert said.endswith("read the log before and after the space was altered separately, with --from and --to")
    assert flowstone("cat", "--format=csv", "--space=t", "--to=5", log.path).code == 0


def test_output_file_is_supported_by_every_format(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    for form in ("yaml", "json", "lua", "table", "csv"):
        path = tmp_path / form
        assert flowstone("cat", "--format", form, "--output", path, shop).out == b""
        assert path.read_bytes() == flowstone("cat", "--format", form, shop).out
    assert sorted(os.listdir(tmp_path)) == ["csv", "json", "lua", "table", "yaml"]


def test_failed_output_leaves_no_file(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    assert flowstone("cat", "--format=csv", "--space=nope", "--output", tmp_path / "x", shop).code == 2
    assert os.listdir(tmp_path) == []


@pytest.fixture
def damaged(shop: Path, tmp_path: Path) -> Path:
    """Return the logs, the second one with a wrong byte in the middle."""
    copy = tmp_path / "shop"
    shutil.copytree(shop, copy)
    log = copy / "00000000000000000011.xlog"
    data = bytearray(log.read_bytes())
    data[200] ^= 0xFF
    log.write_bytes(data)
    return copy


def test_damage_ends_the_listing_with_one_line(flowstone: Command, damaged: Path) -> None:
    stopped = flowstone("cat", "--format=json", damaged)
    assert stopped.code == 1
    assert len(stopped.errors) == 1
    assert "00000000000000000011.xlog: damaged at byte " in stopped.errors[0]
    assert stopped.out.count(b"\n") == 16


def test_force_continues_and_reports_skipped_bytes(flowstone: Command, damaged: Path) -> None:
    forced = flowstone("cat", "--format=json", "--force", damaged)
    assert forced.code == 3
    assert forced.errors[0].startswith("warning: ")
    assert "skipped bytes" in forced.errors[0]
    assert forced.out.count(b"\n") == 17


def test_force_is_not_suggested_when_already_given(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.write_bytes((shop / LOG).read_bytes().replace(b"VClock: {}", b"VClock: {x}", 1))
    refused = flowstone("cat", log)
    assert (refused.code, "with --force" in refused.errors[0]) == (1, True)
    forced = flowstone("cat", "--force", log)
    assert (forced.code, "with --force" in forced.errors[0]) == (1, False)


def test_gap_accepted_by_force_is_reported(flowstone: Command, tmp_path: Path) -> None:
    for start in (0, 5):
        with Log(tmp_path, start=start) as log:
            log.insert(512, start)
    refused = flowstone("cat", tmp_path)
    assert refused.code == 1
    assert refused.errors[0].endswith("or skip the missing rows with --force")
    forced = flowstone("cat", "--format=json", "--force", tmp_path)
    assert (forced.code, forced.out.count(b"\n"), len(forced.errors)) == (3, 2, 1)
    assert forced.errors[0].startswith("warning: ")
    assert "LSN 2..5 of replica 1 missing" in forced.errors[0]


def test_lua_has_only_settled_rows_by_default(flowstone: Command, shop: Path) -> None:
    settled = flowstone("cat", "--format=lua", shop)
    assert "Edsger" not in settled.text
    assert settled.errors == ["note: 3 rows skipped (all spaces): rolled back"]
    assert "Edsger" in flowstone("cat", "--format=lua", "--no-settled", shop).text


def test_lua_has_the_truncates_of_the_selected_spaces(flowstone: Command, tmp_path: Path) -> None:
    upsert: Any = 9
    with Log(tmp_path) as log:
        log.insert(512, 1)
        log.insert(513, 1)
        for space_id in (512, 513):
            log.write((upsert, {0x10: 330, 0x21: (space_id, 1), 0x28: [["+", 1, 1]]}))
    assert b"330" not in flowstone("cat", "--format=json", log.path).out
    text = flowstone("cat", "--format=lua", "--space=513", log.path).text
    assert [line.partition(":")[0] for line in text.splitlines()] == ["box.space[513]", "box.space[330]"]
    assert "512" not in text


def test_lua_of_a_snapshot_truncates_no_space(flowstone: Command, real_log: Path) -> None:
    (snapshot, *_) = sorted(real_log.glob("*.snap"), reverse=True)
    assert "space[330]" not in flowstone("cat", "--format=lua", "--show-system", snapshot).text


def test_a_torn_tail_is_a_warning(flowstone: Command, shop: Path, tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.write_bytes((shop / "00000000000000000011.xlog").read_bytes()[:-12])
    shown = flowstone("cat", "--format=json", log)
    assert shown.code == 0
    assert shown.out.count(b"\n") == 2
    assert len(shown.errors) == 1
    assert "torn at byte" in shown.errors[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "flowstone: nowhere: no such file or directory"),
        (["notes.txt"], 2, "flowstone: notes.txt: not a log file; log files end in .xlog or .snap"),
        (["wrong.xlog"], 2, "flowstone: wrong.xlog: not a log file: "),
        (["empty"], 2, "flowstone: empty: no .xlog or .snap file in this directory"),
        (["--space", "nope", "shop"], 2, "flowstone: no space 'nope' in "),
        (["--timestamp", "noon", "shop"], 2, "flowstone: --timestamp 'noon' is not a valid time; use "),
        (["--timestamp", "2024-05-01T12:00:00", "shop"], 2, "flowstone: --timestamp '2024-05"),
        (["--timestamp", "2024-13-01T12:00:00Z", "shop"], 2, "flowstone: --timestamp '2024-13"),
        (["--format", "xml", "shop"], 2, "flowstone cat: Invalid value for '--format': "),
        (["--from", "one", "shop"], 2, "flowstone cat: Invalid value for '--from': "),
        (["--nope", "shop"], 2, "flowstone cat: No such option: --nope"),
        ([], 2, "flowstone cat: Missing argument"),
        (
            ["--format=parquet", "shop"],
            2,
            "flowstone: parquet cannot be written to stdout; specify a file with --output FILE",
        ),
        (["--columns=a", "shop"], 2, "flowstone: --columns does not apply to yaml; "),
        (["--format=csv", "--columns=a", "shop"], 2, "flowstone: no column 'a'; known columns: replica_id, "),
        (["--format=table", "--columns=a", "shop"], 2, "flowstone: no column 'a'; known columns: lsn, "),
        (["--unsigned-as=double", "shop"], 2, "flowstone: --unsigned-as, --decimal-scale and --strings-as do not"),
        (["--strings-as=binary", "shop"], 2, "flowstone: --unsigned-as, --decimal-scale and --strings-as do not"),
        (["/dev/null"], 2, "flowstone: /dev/null: a device, not a log file; log files end in "),
        (["fifo"], 2, "flowstone: fifo: a pipe, not a log file; log files end in "),
        (["vylog.xlog"], 2, "flowstone: vylog.xlog: a VYLOG file of the vinyl engine; only "),
        (["--from=6", "--to=5", "shop"], 2, "flowstone: --from 6 is greater than --to 5; "),
        (["--timestamp=-1", "shop"], 2, "flowstone: --timestamp '-1' is before 1970; "),
        (["--replica=32", "shop"], 2, "flowstone cat: Invalid value for '--replica': "),
        (["--format=lua", "--names", "shop"], 2, "flowstone: --names does not apply to lua; "),
        (["--output", "no/such/file", "nowhere"], 2, "flowstone: no/such/file: no such directory: "),
        (["--output", "empty", "nowhere"], 2, "flowstone: empty: is a directory; specify a file in it"),
    ],
)  # fmt: skip
def test_usage_error_is_one_line(
    flowstone: Command,
    shop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    shutil.copytree(shop, tmp_path / "shop")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "wrong.xlog").write_text("hello\nworld\n\n")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "vylog.xlog").write_bytes((shop / LOG).read_bytes().replace(b"XLOG\n", b"VYLOG\n", 1))
    monkeypatch.chdir(tmp_path)
    refused = flowstone("cat", *arguments)
    assert (refused.code, refused.out) == (code, b"")
    assert len(refused.errors) == 1
    assert refused.errors[0].startswith(says)


def test_unreadable_file_is_reported(
    flowstone: Command, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / LOG
    shutil.copy(shop / LOG, log)
    log.chmod(0)
    if os.access(log, os.R_OK):
        # Root can read everything, so the error is simulated.
        def refuse(_: object, path: str) -> NoReturn:
            raise PermissionError(errno.EACCES, "Permission denied", path)

        monkeypatch.setattr(SystemDisk, "open", refuse)
    refused = flowstone("cat", log)
    assert (refused.code, refused.errors) == (2, [f"flowstone: {log}: Permission denied"])
