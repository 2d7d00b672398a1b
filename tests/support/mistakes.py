"""Mistakes in a spec's text, and what is said about them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagec.compiler.errors import Problem, SpecError
from pagec.compiler.spec import build_graph, parse_spec


@dataclass(frozen=True)
class Mistake:
    """`old` is replaced by `new` in a spec; the problem stands where `marked` begins in `new`."""

    old: str
    new: str
    marked: str
    message: str
    remedy: str = ""


def problems_of(text: str, file: str = "tiny.yaml") -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        build_graph(parse_spec(text, file))
    return caught.value.problems


def check(mistake: Mistake, base: str) -> None:
    """The mistake is reported at its place, with its remedy."""
    assert mistake.old in base
    text = base.replace(mistake.old, mistake.new, 1)
    found = [p for p in problems_of(text) if mistake.message in p.message]
    assert found, problems_of(text)
    assert found[0].file == "tiny.yaml"
    assert mistake.remedy in found[0].remedy
    if mistake.marked:
        if mistake.marked in mistake.new:
            offset = text.index(mistake.new) + mistake.new.index(mistake.marked)
        else:
            offset = text.index(mistake.marked)
        before = text[:offset]
        assert (found[0].line, found[0].column) == (before.count("\n") + 1, offset - before.rfind("\n"))
