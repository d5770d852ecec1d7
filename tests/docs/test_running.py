"""Examples are run, and wrong ones are found: pages with and without mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import BadPage, page_of
from tests.docs.running import BlockFailed, interpreter, run_page


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with interpreter(tmp_path_factory.mktemp("python")) as socket:
        yield socket


def run(text: str, directory: Path, python: Path) -> None:
    run_page(page_of(directory.name, text), directory, python)


TRUE = {
    "a shell keeps exported variables": "```sh\nexport A=1\n```\n```console\n$ echo $A\n1\n```\n",
    "names stay": "```python\na = 1\n```\n```python\nprint(a)\n```\n```text\n1\n```\n",
    "await stands anywhere": "```python\nimport asyncio\nawait asyncio.sleep(0)\nprint(2)\n```\n```text\n2\n```\n",
    "times are any time": "```console\n$ date -u +%FT%TZ\n2026-01-01T00:00:00Z\n```\n",
    "lines are left out": "```console\n$ seq 5\n1\n…\n5\n```\n",
    "parts are left out": "```console\n$ echo one two three\none … three\n```\n",
    "a hidden block runs": "<!-- sh\necho x >file\n-->\n```console\n$ cat file\nx\n```\n",
    "a file is written": "<!-- file: a/b.py -->\n```python\nprint(3)\n```\n```console\n$ python a/b.py\n3\n```\n",
    "paths are the page's own": "```sh\nmkdir -p /backup\n```\n```console\n$ ls -d /backup\n/backup\n```\n",
    "ports come back": "```console\n$ echo 127.0.0.1:3301 db1:3301\n127.0.0.1:3301 db1:3301\n```\n",
    "hosts have ports of their own": '```python\na = [{"host": "db1", "port": 3301}, {"host": "db2", "port": 3301}]\n'
    "for each in a:\n    print('{host}:{port}'.format(**each))\n```\n```text\ndb1:3301\ndb2:3301\n```\n",
    "JSON has the keys": '```sh\necho \'{"a": 2, "b": null}\'\n```\n```json\n{"a": 1}\n```\n',
    "an error that is shown": "```console\n$ echo oh; false\noh\n```\n",
    "it runs on": "<!-- keeps running -->\n```console\n$ echo up; sleep 600\nup\n```\n",
    "what is not run is not run": "<!-- not run: it is a test -->\n```sh\nfalse\n```\n",
}

FALSE = {
    "a command that fails": "```sh\nfalse\ntrue\n```\n",
    "a command that fails in a pipe": "```sh\nfalse | true\n```\n",
    "a command that fails where nothing of it is shown": "```console\n$ echo oh; false\n…\n```\n",
    "another output": "```console\n$ echo 1\n2\n```\n",
    "more output": "```console\n$ seq 2\n1\n```\n",
    "less output": "```console\n$ seq 1\n1\n2\n```\n",
    "an exception": "```python\n1 / 0\n```\n",
    "an exception in a coroutine": "```python\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0\n```\n",
    "another text": "```python\nprint(1)\n```\n```text\n2\n```\n",
    "nothing that could have printed it": "```text\n2\n```\n",
    "no such key": '```sh\necho \'{"a": 2}\'\n```\n```json\n{"b": 1}\n```\n',
    "another type": '```sh\necho \'{"a": "x"}\'\n```\n```json\n{"a": 1}\n```\n',
    "no JSON": '```sh\necho \'{"a": 2}\'\n```\n```json\n{"a":\n```\n',
    "what should run on and ends": "<!-- keeps running -->\n```console\n$ echo down\nup\n```\n",
    "a node that is told nonsense": '```toml\nwal_mode = "sometimes"\n```\n',
    "a file of no name": "```ini\n[Unit]\n```\n",
}

BAD = {
    "no language": "```\nx\n```\n",
    "an unknown language": "```cobol\nx\n```\n",
    "no end": "```sh\nx\n",
    "a remark about nothing": "<!-- keeps running -->\nText.\n",
    "an unknown need": "<!-- needs: a lot -->\n",
    "SQL without Spark": "```sql\nSELECT 1\n```\n",
}


@pytest.mark.parametrize("text", TRUE.values(), ids=TRUE)
def test_correct_page_passes(text: str, tmp_path: Path, python: Path) -> None:
    run(text, tmp_path, python)


@pytest.mark.parametrize("text", FALSE.values(), ids=FALSE)
def test_incorrect_page_fails(text: str, tmp_path: Path, python: Path) -> None:
    with pytest.raises(BlockFailed):
        run(text, tmp_path, python)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_page_that_breaks_the_rules_is_rejected(text: str) -> None:
    with pytest.raises(BadPage):
        page_of("page.md", text)


def test_no_process_is_left_running(tmp_path: Path, python: Path) -> None:
    run("```sh\nsleep 600 & echo $! >child\n```\n", tmp_path, python)
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
