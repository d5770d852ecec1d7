"""The Kubernetes manifests: objects that refer to each other, arguments that the commands accept, pods without rights.

No cluster runs here: the manifests are read, not applied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import flowstone
from flowstone.node.configuration import OPTIONS
from tests.packaging.commands import options_of
from tests.packaging.test_service_unit import check
from tests.places import ROOT
from tests.real_tarantool import free_port

MANIFESTS: Final = ROOT / "packaging" / "kubernetes"
Object = dict[str, Any]


def objects(kind: str = "") -> list[Object]:
    found = [each for path in sorted(MANIFESTS.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    return [each for each in found if kind in ("", each["kind"])]


def named(kind: str, name: str) -> Object:
    (found,) = (each for each in objects(kind) if each["metadata"]["name"] == name)
    return found


SETS: Final = objects("StatefulSet")
EACH_SET: Final = pytest.mark.parametrize("workload", SETS, ids=[each["metadata"]["name"] for each in SETS])


def pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Object) -> Object:
    (found,) = pod(workload)["containers"]
    return dict(found)


def test_there_are_a_set_of_three_an_archive_and_a_mirror() -> None:
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in SETS}
    assert replicas == {"flowstone": 3, "flowstone-archive": 1, "flowstone-mirror": 1}


@EACH_SET
def test_selectors_choose_the_pods_of_the_template(workload: Object) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    assert named("Service", workload["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


def test_services_and_budget_choose_the_members() -> None:
    members = named("StatefulSet", "flowstone")
    labels = members["spec"]["selector"]["matchLabels"]
    ports = {port["name"]: port["containerPort"] for port in container(members)["ports"]}
    for service in objects("Service"):
        assert service["spec"]["selector"] == labels
        for port in service["spec"]["ports"]:
            assert ports[port["name"]] == port["port"]
    budget = named("PodDisruptionBudget", "flowstone")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    quorum = members["spec"]["replicas"] // 2 + 1
    assert members["spec"]["replicas"] - budget["maxUnavailable"] >= quorum
    # A member becomes ready only when it has found the others, by names that must exist before.
    assert named("Service", "flowstone-members")["spec"]["publishNotReadyAddresses"] is True


@EACH_SET
def test_pods_have_no_rights_and_write_to_volumes_only(workload: Object) -> None:
    security = pod(workload)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert pod(workload)["automountServiceAccountToken"] is False
    own = container(workload)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {each["name"] for each in pod(workload)["volumes"]}
    claims = {each["metadata"]["name"] for each in workload["spec"]["volumeClaimTemplates"]}
    mounts = {each["name"]: each["mountPath"] for each in container(workload)["volumeMounts"]}
    assert mounts.keys() == volumes | claims
    assert claims == {"data"}
    assert mounts["data"] == "/data"


@EACH_SET
def test_probes_ask_for_health_at_a_port_of_the_container(workload: Object) -> None:
    found = container(workload)
    ports = {port["name"] for port in found["ports"]}
    paths = {kind: found[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: each["path"] for kind, each in paths.items()} == {
        "startup": "/health/live",
        "liveness": "/health/live",
        "readiness": "/health/ready",
    }
    assert {each["port"] for each in paths.values()} <= ports
    assert pod(workload)["terminationGracePeriodSeconds"] >= 60


@EACH_SET
def test_images_have_the_version_of_the_package(workload: Object) -> None:
    assert container(workload)["image"].rpartition(":")[2] == flowstone.__version__


@EACH_SET
def test_arguments_are_options_of_the_command(workload: Object) -> None:
    command, *arguments = container(workload)["args"]
    known = options_of(command)
    given = {each for each in arguments if each.startswith("--")}
    assert given <= known
    secret = {"user", "replication", "http-token", "username", "password"}
    for variable in container(workload)["env"]:
        source = variable["valueFrom"]["secretKeyRef"]
        assert source["name"] == "flowstone"
        assert source["key"] in secret
        variables = {option.variable for option in OPTIONS.values()} | {"FLOWSTONE_USER", "FLOWSTONE_HTTP_TOKEN"}
        assert variable["name"] in variables | {"TT_CLI_USERNAME", "TT_CLI_PASSWORD"}


def test_secret_in_the_comment_has_all_keys_in_use() -> None:
    comment = "\n".join(re.findall(r"^# ?(.*)", (MANIFESTS / "members.yaml").read_text(), re.MULTILINE))
    used = {each["valueFrom"]["secretKeyRef"]["key"] for workload in SETS for each in container(workload)["env"]}
    assert set(re.findall(r"--from-literal=([\w-]+)=", comment)) == used


def test_mirror_follows_all_members_and_the_archive_the_service() -> None:
    names = [f"flowstone-{number}.flowstone-members:3301" for number in range(3)]
    assert ",".join(names) in container(named("StatefulSet", "flowstone-mirror"))["args"]
    assert "flowstone:3301" in container(named("StatefulSet", "flowstone-archive"))["args"]


def test_configuration_of_the_members_is_accepted_by_the_check(tmp_path: Path) -> None:
    members = named("StatefulSet", "flowstone")
    (path,) = (each for each in container(members)["args"] if each.endswith(".toml"))
    text = named("ConfigMap", "flowstone")["data"][Path(path).name]
    assert 'work_dir = "/data"' in text
    for port in (3301, 8080):
        assert f'"*:{port}"' in text
        text = text.replace(f'"*:{port}"', f'"127.0.0.1:{free_port()}"')
    (tmp_path / "node.toml").write_text(text.replace('"/data"', f'"{tmp_path}/data"'))
    check(["serve", "--check", "--config", str(tmp_path / "node.toml")], tmp_path)
