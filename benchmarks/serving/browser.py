"""Headless Chromium, driven over its DevTools pipe with nothing but the standard library."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PHONE = (390, 844)
DESK = (1280, 900)
"""Width and height of the window."""

NO_GPU = ("--disable-gpu",)
SOFTWARE_GPU = (
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan,WebGPU"),
    *("--use-vulkan=swiftshader", "--ignore-gpu-blocklist"),
)
"""Flags of a browser with WebGPU that the processor computes."""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
)


class Browser:
    """One page in a browser."""

    def __init__(self, commands: Any, answers: Any):
        self._commands = commands
        self._answers = answers
        self._next = 0
        self._waiting = b""
        self.complaints: list[str] = []
        """Errors and warnings of the console, and what could not be loaded."""
        self.asked_for: list[str] = []
        """Every address that was asked for."""
        self._events: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(self, address: str, window: tuple[int, int] = DESK) -> None:
        """Open a page and wait until it is loaded."""
        width, height = window
        phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        self._events.clear()
        self._call("Page.navigate", {"url": address})
        while "Page.loadEventFired" not in self._events:
            self._read()

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window."""
        return self.evaluate("document.documentElement.scrollWidth - window.innerWidth")

    def screenshot(self, path: str | Path, whole: bool = True) -> None:
        """Write a PNG of the page."""
        options = {"format": "png", "captureBeyondViewport": whole, **self._clip(whole)}
        found = self._call("Page.captureScreenshot", options)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        width, height = self.evaluate("[window.innerWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}

    def _call(self, method: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": dict(parameters or {})}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            piece = os.read(self._answers.fileno(), 2**16)
            assert piece, "the browser ended"
            self._waiting += piece
        line, _, self._waiting = self._waiting.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, values: Mapping[str, Any]) -> None:
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.asked_for.append(values["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values["exceptionDetails"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(values["args"]))


@contextlib.contextmanager
def open_browser(profile: Path, flags: Sequence[str] = NO_GPU) -> Iterator[Browser]:
    """Start a browser with a new profile in the folder `profile`, and end it with the block.

    Raises:
      FileNotFoundError: no Chromium is installed.
    """
    if CHROMIUM is None:
        raise FileNotFoundError("no chromium, chromium-browser or google-chrome is installed")
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()

    # DevTools reads commands from descriptor 3 and writes answers to 4.
    hand_over = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'
    process = subprocess.Popen(
        ["bash", "-c", hand_over, CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}"],
        pass_fds=(to_browser, to_us),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(to_us)
    with os.fdopen(from_us, "wb") as commands, os.fdopen(from_browser, "rb") as answers:
        try:
            yield Browser(commands, answers)
        finally:
            with contextlib.suppress(OSError):
                commands.write(b'{"id": 0, "method": "Browser.close"}\0')
                commands.flush()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
