"""A small model as a real artifact: its own kernels, graph and probes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small import small_artifact


@pytest.fixture(scope="session")
def small() -> Path:
    return small_artifact()
