"""The cost of flash attention over a prompt: BM query rows against KV tiles of BN keys.

Rows are a tile's tokens times the query heads of a KV head, so that grouped heads share the loads of a tile.

    tensor cores   4 BM BN D / rate
    exp            BM BN / 16
    arithmetic     (7 BM BN + BM D + 48 BM) / rate: softmax; rescaled sums; maxima and sums of rows
    L2             4 BN D / rate
    shared memory  4 BN D / 128 for each 16 rows' warp, which reads the tile itself, or for each group of four
                   that multiply together

Where there are more warps than 16 rows each, they share rows: weights then pass through shared memory, and
the row's maxima and sums take two more barriers.

PUBLIC holds the tiles of kernels that were tuned on the device, to compare with: FlashAttention-2 (arXiv
2307.08691; csrc/flash_attn/src/flash_fwd_launch_template.h of Dao-AILab/flash-attention) on A100, and
FlashAttention-3 (arXiv 2407.08608; hopper/tile_size.h, causal; a warp group for each 64 rows, beside one that
loads) on H100. They are written in CUTLASS, which needs fewer registers than Triton and takes any multiple
of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagec.autotune.clocks import (
    EXP_PER_CLOCK,
    SHARED_BYTES_PER_CLOCK,
    UNEVEN,
    Bound,
    Loop,
    loads_wait,
    makespan,
    rates_of,
    residents_of,
)
from pagec.autotune.occupancy import THREADS_PER_WARP, resources
from pagec.autotune.prediction import Point, Prediction, roofline_us
from pagec.autotune.problem import ITEM_BYTES, Prefill
from pagec.compiler.backends.cuda.attention import heads_taken
from pagec.compiler.backends.cuda.knobs import GROUP_ROWS, GROUP_WARPS
from pagec.compiler.backends.cuda.resources import Resources, occupancy
from pagec.compiler.target import CudaTarget

WARP_ROWS: Final = 16
# Registers of a thread are a multiple of this.
REGISTERS_STEP: Final = 8
FLOAT_PER_SCORE: Final = 7
FLOAT_PER_ROW: Final = 48
# By (sm, head size). Both kernels hold the next keys while they use the values: two stages.
PUBLIC: Final[Mapping[tuple[int, int], Point]] = {
    (80, 64): {"BM": 128, "BN": 128, "warps": 4, "stages": 2, "split": 0},
    (80, 128): {"BM": 128, "BN": 64, "warps": 4, "stages": 2, "split": 0},
    (80, 256): {"BM": 128, "BN": 64, "warps": 8, "stages": 2, "split": 0},
    (90, 64): {"BM": 192, "BN": 128, "warps": 12, "stages": 2, "split": 0},
    (90, 128): {"BM": 128, "BN": 128, "warps": 8, "stages": 2, "split": 0},
    (90, 256): {"BM": 128, "BN": 80, "warps": 8, "stages": 2, "split": 0},
}


def by_warp_groups(rows: int, warps: int, target: CudaTarget) -> bool:
    """Whether a product of so many rows takes the matrix instructions of sm_90."""
    return target.sm >= 90 and rows >= GROUP_ROWS and warps >= GROUP_WARPS


def estimate(problem: Prefill, point: Point, target: CudaTarget) -> Resources:
    """Registers and shared memory, fitted to what Triton 3.9 gave for the template."""
    bm, bn, d, threads = point["BM"], point["BN"], problem.head_dim, THREADS_PER_WARP * point["warps"]
    grouped = by_warp_groups(bm, point["warps"], target)
    scores, sums = bm * bn / threads, bm * d / threads
    totals = sums if point["split"] else 0.0  # of all splits, beside this one's
    addresses = bn * d / threads / 2  # of 16 bytes each, of keys and of values, two registers
    values = sums + totals + 1.5 * scores + addresses
    # Without groups queries stay in registers, too.
    registers = values + 40 if grouped else 1.15 * (values + sums / 2) + 60
    queries, tile = bm * d * ITEM_BYTES, 2 * bn * d * ITEM_BYTES
    buffers = point["stages"] if grouped else point["stages"] - 1
    if not grouped and point["warps"] * WARP_ROWS > bm:
        queries += bm * bn * ITEM_BYTES  # weights that warps of the same rows exchange
    return resources(registers, queries + buffers * tile, "HGMMA" if grouped else "HMMA")


def public_tile(problem: Prefill, target: CudaTarget) -> tuple[Point, Resources]:
    """The tile of the kernel that was tuned on such a device, and what it holds: it does not spill, and one
    block fits (FlashAttention-3 gives its loading warps' registers to the others)."""
    point = PUBLIC[target.sm, problem.head_dim]
    held = estimate(problem, point, target)
    most = target.registers_per_sm // (THREADS_PER_WARP * point["warps"])
    registers = min(held.registers, most // REGISTERS_STEP * REGISTERS_STEP)
    return point, replace(held, registers=registers, stack_bytes=0)


def predict(problem: Prefill, point: Point, target: CudaTarget, held: Resources) -> Prediction:
    """The time of all tiles, the longest rows first, on as many slots as there are."""
    loop = loop_of(problem, point, target, held)
    fitting = occupancy(held, point["warps"], target)
    taken, chunks = heads_taken(problem.group, point["BM"])
    tokens = max(1, point["BM"] // taken)
    items = -(-problem.tokens // tokens)
    copies = problem.sequences * problem.kv_heads * chunks
    residents = residents_of(fitting, items * copies, target.sms)
    bound = loop.step(residents)[1]
    rates = rates_of(target)
    moved = 2 * point["BM"] * problem.head_dim * ITEM_BYTES / rates.l2_bytes_per_clock
    around = rates.memory_latency + rates.l2_latency + residents * moved
    clocks_of = loop.clocks_of(around, residents)
    jobs = [
        (clocks_of(-(-min(problem.tokens, tokens * (item + 1)) // point["BN"])), copies)
        for item in range(items)
    ]
    slots = target.sms * residents
    clocks = makespan(jobs, slots)
    if clocks > UNEVEN * sum(job * count for job, count in jobs) / slots:
        bound = "waves"
    us, (least, limit) = clocks / target.clock_mhz, roofline_us(problem, target)
    if least > us:
        us, bound = least, limit
    return Prediction(us, bound, fitting, held, loop.pipes)


def loop_of(problem: Prefill, point: Point, target: CudaTarget, held: Resources) -> Loop:
    """A step: a KV tile."""
    rates, d, (bm, bn) = rates_of(target), problem.head_dim, (point["BM"], point["BN"])
    grouped = held.mma == "HGMMA"
    readers = -(-point["warps"] // GROUP_WARPS) if grouped else min(point["warps"], bm // WARP_ROWS)
    tile = 2 * bn * d * ITEM_BYTES
    rate = target.mma_flops_per_clock if grouped else rates.warp_mma_flops_per_clock
    product, reads = 2 * bm * bn * d / rate, readers * tile / SHARED_BYTES_PER_CLOCK
    sharing = 1 if grouped else max(1, point["warps"] * WARP_ROWS // bm)  # warps to a row
    exchanged = bm * bn * ITEM_BYTES * (1 + sharing) / SHARED_BYTES_PER_CLOCK if sharing > 1 else 0.0
    if grouped:  # operands come from shared memory while the product runs: queries and keys, then values
        queries = bm * d * ITEM_BYTES / SHARED_BYTES_PER_CLOCK
        multiply = max(product, queries + reads / 2) + max(product, reads / 2)
    else:
        multiply = 2 * product
    pipes: dict[Bound, float] = {
        "tensor cores": multiply,
        "exp": bm * bn / EXP_PER_CLOCK,
        "arithmetic": bm * (FLOAT_PER_SCORE * bn + d + FLOAT_PER_ROW) / rates.float_per_clock,
        "shared memory": reads + exchanged,
        "L2": tile / rates.l2_bytes_per_clock,
    }
    wait = loads_wait(rates.memory_latency, point["stages"])
    return Loop(pipes, point["warps"], wait, syncs=3 if sharing > 1 else 1)
