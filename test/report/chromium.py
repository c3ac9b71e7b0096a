"""A page in real headless Chromium, driven over its debugging pipe; no library is needed for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Page", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT = 60


def find_chromium() -> str | None:
    """Return the path of the browser, ``None`` if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser that is started for it.

    Attributes:
        problems: Errors and warnings of the console, exceptions, and refused requests.
        requests: The URLs that were asked for.
    """

    def __init__(self, browser: str, profile: Path) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, browser, *options, "--remote-debugging-pipe"),
                *(f"--user-data-dir={profile}", "--no-first-run", "about:blank"),
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._in, False)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Show a file."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _TIMEOUT
        while not self._loaded:
            self._receive(end)
        self.run("new Promise((done) => setTimeout(done, 50))")

    def run(self, script: str) -> Any:
        """Return the value of an expression; promises are waited for."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the window."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def prefer(self, scheme: str, media: str = "") -> None:
        """Ask for ``"light"`` or ``"dark"``, on the screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)
        self.run("new Promise((done) => setTimeout(done, 100))")

    def screenshot(self, path: Path) -> bytes:
        """Write the whole page as PNG."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        picture = base64.b64decode(found["data"])
        path.write_bytes(picture)
        return picture

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _TIMEOUT
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert time.monotonic() < end, "the browser does not answer"
            assert self._process.poll() is None, "the browser ended"
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._notice(message.get("method", ""), message.get("params", {}))
        return message

    def _notice(self, method: str, found: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.problems.append(json.dumps(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
