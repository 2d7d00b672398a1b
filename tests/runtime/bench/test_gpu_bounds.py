"""Bytes and FLOPs of a GPU's launches, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu_artifacts import gpu_artifact
from support.graphs import llama_text

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.gpu_program import GpuLaunch
from pagec.runtime.bench.bounds import bounds_of

F32 = 4


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> GpuArtifact:
    return gpu_artifact(llama_text(), tmp_path_factory.mktemp("gpu") / "out")


def launch_of(artifact: GpuArtifact, template: str, part: str = "body") -> GpuLaunch:
    """The first launch of a template in the largest span."""
    templates = {kernel.key: kernel.template for kernel in artifact.program.kernels}
    spans = artifact.program.body if part == "body" else artifact.program.head
    return next(one for one in spans[-1].launches if templates[one.kernel] == template)


def test_a_linear_reads_its_matrix_once(artifact: GpuArtifact) -> None:
    """Of queries, keys and values: 128 x 64. It turns and writes them, by a position, a slot, and 8 cosines
    and sines."""
    launch, bounds = launch_of(artifact, "linear"), bounds_of(artifact)
    nbytes, flops = bounds.of(launch.name, launch.kernel, 5, [])
    assert nbytes == F32 * (128 * 64 + 5 * (64 + 128 + 1 + 1 + 16))
    assert flops == 5 * 2 * 128 * 64
    assert bounds.reads_memory(launch.name, launch.kernel)


def test_attention_is_shared_out_between_chunks_and_single_tokens(artifact: GpuArtifact) -> None:
    chunks = [(9, 1), (0, 16), (19, 1)]
    bounds, row = bounds_of(artifact), 2 * 4 * 16 * F32  # a query, and what comes of it
    decode, prefill = launch_of(artifact, "attention_decode"), launch_of(artifact, "attention_prefill")
    nbytes, flops = bounds.of(decode.name, decode.kernel, 2, chunks)
    assert nbytes == 30 * 2 * 2 * 16 * F32 + 2 * row // 2  # the result is the merge's to write
    assert flops == 30 * 4 * 4 * 16
    nbytes, flops = bounds.of(prefill.name, prefill.kernel, 1, chunks)
    assert nbytes == 16 * 2 * 2 * 16 * F32 + 16 * row
    assert flops == 16 * 17 // 2 * 4 * 4 * 16
    merge = launch_of(artifact, "attention_merge")
    assert bounds.of(merge.name, merge.kernel, 3, chunks) == (2 * row // 2, 0)


def test_an_embedding_reads_the_rows_that_it_takes(artifact: GpuArtifact) -> None:
    launch = launch_of(artifact, "embed")
    assert bounds_of(artifact).of(launch.name, launch.kernel, 3, []) == (3 * (F32 + 2 * 64 * F32), 0)


def test_keys_and_values_are_written_to_the_pool(tmp_path: Path) -> None:
    """Where heads are normed, by a kernel of its own: q, k, v in; q out; k and v to the pool; a position, a
    slot, and 8 cosines and sines. The two weights, of 64 with their padding, come once."""
    sizes = "layers: 1, vocab: 256, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, inter: 128, max_len: 128"
    artifact = gpu_artifact(f"extends: qwen3\nparams: {{{sizes}}}\n", tmp_path / "out")
    launch = launch_of(artifact, "kv_write")
    row = F32 * (128 + 64 + 64 + 1 + 1 + 16)
    assert bounds_of(artifact).of(launch.name, launch.kernel, 3, []) == (3 * row + 2 * 64 * F32, 0)
