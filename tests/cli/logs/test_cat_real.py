"""`flowstone cat` and `play` on files of the real Tarantool 2.6, compared with `tarantoolctl` and the server itself."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.cli.conftest import DUMP, REAL_LOG, Command

pytestmark = pytest.mark.real

LOGS = (
    "00000000000000000000.snap",
    "00000000000000000000.xlog",
    "00000000000000000059.snap",
    "00000000000000000059.xlog",
)
NUMBER = re.compile(rb"(?<=[\[,:])-?(nan|inf)(?=[\],}])")

SCHEMA = "\n".join(
    line for line in REAL_LOG.replace(",\n    ", ", ").splitlines()
    if re.match(r"local (format|all|mine|sync)\b|(all|mine|sync):create_index", line)
)  # fmt: skip


def reference(line: bytes) -> Any:
    """Return a line of tarantoolctl with our names in place of its numeric types."""
    words = {b"nan": b'"NaN"', b"-nan": b'"NaN"', b"inf": b'"Infinity"', b"-inf": b'"-Infinity"'}
    row = json.loads(NUMBER.sub(lambda found: words[found[0]], line).decode("utf-8", "surrogateescape"))
    names = {40: "CONFIRM", 41: "ROLLBACK"}
    kind = row["HEADER"]["type"]
    if kind in names:
        # It shows the body, a map with keys 2 and 3, as an array that Lua counts from 1.
        row["HEADER"]["type"] = names[kind]
        row["BODY"] = {"replica_id": row["BODY"][1], "lsn": row["BODY"][2]}
    return row


def ours(line: bytes) -> Any:
    row = json.loads(line)
    row.get("BODY", {}).pop("space", None)
    if row.get("BODY", {}).get("space_id") == 516:
        # Bytes: base64 in our output, arbitrary in that of tarantoolctl.
        row["BODY"]["tuple"][1] = base64.b64decode(row["BODY"]["tuple"][1]).decode("utf-8", "surrogateescape")
    return row


def rounded(value: Any) -> Any:
    """Return numbers rounded to the 14 digits that tarantoolctl prints."""
    if isinstance(value, float):
        return float(f"{value:.14g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return value


@pytest.mark.parametrize("name", LOGS)
def test_every_row_equals_the_output_of_tarantoolctl(
    flowstone: Command, real_log: Path, tarantool: ModuleType, name: str
) -> None:
    expected = tarantool.cat(real_log / name).splitlines()
    shown = flowstone("cat", "--format", "json", "--show-system", "--show-secrets", real_log / name).out.splitlines()
    assert len(expected) == len(shown) > 0
    for theirs, our_line in zip(expected, shown, strict=True):
        assert rounded(ours(our_line)) == rounded(reference(theirs))


@pytest.mark.parametrize("name", LOGS)
def test_rows_hidden_without_show_system_equal_those_of_tarantoolctl(
    flowstone: Command, real_log: Path, tarantool: ModuleType, name: str
) -> None:
    expected = tarantool.cat(real_log / name, show_system=False).splitlines()
    shown = flowstone("cat", "--format", "json", real_log / name).out.splitlines()
    assert [reference(line)["HEADER"].get("lsn") for line in expected] == [
        ours(line)["HEADER"].get("lsn") for line in shown
    ]


def test_yaml_is_valid_and_equals_that_of_tarantoolctl(flowstone: Command, real_log: Path) -> None:
    for options in (["--names"], ["--no-names"]):
        documents = list(yaml.safe_load_all(flowstone("cat", "--show-system", *options, real_log).out))
        lines = [
            json.loads(line) for line in flowstone("cat", "--format=json", "--show-system", real_log).out.splitlines()
        ]
        assert len(documents) == len(lines) > 500
        for document, line in zip(documents, lines, strict=True):
            assert document["HEADER"] == line["HEADER"]
            assert document.get("BODY", {}).get("space") == line.get("BODY", {}).get("space")
            if options == ["--no-names"]:
                assert document.get("BODY", {}).keys() == line.get("BODY", {}).keys()


def test_yaml_names_fields_and_groups_transactions(flowstone: Command, real_log: Path) -> None:
    text = flowstone("cat", "--space", "all", real_log / "00000000000000000000.xlog").text
    assert "# transaction 25: 3 rows\n---\nHEADER:\n  lsn: 25\n" in text
    assert '  tuple: {id: 20, text: "t1"}\n' in text
    assert '  key: {id: 1}\n  operations: [["=", "text", "changed"], ["=", "d", 2.5], ["!", -1, false]]\n' in text
    assert "  key: {id: 8}\n" in text
    assert '!!binary "//5h"' in text


def test_fields_added_later_are_named_from_then_on(flowstone: Command, real_log: Path) -> None:
    text = flowstone("cat", "--space", "all", "--format=json", "--names", real_log / "00000000000000000059.xlog").text
    assert json.loads(text.splitlines()[0])["BODY"]["tuple"]["note"] == "n"


def test_settled_excludes_rolled_back_rows(flowstone: Command, real_log: Path) -> None:
    def tuples(*options: str) -> list[Any]:
        lines = flowstone("cat", "--format=json", "--space=sync", *options, real_log / "00000000000000000000.xlog").out
        return [json.loads(line)["BODY"]["tuple"] for line in lines.splitlines()]

    assert tuples() == [[1, "kept"], [2, "rolled back"], [3, "kept too"]]
    assert tuples("--settled") == [[1, "kept"], [3, "kept too"]]


def test_hashes_are_shown_only_on_request(flowstone: Command, real_log: Path) -> None:
    log = real_log / "00000000000000000000.xlog"
    hashes = re.findall(
        rb'"chap-sha1":"([^"]{28})"', flowstone("cat", "--format=json", "--space=_user", "--show-secrets", log).out
    )
    assert len(hashes) == 2
    for form in ("yaml", "json", "lua", "table", "csv"):
        hidden = flowstone("cat", "--format", form, "--space=_user", log)
        assert hidden.code == 0
        assert b"hidden" in hidden.out
        assert not any(each in hidden.out for each in hashes)
        assert any(
            each in flowstone("cat", "--format", form, "--space=_user", "--show-secrets", log).out for each in hashes
        )


SPACES = ("--space=all", "--space=mine", "--space=sync")


def test_server_that_runs_the_lua_has_the_same_data(
    flowstone: Command, real_log: Path, tarantool: ModuleType, tmp_path: Path
) -> None:
    logs = sorted(real_log.glob("*.xlog"))
    made = flowstone("cat", "--format=lua", *SPACES, *logs)
    assert made.code == 0
    printed = tarantool.run(f"box.cfg{{log='server.log'}}\n{SCHEMA}\n{made.text}\n{DUMP}", tmp_path)
    assert printed == (real_log / "data.txt").read_text()


def test_server_after_play_has_the_same_data(
    flowstone: Command, real_log: Path, tarantool: ModuleType, tmp_path: Path
) -> None:
    logs = sorted(real_log.glob("*.xlog"))
    with tarantool.serve(tmp_path, setup=SCHEMA) as server:
        played = flowstone("play", server.uri, *SPACES, *logs)
    assert (played.code, played.errors) == (0, ["note: 1 row skipped (all spaces): rolled back"])
    # Local rows, which have no replica id, are counted separately.
    assert played.text.endswith("resume each replica with --replica 0 --from 2, --replica 1 --from 61\n")
    printed = tarantool.run("box.cfg{log='again.log'}" + DUMP, tmp_path)
    assert printed == (real_log / "data.txt").read_text()


def test_truncated_spaces_are_equal_after_play_and_lua(
    flowstone: Command, tarantool: ModuleType, tmp_path: Path
) -> None:
    schema = "box.schema.space.create('t'):create_index('pk') box.schema.space.create('u'):create_index('pk') "
    fill = (
        "box.space.t:insert{1} box.space.u:insert{1} box.space.t:truncate() box.space.t:insert{2} box.space.u:insert{2}"
    )
    dump = " local j = require('json') print(j.encode(box.space.t:select()), j.encode(box.space.u:select())) os.exit(0)"
    (tmp_path / "first").mkdir()
    printed = tarantool.run(f"box.cfg{{log='server.log'}} {schema} {fill} {dump}", tmp_path / "first")
    assert printed.split() == ["[[2]]", "[[1],[2]]"]
    with tarantool.serve(tmp_path / "played", setup=schema) as server:
        assert flowstone("play", server.uri, tmp_path / "first").code == 0
    assert tarantool.run("box.cfg{log='again.log'}" + dump, tmp_path / "played") == printed
    made = flowstone("cat", "--format=lua", tmp_path / "first").text
    (tmp_path / "lua").mkdir()
    assert tarantool.run(f"box.cfg{{log='server.log'}} {schema}\n{made}\n{dump}", tmp_path / "lua") == printed
