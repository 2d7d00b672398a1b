"""A server that commands talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import RunningServer, served_artifact


@pytest.fixture(scope="session")
def byte_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights whose tokens are bytes."""
    return served_artifact(tmp_path_factory.mktemp("served") / "artifact")


@pytest.fixture(scope="session")
def server(byte_artifact: Path) -> Iterator[RunningServer]:
    """It asks for the key "secret"."""
    with RunningServer(byte_artifact, "--api-key", "secret", "--served-model-name", "bytes") as running:
        yield running
