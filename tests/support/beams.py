"""Beam search by its definition: the whole vocabulary, sums from the beginning, lists and nothing clever.

A model is a function: the tokens generated so far -> logits float32 [vocab]. A text is a list of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from pagec.runtime.sampling.beam import BeamSearchParams
from support.sampling import log_probability

Model = Callable[[list[int]], Any]
Text = list[int]


def total(model: Model, text: Text) -> float:
    """The sum of a text's log probabilities."""
    found = 0.0
    for end, token in enumerate(text):
        found += log_probability(model(text[:end]), token)
    return found


def score(model: Model, text: Text, penalty: float) -> float:
    return float(total(model, text) / len(text) ** penalty)


def continuations(model: Model, beams: list[Text]) -> list[Text]:
    """All texts that are one token longer, the likeliest first; then by beam, then by token."""
    found = [
        (-total(model, [*beam, token]), rank, token)
        for rank, beam in enumerate(beams)
        for token in range(len(model(beam)))
    ]
    return [[*beams[rank], token] for _, rank, token in sorted(found)]


def transformers_search(
    model: Model, params: BeamSearchParams, max_tokens: int, ends: Collection[int]
) -> list[Text]:
    """The rules of transformers; the best text comes first."""
    width, penalty, rule = params.beam_width, params.length_penalty, params.early_stopping
    beams: list[Text] = [[]]
    finished: list[Text] = []
    for length in range(1, max_tokens + 1):
        texts = continuations(model, beams)
        finished += [text for text in texts[:width] if text[-1] in ends or length == max_tokens]
        finished = sorted(finished, key=lambda text: -score(model, text, penalty))[:width]
        beams = [text for text in texts if text[-1] not in ends][:width]
        if not beams:
            break
        if len(finished) == width:
            if rule is True or width == 1:
                break
            best_length = max_tokens if rule == "never" and penalty > 0 else length
            if not total(model, beams[0]) / best_length**penalty > score(model, finished[-1], penalty):
                break
    return finished


def search_until_all_have_ended(
    model: Model, width: int, penalty: float, max_tokens: int, ends: Collection[int]
) -> list[Text]:
    """Keeps the best `width` of ended texts and continuations of the others until all have ended."""
    kept: list[Text] = [[]]
    for _ in range(max_tokens):
        ended = [text for text in kept if text and text[-1] in ends]
        going = [text for text in kept if text not in ended]
        if not going:
            break
        pool = ended + continuations(model, going)
        kept = sorted(pool, key=lambda text: -score(model, text, penalty))[:width]
    return kept
