"""A real Chromium without a window, driven over a pipe by its DevTools protocol: no driver is needed."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tests.support.tools import need_command

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Tab:
    """One page of the browser.

    Attributes:
        requests: Every address that pages of this tab asked for.
        complaints: What the browser logged: errors, and what it refused to load.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, scheme: Literal["light", "dark"]) -> None:
        """Show a file in a window of that width, and wait until it is there."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, target: Path) -> None:
        """The whole page as a picture."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next message of the browser; each ends with a zero byte."""
        while b"\0" not in self._rest:
            piece = os.read(self._receive, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method = message.get("method")
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]))
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser with a profile of its own, for the with-block."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4. Not every sh knows descriptors above 9.
    shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    command = [need_command("chromium"), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command], pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Tab(our_out, our_in)
    finally:
        os.close(our_out)
        os.close(our_in)
        process.kill()
        process.wait()
