"""Tiny artifacts under the names of the real ones."""

from __future__ import annotations

import pytest
from support.gpu_artifacts import gpu_artifact
from support.graphs import llama_text

from gpu.artifacts import Artifacts


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Two layers, under the names of the real ones."""
    made = tmp_path_factory.mktemp("gpu")
    for name, max_len in (("8b", 160), ("1b", 160), ("1b-short", 80)):
        text = llama_text(
            vocab=192, hidden=64, heads=4, kv_heads=2, head_dim=16, inter=128, max_len=max_len, layers=2
        )
        gpu_artifact(text, made / name, T=32, S=6, R=6)
    return Artifacts(made)
