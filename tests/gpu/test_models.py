"""The checks of whole models, on a fake GPU whose launches Triton's interpreter executes: they pass, and they
find what is planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cuda import in_interpreter
from support.gpu_artifacts import gpu_artifact
from support.graphs import llama_text

from gpu import fake
from gpu.models import Finding, Lengths, beside_reference, in_any_company
from gpu.steps import packed, tails, ways

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and no padding."""
    text = llama_text(vocab=192, hidden=64, heads=4, kv_heads=2, head_dim=16, inter=128, max_len=80, layers=1)
    made = tmp_path_factory.mktemp("gpu")
    gpu_artifact(text, made / "1b", T=32, S=6, R=16)
    gpu_artifact(text, made / "1b-strict", T=32, S=6, R=16, strict=True)
    return made


def found(function: Callable[..., Finding], *arguments: Any) -> Finding:
    finding = in_interpreter(function, *arguments)
    assert isinstance(finding, Finding)
    return finding


# ------------------------------------------------------------------------------------ reference


def test_a_right_model_is_as_close_to_the_reference_as_sums_are(directory: Path) -> None:
    finding = found(fake.check, directory, "1b", beside_reference)
    assert finding.wrong == ()
    assert "19 positions" in finding.detail


@pytest.mark.parametrize("template", ["attention_prefill", "linear"])
def test_a_wrong_kernel_is_found(directory: Path, template: str) -> None:
    (wrong,) = found(fake.check, directory, "1b", beside_reference, template, 1.05).wrong
    assert "of the bound" in wrong


def test_a_kernel_that_writes_nothing_is_found_by_the_poison(directory: Path) -> None:
    (wrong,) = found(fake.check, directory, "1b", beside_reference, "rowwise", 0.0).wrong
    assert "not finite" in wrong


# -------------------------------------------------------------------------------------- company


def test_strict_programs_give_the_same_bytes_in_any_company(directory: Path) -> None:
    finding = found(fake.check, directory, "1b-strict", in_any_company)
    assert finding.wrong == ()
    assert "6 ways" in finding.detail


def test_a_last_bit_that_depends_on_the_company_is_found(directory: Path) -> None:
    finding = found(fake.check, directory, "1b-strict", in_any_company, "attention_merge", 1 + 2.0**-18)
    assert any(wrong.startswith("token by token, by graphs: ") for wrong in finding.wrong)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    kept=st.integers(1, 8),
    most=st.integers(1, 50),
    last=st.integers(1, 6),
)
def test_every_way_takes_all_tokens_once_within_the_capacity(
    lengths: list[int], kept: int, most: int, last: int
) -> None:
    kept = min(kept, len(lengths))
    S = max(kept, 5)
    most = max(most, max(lengths[:kept]), S)
    for way in ways(lengths, kept, most, S, last):
        taken = np.zeros(len(lengths), int)
        for step in way.steps:
            numbers = [number for number, _ in step]
            assert len(set(numbers)) == len(numbers) <= S, way.name
            assert 0 < sum(count for _, count in step) <= most, way.name
            for number, count in step:
                assert count > 0
                taken[number] += count
        assert taken[:kept].tolist() == lengths[:kept], way.name


def test_tails_end_with_single_tokens() -> None:
    assert tails([3, 1], [0, 1], 2, 16) == [[(0, 1)], [(0, 1)], [(0, 1), (1, 1)]]


def test_packed_steps_are_full() -> None:
    assert packed([(0, 3), (1, 4)], 5) == [[(0, 3), (1, 2)], [(1, 2)]]


def test_the_checks_compute_more_than_a_block_and_less_than_a_pool() -> None:
    full = Lengths()
    assert max(full.prompts) > 256
    blocks = sum(-(-length // 16) for length in full.kept) + full.strangers * -(-full.stranger // 16)
    assert blocks < 600
