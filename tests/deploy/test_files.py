"""What deploy/ holds fits the schemas of those who read it, and its parts fit each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config
from kvstore.quantity import parse_bytes
from tests.support.deployed import (
    COMPOSE,
    DOCKERFILE,
    GRAFANA,
    K8S,
    REPOSITORY,
    compose_services,
    documents,
    manifests,
)

PROGRAMS = Path(sys.executable).parent
OF_CUSTOM_KINDS = {"kustomization.yaml", "podmonitor.yaml"}
KUBERNETES = ("1.29", "1.37")
"""The oldest that has native sidecars, and a recent one."""


def accepts(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [PROGRAMS / command[0], *command[1:]], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_compose_file_fits_the_specification(tmp_path: Path) -> None:
    schema = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    status, said = accepts(*schema, COMPOSE)
    assert status == 0, said
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(COMPOSE.read_text(encoding="utf-8").replace("cap_drop", "cap_dropp", 1))
    assert accepts(*schema, broken)[0] == 1


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_fit_kubernetes(version: str, tmp_path: Path) -> None:
    strict = ("kubernetes-validate", "--strict", "-k", version)
    checked = sorted(path for path in K8S.iterdir() if path.name not in OF_CUSTOM_KINDS)
    status, said = accepts(*strict, *checked)
    assert status == 0, said
    broken = tmp_path / "engine.yaml"
    engine = (K8S / "engine.yaml").read_text(encoding="utf-8")
    broken.write_text(engine.replace("livenessProbe", "liveProbe", 1))
    assert accepts(*strict, broken)[0] != 0


def test_the_dockerfile_passes_hadolint(tmp_path: Path) -> None:
    status, said = accepts("hadolint", DOCKERFILE)
    assert status == 0, said
    broken = tmp_path / "Dockerfile"
    broken.write_text(re.sub(r"python:[\w.-]+ AS wheel", "python:latest AS wheel", DOCKERFILE.read_text()))
    assert accepts("hadolint", broken)[0] == 1


def test_the_image_is_small_pinned_and_not_root() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert re.findall(r"^FROM (?!\S+:v?\d+\.\d+\.\d+)\S+", text, re.MULTILINE) == []
    last = text.rpartition("\nFROM ")[2]
    assert "USER 1000:1000" in last
    assert "pip" not in last, "what installs stays in the stage before"
    assert "[prefill" not in text, "which has torch"


def test_the_build_context_has_what_is_copied() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == sources
    assert [source for source in sources if not (REPOSITORY / source).exists()] == []


def test_every_manifest_is_listed() -> None:
    [kustomization] = documents(K8S / "kustomization.yaml")
    files = {path.name for path in K8S.iterdir()} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    containers = [each for spec in pods().values() for each in every_container(spec)]
    images = {each["image"] for each in containers if ":" not in each["image"]}
    assert {image["name"] for image in kustomization["images"]} == images


def pods() -> dict[str, Any]:
    return {name: each["spec"]["template"]["spec"] for name, each in manifests("Deployment").items()}


def every_container(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def test_names_that_point_at_each_other_exist() -> None:
    """Ports of services, probes, policies and of the pod monitor, and the labels that they select."""
    ports = {name: set(port_names(spec)) for name, spec in pods().items()}
    assert {name: labels_of(each) for name, each in manifests("Deployment").items()} == {
        name: {"app.kubernetes.io/name": name} for name in ports
    }
    for name, service in manifests("Service").items():
        assert service["spec"]["selector"] == {"app.kubernetes.io/name": name}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[name]
    for name, policy in manifests("NetworkPolicy").items():
        assert policy["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports[name]
    for name, monitor in manifests("PodMonitor").items():
        assert monitor["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports[name]
    for spec in pods().values():
        for container in every_container(spec):
            probes = [value for key, value in container.items() if key.endswith("Probe")]
            wanted = {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe}
            assert wanted <= {port["name"] for port in container["ports"]}


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    return labels


def port_names(spec: dict[str, Any]) -> list[str]:
    return [port["name"] for each in every_container(spec) for port in each.get("ports", [])]


def test_engine_and_sidecar_share_memory_and_user_and_the_pool_fits() -> None:
    spec = pods()["engine"]
    [sidecar], [engine] = spec["initContainers"], spec["containers"]
    shm = {"name": "shm", "mountPath": "/dev/shm"}
    assert shm in sidecar["volumeMounts"]
    assert shm in engine["volumeMounts"]
    assert spec["securityContext"]["runAsUser"] == 1000
    assert sidecar["restartPolicy"] == "Always"
    environment = {each["name"]: each["value"] for each in sidecar["env"]}
    pool = parse_bytes(environment["KVSTORE_POOL_BYTES"])
    [size] = [each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == "shm"]
    assert pool < parse_bytes(sidecar["resources"]["limits"]["memory"] + "B") <= parse_bytes(f"{size}B")
    assert spec["terminationGracePeriodSeconds"] > Config().drain_seconds


def test_compose_shares_the_sidecars_memory_with_the_engine_and_publishes_on_loopback() -> None:
    services = compose_services()
    assert "shm:/dev/shm" in services["kvstore"]["volumes"]
    assert "shm:/dev/shm" in services["vllm"]["volumes"]
    assert services["vllm"]["profiles"] == ["vllm"]
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    grace = services["kvstore"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > Config().drain_seconds


def test_grafana_finds_its_dashboard_and_its_data() -> None:
    [source] = documents(GRAFANA / "provisioning/datasources/prometheus.yml")
    [provider] = documents(GRAFANA / "provisioning/dashboards/kvstore.yml")
    services = compose_services()
    assert [each["url"] for each in source["datasources"]] == ["http://prometheus:9090"]
    assert "prometheus" in services
    folder = provider["providers"][0]["options"]["path"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert {target: path for path, target in mounts.items()}[folder] == "./deploy/grafana/dashboards"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (GRAFANA / "dashboards" / Path(home).name).exists()
