"""Norms that a linear does itself: its results, and for which numbers of rows that is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.graphs import llama_graph
from support.interpret import interpret

from pagec.compiler.backends.cuda.fuse_norm import find_norms, most_rows
from pagec.compiler.backends.cuda.knobs import Choice, Chooser
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape, Prologue, linear, plain
from pagec.compiler.backends.cuda.lower import Lowering, Settings
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.dims import Capacity, row_stride
from pagec.compiler.ir import Graph
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import kv_layout

H100 = load_cuda_target("h100")
EPS = 1e-5


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("width", "offset"), [(512, 0.0), (200, 1.0)])
def test_rows_are_normed_and_rounded_before_the_product(width: int, offset: float, splits: int) -> None:
    """To float16, as a kernel apart would; the padding of rows and weights is zero."""
    rng, k, rows, n = np.random.default_rng(0), row_stride((width,)), 5, 64
    x, w, norm = (np.zeros(size, np.float32) for size in ((rows, k), (n, k), k))
    x[:, :width], norm[:width] = rng.standard_normal((rows, width)), rng.standard_normal(width)
    w[:, :width] = rng.integers(-8, 9, (n, width))  # products of float16 and these are exact
    shape = LinearShape(n, k, "f16")
    knobs = LinearKnobs(BM=16, BN=32, BK=32, group_m=1, splits=splits)
    prologue = Prologue("x", "f32", "norm", width, EPS, offset)
    arrays: dict[str, Any] = {"x": x, "w": w.astype(np.float16), "norm_weight": norm}
    arrays |= {"partial": np.full((splits, rows, n), np.nan, np.float32)}
    arrays["out0"] = np.full((rows, n), np.nan, np.float32)
    for kernel in linear(shape, plain(shape, "f32"), knobs, prologue):
        interpret(kernel, {name: arrays[name] for name, _ in kernel.arrays}, {"T": rows})
    exact = x.astype(np.float64)
    scale = 1 / np.sqrt((exact**2).sum(1, keepdims=True) / width + EPS)
    normed = exact * scale * (norm.astype(np.float64) + offset)
    expected = normed.astype(np.float16).astype(np.float64) @ w.T
    # An element that a last bit of float32 moves over a rounding boundary of float16 is off by 2^-11 of it.
    moved = np.abs(normed).max() * 2.0**-10 * 8
    assert np.abs(arrays["out0"] - expected).max() <= moved
    sums = (width + 2) * 2.0**-24 * (np.abs(normed) @ np.abs(w).T)
    assert (np.abs(arrays["out0"] - expected) <= sums).mean() > 0.9


def graph() -> Graph:
    return run_passes(llama_graph(layers=2), Numbers("bf16", "bf16", "bf16"))


def lowering(strict: bool, refused: frozenset[Choice] = frozenset()) -> Lowering:
    fused = graph()
    kv = kv_layout(fused, "bf16", 16, "rows")
    settings = Settings(Capacity(256, 4, 4), 64, kv, Chooser(H100, {}, strict=strict, refused=refused))
    return Lowering(fused, llama_graph(layers=2), settings)


def test_norms_that_one_linear_reads_are_found() -> None:
    """Not the first: what it norms is rounded in the same kernel, and kept."""
    norms = {norm.node.outputs[0] for norm in find_norms(graph()).values()}
    assert norms == {"l0.h.1.bf16", "l1.h.bf16", "l1.h.1.bf16", "logits.rmsnorm.bf16"}


def test_few_rows_leave_the_norm_to_the_linear_and_many_do_not() -> None:
    found = lowering(strict=False)
    name, norm = next(iter(found.norms.items()))
    node = found.graph.producers()[name]
    few = found.few[norm.node.outputs[0]]
    assert few in found.chooser.limits
    for rows, launches in ((few, 0), (few + 1, 1)):
        assert len(found.lower(norm.node, rows)) == launches
        (args,) = [call.args for call in found.lower(node, rows)[:1]]
        assert (f"value:{norm.prologue.source}" in args) == (launches == 0)
    assert norm.prologue.source in found.reads(node)


def test_a_norm_whose_kernel_is_refused_is_a_launch_again() -> None:
    """The choice stands behind the kernel, as a tuned one does."""
    found = lowering(strict=False)
    name, norm = next(iter(found.norms.items()))
    choice = found.lower(found.graph.producers()[name], 1)[0].choice
    assert choice is not None
    again = lowering(strict=False, refused=frozenset({choice}))
    assert again.few[norm.node.outputs[0]] == 0
    assert len(again.lower(norm.node, 1)) == 1


def test_strict_programs_never_do() -> None:
    found = lowering(strict=True)
    assert not found.norms
    works = [node for node in found.graph.nodes if node.op == "fused.rowwise"]
    assert all(found.lower(node, 1) for node in works)


def test_the_more_there_is_to_read_again_the_fewer_rows() -> None:
    """Rows of twice the length, or more programs that share a multiprocessor, allow no more rows."""
    fused = graph()
    norm = next(iter(find_norms(fused).values()))
    most = [
        most_rows(norm, fused, LinearShape(n, 64, "bf16"), [LinearKnobs(16, 64, 64)] * 5, H100)
        for n in (1 << 10, 1 << 17, 1 << 20, 1 << 24)
    ]
    assert most == sorted(most, reverse=True)
    assert most[0] == 16
    assert most[-1] == 0
