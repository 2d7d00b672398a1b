"""Whole models: beside the reference on the GPU, in any company, by graphs or not, with nothing compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gpu.device import Loaded
from gpu.steps import NoGraphs, Texts, Way, logits_of, num_blocks_for, ways
from gpu.watch import Watch
from pagec.compiler import reference
from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.ir import CacheType, Graph
from pagec.compiler.packing import unpack
from pagec.compiler.passes import Numbers, run_passes
from pagec.runtime.cli.verification import MODEL_SLACK, mean_kl
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sequence import Request

CHOOSING: Final = ("argmax", "sample")
# Largest difference of logits that sums in float32 may make, of the logits' deviation.
F32_SLACK: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of what is computed, in tokens: `prompts` beside the reference; the sequences that are `kept` in any
    company, and how many strangers of up to how many tokens are with them; how many of the `last` tokens come
    one by one."""

    prompts: Sequence[int] = (1, 15, 17, 70, 260)
    kept: Sequence[int] = (1, 5, 31, 64, 130, 300)
    strangers: int = 26
    stranger: int = 90
    last: int = 6


FULL: Final = Lengths()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check says: nothing `wrong` is good."""

    wrong: tuple[str, ...]
    detail: str = ""


# ------------------------------------------------------------------------------------ reference


def beside_reference(loaded: Loaded, seed: int, sizes: Lengths = FULL) -> Finding:
    """Logits of a few prompts, computed in chunks: in float32 by the largest difference; rounded ones by
    how far they are from float32 (mean KL divergence), against how far the reference rounded alike is."""
    artifact, rng = loaded.artifact, np.random.default_rng(seed)
    limits = artifact.program
    texts = _random_texts(sizes.prompts, limits.max_len, limits.vocab, rng)
    lengths = [len(text) for text in texts]
    steps = ways(lengths, len(texts), limits.capacity.T, limits.capacity.S, sizes.last)[2].steps
    torch.set_float32_matmul_precision("highest")  # no TF32
    graph, numbers = artifact.graph(), numbers_of(artifact)
    weights = Weights(loaded)
    mine = torch.from_numpy(np.concatenate(_logits(loaded, texts, len(texts), steps, rng))).double()
    if not bool(mine.isfinite().all()):
        return Finding((f"{int((~mine.isfinite()).sum())} logits are not finite",))
    plain = _reference(graph, texts, weights).double()
    if numbers.dtype == numbers.kv_dtype == "f32":
        error = float((mine - plain).abs().max())
        return _judged("the largest error of a logit", error, F32_SLACK * float(plain.std()), len(mine))
    rounded = _reference(run_passes(graph, numbers), texts, weights).double()
    error, allowed = mean_kl(plain, mine), mean_kl(plain, rounded)
    return _judged("the mean KL divergence from float32", error, MODEL_SLACK * allowed + 1e-12, len(mine))


def _judged(what: str, error: float, bound: float, count: int) -> Finding:
    text = f"{what} over {count} positions is {error:.3g}, {error / bound:.3f} of the bound"
    return Finding(() if error <= bound else (text,), text)  # NaN is beyond


def numbers_of(artifact: GpuArtifact) -> Numbers:
    """How the artifact's program rounds."""
    numerics = artifact.manifest["numerics"]
    return Numbers(numerics["dtype"], numerics["kv_dtype"], numerics["residual"])


class Weights:
    """A program's weights in float32, by the model's names, unpacked from the GPU's memory and put there."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._packed = {part: w for w in reversed(loaded.artifact.program.weights) for part in w.parts}
        self._read: dict[str, torch.Tensor] = {}
        self.device = loaded.runner.memory.step_area.device

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._read:
            packed, loaded = self._packed[name], self._loaded
            kind = np.uint16 if packed.dtype == "bf16" else np.float32
            raw = loaded.device.download(loaded.runner.memory.weights[packed.name], kind)
            for part, x in unpack(packed, raw).items():
                self._read[part] = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
        return self._read[name]


def _reference(graph: Graph, texts: Sequence[Sequence[int]], weights: Weights) -> torch.Tensor:
    """Logits of all positions, on the host. Nothing is chosen by them."""
    graph = replace(graph, nodes=tuple(node for node in graph.nodes if node.op not in CHOOSING))
    inputs = reference.step_inputs(graph, texts)
    count, longest = sum(map(len, texts)), max(map(len, texts))
    if "logit_rows" in graph.inputs:
        inputs["logit_rows"] = torch.arange(count, dtype=torch.int32)
    for name in graph.inputs:
        if isinstance(kind := graph.types[name], CacheType):
            inputs[name] = reference.empty_cache(kind, len(texts), longest)
    there = {name: value.to(weights.device) for name, value in inputs.items()}
    return reference.run(graph, there, weights)["logits"].cpu()


# -------------------------------------------------------------------------------------- company


def in_any_company(loaded: Loaded, seed: int, sizes: Lengths = FULL) -> Finding:
    """Strict programs: the same bytes alone or in a crowd, however chunked, by graphs or not."""
    return _compared(loaded, seed, sizes, lambda _: True)


def graphs_beside_launches(loaded: Loaded, seed: int, sizes: Lengths = FULL) -> Finding:
    """Any program: graphs give the bytes that their launches give."""
    return _compared(loaded, seed, sizes, lambda way: way.name.startswith("token by token"))


def _compared(loaded: Loaded, seed: int, sizes: Lengths, wanted: Callable[[Way], bool]) -> Finding:
    program, rng = loaded.artifact.program, np.random.default_rng(seed)
    strangers = rng.integers(1, sizes.stranger, sizes.strangers).tolist()
    longest = min(program.max_len, program.capacity.T)
    texts = _random_texts([*sizes.kept, *strangers], longest, program.vocab, rng)
    lengths, kept = [len(text) for text in texts], len(sizes.kept)
    found = {}
    for way in ways(lengths, kept, program.capacity.T, program.capacity.S, sizes.last):
        if wanted(way):
            found[way.name] = _logits(loaded, texts, kept, way.steps, rng, eager=way.eager)
    first, *others = found
    wrong = [f"{name}: {text}" for name in others if (text := _difference(found[first], found[name]))]
    wrong += ["logits are not finite"] * (not all(np.isfinite(rows).all() for rows in found[first]))
    return Finding(tuple(wrong), f"{sum(lengths[:kept])} positions, {len(found)} ways: {', '.join(found)}")


def _difference(one: Sequence[Any], other: Sequence[Any]) -> str:
    """In which positions of how many sequences bytes differ."""
    differ = [(a.view(np.int32) != b.view(np.int32)).any(-1) for a, b in zip(one, other, strict=True)]
    count = sum(int(rows.sum()) for rows in differ)
    if not count:
        return ""
    sequence = next(number for number, rows in enumerate(differ) if rows.any())
    position = int(differ[sequence].argmax())
    return f"{count} positions differ, the first is {position} of sequence {sequence}"


def _logits(
    loaded: Loaded,
    texts: Sequence[Sequence[int]],
    kept: int,
    steps: Sequence[Any],
    rng: np.random.Generator,
    *,
    eager: bool = False,
) -> list[Any]:
    runner, program = loaded.runner, loaded.artifact.program
    graphs = runner.graphs
    assert num_blocks_for(program, texts) <= runner.num_blocks
    placed = Texts(program, runner.num_blocks, texts, kept, rng)
    try:
        runner.graphs = NoGraphs() if eager else graphs
        return logits_of(runner, loaded.device, placed, [len(text) for text in texts], steps, kept)
    finally:
        runner.graphs = graphs


def _random_texts(lengths: Sequence[int], most: int, vocab: int, rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, vocab, min(length, most)).tolist() for length in lengths]


# ----------------------------------------------------------------------------- nothing compiles

REQUESTS: Final[Sequence[Mapping[str, Any]]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "n": 3, "seed": 2},
    {"temperature": 0.0, "logprobs": 2},
)
ANSWER: Final = 8


def nothing_compiled(
    loaded: Loaded,
    seed: int,
    directories: Sequence[Path] | None = None,
    *,
    most: int = 200,
) -> Finding:
    """Requests of several kinds, of up to `most` tokens, on the engine, once it is ready."""
    program, rng = loaded.artifact.program, np.random.default_rng(seed)
    watch = Watch(loaded.library, directories)
    requests: list[Request] = []
    for number in range(3 * len(REQUESTS)):
        prompt = rng.integers(0, program.vocab, 1 + number * most // 13).tolist()
        params = SamplingParams(**REQUESTS[number % len(REQUESTS)])
        requests.append(loaded.engine.add_request(prompt, ANSWER, params=params, ignore_eos=True))
    tokens = sum(1 for _ in loaded.engine.stream())
    wrong = watch.seen()
    wrong += [f"request {r.id} failed: {r.error}" for r in requests if r.error is not None]
    short = [r.id for r in requests if any(len(s.output) != ANSWER for s in r.sequences)]
    wrong += [f"requests {short} ended too early"] if short else []
    return Finding(tuple(wrong), f"{tokens} tokens of {len(requests)} requests")
