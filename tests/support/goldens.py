"""Golden files: the exact text of every stage. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent.parent / "goldens"


class Golden:
    """Compares texts with files under tests/goldens."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def check(self, name: str, text: str) -> None:
        """Fails with a diff if the file holds another text."""
        path = DIRECTORY / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.is_file():
            pytest.fail(f"there is no golden {name}; write it with --update-golden and look at it")
        expected = path.read_text()
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), "golden", "now", lineterm="", n=2
            )
            pytest.fail(f"{name} has changed (--update-golden if it is meant to):\n" + "\n".join(diff))
