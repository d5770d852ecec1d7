"""Reloading the configuration: the options that the process itself applies, and those that need a restart.
Also, a stop while HTTP is starting.

Other signals are tested on real processes in test_serve.py, HTTP in test_node_web.py, the log in test_log.py.
"""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from tests.cli.node.test_serve import SECONDS, Serve, serve
from tests.interop.member import eventually
from tests.real_tarantool import free_port

__all__ = ["serve"]


def test_process_stopped_while_its_dashboard_waits_for_a_peer_does_not_start(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        peer.settimeout(SECONDS)
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        served = serve("--http-listen=127.0.0.1:0", "--dashboard", f"--replication={address}")
        asked, _ = peer.accept()  # from the dashboard, which starts first; it is never answered
        with asked:
            assert served.end() == 0
    assert not any("connecting" in line for line in served.lines)
    assert served.lines[-1].endswith("stopped")
    assert not (tmp_path / "data").exists()


def test_reload_changes_the_log_format_and_names_options_that_need_a_restart(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('log_format = "plain"\n')
    served = serve("--config=node.toml")
    served.wait_for("ready")
    file.write_text('log_format = "json"\nhttp_listen = "127.0.0.1:0"\n')
    served.tell(signal.SIGHUP)
    warning = "http_listen cannot be changed at run time; restart the node to apply it"
    eventually("the warning is logged", lambda: any(warning in line for line in served.lines))
    assert served.end() == 0
    last = json.loads(served.lines[-1])
    assert (last["message"], last["level"], last["logger"]) == ("stopped", "INFO", "flowstone")


async def test_log_options_take_effect_when_a_client_sets_them(serve: Serve) -> None:
    address = f"127.0.0.1:{free_port()}"
    served = serve("--user=app:secret", f"--listen={address}")
    served.wait_for("ready")
    options = {"log_format": "json", "log_level": "warn"}
    async with await Connection.open(production(), parse_uri(f"app:secret@{address}")) as client:
        await client.request(RequestType.CALL, pack({Key.FUNCTION_NAME: "box.cfg", Key.TUPLE: [options]}))
        await client.request(RequestType.CALL, pack({Key.FUNCTION_NAME: "box.cfg", Key.TUPLE: [{"log_level": "info"}]}))
    assert served.end() == 0
    last = json.loads(served.lines[-1])
    assert (last["message"], last["level"]) == ("stopped", "INFO")
    assert not any("'log_level' configuration option to 'info'" in line for line in served.lines)


def test_node_that_lost_a_peer_stays_writable_after_a_reload(serve: Serve, tmp_path: Path) -> None:
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    options = f'user = "app:secret"\nreplication = ["app:secret@{first}", "app:secret@{second}"]\n'
    file = tmp_path / "node.toml"
    file.write_text(options)
    peers = [
        serve("--config=node.toml", f"--listen={address}", f"--work-dir={number}")
        for number, address in enumerate((first, second))
    ]
    for peer in peers:
        peer.wait_for("ready")
    survivor, lost = peers
    assert lost.end(signal.SIGKILL) != 0
    begun = len(survivor.lines)
    file.write_text(f"{options}checkpoint_count = 4\n")
    survivor.tell(signal.SIGHUP)
    survivor.wait_for("configuration reloaded; changed: checkpoint_count")
    assert not [line for line in survivor.lines[begun:] if "connecting" in line or "read-only" in line]
    file.write_text(f'user = "app:secret"\nreplication = "app:secret@{first}"\n')
    survivor.tell(signal.SIGHUP)
    survivor.wait_for("configuration reloaded; changed: checkpoint_count, replication")
    assert survivor.end() == 0
