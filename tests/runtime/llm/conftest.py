"""One small model for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small import small_artifact

from pagec.runtime import LLM


@pytest.fixture(scope="module")
def path() -> Path:
    return small_artifact()


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1, max_num_seqs=8, num_blocks=400, seed=7) as llm:
        yield llm
