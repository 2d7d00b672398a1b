"""A process at a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

TIMEOUT_S: Final = 60.0
STYLING: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a command; `expect` reads what it shows. Ends it with the `with` block."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        size: tuple[int, int] = (40, 100),
    ) -> None:
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            list(command),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", **(env or {})},
            cwd=cwd,
            preexec_fn=_own_terminal,  # so that Ctrl-C reaches it
        )
        os.close(inner)
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, text: str) -> None:
        """Keys, as they come from a keyboard: "\\r" is Enter, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._end, text.encode())

    def expect(self, text: str) -> str:
        """Reads until a text appears, whatever its colours; what stood before it."""
        while text not in self._unread:
            piece = self._read()
            assert piece, f"no {text!r} in {self._unread!r}"
            self._unread = STYLING.sub("", self._unread + piece)
        before, _, self._unread = self._unread.partition(text)
        return before

    def read_some(self) -> str:
        """What is there, or comes next."""
        found, self._unread = self._unread or self._read(), ""
        return found

    def wait(self) -> int:
        """Reads to the end; the exit code."""
        while piece := self._read():
            self._unread += piece
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> str:
        """What comes next; "" at the end, or when nothing comes."""
        if not select.select([self._end], [], [], TIMEOUT_S)[0]:
            return ""
        try:
            return os.read(self._end, 1 << 16).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            return ""


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
