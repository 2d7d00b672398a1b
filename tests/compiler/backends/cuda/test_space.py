"""Tuning spaces: what the files hold, and that what is dropped could not have run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from pagec import templates
from pagec.compiler.backends.cuda.attention import AttentionShape, DecodeKnobs, PrefillKnobs, prefill
from pagec.compiler.backends.cuda.build import compile_kernel
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape
from pagec.compiler.backends.cuda.space import (
    TEMPLATES,
    holds_decode,
    holds_linear,
    holds_prefill,
    numeric,
    points,
)
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.errors import CompileError

A100, H100 = load_cuda_target("a100"), load_cuda_target("h100")
LLAMA = AttentionShape(32, 8, 128, "bf16", "bf16", 128**-0.5, 64, 8192)


@pytest.mark.parametrize("kind", TEMPLATES, ids=TEMPLATES.get)
def test_spaces_name_all_knobs_and_hold_the_defaults(kind: type) -> None:
    every = list(points(kind))
    assert len(every) == len(set(every))
    assert numeric(kind) <= {field.name for field in fields(kind)}
    assert kind() in every


def test_every_space_belongs_to_a_template() -> None:
    directory = Path(templates.__file__).parent / "cuda"
    assert {path.stem for path in directory.glob("*.yaml")} == set(TEMPLATES.values())
    assert all((directory / f"{name}.py.jinja").is_file() for name in TEMPLATES.values())


def test_the_known_good_tiles_are_legal() -> None:
    """FlashAttention-2's and -3's tiles, and a plain decode."""
    assert holds_prefill(LLAMA, PrefillKnobs(128, 64, 8, 2), A100)
    assert holds_prefill(LLAMA, PrefillKnobs(128, 128, 8, 2), H100)
    assert holds_decode(LLAMA, DecodeKnobs(64, 512, 4, 3, 2), A100)
    assert holds_linear(LinearShape(4096, 4096, "bf16"), LinearKnobs(128, 256, 64, 8, 3), H100)


@pytest.mark.slow
def test_what_is_dropped_does_not_compile_clean(tmp_path: Path) -> None:
    knobs = PrefillKnobs(128, 128, 4, 4)
    assert not holds_prefill(LLAMA, knobs, A100)
    with pytest.raises(CompileError):
        compile_kernel(prefill(LLAMA, knobs).write(tmp_path), A100)


def test_linear_points_respect_the_matrix() -> None:
    shape = LinearShape(960, 576, "bf16")
    legal = [knobs for knobs in points(LinearKnobs) if holds_linear(shape, knobs, A100)]
    assert legal
    assert {knobs.BK for knobs in legal} == {32, 64}
    assert not any(knobs.tma for knobs in legal)
    assert any(knobs.tma for knobs in points(LinearKnobs) if holds_linear(shape, knobs, H100))
