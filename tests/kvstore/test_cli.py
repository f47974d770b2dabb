"""The command line as a process: statuses, messages, and what it does not load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import PREFILL_ONLY, Config
from tests.support.command_line import environment, kvstore, kvstore_here, spawn

ABSENT = "unix:/dev/shm/no-server-is-here.sock"
PROMPT = ("--model", "m")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("1 2 3")
    return path


# -- help and flags -----------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    done = kvstore("--help")
    assert done.returncode == 0
    for command in (
        "serve",
        "lookup",
        "explain",
        "status",
        "namespaces",
        "clear",
        "pin",
        "unpin",
        "prefetch",
    ):
        assert re.search(rf"^\W+{command} ", done.stdout, re.MULTILINE), command
    assert "Exit status" in done.stdout


def test_serve_and_config_take_every_setting_of_a_server() -> None:
    for command in ("serve", "config"):
        text = kvstore(command, "--help", COLUMNS="200").stdout
        taken = {name for name in Config.model_fields if re.search(f"--{name.replace('_', '-')}[ ,]", text)}
        assert taken == set(Config.model_fields) - set(PREFILL_ONLY)
    assert "[default: (64 MiB)]" in text


def test_version_is_one_line() -> None:
    done = kvstore("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"prefix-kvstore( not installed| \d+\.\d+\S*)\n", done.stdout)


def test_a_setting_of_prefill_is_no_flag_and_stays_valid_elsewhere() -> None:
    assert "No such option: --block-size" in kvstore("serve", "--block-size", "32").stderr
    done = kvstore("config", "--json", KVSTORE_BLOCK_SIZE="32")
    assert json.loads(done.stdout)["block_size"] == {"value": "32", "source": "environment"}


def test_an_unknown_flag_is_answered_with_the_nearest() -> None:
    done = kvstore("serve", "--pool-byte", "1GiB")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "No such option: --pool-byte" in done.stderr
    assert "--pool-bytes" in done.stderr.replace("--pool-byte ", "")


def test_completion_knows_commands_and_flags() -> None:
    run = "import sys; sys.argv[0] = 'kvstore'; from kvstore.cli import main; main()"
    for line, expected in (("kvstore prefe", "prefetch"), ("kvstore serve --pool-p", "--pool-path")):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run(
            [sys.executable, "-c", run],
            env=environment() | words | {"_KVSTORE_COMPLETE": "complete_bash"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == [expected]


def test_the_command_line_itself_loads_little() -> None:
    """Every command pays for what is loaded here, completion included; serve has to be up in 1.5 s."""
    program = (
        "import sys, typer.main; from kvstore.cli import app; typer.main.get_command(app); "
        "print(*sys.modules, sep='\\n')"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pydantic" in loaded
    assert (
        loaded & {"grpc", "numpy", "prometheus_client", "redis", "torch", "transformers", "xxhash"} == set()
    )


# -- config -------------------------------------------------------------------------------------------


def test_config_tells_values_and_sources_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('pool_bytes = "2GiB"\nlease_seconds = 7\n')
    settings = ("--config", file, "--client-leases", "32")
    environ = {"KVSTORE_REDIS_URL": "redis://me:hush@cache:6379/0", "KVSTORE_LEASE_SECONDS": "8"}
    done = kvstore("config", *settings, "--json", **environ)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert set(facts) == set(Config.model_fields)
    assert facts["pool_bytes"] == {"value": "2 GiB", "source": "file"}
    assert facts["lease_seconds"] == {"value": "8 s", "source": "environment"}
    assert facts["client_leases"] == {"value": "32", "source": "flag"}
    assert facts["redis_url"] == {"value": "redis://me:***@cache:6379/0", "source": "environment"}
    text = kvstore("config", *settings, **environ).stdout
    assert re.search(r"^client_leases +32 +flag *$", text, re.MULTILINE)
    assert "hush" not in text + done.stdout


def test_a_narrow_terminal_loses_no_setting() -> None:
    """FORCE_COLOR has rich take a pipe for a terminal, COLUMNS says how wide."""
    done = kvstore("config", "--redis-prefix", "x" * 70, FORCE_COLOR="1", COLUMNS="30", NO_COLOR="1")
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(map(len, text.splitlines())) <= 30
    assert "x" * 70 in text.replace("\n", "")
    assert "unix:/dev/shm/prefix-kvstore.sock" in text.replace("\n", "")


def test_a_wrong_setting_is_one_message_that_names_where_it_was_set() -> None:
    done = kvstore("config", "--pool-bytes", "lots", KVSTORE_BLOCK_SIZ="3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        "environment variable KVSTORE_BLOCK_SIZ does not exist; did you mean KVSTORE_BLOCK_SIZE?"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


# -- what goes wrong before a server is asked ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lookup", "--model", "m"), "no prompt is given"),
        (("explain", "absent.txt", "--model", "m"), "prompt absent.txt cannot be read"),
        (("status", "5"), "SECONDS is '5' without --watch"),
        (("status", "--watch", "often"), "SECONDS is 'often', expected a duration above zero"),
        (("status", "--timeout", "0"), "--timeout is '0', expected a duration above zero"),
        (("status", "--address", "here"), "--address is 'here': expected unix:/absolute/path, host:port"),
        (("status", "--token-file", "absent"), "--token-file absent cannot be read"),
        (("status", "--address", ABSENT, "--tls"), "is a unix socket, which has no TLS"),
        (("status", "--address", "127.0.0.1:1", "--tls-cert", "a"), "give both, or neither"),
        (("clear",), "clearing all namespaces needs --yes where nobody can be asked"),
        (("clear", "--namespace", "0a", "--yes"), "--namespace is '0a', expected 32 hexadecimal digits"),
        (("clear", "--tier", "disk", "--yes"), "--tier is 'disk', expected device, host; "),
        (
            ("clear", "--tier", "redis", "--yes"),
            "--tier is 'redis', which is not cleared: it forgets by its time",
        ),
        (("lookup", "-", "--model", "m", "--tier", "disk"), "expected device, host, redis; "),
    ],
)
def test_an_error_is_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvstore_here(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_token_does_not_travel_to_other_machines_in_the_clear(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 22)
    done = kvstore_here("status", "--address", "10.0.0.7:9471", "--token-file", token)
    assert done.returncode == 2
    assert "10.0.0.7:9471, which may be another machine" in done.stderr
    assert "in the clear" in done.stderr
    assert token.read_text() not in done.stderr


def test_clear_says_in_its_help_that_redis_is_not_cleared() -> None:
    text = " ".join(kvstore("clear", "--help", COLUMNS="200").stdout.split())
    assert "Redis is not cleared: it forgets by its time to live." in text
    assert "device or host" in text


def test_a_text_without_transformers_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')\n"
    )
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    done = kvstore("lookup", "--text", "hello", "--tokenizer", "gpt2", *PROMPT, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --tokenizer gpt2 needs transformers, which is not installed; `pip")


# -- a server that is away ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["lookup", "explain", "prefetch", "pin", "unpin", "status", "namespaces", "clear"]
)
def test_no_server_is_an_error_that_names_address_and_fix(command: str, prompt: Path) -> None:
    more: dict[str, tuple[str | Path, ...]] = {
        "pin": ("name", prompt, *PROMPT),
        "unpin": ("name",),
        "status": (),
        "namespaces": (),
        "clear": ("--yes",),
    }
    done = kvstore_here(command, *more.get(command, (prompt, *PROMPT)), "--address", ABSENT, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: no server answers at {ABSENT} (")
    assert "start one with `kvstore serve`" in done.stderr


def test_the_address_is_the_configured_one(tmp_path: Path) -> None:
    """Unless it is given; then the settings, even wrong ones, are nobody's business."""
    file = tmp_path / "kvstore.toml"
    file.write_text(f'listen = "unix:{tmp_path}/first.sock,:9"\n')
    done = kvstore_here("status", "--config", file)
    assert f"no server answers at unix:{tmp_path}/first.sock (" in done.stderr
    done = kvstore_here("status", KVSTORE_LISTEN="127.0.0.1:1")
    assert "no server answers at 127.0.0.1:1 (" in done.stderr
    done = kvstore_here("status", KVSTORE_LISTEN=":0")
    assert "whose port the server chooses when it starts; give --address" in done.stderr
    done = kvstore_here("status", "--address", ABSENT, KVSTORE_NONSENSE="1")
    assert f"no server answers at {ABSENT} (" in done.stderr


def test_an_error_of_a_process_is_what_it_is_here() -> None:
    """Most tests call the command line in their own process; this one is what people run."""
    asked = ("status", "--address", ABSENT)
    there, here = kvstore(*asked), kvstore_here(*asked)
    assert (there.returncode, there.stdout, there.stderr) == (here.returncode, here.stdout, here.stderr)


def test_ctrl_c_ends_a_watch_with_130() -> None:
    with spawn("status", "--watch", "50ms", "--json", "--address", ABSENT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert ["no server answers" in json.loads(line)["error"] for line in lines] == [True, True]
