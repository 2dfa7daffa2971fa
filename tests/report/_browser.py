"""Headless Chromium, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 60.0

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium (on Debian: apt-get install chromium)"
)


class Browser:
    """A browser with one page. `problems` has the errors of its console, uncaught exceptions, and
    violations of the page's content security policy. `asked` has the addresses that it requested.
    """

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        own_read, theirs_write = os.pipe()
        theirs_read, own_write = os.pipe()
        switches = [
            "--headless",
            "--no-sandbox",  # root may not use the sandbox
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--window-size={width},{height}",
            f"--user-data-dir={profile}",
        ]
        # Chromium reads commands from descriptor 3 and writes to descriptor 4
        script = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *switches, "about:blank"],
            pass_fds=(theirs_read, theirs_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._from = own_read
        self._to = own_write
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._from)
        os.close(self._to)

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive first are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 16)
            assert data, "chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(json.dumps(values["args"]))
        elif event == "Log.entryAdded":
            self.problems.append(values["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked.append(values["request"]["url"])

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, as Python's value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address: str) -> None:
        """Open the address, and wait until the page is complete."""
        self.call("Page.navigate", url=address)
        self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def until(self, script: str) -> None:
        """Wait until the expression is true."""
        ends = time.monotonic() + LIMIT_S
        while not self.run(script):
            assert time.monotonic() < ends, script
            time.sleep(0.1)

    def drawn(self) -> None:
        """Wait until two frames were drawn: before, a mouse event may meet the places of a frame
        from before the last scrolling."""
        frames = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
        self.call("Runtime.evaluate", expression=frames, awaitPromise=True)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the mouse at a place of the window."""
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        pressed = {"buttons": 1} if kind == "mousePressed" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **pressed)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
