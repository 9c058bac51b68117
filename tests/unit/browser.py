"""A real browser for tests of pages: headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHOSEN = "SGLANG_HYBRID_TEST_BROWSER"  # environment variable
PROGRAMS = (
    "chromium-headless-shell", "chromium", "chromium-browser", "chrome-headless-shell", "google-chrome-stable",
    "google-chrome",
)  # fmt: skip
MISSING = f"no Chromium: apt-get install chromium-headless-shell, or name a program in {CHOSEN}"
SECONDS = 60.0  # limit of every call: a busy machine is slow


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    chosen = os.environ.get(CHOSEN)
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page of one browser process. Use it as a context manager. The browser writes its profile to ``folder``."""

    def __init__(self, program: str, folder: Path) -> None:
        self._identifier = 0
        self._session: str | None = None
        self._received = bytearray()
        self.errors: list[str] = []  # exceptions of scripts, and what the page's security policy blocked
        self.requested: list[str] = []  # URLs of all requests
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        # Chromium expects descriptors 3 and 4; the ends of the pipes must not have one of these numbers already
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (child_in, child_out)]
        flags = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                 f"--user-data-dir={folder}", "--disable-background-networking", "--disable-dev-shm-usage"]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses to run as root in its sandbox
        shell = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, *flags, "about:blank"],
            pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for end in (child_in, child_out, *ends):
            os.close(end)

    def __enter__(self) -> Browser:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """Set the color scheme that the user prefers: ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; for a promise, the value that it resolves to."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Evaluate a JavaScript expression before each drawn frame until it is true. Return its value."""
        return self.evaluate(
            f"new Promise(done => {{ const look = () => {{ let found = false; try {{ found = ({condition}); }} "
            "catch (error) { found = false; } found ? done(found) : requestAnimationFrame(look); }; look(); })"
        )

    def text(self, selector: str) -> str:
        found = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText")
        assert isinstance(found, str), f"there is no {selector}"
        return found

    def picture(self) -> bytes:
        """Return a PNG image of the visible part of the page."""
        answer = self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._identifier += 1
        message: dict[str, Any] = {"id": self._identifier, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._identifier:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while (end := self._received.find(b"\0")) < 0:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {method} in {SECONDS:.0f} s; errors of the page: {self.errors}"
            part = os.read(self._in, 1 << 16)
            assert part, f"the browser ended at {method}"
            self._received += part
        message: dict[str, Any] = json.loads(self._received[:end])
        del self._received[: end + 1]
        return message

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(details["exceptionDetails"].get("exception", details)))
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.errors.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(details["request"]["url"])


def main() -> None:
    """Take a picture of a page, such as ``sglang-hybrid top --web``: ``python tests/unit/browser.py URL FILE``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=860)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--when", default="document.readyState === 'complete'", help="JavaScript that must be true")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder, Browser(program, Path(folder)) as browser:
        browser.resize(options.width, options.height)
        browser.prefer(options.scheme)
        browser.open(options.url)
        browser.wait_for(options.when)
        options.file.write_bytes(browser.picture())


if __name__ == "__main__":
    main()
