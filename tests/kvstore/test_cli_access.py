"""Who may ask, and servers that do not answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from kvstore.service.client import Client
from tests.support.clients import FAST
from tests.support.command_line import Asking, kvstore_here
from tests.support.served import prompt
from tests.support.sidecars import sidecar
from tests.support.stores import make_spec

__all__ = ["prompt"]


def test_a_server_that_is_silent_is_given_up_after_the_timeout(prompt: Path) -> None:
    """The time that the server was asked to wait comes on top, and is told."""
    with sidecar() as alone:
        os.kill(alone.pid, signal.SIGSTOP)
        done = kvstore_here("status", "--address", alone.address, "--timeout", "300ms")
        asked = ("prefetch", prompt, "--model", "m", "--wait", "200ms", "--timeout", "300ms")
        waited = Asking(alone.address).refusal(*asked)
        os.kill(alone.pid, signal.SIGCONT)
    assert done.returncode == 2
    assert f"the server at {alone.address} did not answer within 0.3 s" in done.stderr
    assert "did not answer within 0.5 s" in waited


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_token_opens_what_its_tenant_may_do(tmp_path: Path, prompt: Path) -> None:
    user, admin = "u" * 22, "a" * 22
    private(tmp_path / "user.tokens", f"{user}\n{'n' * 22}\n")
    private(tmp_path / "admin.tokens", f"{admin}\n")
    private(tmp_path / "wrong.tokens", f"{'w' * 22}\n")
    tenants = private(
        tmp_path / "tenants.toml",
        f'[[tenant]]\nname = "user"\ntoken_file = "user.tokens"\nsalt = "{"01" * 16}"\nshare_bytes = "8MiB"\n'
        f'[[tenant]]\nname = "ops"\ntoken_file = "admin.tokens"\nsalt = "{"02" * 16}"\nadmin = true\n',
    )
    with sidecar(tenants_file=str(tenants)) as guarded:
        asking = Asking(guarded.address)
        with Client(guarded.address, token=user, options=FAST) as client:
            client.namespace(make_spec("owned")).register()
        asked = ("lookup", prompt, "--model", "owned")
        assert asking.refusal(*asked).endswith("; --token-file names the file that holds the token\n")
        wrong = tmp_path / "wrong.tokens"
        refusal = asking.refusal(*asked, "--token-file", wrong)
        assert refusal.endswith(f"; the token was the first line of --token-file {wrong}\n")
        as_user = ("--token-file", tmp_path / "user.tokens")
        assert asking.facts(*asked, *as_user, status=1)["matched_tokens"] == 0
        assert "this call is for admins" in asking.refusal("status", *as_user)
        as_admin = ("--token-file", tmp_path / "admin.tokens")
        for command in (asked, ("pin", "name", *asked[1:])):
            refusal = asking.refusal(*command, *as_admin)
            assert "no namespace of this tenant" in refusal
            assert "namespaces of the token's own tenant, an admin's too" in refusal
        unknown = asking.refusal("clear", "--namespace", "0a" * 16, "--yes", *as_admin)
        assert "own tenant" not in unknown, "an admin clears what is anybody's"
        assert asking.facts("namespaces", *as_admin)["namespaces"][0]["tenant"] == "user"
        assert re.search(r"^user +owned", asking.text("namespaces", *as_admin), re.MULTILINE)
        tenants_now = {
            each["name"]: each["share_bytes"] for each in asking.facts("status", *as_admin)["tenants"]
        }
        assert tenants_now == {"user": 8 << 20, "ops": 0}
        assert re.search(r"^user +8\.0 MiB +0 B", asking.text("status", *as_admin), re.MULTILINE)


def test_tls_is_spoken_with_the_authority_that_is_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *request.split(), *names], check=True, capture_output=True)
    token = private(tmp_path / "token", "t" * 22)
    tenants = private(
        tmp_path / "tenants.toml",
        f'[[tenant]]\nname = "ops"\ntoken_file = "token"\nsalt = "{"02" * 16}"\nadmin = true\n',
    )
    with sidecar(
        listen="127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), tenants_file=str(tenants)
    ) as guarded:
        asking, login = Asking(guarded.address), ("--token-file", token)
        assert asking.facts("status", *login, "--tls-ca", cert)["healthy"]
        for options, hint in (
            ((), "where it speaks TLS, add --tls, or --tls-ca with the authority that it has"),
            (("--tls",), "name the authority of its certificate with --tls-ca"),
        ):
            refusal = asking.refusal("status", *login, *options)
            assert f"no server answers at {guarded.address}" in refusal
            assert refusal.endswith(f"; {hint}\n")
        environ = {
            "KVSTORE_LISTEN": guarded.address,
            "KVSTORE_TLS_CERT": str(cert),
            "KVSTORE_TLS_KEY": str(key),
        }
        done = kvstore_here("status", *login, "--tls-ca", cert, "--json", **environ)
        assert done.returncode == 0, done.stderr


def test_tls_to_a_server_without_it_says_so(tmp_path: Path) -> None:
    with sidecar(listen="127.0.0.1:0") as plain:
        refusal = Asking(plain.address).refusal("status", "--tls")
    assert refusal.endswith("; it does not speak TLS; leave the TLS options out\n")
