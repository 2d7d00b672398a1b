"""Weights out of a checkpoint's tensors: each stored form, and what is missing, surplus or misshapen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers import WeightSource
from pagec.compiler.importers.checkpoint import F32
from pagec.compiler.spec import parse_spec


class Arrays:
    """A checkpoint in memory."""

    path = Path("memory")

    def __init__(self, arrays: dict[str, F32]) -> None:
        self.arrays = arrays

    def names(self) -> set[str]:
        return set(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def read(self, name: str) -> F32:
        return self.arrays[name]


def numbers(*shape: int) -> F32:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def source(tiny: str, weight: str, use: str = "$new", **arrays: F32) -> WeightSource:
    """The small model with one more weight ("new", used as `use`) and its tensors."""
    text = tiny.replace("graph:", f"  new: {weight}\ngraph:").replace(
        "linear(h, $up)", f"linear(h, $up) * {use}"
    )
    text = text.replace("params:", "params:\n  head_dim: hidden // 2").replace(
        "hidden: 8\n", "hidden: 8\n  one: 1\n"
    )
    text = text.replace("layers: 2", "layers: one").replace("shape: [vocab", "shape: [vocab * head_dim // 4")
    base = {"embed.weight": numbers(32, 8), "0.norm.weight": numbers(8), "0.up.weight": numbers(8, 8)}
    return WeightSource(
        parse_spec(text, "tiny.yaml"), Arrays(base | {k.replace("_", "."): v for k, v in arrays.items()})
    )


def test_rows_of_every_block(tiny: str) -> None:
    """q, k and v in turns, a head of each: [heads, 3, head_dim]."""
    fused = numbers(24, 8)
    weight = "{name: f, shape: [hidden, hidden], rows: [%s], every: 3 * head_dim}"
    found = source(tiny, weight % "4, 8", "linear(h, $new)", f=fused)
    assert np.array_equal(found.get("new"), np.concatenate([fused[4:8], fused[16:20]]))
    with pytest.raises(CheckpointError, match="surplus: rows 8 to 12 of f"):
        found.check()
    source(tiny, weight % "8, 12", "linear(h, $new)", f=fused).check()
    for rows in (23, 12, 36):
        with pytest.raises(CheckpointError, match=r"new needs \[8, 8\] as rows 4 to 8 of every 12"):
            source(tiny, weight % "4, 8", "linear(h, $new)", f=numbers(rows, 8)).get("new")


def test_transposed_and_rows(tiny: str) -> None:
    fused = numbers(8, 24)
    weight = "{name: f, shape: [hidden, hidden], rows: [hidden, 2 * hidden], stored: transposed}"
    found = source(tiny, weight, "linear(h, $new)", f=fused)
    assert np.array_equal(found.get("new"), fused[:, 8:16].T)
    assert found.get("new").flags.c_contiguous
    with pytest.raises(CheckpointError, match="surplus: rows 16 to 24 of f"):
        found.check()
    source(tiny, weight, "linear(h, $new)", f=fused[:, :16]).check()


def test_rotary_interleaved(tiny: str) -> None:
    logical = numbers(2, 2, 2, 8)  # heads, halves, pairs, width
    stored = logical.swapaxes(1, 2).reshape(8, 8)
    weight = "{name: f, shape: [hidden, hidden], stored: rotary_interleaved}"
    found = source(tiny, weight, "linear(h, $new)", f=stored)
    found.check()
    assert np.array_equal(found.get("new"), logical.reshape(8, 8))


def test_plus_one(tiny: str) -> None:
    stored = numbers(8)
    found = source(tiny, "{name: f, shape: [hidden], stored: plus_one}", f=stored)
    assert np.array_equal(found.get("new"), stored - np.float32(1))


def test_the_first_name_that_is_present_wins(tiny: str) -> None:
    weight = "{name: [a, b], shape: [hidden]}"
    assert np.array_equal(source(tiny, weight, b=numbers(8)).get("new"), numbers(8))
    with pytest.raises(CheckpointError, match="b differs from a, the spec takes them for one weight"):
        source(tiny, weight, a=numbers(8), b=numbers(8) + 1).check()


@pytest.mark.parametrize("single", [True, False])
def test_stacks(tiny: str, single: bool) -> None:
    experts = numbers(3, 4, 8)
    use = "(1 if one == 1 else $new)"
    name = "f" if single else "f.{e}"
    weight = f"{{name: '{name}', shape: [hidden, 4], stack: 3, stored: transposed}}"
    arrays = {"f": experts} if single else {f"f_{e}": experts[e] for e in range(3)}
    found = source(tiny, weight, use, **arrays)
    found.check()
    assert np.array_equal(found.get("new"), experts.swapaxes(1, 2))


def test_everything_that_is_wrong_is_listed(tiny: str) -> None:
    found = source(tiny, "{name: [a, b], shape: [hidden]}", extra=numbers(3))
    found.checkpoint.arrays["0.up.weight"] = numbers(8, 9)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError) as caught:
        found.check()
    assert str(caught.value).splitlines() == [
        "memory: the checkpoint does not fit the model:",
        "  missing: a or b for new",
        "  0.up.weight is [8, 9], l0.up needs [8, 8]",
        "  surplus: extra [3]",
        "  fix: say in the weights section, by name and shape, what the model has; null drops an inherited "
        "weight",
    ]
    with pytest.raises(CheckpointError, match=r"0.up.weight is \[8, 9\]"):
        found.get("l0.up")
    with pytest.raises(CheckpointError, match="missing: a or b"):
        found.get("new")


def test_tensors_that_may_be_ignored(tiny: str) -> None:
    text = tiny.replace("graph:", 'ignore: ["*.inv_freq"]\ngraph:').replace("layers: 2", "layers: 1")
    arrays = {"embed.weight": numbers(32, 8), "0.norm.weight": numbers(8), "0.up.weight": numbers(8, 8)}
    WeightSource(parse_spec(text, "t.yaml"), Arrays({**arrays, "l.0.inv_freq": numbers(4)})).check()
