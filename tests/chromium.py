"""Chromium without a window, told what to do through a pipe: pages as people see them.

with Browser() as browser:
    page = browser.open(path)
    page.run("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PATIENCE = 60.0  # seconds
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)


@contextmanager
def browser() -> Iterator[Browser]:
    """One that is closed at the end."""
    assert COMMAND is not None
    (theirs, ours), (come, go) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        line = f'exec "$@" 3<&{theirs} 4>&{go}'
        started = ["bash", "-c", line, "bash", COMMAND, *_OPTIONS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(started, pass_fds=(theirs, go), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(go)
        made = Browser(ours, come)
        try:
            yield made
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(come)


@dataclass
class Browser:
    """What goes to it and comes from it."""

    ours: int
    come: int
    count: int = 0
    left: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def send(self, method: str, session: str | None = None, **about: Any) -> dict[str, Any]:
        """Ask for something; the answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": about}
        if session is not None:
            message["sessionId"] = session
        os.write(self.ours, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def wait(self, method: str) -> None:
        """Until something has happened."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.left:
            ready, _, _ = select.select([self.come], [], [], PATIENCE)
            come = os.read(self.come, 1 << 20) if ready else b""
            if not come:
                raise TimeoutError("no word from Chromium")
            self.left += come
        first, _, self.left = self.left.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900) -> Page:
        """A page from a file, and all that it says on the way."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for room in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{room}.enable")
        page.resize(width, height)
        self.events.clear()
        page.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("Page.loadEventFired")
        return page


@dataclass
class Page:
    """A page that is open."""

    browser: Browser
    session: str

    def send(self, method: str, **about: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **about)

    def run(self, script: str) -> Any:
        """The value of an expression there."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """A key, down and up."""
        codes: Mapping[str, int] = {"Enter": 13, "Tab": 9}
        about = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        about = {"deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, **about)

    def media(self, media: str = "", **features: str) -> None:
        """As `print`, or with `prefers_color_scheme="dark"`."""
        given = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.send("Emulation.setEmulatedMedia", media=media, features=given)

    def picture(self) -> bytes:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        return base64.b64decode(data)

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts and of the page, and whatever it asked the network for."""
        self.run("0")  # what has happened before has come
        found = []
        for event in self.browser.events:
            method, about = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(about))
            elif method == "Network.requestWillBeSent":
                url = about["request"]["url"]
                found += [] if url.startswith(("file:", "data:")) else [url]
        return found
