"""With real kernels: a request's logits are the same bytes alone, in a crowd, chunked, preempted, on 1 or 2
threads.

The whole KV pool is filled with NaN before each case. The model is small and random, compiled here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagec.compiler.target import host
from pagec.runtime.engine import Engine
from pagec.runtime.sequence import Request

SIZES = "vocab: 200, hidden: 96, layers: 2, heads: 6, kv_heads: 2, max_len: 1024"
SPECS = {
    "dense": f"extends: llama\nparams: {{{SIZES}, inter: 160, window: 200}}\n",
    "experts": f"extends: qwen3-moe\nparams: {{{SIZES}, inter: 40, experts: 6, top_k: 3}}\n",
}
LENGTHS = (1, 15, 16, 17, 300)
OUTPUT = 5


VARIANTS = [
    ("cpu", "bf16", "dense"),
    ("cpu", "f32", "dense"),
    ("cpu-avx512", "bf16", "dense"),
    ("cpu-avx2", "bf16", "dense"),
    ("cpu-avx2", "f32", "dense"),
    ("cpu", "bf16", "experts"),
    ("cpu-avx2", "f32", "experts"),
]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pagec.compiler.backends.targets import load_target
    from pagec.compiler.driver import CompileOptions, compile_model

    target, dtype, kind = request.param
    missing = set(load_target(target).requires) - host().flags
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    path = tmp_path_factory.mktemp("determinism")
    (path / "small.yaml").write_text(SPECS[kind])
    options = CompileOptions(
        str(path / "small.yaml"),
        weights="random:1",
        target=target,
        dtype=dtype,
        max_step_tokens=64,
        max_seqs=8,
        output=path / "out",
    )
    return compile_model(options, lambda stage, done, total: None).path  # noqa: ARG005


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 200, length).tolist()  # type: ignore[no-any-return]


def ask(engine: Engine, length: int) -> Request:
    """A prompt, answered to the end with all logits."""
    request = engine.add_request(prompt(length), OUTPUT, prompt_logits=True, ignore_eos=True)
    for _ in engine.stream():
        pass
    assert engine.scheduler.blocks.num_used == 0
    return request


def logits(request: Request) -> bytes:
    """Of every position of the prompt and the answer."""
    rows = np.concatenate(request.logits)
    assert rows.shape == (len(request.prompt) + OUTPUT - 1, 200)
    assert np.isfinite(rows).all()
    assert rows[len(request.prompt) - 1 :].argmax(axis=1).tolist() == request.output
    return rows.tobytes()


def start(engine: Engine, count: int, output: int) -> None:
    """Starts other requests, until all are decoding."""
    others = [engine.add_request(prompt(24 + n), output, ignore_eos=True) for n in range(count)]
    while any(not request.output for request in others):
        engine.step()


@pytest.fixture(scope="module")
def alone(artifact: Path) -> dict[int, bytes]:
    engine = Engine(artifact, threads=2, num_blocks=64)
    return {length: logits(ask(engine, length)) for length in LENGTHS}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 16, 33, None])
def test_chunks_and_threads(artifact: Path, alone: dict[int, bytes], threads: int, chunk: int | None) -> None:
    engine = Engine(artifact, threads=threads, num_blocks=64, prefill_chunk=chunk)
    for length in LENGTHS:
        engine.runner.fill_kv_with_nan()
        assert logits(ask(engine, length)) == alone[length], length


def test_in_a_crowd(artifact: Path, alone: dict[int, bytes]) -> None:
    engine = Engine(artifact, threads=2, num_blocks=128)
    for length in LENGTHS:
        engine.runner.fill_kv_with_nan()
        start(engine, 7, output=30)
        assert logits(ask(engine, length)) == alone[length], length


def test_after_preemption(artifact: Path, alone: dict[int, bytes]) -> None:
    """Two older requests grow until the pool is dry; the youngest is computed again."""
    engine = Engine(artifact, threads=2, num_blocks=6)
    preemptions = 0
    for length in (15, 16, 17):
        engine.runner.fill_kv_with_nan()
        start(engine, 2, output=30)
        request = ask(engine, length)
        preemptions += request.num_preemptions
        assert logits(request) == alone[length], length
    assert preemptions > 0
