"""Our datastore as a process that implements the `lsmaster` commands of the kill rounds.

Usage: `python -m tests.limestone.interop.our_master [compatible]`; the environment has the endpoint of the replica.
"""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue
from typing import Final

from flowstone.limestone.store.blocking import BlockingBlobPool, Datastore, LogChannel

OUTPUT: Final = threading.Lock()


class Store:
    """A datastore and its channels, each with its own thread."""

    def __init__(self, *, compatible: bool) -> None:
        self._compatible = compatible
        self._store: Datastore
        self._pool: BlockingBlobPool
        self._channels: list[LogChannel] = []
        self._epochs = [0] * 10
        self._durable = 0
        self._queues: dict[str, SimpleQueue[list[str]]] = {}

    def take(self, words: list[str]) -> None:
        """Run a command in the thread for its kind and channel."""
        number, command, *rest = words
        if command == "durable":
            answer(f"{number} ok {self._durable}")
            return
        name = f"channel {rest[0]}" if command in ("begin", "put", "end") else command
        if name not in self._queues:
            self._queues[name] = SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queues[name],), daemon=True).start()
        self._queues[name].put(words)

    def _serve(self, queue: SimpleQueue[list[str]]) -> None:
        while True:
            number, command, *rest = queue.get()
            try:
                answer(f"{number} ok {getattr(self, f'_{command}')(*rest)}")
            except Exception as error:
                answer(f"{number} error {type(error).__name__}: {error}".replace("\n", " "))

    def _open(self, directory: str, channels: str) -> int:
        self._store = Datastore.from_environment(directory, os.environ, compatible=self._compatible)
        self._store.add_persistent_callback(self._told)
        self._channels = [self._store.create_channel() for _ in range(int(channels))]
        self._store.ready()
        self._pool = self._store.blob_pool()
        return self._store.last_epoch

    def _told(self, epoch: int) -> None:
        self._durable = max(self._durable, epoch)

    def _switch(self, epoch: str) -> str:
        self._store.switch_epoch(int(epoch))
        return ""

    def _begin(self, channel: str) -> int:
        log = self._channels[int(channel)]
        log.begin_session()
        epoch = log._channel.epoch
        assert epoch is not None
        return epoch

    def _put(self, channel: str, storage: str, key: str, value: str, major: str, minor: str, *blobs: str) -> str:
        log, version = self._channels[int(channel)], (int(major), int(minor))
        log.add_entry(int(storage), unhex(key), unhex(value), version, [*map(int, blobs)])
        return ""

    def _end(self, channel: str) -> str:
        self._channels[int(channel)].end_session()
        return ""

    def _blob(self, content: str) -> int:
        return self._pool.register_data(unhex(content))

    def _quit(self) -> str:
        self._pool.release()
        self._store.shutdown()
        return ""


def unhex(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)


def answer(line: str) -> None:
    with OUTPUT:
        sys.stdout.write(f"{line.rstrip()}\n")
        sys.stdout.flush()


def main() -> None:
    store = Store(compatible="compatible" in sys.argv[1:])
    for line in sys.stdin:
        store.take(line.split())


if __name__ == "__main__":
    main()
