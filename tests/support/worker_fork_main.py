"""Forks ``prefill`` commands from a process that has loaded torch once: a worker then starts in a moment.

Reads a JSON object a line, {"arguments", "stdout", "stderr"}, and answers with the child's pid. The
children end with this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from types import FrameType

import prefill.serve  # noqa: F401 - what makes a start slow
from prefill.cli import main

_PR_SET_PDEATHSIG = 1


def run(arguments: list[str], stdout: str, stderr: str) -> None:
    """Become the command."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for path, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv = ["prefill", *arguments]
    main()


def reap(_number: int, _frame: FrameType | None) -> None:
    """Nobody else waits for the children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def serve() -> None:
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(job["arguments"], job["stdout"], job["stderr"])
            sys.exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
