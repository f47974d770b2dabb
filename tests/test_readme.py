"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.config import Config
from tests.support.command_line import Asking, environment
from tests.support.sidecars import sidecar

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def shown_after(start: str) -> list[str]:
    """Lines of the block that begins with ``start``, up to the next command or the end of the block."""
    text = README.partition(f"\n{start}\n")[2]
    return re.split(r"\n(?:```|\$ )", text, maxsplit=1)[0].splitlines()


def run(program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_client_program_runs_as_printed_and_its_prompt_is_found() -> None:
    blocks = re.findall(r"```python\n(.*?)```\n\n(?:```\n(.*?)```)?", README, re.DOTALL)
    (program, output), *_ = [block for block in blocks if "import Client" in block[0]]
    address = str(Config().listen[0])
    assert program.count(address) == 1
    with sidecar(pool_bytes="64MiB") as server:
        for _ in range(2):  # whoever tries it twice sees the same
            assert run(program.replace(address, server.address)) == (0, output, "")
        asking = Asking(server.address)
        for command, tokens in (("lookup", 1000), ("explain", 1301)):
            line = f"$ seq 0 {tokens - 1} | .venv/bin/kvstore {command} - --model my-model"
            said = asking.text(command, "-", "--model", "my-model", stdin="\n".join(map(str, range(tokens))))
            expected = shown_after(line)
            assert len(expected) == 2
            assert [row for row in expected if row not in said] == []
    status, text, _ = run(program.replace(address, f"{server.address}-of-nobody"))
    assert (status, text) == (0, "0 of 1000 tokens, ending in []\n"), "without a server all is a miss"
