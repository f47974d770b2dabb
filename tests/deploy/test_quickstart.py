"""What docs/quickstart.md shows is what happens, step by step."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from kvstore.config import Config
from tests.support.command_line import Asking, environment
from tests.support.deployed import REPOSITORY
from tests.support.sidecars import Sidecar, sidecar

GUIDE = (REPOSITORY / "docs/quickstart.md").read_text(encoding="utf-8")
HELLO = "$ .venv/bin/python hello.py"


def shown_after(command: str) -> list[list[str]]:
    """The lines under each place where a command is shown."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    steps = [
        step
        for language, block in blocks
        if not language
        for step in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
        if step
    ]
    return [lines[1:] for step in steps if (lines := step.splitlines())[0] == command]


def hello(server: Sidecar, folder: Path) -> list[str]:
    """The program of the guide, with the address of a test's server."""
    [program] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    address = str(Config().listen[0])
    assert program.count(address) == 1
    path = folder / "hello.py"
    path.write_text(program.replace(address, server.address))
    done = subprocess.run(
        [sys.executable, path], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_steps_of_the_guide(tmp_path: Path) -> None:
    with sidecar(pool_bytes="64MiB", extent_bytes="8MiB") as server:
        first, second, after_restart = shown_after(HELLO)
        assert hello(server, tmp_path) == first
        assert hello(server, tmp_path) == second
        asking = Asking(server.address)
        for command, tokens in (("lookup", 1000), ("explain", 1301)):
            [expected] = shown_after(f"$ seq 0 {tokens - 1} | .venv/bin/kvstore {command} - --model my-model")
            said = asking.text(command, "-", "--model", "my-model", stdin="\n".join(map(str, range(tokens))))
            assert [line for line in expected if line not in said.splitlines()] == []
        counts = asking.facts("status")
        assert (counts["asked_tokens"], counts["hit_tokens"]) == (2000, {"host": 992})
        assert counts["miss_tokens"] == {"cold": 992, "tail": 16}
        with urllib.request.urlopen(server.serving["http"] + "/", timeout=10) as page:
            assert b"<h1>prefix-kvstore" in page.read()
        assert server.stop() == 0
        server.start()
        assert hello(server, tmp_path) == after_restart


def test_the_server_says_where_it_is_as_shown() -> None:
    """The lines of the defaults."""
    [lines] = shown_after("$ .venv/bin/kvstore serve --redis-url embedded")
    config = Config()
    assert lines[0] == f"serving on {config.listen[0]}"
    assert lines[1].startswith(f"pool: {config.pool_path}, 1 GiB;")
    assert lines[2] == f"live page, metrics and health: http://{config.http_listen}"


def test_the_picture_of_the_page_is_there_and_small() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [path] = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    picture = (REPOSITORY / path).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


def test_every_link_of_the_guides_leads_somewhere() -> None:
    links = [
        (REPOSITORY / name, link)
        for name in ("README.md", "docs/quickstart.md", "docs/operations.md")
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (REPOSITORY / name).read_text(encoding="utf-8"))
    ]
    assert len(links) > 20
    local = [(page, link) for page, link in links if "://" not in link]
    assert [(page.name, link) for page, link in local if not (page.parent / link).exists()] == []
