"""A real checkpoint compiled for a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.targets import rounded

from pagec.compiler import artifact as artifacts
from pagec.compiler.artifact import GpuArtifact, look_at
from pagec.compiler.driver import CompileOptions, compile_model, find_source
from pagec.compiler.importers import WeightSource
from pagec.compiler.packing import unpack

pytest.importorskip("triton")


@pytest.mark.slow
def test_packed_weights_are_the_checkpoints(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Of steps of few tokens, which take fewer kernels. Matrices are rounded to bf16 once, norms are kept."""
    options = CompileOptions(
        str(smollm2_gguf), target="h100", max_step_tokens=16, max_seqs=4, output=tmp_path / "out"
    )
    found = look_at(compile_model(options, lambda *_: None).path)
    assert isinstance(found, GpuArtifact)
    found.check_weights()
    assert (found.path / "tokenizer" / "tokenizer.json").is_file()
    source = find_source(options)
    assert source.checkpoint is not None
    weights = WeightSource(source.spec, source.checkpoint)
    left = set(found.graph().weights)
    for weight in found.program.weights:
        packed = artifacts.read_packed(found.path / artifacts.WEIGHTS, found.program.weights, weight.name)
        for name, own in unpack(weight, packed).items():
            expected = weights.get(name)
            assert np.array_equal(own, rounded(expected, "bf16") if expected.ndim > 1 else expected), name
            left.discard(name)
    assert not left
