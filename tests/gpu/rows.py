"""The rows of `check.sh bench`: what is timed, and beside what.

A row's `ratio` is the time of the first peer over ours, so that more is better; `goal`: what it should reach.
Times are in microseconds, medians; `spread`: the distance between the quartiles, of the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from gpu import peers
from gpu.device import DTYPES, Loaded
from gpu.models import numbers_of
from gpu.results import Line
from gpu.steps import Texts
from gpu.timing import Run, Timer
from pagec.autotune.measure import Sample
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.gpu_program import GpuLaunch
from pagec.compiler.ir import Node
from pagec.compiler.passes import run_passes
from pagec.runtime.bench.cost import model_cost
from pagec.runtime.gpu.step import Step

Load = Callable[[str], Loaded]


@dataclass(frozen=True, slots=True)
class Bench:
    """What rows measure with. `copy_bytes_per_us`: read and written by a copy, both counted."""

    load: Load
    timer: Timer
    copy_bytes_per_us: float
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Row:
    """`models`: the artifacts that must be loaded for it."""

    name: str
    models: tuple[str, ...]
    measure: Callable[[Bench], Line]
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the rows are measured at. `prefill` and `decode`: (sequences, tokens of each)."""

    prefill: Sequence[tuple[int, int]] = ((1, 4096), (4, 1024), (1, 1024))
    decode: Sequence[tuple[int, int]] = ((16, 4096), (64, 4096), (16, 16384), (1, 65536))
    linear_rows: Sequence[int] = (1, 16, 64, 256, 2048)
    batches: Sequence[int] = (1, 8, 64, 256)
    context: int = 512
    short_context: int = 64
    short_batches: Sequence[int] = (1, 64)
    requests: int = 64
    prompt: int = 128
    answer: int = 128

    @property
    def pool_tokens(self) -> int:
        """Tokens for which there must be room in a pool."""
        steps = max(self.batches) * (self.context + self.answer)
        asked = self.requests * (self.prompt + self.answer)
        return max([n * tokens for n, tokens in (*self.prefill, *self.decode)] + [steps, asked])


# The least ratios that are asked for.
PREFILL_GOAL: Final = 1.0
DECODE_GOAL: Final = 0.85
STEP_GOAL: Final = round(1 / 1.3, 3)
LIMIT_GOAL: Final = 0.95


def all_rows(sizes: Sizes, big: str = "8b", small: str = "1b", short: str = "1b-short") -> list[Row]:
    """Those with a goal come first within a model."""
    return [
        *(_prefill_row(big, *size) for size in sizes.prefill),
        *(_decode_row(big, *size) for size in sizes.decode),
        *(_step_row(big, n, sizes.context, STEP_GOAL if n == 1 else None) for n in sizes.batches),
        *(
            Row(f"linear {which}, {rows} rows", (big,), partial(linear, big, which, rows))
            for which in LINEARS
            for rows in sizes.linear_rows
        ),
        _engine_row(big, sizes),
        *(_limit_row(small, short, n, sizes.short_context) for n in sizes.short_batches),
        *(_step_row(small, n, sizes.context, None) for n in sizes.batches),
        _engine_row(small, sizes),
    ]


def _prefill_row(model: str, sequences: int, tokens: int) -> Row:
    name = f"prefill attention, {sequences} x {tokens} tokens"
    return Row(name, (model,), partial(prefill, model, sequences, tokens), PREFILL_GOAL)


def _decode_row(model: str, sequences: int, context: int) -> Row:
    goal = DECODE_GOAL if sequences >= 16 else None
    name = f"decode attention, {sequences} x {context} keys"
    return Row(name, (model,), partial(decode, model, sequences, context), goal)


def _step_row(model: str, batch: int, context: int, goal: float | None) -> Row:
    name = f"decode step of {model}, batch {batch}"
    return Row(name, (model,), partial(decode_step, model, batch, context), goal)


def _limit_row(model: str, short: str, batch: int, context: int) -> Row:
    name = f"decode step of {model} at context {context}, batch {batch}: long limit beside short"
    return Row(name, (model, short), partial(limits, model, short, batch, context), LIMIT_GOAL)


def _engine_row(model: str, sizes: Sizes) -> Row:
    asked = sizes.requests, sizes.prompt, sizes.answer
    name = f"engine of {model}, {asked[0]} requests of {asked[1]} + {asked[2]} tokens"
    return Row(name, (model,), partial(engine, model, *asked))


# ------------------------------------------------------------------------------------- attention


def prefill(model: str, sequences: int, tokens: int, bench: Bench) -> Line:
    """One layer over a paged cache, beside torch's attention over dense arrays."""
    loaded = bench.load(model)
    kv = loaded.artifact.program.kv
    step = uploaded(loaded, [(0, tokens)] * sequences)
    runs = {"ours": _calls(loaded, step, first_of(loaded, step, ["attention_prefill"]))}
    like = loaded.runner.memory.kv.view(DTYPES[kv.dtype])
    heads = model_cost(loaded.artifact).layers[0].heads
    runs |= peers.attention_peers(sequences, tokens, heads, kv.kv_heads, kv.head_dim, like)
    return compared(bench.timer.time(runs))


def decode(model: str, sequences: int, context: int, bench: Bench) -> Line:
    """One layer, with the merge of its parts, beside the time of copying as many bytes."""
    loaded = bench.load(model)
    step = uploaded(loaded, [(context - 1, 1)] * sequences)
    launches = first_of(loaded, step, ["attention_decode", "attention_merge"])
    cost, item = model_cost(loaded.artifact).layers[0], ITEM_BYTES[loaded.artifact.program.kv.dtype]
    bound = sequences * cost.kv_bytes(context - 1, 1, item) / bench.copy_bytes_per_us
    found, rounds = bench.timer.time({"ours": _calls(loaded, step, launches)})
    return compared((found, rounds), {"copy bandwidth": bound})


def uploaded(loaded: Loaded, chunks: Sequence[tuple[int, int]]) -> Step:
    """A step of (start, tokens) chunks of random tokens, where kernels read it."""
    runner, program, rng = loaded.runner, loaded.artifact.program, np.random.default_rng(0)
    lengths = [start + count for start, count in chunks]
    texts = [rng.integers(0, program.vocab, length).tolist() for length in lengths]
    placed = Texts(program, runner.num_blocks, texts, 0, rng)
    return runner.upload(placed.batch((n, *chunk) for n, chunk in enumerate(chunks)))


def first_of(loaded: Loaded, step: Step, templates: Iterable[str]) -> list[GpuLaunch]:
    """The first launch of each template in a step's body."""
    of = {kernel.key: kernel.template for kernel in loaded.artifact.program.kernels}
    return [next(one for one in step.span.launches if of[one.kernel] == name) for name in templates]


def _calls(loaded: Loaded, step: Step, launches: Sequence[GpuLaunch]) -> Run:
    """A run of some launches of a step that is uploaded."""
    calls = loaded.runner.prepare(launches)
    return lambda: calls.run(step.rows)


# --------------------------------------------------------------------------------------- linears

# By a weight of the first layer that they multiply with.
LINEARS: Final[Mapping[str, str]] = {"q k v": "l0.q", "o": "l0.o", "gate up": "l0.gate", "down": "l0.down"}


def linear(model: str, which: str, rows: int, bench: Bench) -> Line:
    """A linear with its epilogue, beside cuBLAS and a kernel for each further op. Of few rows ours does the
    norm before it, too."""
    loaded = bench.load(model)
    artifact, device = loaded.artifact, loaded.runner.memory.step_area.device
    fused = fuse_writes(run_passes(artifact.graph(), numbers_of(artifact)))
    node = next(node for node in fused.nodes if _multiplies(node, LINEARS[which]))
    step = uploaded(loaded, [(0, rows)])
    launches = launches_of(node, step, {node.outputs[0] for node in fused.nodes})
    for name in node.values():
        _fill(loaded, name)
    dtype = DTYPES[artifact.manifest["numerics"]["dtype"]]
    runs = {
        "ours": _calls(loaded, step, launches),
        "cuBLAS and kernels": peers.linear_peer(node, fused, rows, dtype, device),
    }
    return compared(bench.timer.time(runs))


def _multiplies(node: Node, weight: str) -> bool:
    return node.op in ("linear", "fused.linear") and any(
        name[0] == "$" and weight in name[1:].split("+") for name in node.inputs
    )


def launches_of(node: Node, step: Step, nodes: Collection[str]) -> list[GpuLaunch]:
    """A node's launches: the one named as it, and those up to the next node's."""
    names = [launch.name for launch in step.span.launches]
    first = names.index(node.outputs[0])
    end = next((at for at in range(first + 1, len(names)) if names[at] in nodes), len(names))
    return list(step.span.launches[first:end])


def _fill(loaded: Loaded, name: str) -> None:
    """Random rows: zeros take a GPU less power."""
    buffers = {buffer.name: buffer for buffer in loaded.artifact.program.buffers}
    if name in buffers and buffers[name].dtype != "i32":
        loaded.runner.memory.buffers[name].view(DTYPES[buffers[name].dtype]).normal_()


# ----------------------------------------------------------------------------------------- steps


def decode_step(model: str, batch: int, context: int, bench: Bench) -> Line:
    """A captured step and its greedy head, beside the time of reading weights, keys and values once."""
    loaded = bench.load(model)
    cost = model_cost(loaded.artifact)
    kv = sum(layer.kv_bytes(context - 1, 1, cost.kv_item_bytes) for layer in cost.layers)
    bound = (cost.weights_bytes + batch * kv) / bench.copy_bytes_per_us
    found = bench.timer.time({"ours": captured_step(loaded, batch, context)})
    return compared(found, {"copy bandwidth": bound})


def captured_step(loaded: Loaded, batch: int, context: int) -> Run:
    """Replays the graphs of a step of `batch` sequences."""
    runner = loaded.runner
    step = uploaded(loaded, [(context - 1, 1)] * batch)
    body, head = runner.graphs.body(step.bucket), runner.graphs.head(batch, "greedy")
    assert body is not None, f"there is no graph for {batch} sequences"
    assert head is not None, f"there is no graph for {batch} logit rows"

    def run() -> None:
        body.replay()
        head.replay()

    return run


def limits(model: str, short: str, batch: int, context: int, bench: Bench) -> Line:
    """The same model for long sequences and for short ones, at a context that both hold."""
    runs = {"ours": captured_step(bench.load(model), batch, context)}
    runs["short limit"] = captured_step(bench.load(short), batch, context)
    return compared(bench.timer.time(runs))


def engine(model: str, requests: int, prompt: int, answer: int, bench: Bench) -> Line:
    """Generated tokens per second of requests that come at once."""
    loaded = bench.load(model)
    vocab, rng = loaded.artifact.program.vocab, np.random.default_rng(0)
    speeds = []
    for _ in range(3):  # the first one warms up
        for _ in range(requests):
            tokens = rng.integers(0, vocab, prompt).tolist()
            loaded.engine.add_request(tokens, answer, ignore_eos=True)
        began = bench.clock()
        count = sum(1 for _ in loaded.engine.stream())
        speeds.append(count / (bench.clock() - began))
    best, other = max(speeds[1:]), min(speeds[1:])
    return {"unit": "tokens/s", "ours": round(best, 1), "spread": round(1 - other / best, 3), "n": 2}


# ---------------------------------------------------------------------------------------- results


def compared(timed: tuple[Mapping[str, Sample], int], bounds: Mapping[str, float] | None = None) -> Line:
    """A line of "ours" beside the other runs, or beside times that nothing can go below."""
    samples, rounds = timed
    ours = samples["ours"]
    beside = {name: one.median_us for name, one in samples.items() if name != "ours"} | dict(bounds or {})
    line: dict[str, Any] = {
        "unit": "us",
        "ours": round(ours.median_us, 2),
        "peers": {name: round(time_us, 2) for name, time_us in beside.items()},
        "spread": round(ours.spread_us / ours.median_us, 3),
        "n": rounds,
    }
    if beside:
        line["ratio"] = round(next(iter(beside.values())) / ours.median_us, 4)
    return line
