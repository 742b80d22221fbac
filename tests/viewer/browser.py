"""A page in headless Chromium, driven over its DevTools protocol: Debian's `chromium` is enough."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import connect

LIMIT = 240.0
"""Seconds after which something that was waited for will not come, on a busy machine too."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--mute-audio", "--no-first-run",
    "--remote-debugging-port=0", "--disable-extensions", "--disable-background-networking",
    "--disable-gpu-sandbox", "--disable-breakpad", "--disable-sync",
)  # fmt: skip
KEYS = {
    "space": (" ", "Space", 32), "left": ("ArrowLeft", "ArrowLeft", 37),
    "right": ("ArrowRight", "ArrowRight", 39), "home": ("Home", "Home", 36),
    "up": ("ArrowUp", "ArrowUp", 38), "down": ("ArrowDown", "ArrowDown", 40),
    "end": ("End", "End", 35), "n": ("n", "KeyN", 78),
}  # fmt: skip


def program() -> str | None:
    """Chromium on this machine; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page of its own process; `close` ends it."""

    def __init__(self, url: str, size: tuple[int, int] = (1280, 800)) -> None:
        self.folder = tempfile.mkdtemp(prefix="browser")
        width, height = size
        command = [str(program()), *FLAGS, f"--window-size={width},{height}"]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._numbers = itertools.count(1)
        self.said: list[str] = []  # errors of the page
        try:
            self._socket = connect(self._page(), max_size=None, open_timeout=LIMIT)
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
            self.resize(*size)
            self.send("Page.navigate", url=url)
        except BaseException:
            self.close()
            raise

    def _page(self) -> str:
        """The address of the first page's own protocol."""
        file = Path(self.folder) / "DevToolsActivePort"
        until(lambda: file.exists() and file.read_text().count("\n") > 0)
        port = file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=LIMIT) as answer:
            pages = json.load(answer)
        return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; what the page prints in between is kept in `said`."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=LIMIT))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(event["params"]["exceptionDetails"])[:600])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.said.append(event["params"]["entry"]["text"])

    def run(self, code: str) -> Any:
        """What a JavaScript expression is in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip

    def wait(self, code: str) -> None:
        """Until a JavaScript expression is true in the page."""
        # While the page is being made, it has no body yet.
        tried = f"(() => {{ try {{ return !!({code}); }} catch {{ return false; }} }})()"
        until(lambda: self.run(tried), lambda: f"{code}; the page said {self.said}")

    def press(self, key: str, seconds: float = 0.0) -> None:
        """Hold a key for `seconds`."""
        text, code, number = KEYS[key]
        about = {"key": text, "code": code, "windowsVirtualKeyCode": number}
        self.send("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        time.sleep(seconds)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the left button at the first of `points`, move through them, and let go."""
        self._mouse("mouseMoved", *points[0], 0)
        self._mouse("mousePressed", *points[0], 1)
        for point in points[1:]:
            self._mouse("mouseMoved", *point, 1)
        self._mouse("mouseReleased", *points[-1], 1)

    def _mouse(self, kind: str, x: float, y: float, buttons: int) -> None:
        self.send(
            "Input.dispatchMouseEvent",
            type=kind, x=x, y=y, button="left" if buttons else "none", buttons=buttons,
            clickCount=buttons,
        )  # fmt: skip

    def picture(self) -> NDArray[np.uint8]:
        """The page as it looks, [H, W, 3]."""
        data = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        return np.asarray(imageio.imread(io.BytesIO(data)))[..., :3]

    def words(self) -> str:
        """All that can be read in the page."""
        return re.sub(r"\s+", " ", self.run("document.body.innerText"))

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(what: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    """Wait for `what`; fails with `why` where it does not happen."""
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, f"it never happened. {why()}"
        time.sleep(0.05)
