"""Reloading the configuration: the options that the process itself applies, and those that need a restart.
Also a stop while HTTP is starting.

Other signals are tested on real processes in test_serve.py, HTTP in test_node_web.py, the log in test_log.py.
"""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

from tests.cli.node.test_serve import SECONDS, Serve, serve
from tests.real_tarantool import free_port

__all__ = ["serve"]


def test_process_stopped_while_its_dashboard_waits_for_a_peer_does_not_start(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        peer.settimeout(SECONDS)
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        served = serve("--http-listen=127.0.0.1:0", "--dashboard", f"--replication={address}")
        asked, _ = peer.accept()  # by the dashboard, which starts first; it is never answered
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
    served.wait_for("http_listen cannot be changed at run time; restart the node to apply it")
    assert served.end() == 0
    last = json.loads(served.lines[-1])
    assert (last["message"], last["level"], last["logger"]) == ("stopped", "INFO", "flowstone")


def test_a_reload_leaves_a_node_writable_that_has_lost_a_peer(serve: Serve, tmp_path: Path) -> None:
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
