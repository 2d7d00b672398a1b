"""The cost of a linear: tiles of BM x BN, BK of K a step, bands of `group_m` tiles of rows, K in `splits`.

    tensor cores    2 BM BN BK / rate
    shared memory   what the warps read of both tiles, and their filling
    L2              2 (BM + BN) BK / rate
    DRAM bandwidth  weights once; inputs and weights again for each wave of tiles, unless the L2 holds them

A step takes BK of K, a wave as many tiles as the GPU holds at a time.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

from pagec.autotune.clocks import (
    LAUNCH_US,
    SHARED_BYTES_PER_CLOCK,
    UNEVEN,
    Bound,
    Loop,
    loads_wait,
    memory_bytes_per_clock,
    rates_of,
    residents_of,
)
from pagec.autotune.decode import ADDRESS, LOAD_BYTES, PARTIAL_BYTES
from pagec.autotune.occupancy import THREADS_PER_WARP, resources
from pagec.autotune.prediction import Point, Prediction
from pagec.autotune.prefill import by_warp_groups
from pagec.autotune.problem import ITEM_BYTES, Linear
from pagec.compiler.backends.cuda.knobs import GROUP_WARPS
from pagec.compiler.backends.cuda.resources import SCHEDULERS, Resources, occupancy
from pagec.compiler.target import CudaTarget

# Making a descriptor for the tensor memory accelerator, in clocks (an estimate).
DESCRIPTOR: Final = 600


def estimate(problem: Linear, point: Point, target: CudaTarget) -> Resources:  # noqa: ARG001
    """Registers and shared memory, fitted to what Triton 3.9 gave for the template."""
    bm, bn, bk = point["BM"], point["BN"], point["BK"]
    threads = THREADS_PER_WARP * point["warps"]
    grouped = by_warp_groups(bm, point["warps"], target)
    loaded = bm + (0 if point["tma"] else bn)
    sums, addresses = bm * bn / threads, loaded * bk / threads / 4
    registers = sums + addresses + 20 if grouped else 1.5 * sums + addresses + 36
    buffers = point["stages"] if grouped else max(1, point["stages"] - 1)
    return resources(registers, buffers * (bm + bn) * bk * ITEM_BYTES, "HGMMA" if grouped else "HMMA")


def predict(problem: Linear, point: Point, target: CudaTarget, held: Resources) -> Prediction:
    """The time of all tiles, and of putting splits together."""
    rates, fitting = rates_of(target), occupancy(held, point["warps"], target)
    tiles = -(-problem.M // point["BM"]) * -(-problem.N // point["BN"])
    blocks = tiles * point["splits"]
    steps = -(-problem.K // (point["BK"] * point["splits"]))
    residents = residents_of(fitting, blocks, target.sms)
    traffic = traffic_bytes(problem, point, target, target.sms * residents)
    share = traffic / (blocks * steps) * min(blocks, target.sms)
    loop = loop_of(point, target, held, share / memory_bytes_per_clock(target))
    bound = loop.step(residents)[1]
    results = residents * point["BM"] * point["BN"] * ITEM_BYTES / rates.l2_bytes_per_clock
    around = rates.l2_latency + rates.memory_latency + results + DESCRIPTOR * point["tma"]
    waves, slots = -(-blocks // (target.sms * residents)), target.sms * residents
    clocks = waves * loop.clocks_of(around, residents)(steps)
    if waves * slots > UNEVEN * blocks:
        bound = "waves"
    memory = traffic / memory_bytes_per_clock(target)
    if memory > clocks:
        clocks, bound = memory, "DRAM bandwidth"
    us = clocks / target.clock_mhz + _sum_us(problem, point, target)
    return Prediction(us, bound, fitting, held, loop.pipes)


def traffic_bytes(problem: Linear, point: Point, target: CudaTarget, slots: int) -> float:
    """Bytes from and to memory: a wave of tiles reads its rows and columns once."""
    x, w = problem.M * problem.K * ITEM_BYTES, problem.N * problem.K * ITEM_BYTES
    if x + w > target.l2_bytes:
        rows = -(-problem.M // point["BM"])
        columns = -(-problem.N // point["BN"])
        height = min(point["group_m"], rows)
        width = min(-(-slots // height), columns)
        waves = rows * columns / (height * width)
        wave = (height * point["BM"] + width * point["BN"]) * problem.K * ITEM_BYTES
        return max(x + w, waves * wave) + problem.M * problem.N * ITEM_BYTES
    return problem.nbytes


def _sum_us(problem: Linear, point: Point, target: CudaTarget) -> float:
    """Writing, reading and adding what the splits leave, through the L2."""
    if point["splits"] == 1:
        return 0.0
    partial = 2 * problem.M * problem.N * point["splits"] * PARTIAL_BYTES
    return LAUNCH_US + partial / (rates_of(target).l2_bytes_per_clock * target.sms * target.clock_mhz)


def loop_of(point: Point, target: CudaTarget, held: Resources, memory: float) -> Loop:
    """A step of BK; `memory`: clocks that its share of the memory's bandwidth takes."""
    rates, bm, bn, bk = rates_of(target), point["BM"], point["BN"], point["BK"]
    grouped = held.mma == "HGMMA"
    tile = (bm + bn) * bk * ITEM_BYTES
    product = 2 * bm * bn * bk
    if grouped:  # each group of warps reads its rows and all columns while it multiplies
        reads = (bm + bn * -(-point["warps"] // GROUP_WARPS)) * bk * ITEM_BYTES
        multiply = max(product / target.mma_flops_per_clock, reads / SHARED_BYTES_PER_CLOCK)
    else:
        down, across = _warps(bm, bn, point["warps"])
        reads = (bm * across + bn * down) * bk * ITEM_BYTES
        multiply = product / rates.warp_mma_flops_per_clock
    by_pointer = (bm + (0 if point["tma"] else bn)) * bk * ITEM_BYTES
    pipes: dict[Bound, float] = {
        "tensor cores": multiply,
        "issue": by_pointer / LOAD_BYTES * (1 + ADDRESS[0]) / SCHEDULERS,
        "shared memory": (reads + tile) / SHARED_BYTES_PER_CLOCK,
        "L2": tile / rates.l2_bytes_per_clock,
        "DRAM bandwidth": memory,
    }
    return Loop(pipes, point["warps"], loads_wait(rates.memory_latency, point["stages"]))


def _warps(bm: int, bn: int, warps: int) -> tuple[int, int]:
    """How warps share a tile: (down, across), as square as the 16 rows of an instruction allow."""
    down = min(max(1, bm // 16), max(1, isqrt(warps * bm // bn)), warps)
    down = 1 << (down.bit_length() - 1)
    return down, warps // down
