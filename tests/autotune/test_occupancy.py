"""Occupancy and its limits against cases worked out by hand by the rules of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest

from pagec.autotune.occupancy import limit_of, resources, why_not
from pagec.compiler.backends.cuda.resources import Resources, occupancy
from pagec.compiler.backends.targets import load_cuda_target


# A warp's registers come in granules of 256 from 16,384 for each of four schedulers; a block takes 1 KB of
# shared memory for itself, from 164 KB (A100) or 228 KB (H100); 64 warps.
@pytest.mark.parametrize(
    ("target", "registers", "shared_kb", "warps", "blocks", "limit"),
    [
        ("a100", 32, 0, 4, 16, "warps"),  # 64 / 4
        ("a100", 64, 0, 4, 8, "registers"),  # 2,048 a warp: 8 warps a scheduler
        ("a100", 33, 0, 4, 12, "registers"),  # 1,056 become 1,280: 12 warps a scheduler
        ("a100", 128, 48, 8, 2, "registers"),  # 4,096 a warp: 16 warps
        ("a100", 128, 96, 8, 1, "shared memory"),  # 164 / 97
        ("a100", 255, 64, 4, 2, "registers"),  # 8,192 a warp: 8 warps; 164 / 65 would hold 2, too
        ("a100", 168, 0, 4, 3, "registers"),  # 5,376 a warp: 3 warps a scheduler
        ("h100", 168, 0, 12, 1, "registers"),  # 12 warps, exactly one block
        ("h100", 96, 100, 4, 2, "shared memory"),  # 228 / 101
        ("h100", 40, 227, 4, 1, "shared memory"),
        ("h100", 32, 113, 32, 2, "shared memory"),  # 228 / 114; 64 warps are two blocks, too
    ],
)
def test_occupancy(target: str, registers: int, shared_kb: int, warps: int, blocks: int, limit: str) -> None:
    gpu, held = load_cuda_target(target), Resources(registers, 0, shared_kb * 1024, "HMMA")
    assert occupancy(held, warps, gpu) == blocks
    if (target, registers, warps) != ("h100", 32, 32):
        assert limit_of(held, warps, gpu) == limit


def test_what_does_not_fit_is_dropped_with_a_reason() -> None:
    a100, h100 = load_cuda_target("a100"), load_cuda_target("h100")
    large = Resources(64, 0, 200 * 1024, "HMMA")
    assert why_not(large, 4, a100) == "204,800 bytes of shared memory, a100 has 166,912"
    assert why_not(large, 4, h100) == ""
    assert why_not(Resources(255, 12, 0, "HMMA"), 4, h100) == "spills 12 bytes"
    assert why_not(Resources(255, 0, 0, "HMMA"), 16, h100) == "255 registers in 16 warps, more than h100 has"


def test_an_estimate_beyond_the_registers_spills() -> None:
    assert resources(255.4, 0, "HMMA") == Resources(255, 0, 0, "HMMA")
    assert resources(260, 0, "HMMA") == Resources(255, 20, 0, "HMMA")
