"""One server for all tests that leave it as they found it, and an engine in this process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.serving import RunningServer, served_artifact

from pagec.runtime.engine import Engine
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sequence import Request

Run = Callable[[Sequence[int], SamplingParams], Request]


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_artifact(tmp_path_factory.mktemp("served") / "artifact")


@pytest.fixture(scope="session")
def server(artifact: Path) -> Iterator[RunningServer]:
    with RunningServer(artifact, "--served-model-name", "small", "--served-model-name", "alias") as running:
        yield running


@pytest.fixture(scope="session")
def run(artifact: Path) -> Iterator[Run]:
    """Runs a request in this process; it is over when given back."""
    with Engine(artifact, num_blocks=300) as engine:

        def run(prompt: Sequence[int], params: SamplingParams) -> Request:
            request = engine.add_request(prompt, params=params)
            for _ in engine.stream():
                pass
            assert request.error is None
            return request

        yield run
