"""The datastore in threads: one per channel, epochs from another, and all of it durable in the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.limestone import Datastore, LogChannel, Settings, WrongTime

DEADLINE_SECONDS = 60


def test_a_program_without_a_loop_writes_and_waits_for_an_epoch(tmp_path: Path) -> None:
    durable = threading.Event()
    with Datastore(str(tmp_path)) as store:
        channel = store.create_channel()
        store.add_persistent_callback(lambda epoch: durable.set())
        store.ready()
        store.switch_epoch(store.last_epoch + 1)
        channel.begin_session()
        channel.add_entry(1, b"k", b"v", (1, 1))
        channel.end_session()
        store.switch_epoch(2)
        assert durable.wait(DEADLINE_SECONDS)
        assert (store.durable_epoch, store.status().informed_epoch) == (1, 1)
    store.shutdown()
    with pytest.raises(LocalProtocolError):
        channel.begin_session()


def test_settings_are_one_object_or_a_path_with_fields(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Datastore(Settings(str(tmp_path)), spill=3)
    with Datastore.from_environment(str(tmp_path), {}, spill=7) as store:
        store.ready()
        assert store.last_epoch == 0


def test_each_thread_has_its_channel_and_epochs_are_switched_by_another(tmp_path: Path) -> None:
    told: list[int] = []
    sessions, channels = 30, 4
    errors: list[BaseException] = []

    def write(channel: LogChannel) -> None:
        try:
            for number in range(sessions):
                channel.begin_session()
                for minor in range(20):
                    channel.add_entry(channel.id, b"%d/%d" % (number, minor), b"v" * 50, (number, minor))
                if number % 7 == 3:
                    channel.abort_session()
                else:
                    channel.end_session()
        except BaseException as error:
            errors.append(error)

    with Datastore(str(tmp_path), spill=400) as store:
        store.add_persistent_callback(told.append)
        made = [store.create_channel() for _ in range(channels)]
        store.ready()
        store.switch_epoch(1)
        threads = [threading.Thread(target=write, args=(channel,)) for channel in made]
        for thread in threads:
            thread.start()
        epoch = 1
        while any(thread.is_alive() for thread in threads):
            epoch += 1
            store.switch_epoch(epoch)
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        done = threading.Event()
        store.add_persistent_callback(lambda told: done.set() if told == epoch else None)
        store.switch_epoch(epoch + 1)
        assert done.wait(DEADLINE_SECONDS)
        assert store.status().informed_epoch == told[-1] == epoch
    assert errors == []
    assert told == sorted(set(told))
    with Datastore(str(tmp_path)) as again:
        again.ready()
        with pytest.raises(WrongTime):
            again.create_channel()
