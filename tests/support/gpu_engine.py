"""Engines on the fake GPU, whose launches Triton's interpreter executes: to be called by `in_interpreter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagec.compiler.artifact import GpuArtifact, look_at
from pagec.runtime.batch import Batch
from pagec.runtime.device.cuda.device import CudaDevice
from pagec.runtime.engine import Engine
from pagec.runtime.gpu.runner import GpuRunner
from pagec.runtime.sampling.params import SamplingParams
from support.fake_cuda import FakeGpu, FakeLibrary

NUM_BLOCKS = 24


@dataclass(slots=True)
class Ask:
    """A request: a prompt, what it asks, and after how many steps it comes."""

    prompt: list[int]
    max_tokens: int = 6
    params: dict[str, Any] = field(default_factory=dict)
    at_step: int = 0
    processor: str = ""
    abort_after: int = 0


@dataclass(slots=True)
class Answer:
    tokens: list[list[int]]
    logits: list[bytes]
    reason: str | None
    logprobs: list[float]


@dataclass(slots=True)
class Told:
    """What an engine did: answers, launches after it was ready, the functions of the driver called then."""

    answers: list[Answer]
    calls: set[str]
    num_launches: int
    num_replays: int
    blocks_used: int
    ledger: dict[str, Any]


def open_artifact(path: Path) -> GpuArtifact:
    found = look_at(path)
    assert isinstance(found, GpuArtifact)
    return found


def open_device(path: Path, **gpu: Any) -> tuple[GpuArtifact, CudaDevice, FakeLibrary, FakeGpu]:
    artifact, fake = open_artifact(path), FakeGpu(**gpu)
    library = FakeLibrary(artifact, fake, execute=True)
    return artifact, CudaDevice(artifact, gpu=fake, library=library), library, fake


def forbid_three(tokens: Any, logits: Any) -> Any:
    """A logits processor: the three likeliest tokens may not come."""
    del tokens
    logits[np.argsort(logits)[-3:]] = -np.inf
    return logits


def answer(path: Path, asks: list[Ask], options: dict[str, Any], poison: bool = True) -> Told:
    """Runs requests to their end on an engine with these options."""
    artifact, device, library, fake = open_device(path)
    options = {"num_blocks": NUM_BLOCKS} | options
    engine = Engine(artifact, device=device, **options)
    assert isinstance(engine.runner, GpuRunner)
    if poison:
        engine.runner.fill_kv_with_nan()
    replays = _count_replays(fake)
    library.calls.clear()
    library.launches.clear()
    waiting, requests, step = list(enumerate(asks)), {}, 0
    while waiting or engine.has_work:
        for number, ask in [one for one in waiting if one[1].at_step <= step]:
            waiting.remove((number, ask))
            params = SamplingParams(
                **({"temperature": 0.0} | ask.params),
                logits_processors=[forbid_three] if ask.processor else None,
            )
            requests[number] = engine.add_request(
                ask.prompt, ask.max_tokens, params=params, ignore_eos=True, want_logits=True
            )
        engine.step()
        step += 1
        for number, ask in enumerate(asks):
            if ask.abort_after and step == ask.abort_after:
                engine.abort(requests[number])
    engine.step()
    blocks = engine.scheduler.blocks
    used = blocks.num_blocks - 1 - blocks.num_free - blocks.num_cached
    return Told(
        [_answer(requests[number]) for number in range(len(asks))],
        set(library.calls),
        len(library.launches),
        replays[0],
        used,
        engine.ledger.to_json(),
    )


def _answer(request: Any) -> Answer:
    found = [one.own.logprob for s in request.sequences for one in s.logprobs if request.num_logprobs == 0]
    if request.error is not None:
        raise request.error
    return Answer(
        [list(s.output) for s in request.sequences],
        [np.asarray(rows, np.float32).tobytes() for rows in request.logits],
        request.finish_reason,
        found,
    )


def _count_replays(fake: FakeGpu) -> list[int]:
    count, replay = [0], fake.replay

    def counted(graph: Any) -> None:
        count[0] += 1
        replay(graph)

    fake.replay = counted  # type: ignore[method-assign]
    return count


def run_steps(
    path: Path, batches: list[Batch], options: dict[str, Any], prepare: Callable[[Any], None] | None = None
) -> tuple[list[Any], list[bytes]]:
    """Outputs of steps made one after the other, and the pool's bytes after each."""
    artifact, device, _, _ = open_device(path)
    runner = GpuRunner(artifact, device, **({"num_blocks": NUM_BLOCKS} | options))
    runner.fill_kv_with_nan()
    if prepare is not None:
        prepare(runner)
    outputs, pools = [], []
    for batch in batches:
        outputs.append(runner.run(batch))
        pools.append(device.download(runner.memory.kv, np.uint8).tobytes())
    return outputs, pools
