"""Each kernel of a program alone, at several row counts, beside its bound.

All launches of a kernel run one after the other (the layers have weights of their own), and the caches are
emptied before, so that weights, keys and values come from memory as they do in a step. Activations of few
rows stay in the caches: a row-wise kernel may take less time than its bytes would from memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from pagec.compiler.artifact import Artifact
from pagec.compiler.program import HEAD_COUNTS, Kernel, Launch, Program
from pagec.runtime.batch import build_batch
from pagec.runtime.bench.cost import AttentionCost, Chunk, ModelCost, model_cost
from pagec.runtime.bench.limits import Limits, Probes, median_limits, seconds
from pagec.runtime.bench.summary import rounded
from pagec.runtime.engine import Engine
from pagec.runtime.runner import NUM_COUNTS
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

Progress = Callable[[str, int, int], None]

ROW_COUNTS: Final = (1, 2, 4, 16, 64, 256, 1024)
DECODE_CONTEXTS: Final = ((1, 1024), (16, 512), (64, 256))  # sequences, tokens of each
PREFILL_STARTS: Final = (0, 512)
# The machine's limits are measured again after so many cases: they change with what else runs.
CASES_PER_PROBE: Final = 8


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel at a number of rows; times are of one launch. `bound`: what sets the least time."""

    kernel: str
    template: str
    launches: int
    rows: int
    case: str
    us: float
    bound_us: float
    bound: str

    @property
    def share(self) -> float:
        """The least time over the time it took."""
        return self.bound_us / self.us if self.us else 0.0

    def to_json(self) -> dict[str, Any]:
        row = {k: rounded(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**row, "share": rounded(self.share)}


class Bounds:
    """What a launch must at least compute, read and write."""

    def __init__(self, artifact: Artifact) -> None:
        self.cost: ModelCost = model_cost(artifact)
        self._kernels = {kernel.key: kernel for kernel in artifact.program.kernels}

    def kernel(self, launch: Launch, rows: int) -> Kernel:
        """The kernel that a launch takes for so many rows."""
        return self._kernels[launch.key_for(rows)]

    def of(self, launch: Launch, rows: int, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """(bytes, FLOPs) of a launch. Only attention depends on the chunks."""
        kernel = self.kernel(launch, rows)
        layer = self._attention(launch)
        if launch.rows in ("tiles", "merges"):
            rows = sum(count for _, count in chunks)
        if layer is None:
            return kernel.bytes_fixed + kernel.bytes_per_row * rows, kernel.flops_per_row * rows
        nbytes = sum(layer.kv_bytes(*chunk, self.cost.kv_item_bytes) for chunk in chunks)
        nbytes += kernel.bytes_per_row * rows
        return nbytes, sum(layer.flops(*chunk) for chunk in chunks)

    def reads_memory(self, launch: Launch, rows: int) -> bool:
        """Whether it reads what no cache holds in a step: weights, or keys and values."""
        return launch.rows in ("tiles", "merges") or self.kernel(launch, rows).bytes_fixed > 0

    def _attention(self, launch: Launch) -> AttentionCost | None:
        """Attention takes tiles and reads the pool; what merges its parts takes tiles alone."""
        layers = [int(arg.removeprefix("kv:")) for arg in launch.args if arg.startswith("kv:")]
        return self.cost.layers[layers[0]] if launch.rows == "tiles" and layers else None


def bound(nbytes: float, flops: float, limits: Limits) -> tuple[float, str]:
    """The least time in microseconds, and what sets it."""
    memory, compute = 1e6 * nbytes / limits.read_bytes_per_s, 1e6 * flops / limits.flops_per_s
    if not memory and not compute:
        return 0.0, ""
    return max(memory, compute), "memory" if memory >= compute else "compute"


@dataclass(frozen=True, slots=True)
class _Case:
    """Launches that take the same kernels, the rows to try, and the step that is in memory then."""

    launches: list[Launch]
    rows: int
    chunks: list[Chunk]
    name: str


def time_kernels(
    artifact: Artifact, engine: Engine, repeat: int, progress: Progress
) -> tuple[list[KernelTime], Limits]:
    """Every kernel at every row count, and the machine's limits beside them."""
    probes, bounds = Probes(engine.device), Bounds(artifact)
    engine.device.upload(engine.runner.memory.kv, np.zeros(engine.runner.memory.kv.nbytes, np.uint8))
    cases = list(_cases(engine.program, engine.runner.num_blocks))
    measured, timed = [], []
    for done, case in enumerate(cases):
        progress("time kernels", done, len(cases))
        if done % CASES_PER_PROBE == 0:
            measured.append(probes.measure(passes=1))
        timed.append((case, _time(engine, case, bounds, probes, repeat)))
    progress("time kernels", len(cases), len(cases))
    limits = median_limits(measured)
    return [_row(case, us, bounds, limits) for case, us in timed], limits


def _row(case: _Case, us: float, bounds: Bounds, limits: Limits) -> KernelTime:
    launch = case.launches[0]
    kernel = bounds.kernel(launch, case.rows)
    least, what = bound(*bounds.of(launch, case.rows, case.chunks), limits)
    count = len(case.launches)
    return KernelTime(kernel.key, kernel.template, count, case.rows, case.name, us, least, what)


def _time(engine: Engine, case: _Case, bounds: Bounds, probes: Probes, repeat: int) -> float:
    """Microseconds of one launch: the median over passes of all launches in one region."""
    cold = bounds.reads_memory(case.launches[0], case.rows)
    runner = engine.runner
    runner.upload(build_batch(make_entries(engine.program, case.chunks), engine.program))
    runner.upload_logit_rows(np.arange(engine.program.capacity.R, dtype=np.int32))
    calls = runner.prepare(launch.name for launch in case.launches)
    times = []
    for _ in range(repeat + 1):
        if cold:
            probes.empty_caches()
        times.append(seconds(calls, *[case.rows] * NUM_COUNTS))
    return 1e6 * statistics.median(times[1:]) / len(case.launches)


def _cases(program: Program, num_blocks: int) -> Iterator[_Case]:
    T, R = program.capacity.T, program.capacity.R
    full = _fitting(program, num_blocks, [(0, T)])
    for launches in _groups(program):
        match launches[0].rows:
            case "tiles" | "merges":
                yield from _attention_cases(program, num_blocks, launches)
            case count:
                most = min(R, T) if count in HEAD_COUNTS else min(T, sum(n for _, n in full))
                for rows in sorted({*(n for n in ROW_COUNTS if n < most), most}):
                    if launches[0].key_for(rows):
                        yield _Case(launches, rows, full, "")


def _groups(program: Program) -> list[list[Launch]]:
    """Launches with the same kernels, body and head apart: the head may have as few rows as one."""
    groups: dict[object, list[Launch]] = {}
    for launch in (*program.body, *program.head):
        groups.setdefault((launch.rows, launch.variants), []).append(launch)
    return list(groups.values())


def _attention_cases(program: Program, num_blocks: int, launches: list[Launch]) -> Iterator[_Case]:
    wanted = [[(context - 1, 1)] * count for count, context in DECODE_CONTEXTS]
    wanted += [[(start, program.capacity.T)] for start in PREFILL_STARTS]
    seen = []
    for step in wanted:
        chunks = _fitting(program, num_blocks, step)
        if not chunks or chunks in seen:
            continue
        seen.append(chunks)
        rows = sum(-(-count // program.query_tile) for _, count in chunks)
        start, count = chunks[0]
        yield _Case(launches, rows, chunks, f"{len(chunks)} x {count} at {start}")


def _fitting(program: Program, num_blocks: int, step: Sequence[Chunk]) -> list[Chunk]:
    """As much of a step as capacity, length and pool allow."""
    room, blocks = program.capacity.T, (num_blocks - 1) // max(len(program.kv.groups), 1)
    chunks = []
    for start, count in step[: program.capacity.S]:
        start = min(start, program.max_len - 1)
        count = min(count, room, program.max_len - start)
        blocks -= -(-(start + count) // program.kv.block_size)
        if count < 1 or blocks < 0:
            break
        room -= count
        chunks.append((start, count))
    return chunks


def make_entries(program: Program, chunks: Sequence[Chunk]) -> list[Entry]:
    """Entries of sequences whose earlier tokens are taken as computed; blocks are given out in order."""
    rng, block = np.random.default_rng(0), 1
    entries: list[Entry] = []
    for start, count in chunks:
        tokens = rng.integers(0, program.vocab, start + count).tolist()
        request = Request(len(entries), tokens, 1, len(program.kv.groups))
        sequence = request.sequences[0]
        for table in sequence.block_tables:
            size = -(-(start + count) // program.kv.block_size)
            table.extend(range(block, block + size))
            block += size
        entries.append(Entry(request, sequence, start, count, 1))
    return entries
