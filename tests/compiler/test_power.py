"""Powers in float32, by the bit as torch has them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagec.compiler.ops.power import BLOCK, by_pairs, power

# Whole blocks of torch's on any x86: 16 elements with AVX2, 32 with AVX512.
WHOLE = 64
BASES = st.floats(1e-20, 1e30) | st.sampled_from([1.0, 2.0, 10000.0, 500000.0, 1e6])


@given(BASES, st.integers(0, 2**32 - 1))
def test_by_pairs_it_is_torchs_to_the_bit(base: float, seed: int) -> None:
    exponents = np.random.default_rng(seed).uniform(-1, 1, WHOLE).astype(np.float32)
    expected = torch.pow(base, torch.from_numpy(exponents)).numpy()
    assert by_pairs(base, exponents).tobytes() == expected.tobytes()


@given(BASES, st.integers(1, WHOLE))
def test_what_fills_no_block_is_rounded_once(base: float, dims: int) -> None:
    exponents = np.arange(dims, dtype=np.float32) / np.float32(dims)
    found, whole = power(base, exponents), dims // BLOCK * BLOCK
    assert found.dtype == np.float32
    assert found[:whole].tobytes() == by_pairs(base, exponents[:whole]).tobytes()
    expected = np.float64(np.float32(base)) ** exponents[whole:].astype(np.float64)
    # Half a unit in the last place of float32.
    assert (np.abs(found[whole:] - expected) <= 2.0**-24 * expected).all()
