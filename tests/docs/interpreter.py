"""The Python interpreter for a page's blocks, as a separate process: `python -m tests.docs.interpreter SOCKET
[--spark]`.

Blocks of one page share their names, as in a notebook, and may `await`, as in `python -m asyncio`. With `--spark` there
is one Spark session for all pages, `spark` in every block, and the commands that need Spark run here, too, instead of
starting a JVM each (`flowstone_command.py`).

A request is a line of JSON with the descriptors that standard output and error go to; the answer is an exit code.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

REQUEST_MAX: Final = 1 << 20


class Interpreter:
    """Runs requests one after another in its main thread; coroutines run on a loop in another thread."""

    def __init__(self, spark: Any | None) -> None:
        self._given = {} if spark is None else {"spark": spark}
        self._page: str | None = None
        self._names: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_MAX, 2)
                if not request:
                    return
                code = self._answer(json.loads(request), descriptors)
                connection.sendall(b"%d\n" % code)

    def _answer(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with _output_to(descriptors), _environment(request["environment"]):
            os.chdir(request["directory"])
            try:
                if "command" in request:
                    from flowstone.cli import run

                    return run(request["command"])
                self._run(request["code"], request["page"])
            except BaseException:
                traceback.print_exc()
                return 1
        return 0

    def _run(self, code: str, page: str) -> None:
        if page != self._page:
            self._page, self._names = page, {"__name__": "__main__", **self._given}
        compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if compiled.co_flags & inspect.CO_COROUTINE:
            asyncio.run_coroutine_threadsafe(eval(compiled, self._names), self._loop).result()
        else:
            exec(compiled, self._names)


@contextmanager
def _output_to(descriptors: list[int]) -> Iterator[None]:
    kept = [os.dup(number) for number in (1, 2)]
    for number, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def main(path: str, *options: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        spark = None
        if "--spark" in options:
            import flowstone.spark
            from flowstone.spark.spark_session import session

            spark = stack.enter_context(session("documentation", master="local[2]"))
            flowstone.spark.register(spark)
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)  # a visible socket accepts connections
        Interpreter(spark).serve(listener)


if __name__ == "__main__":
    main(*sys.argv[1:])
