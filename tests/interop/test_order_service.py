"""The example of a web service keeps its promise when the leader of its set is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.interop import workload
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import eventually
from tests.interop.mesh import Mesh, keys
from tests.places import ROOT
from tests.real_tarantool import free_port

ORDERS = 730


def define(mesh: Mesh) -> None:
    fields = [["id", "unsigned"], ["item", "string"]]
    create = ["call", "box.schema.space.create", ["orders", {"id": ORDERS, "is_sync": True, "format": fields}]]
    index = ["call", "box.space.orders:create_index", ["pk", {}]]
    assert not workload.run(mesh.wait_leader(), [create, index])


@contextmanager
def service(mesh: Mesh, log: Path) -> Iterator[int]:
    """Run the example; yield its port."""
    port = free_port()
    members = ",".join(f"127.0.0.1:{member.port}" for member in mesh)
    with log.open("wb") as output:
        command = [sys.executable, str(ROOT / "examples" / "order_service.py"), members, str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        eventually("the service answers", lambda: ask(port, "GET", "/orders/0")[0] == 404)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@not_for_stand_ins
def test_service_goes_on_when_the_leader_is_killed(nodes: Cluster, tmp_path: Path) -> None:
    mesh = Mesh(nodes, ("ours", "ours", "ours"), direct=True)
    mesh.set_modes("candidate")
    define(mesh)
    statuses: dict[int, int] = {}
    with service(mesh, tmp_path / "service.log") as port:
        for number in range(1, 41):
            if number == 20:
                mesh.wait_leader().kill()
            statuses[number], _ = ask(port, "POST", "/orders", {"id": number, "item": "tea"})
        assert ask(port, "GET", "/orders/40") == (200, {"id": 40, "item": "tea"})
        assert ask(port, "POST", "/orders", {"id": 40, "item": "tea"})[0] == 409
        status, told = ask(port, "POST", "/orders", {"id": "x", "item": "tea"})
        assert (status, told["error"]) == (400, "Order: field 'id': expected `int`, got `str`")
    assert set(statuses.values()) <= {201, 504}
    assert list(statuses.values()).count(504) <= 1
    stored = {number for number, status in statuses.items() if status == 201}
    found = set(keys(next(member for member in mesh if member.is_running), ORDERS))
    assert stored <= found <= set(statuses)
