"""The memory of a scan does not grow with the log."""

import subprocess
import sys
from pathlib import Path

from flowstone.iproto.constants import RequestType
from tests.conftest import FULL
from tests.history.logs import Log, multiply

SIZE = 2 * 1024**3 if FULL else 128 * 1024**2
LIMIT_MB = 500

SCAN = """
import sys
import flowstone
rows = sum(batch.num_rows for batch in flowstone.read_log(sys.argv[1], space="people", force=True))
# Not ru_maxrss: that of a forked process starts with its parent's.
status = dict(line.split(":") for line in open("/proc/self/status"))
print(rows, int(status["VmHWM"].split()[0]) // 1024)
"""


def test_memory_does_not_depend_on_the_size_of_the_directory(tmp_path: Path) -> None:
    rows = 200_000
    with Log(tmp_path / "one") as log:
        log.create_space(512, "people", ("id", "unsigned"), ("name", "string"), ("age", "unsigned"))
        for first in range(0, rows, 20):  # small enough to stay uncompressed
            people = range(first, first + 20)
            log.write(*((RequestType.INSERT, {0x10: 512, 0x21: (n, f"name of {n}", n % 90)}) for n in people))
    size = Path(log.path).stat().st_size
    multiply(Path(log.path), tmp_path / "many", SIZE)
    command = [sys.executable, "-c", SCAN, str(tmp_path / "many")]
    found, peak_mb = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert found == rows * -(-SIZE // size)
    assert peak_mb < LIMIT_MB
