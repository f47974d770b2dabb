"""The files of deploy/ as those read them who run them, and the command lines that they name."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "Dockerfile"
K8S = REPOSITORY / "deploy/k8s"
PROMETHEUS = REPOSITORY / "deploy/prometheus"
GRAFANA = REPOSITORY / "deploy/grafana"


def documents(path: Path) -> list[Any]:
    """All that are in a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def compose_services() -> dict[str, Any]:
    """By name, with the defaults of their variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text(encoding="utf-8"))
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def manifests(kind: str) -> dict[str, Any]:
    """By name, of those that the kustomization lists."""
    [kustomization] = documents(K8S / "kustomization.yaml")
    found = [each for name in kustomization["resources"] for each in documents(K8S / name)]
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def instruction(name: str) -> list[str]:
    """The command of the last ENTRYPOINT, CMD or HEALTHCHECK of the Dockerfile, in the form of a list."""
    lines = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    [*_, last] = [line for line in lines if line.startswith(f"{name} ")]
    command: list[str] = json.loads(last[last.index("[") :])
    return command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
