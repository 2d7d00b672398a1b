"""A whole small model's artifact, launch by launch on the device, against the graph's meaning.

The launches run in Triton's interpreter, as the device has packed them: a wrong pointer, grid or order of
work gives wrong logits, or a NaN of memory that nothing has written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import in_interpreter
from support.gpu_artifacts import gpu_artifact, random_weights
from support.gpu_steps import Chunk, copied_blocks, run_steps
from support.graphs import llama_text

from pagec.compiler import reference
from pagec.compiler.artifact import GpuArtifact

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

MAX_LEN = 64
# Sums of 64 to 256 products of float32, in two layers, in another order than torch's: as test_lower.py.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> GpuArtifact:
    return gpu_artifact(llama_text(max_len=MAX_LEN), tmp_path_factory.mktemp("gpu") / "out", T=40, S=4, R=4)


def test_steps_give_the_logits_of_the_models_meaning(artifact: GpuArtifact) -> None:
    """Chunks, then a chunk beside single tokens that the step before has chosen, then single tokens alone:
    captured and replayed these two."""
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(0, 256, n)] for n in (17, 5, 3)]
    more = [int(t) for t in rng.integers(0, 256, 6)]
    blocks = ((3, 5), (7, 2), (1, 4))

    def step(starts: list[int], tokens: list[tuple[int, ...]]) -> list[Chunk]:
        return [Chunk(*given) for given in zip(blocks, starts, tokens, strict=True)]

    steps = [
        step([0, 0, 0], [tuple(prompt) for prompt in prompts]),
        step([17, 5, 3], [(-1,), tuple(more), (-3,)]),
        step([18, 11, 4], [(-1,), (-2,), (-3,)]),
    ]
    found = in_interpreter(run_steps, artifact.path, steps)
    sequences = prompts
    for number, (logits, greatest) in enumerate(found):
        expected = last_logits(artifact, sequences)
        assert np.abs(logits - expected).max() < TOLERANCE
        assert (greatest == logits.argmax(-1)).all()
        chosen = [[int(token)] for token in greatest]
        came = [chosen[0], more, chosen[2]] if number == 0 else chosen
        sequences = [[*sequence, *tokens] for sequence, tokens in zip(sequences, came, strict=True)]


def last_logits(artifact: GpuArtifact, sequences: list[list[int]]) -> Any:
    """Each sequence's last logits, from its beginning, by the ops' meanings."""
    source = artifact.graph()
    weights = random_weights(source, 0)
    inputs = reference.step_inputs(source, sequences)
    values = reference.run(source, inputs, lambda name: torch.from_numpy(weights[name]))
    ends = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    return np.stack([values["logits"].numpy()[end - 1] for _, end in pairwise(ends)])


def test_the_programs_own_kernel_copies_blocks(artifact: GpuArtifact) -> None:
    before, after = in_interpreter(copied_blocks, artifact.path, [(1, 5), (11, 0), (7, 2)])
    before[:, [5, 0, 2]] = before[:, [1, 11, 7]]
    assert (before == after).all()
