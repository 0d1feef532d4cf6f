"""A real Chromium without a window, spoken to by its DevTools protocol over a pipe; no driver, no port."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser and one page in it."""

    def __init__(self, sending: int, receiving: int) -> None:
        self._sending, self._receiving = sending, receiving
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, timeout: float = 60.0, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, f"Chromium does not answer {waiting_for}"
            if select.select([self._receiving], [], [], left)[0]:
                data = os.read(self._receiving, 1 << 20)
                assert data, "Chromium ended"
                self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, *, dark: bool, width: int = 1200) -> None:
        """Load the file and wait until it is."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call("Page.navigate", url=path.as_uri())
        until(lambda: "file:" in self.js("location.href") and self.js("document.readyState") == "complete")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser; ended with all of its processes."""
    program = found()
    assert program, "no Chromium here"
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [program, "--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
                     f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]  # fmt: skip
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        # The protocol's pipe is at descriptors 3 and 4.
        script = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments], pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Chromium(to_browser[1], from_browser[0])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            os.close(to_browser[1])
            os.close(from_browser[0])
