"""A headless Chromium, driven over its DevTools protocol by one connection."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.05

_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-sandbox",  # which root may not have; it shows pages of our own only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--password-store=basic",
)
_KEYS = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, " ": 32}


@dataclass(slots=True)
class Tab:
    """One page. ``errors`` are what its console, its scripts and its network complained of."""

    socket: ClientConnection
    session: str
    errors: list[str] = field(default_factory=list)
    _sent: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command; events that arrive before it are taken note of."""
        self._sent += 1
        message = {"id": self._sent, "sessionId": self.session, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            received = json.loads(self.socket.recv(ANSWER_SECONDS))
            if received.get("id") == self._sent and received.get("sessionId") == self.session:
                assert "error" not in received, f"{method}: {received['error']}"
                result: dict[str, Any] = received["result"]
                return result
            self._note(received)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(f"console.{details['type']}: {details['args']}")
        elif method == "Log.entryAdded":
            self.errors.append(f"{details['entry']['source']}: {details['entry']['text']}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; awaited where it is a promise."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def await_true(self, expression: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} never came true; errors: {self.errors}"
            time.sleep(POLL_SECONDS)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.await_true("document.readyState === 'complete'")

    def press(self, key: str) -> None:
        code = {"windowsVirtualKeyCode": _KEYS[key], "key": key, "code": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def scheme(self, name: str) -> None:
        """dark or light."""
        preference = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=preference)

    def picture(self, last: str = "body") -> bytes:
        """A PNG of the page down to the end of an element."""
        box = f"document.querySelector({json.dumps(last)}).getBoundingClientRect()"
        width, height = self.evaluate(f"[innerWidth, {box}.bottom + scrollY + 24]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])


@contextmanager
def chromium_tab() -> Iterator[Tab]:
    """An empty page in a browser with a profile of its own."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium; Debian's package has it")
    with TemporaryDirectory(prefix="chromium-") as profile:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(
                _address(Path(profile), process), max_size=None, open_timeout=START_SECONDS
            ) as socket:
                yield _attach(socket)
                socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
            process.wait(ANSWER_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens, which it writes down once it does."""
    deadline = time.monotonic() + START_SECONDS
    written = profile / "DevToolsActivePort"
    while not written.exists() or written.read_text().count("\n") < 1:
        assert process.poll() is None, f"chromium ended with status {process.returncode}"
        assert time.monotonic() < deadline, f"chromium did not start in {START_SECONDS} s"
        time.sleep(POLL_SECONDS)
    port, path = written.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{path}"


def _attach(socket: ClientConnection) -> Tab:
    target = _ask(socket, "Target.createTarget", url="about:blank")["targetId"]
    session = _ask(socket, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    tab = Tab(socket, session)
    for domain in ("Page", "Runtime", "Log"):
        tab.call(f"{domain}.enable")
    return tab


def _ask(socket: ClientConnection, method: str, **parameters: Any) -> dict[str, Any]:
    """A command to the browser itself."""
    socket.send(json.dumps({"id": 0, "method": method, "params": parameters}))
    while True:
        received = json.loads(socket.recv(ANSWER_SECONDS))
        if received.get("id") == 0:
            result: dict[str, Any] = received["result"]
            return result
