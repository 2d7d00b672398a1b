"""A headless Chromium, driven over the DevTools protocol: JSON with a NUL at its end, on pipes 3 and 4."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 60.0
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    # A name that is looked up would be a request to another host.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# Puts its first two arguments, file descriptors, where Chromium looks for them.
LAUNCH: Final = (
    "import os, sys; read, write, *command = sys.argv[1:]; "
    "os.dup2(int(read), 3); os.dup2(int(write), 4); os.execv(command[0], command)"
)


def find_chromium() -> str | None:
    """A Chromium on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(binary: str, profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile."""
    to_browser, from_browser = os.pipe(), os.pipe()
    inner = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser[0], from_browser[1])]
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", LAUNCH, *map(str, inner)),
            *(binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        ],
        pass_fds=inner,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for end in (*inner, to_browser[0], from_browser[1]):
        os.close(end)
    browser = Browser(to_browser[1], from_browser[0])
    try:
        yield browser
    finally:
        os.close(to_browser[1])  # which ends it
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        browser.join()


class Browser:
    """Sends commands and sorts what comes back: answers to whoever waits, events to their pages."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to = write_to
        self._read_from = read_from
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def open(self, url: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> Page:
        """A page of this size, in whose document the events since its first request are noted."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result; an error of the browser is one of the test."""
        id = next(self._ids)
        answer = self._answers[id] = queue.Queue()
        message: dict[str, Any] = {"id": id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=TIMEOUT_S)
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    def join(self) -> None:
        """Waits until the browser has closed its end."""
        self._thread.join()
        os.close(self._read_from)

    def _read(self) -> None:
        data = b""
        while chunk := os.read(self._read_from, 1 << 16):
            *whole, data = (data + chunk).split(b"\0")
            for text in whole:
                message = json.loads(text)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.note(message["method"], message["params"])


class Page:
    """An open page. `errors`: what went to the console as one; `urls`: all that was asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._browser = browser
        self._session = session

    def note(self, event: str, params: dict[str, Any]) -> None:
        """An event of this page."""
        if event == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif (
            event == "Runtime.exceptionThrown"
            or (event == "Log.entryAdded" and params["entry"]["level"] == "error")
            or (event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"))
        ):
            self.errors.append(json.dumps(params))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript; of a promise, what it is resolved with."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30.0) -> Any:
        """The first value of JavaScript that is true, looked at every few milliseconds."""
        value = self.evaluate(
            f"""new Promise((resolve) => {{
              const end = performance.now() + {seconds * 1000};
              const look = () => {{
                let value = false;
                try {{ value = {condition}; }} catch {{}}
                if (value || performance.now() > end) resolve(value instanceof Node || value);
                else setTimeout(look, 5);
              }};
              look();
            }})"""
        )
        assert value, f"never true: {condition}"
        return value

    def type(self, selector: str, text: str) -> None:
        """Puts text where the selector points, as from a keyboard."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, file: Path) -> None:
        """The page as it looks."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
