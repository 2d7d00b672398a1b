"""The cost of paged decoding: items of `split` keys walked by a persistent grid, then merged.

A sequence and KV head is cut into splits of fixed length; as many programs as the GPU holds take turns.
The query heads of a KV head are the rows of one matrix of at least 16. Nearly all of the time is reading the
cache, so what counts is how many bytes are under way (tiles, stages, programs per multiprocessor), how evenly
items are dealt, and what cutting costs: latencies at each item's start and the merge.

A tile of more keys than a block has gathers rows of several pages: more address arithmetic, more registers.
Every run of keys that lies together opens a row of memory anew. Larger blocks leave more slots of a
sequence's last block empty, which the choice of a block size weighs as lost room (`empty_share`).
"""

from __future__ import annotations

from typing import Final

from pagec.autotune.clocks import (
    EXP_PER_CLOCK,
    LAUNCH_US,
    SHARED_BYTES_PER_CLOCK,
    UNEVEN,
    Bound,
    Loop,
    loads_wait,
    makespan,
    memory_bytes_per_clock,
    rates_of,
    residents_of,
)
from pagec.autotune.occupancy import THREADS_PER_WARP, resources
from pagec.autotune.prediction import Point, Prediction
from pagec.autotune.prefill import FLOAT_PER_ROW, FLOAT_PER_SCORE
from pagec.autotune.problem import ITEM_BYTES, Decode
from pagec.compiler.backends.cuda.attention import MIN_ROWS, heads_taken
from pagec.compiler.backends.cuda.resources import SCHEDULERS, Resources, occupancy
from pagec.compiler.target import CudaTarget

# Bytes that a warp's load instruction moves, and instructions for its address: one page, or one for each row.
LOAD_BYTES: Final = 512
ADDRESS: Final = (2, 6)
# What reading a run of keys costs beside its bytes, in bytes (an estimate).
RUN_BYTES: Final = 64
MAX_ROWS: Final = 64
PARTIAL_BYTES: Final = 4
# Loads that wait for each other at an item's start: the item, its table, its page.
CHAIN: Final = 3


def rows_of(group: int) -> int:
    """Rows of the matrix that a group of query heads makes."""
    return max(MIN_ROWS, 1 << (min(group, MAX_ROWS) - 1).bit_length())


def estimate(problem: Decode, point: Point, target: CudaTarget) -> Resources:  # noqa: ARG001
    """Registers and shared memory, fitted to what Triton 3.9 gave for the template (both architectures)."""
    bn, d, threads = point["BN"], problem.head_dim, THREADS_PER_WARP * point["warps"]
    rows = rows_of(problem.group)
    scores, sums = rows * bn / threads, rows * d / threads
    addresses = min(32.0, bn * d / threads / 2) + (16 if bn > point["block_size"] else 0)
    tile = 2 * bn * d * ITEM_BYTES
    shared = rows * (d + bn) * ITEM_BYTES + max(1, point["stages"] - 1) * tile
    return resources(48 + sums + 1.5 * scores + addresses, shared, "HMMA")


def empty_share(problem: Decode, point: Point) -> float:
    """Slots that stay empty for each one filled: half of the last block."""
    return point["block_size"] / 2 / problem.context


def predict(problem: Decode, point: Point, target: CudaTarget, held: Resources) -> Prediction:
    """The time of decoding and merging."""
    rates, fitting = rates_of(target), occupancy(held, point["warps"], target)
    _, chunks = heads_taken(problem.group, rows_of(problem.group))
    streams = problem.sequences * problem.kv_heads * chunks
    full, rest = divmod(problem.context, point["split"])
    items = streams * (full + bool(rest))
    residents = residents_of(fitting, items, target.sms)
    loop = loop_of(problem, point, target, min(items, target.sms))
    bound = loop.step(residents)[1]
    around = CHAIN * rates.l2_latency + rates.memory_latency
    clocks_of = loop.clocks_of(around, residents)
    jobs = [
        (clocks_of(-(-keys // point["BN"])), streams * count)
        for keys, count in ((point["split"], full), (rest, 1))
        if keys and count
    ]
    slots = target.sms * residents
    clocks = makespan(jobs, slots)
    if clocks > UNEVEN * sum(job * count for job, count in jobs) / slots:
        bound = "waves"
    partial = problem.sequences * problem.heads * (full + bool(rest)) * (problem.head_dim + 2) * PARTIAL_BYTES
    memory = (problem.nbytes * _run_cost(problem, point) + partial) / memory_bytes_per_clock(target)
    if memory > clocks:
        clocks, bound = memory, "DRAM bandwidth"
    merging = (full + bool(rest)) * rates.l2_latency + partial / (rates.l2_bytes_per_clock * target.sms)
    us = (clocks + merging) / target.clock_mhz + LAUNCH_US
    return Prediction(us, bound, fitting, held, loop.pipes)


def _run_cost(problem: Decode, point: Point) -> float:
    """What reading runs of a block's keys costs, relative to their bytes."""
    return 1 + RUN_BYTES / (point["block_size"] * problem.head_dim * ITEM_BYTES)


def loop_of(problem: Decode, point: Point, target: CudaTarget, active: int) -> Loop:
    """A step: a tile of keys and values, while `active` multiprocessors share the memory's bandwidth."""
    rates, d, bn, rows = rates_of(target), problem.head_dim, point["BN"], rows_of(problem.group)
    tile = 2 * bn * d * ITEM_BYTES
    exchanged = rows * bn * ITEM_BYTES * (1 + point["warps"])
    loads = tile / LOAD_BYTES * (1 + ADDRESS[bn > point["block_size"]])
    pipes: dict[Bound, float] = {
        "tensor cores": 4 * rows * bn * d / rates.warp_mma_flops_per_clock,
        "exp": rows * bn / EXP_PER_CLOCK,
        "arithmetic": rows * (FLOAT_PER_SCORE * bn + d + FLOAT_PER_ROW) / rates.float_per_clock,
        "issue": loads / SCHEDULERS,
        "shared memory": (2 * tile + exchanged) / SHARED_BYTES_PER_CLOCK,
        "L2": tile / rates.l2_bytes_per_clock,
        "DRAM bandwidth": tile * _run_cost(problem, point) * active / memory_bytes_per_clock(target),
    }
    return Loop(pipes, point["warps"], loads_wait(rates.memory_latency, point["stages"]), syncs=3)
