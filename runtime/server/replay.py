"""Runs a recorded request again, alone, and compares every token and every bit of its log probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import MANIFEST
from pagec.compiler.errors import ArtifactError, PagecError
from pagec.runtime.engine import Engine
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.grammar import GrammarCompiler
from pagec.runtime.sequence import Request
from pagec.runtime.server.params import unpacked
from pagec.runtime.server.record import Record, plain_logprobs
from pagec.runtime.text.defaults import TOKENIZER_DIRECTORY


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a choice first differs: `what` at `position` of its output."""

    choice: int
    position: int
    what: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of a request. `num_tokens`: of all choices, as recorded."""

    id: str
    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.is_equal}

    def describe(self) -> str:
        """For people."""
        if self.is_equal:
            return f"{self.id}: {self.num_tokens} tokens, every bit the same"
        first = self.differences[0]
        return (
            f"{self.id}: differs in choice {first.choice} at token {first.position}: {first.what} was "
            f"{first.recorded}, is {first.replayed}"
        )


def check_reproducible(path: Path) -> None:
    """ArtifactError if an artifact does not promise the same bits alone as in company."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        target, numerics = manifest["target"], manifest["numerics"]
        is_gpu, is_strict = "sm" in target, numerics.get("strict") is True
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return  # no artifact: opening it says why
    if is_gpu and not is_strict:
        raise ArtifactError(
            f"is made for {target['name']} without the strict mode: its sums depend on how many requests run "
            "at once, so none can be reproduced alone",
            place=str(path),
            remedy="compile and serve the model in strict mode",
        )


def run_again(engine: Engine, path: Path, record: Record) -> Comparison:
    """Runs one request until it has as many tokens as were recorded."""
    choices: list[Mapping[str, Any]] = record.data["choices"]
    request = _add(engine, path, record)
    wanted = [len(choice["token_ids"]) for choice in choices]
    while not request.is_finished and not _has(request, wanted):
        engine.step()
    if request.error is not None:
        raise PagecError(f"failed: {request.error}", place=record.id)
    found = _results(request)
    engine.abort(request)
    differences = [
        difference
        for index, (recorded, replayed) in enumerate(zip(choices, found, strict=False))
        if (difference := _compare(index, recorded, replayed)) is not None
    ]
    return Comparison(record.id, sum(wanted), tuple(differences))


def _add(engine: Engine, path: Path, record: Record) -> Request:
    data = record.data
    params = unpacked(data["params"])
    grammar = None
    if params.structured_outputs is not None:
        tokenizer = path / TOKENIZER_DIRECTORY / "tokenizer.json"
        compiler = GrammarCompiler(tokenizer, engine.program.vocab, engine.eos_token_ids)
        grammar = compiler.compile(params.structured_outputs)
    beam = BeamSearchParams(**data["beam"]) if data.get("beam") else None
    return engine.add_request(
        data["prompt"],
        params=params if beam is None else None,
        bad_words=data.get("bad_words") or (),
        grammar=grammar,
        beam=beam,
    )


def _has(request: Request, wanted: Sequence[int]) -> bool:
    """Whether all choices have so many tokens. A beam search has none before its end."""
    if request.on_commit is not None or len(request.sequences) < len(wanted):
        return False
    counts = [len(sequence.output) for sequence in request.sequences]
    return all(
        count >= most or sequence.finish_reason is not None
        for count, most, sequence in zip(counts, wanted, request.sequences, strict=False)
    )


@dataclass(frozen=True, slots=True)
class _Result:
    token_ids: list[int]
    logprobs: list[Any]
    score: float | None = None


def _results(request: Request) -> list[_Result]:
    if request.on_commit is not None:
        return [_Result(list(h.tokens), [], h.score) for h in request.hypotheses]
    return [_Result(s.output, [plain_logprobs(one) for one in s.logprobs]) for s in request.sequences]


def _compare(index: int, recorded: Mapping[str, Any], replayed: _Result) -> Difference | None:
    """The first difference of one choice; None if there is none."""
    tokens: list[int] = recorded["token_ids"]
    for position, token in enumerate(tokens):
        other = replayed.token_ids[position] if position < len(replayed.token_ids) else None
        if token != other:
            return Difference(index, position, "the token", token, other)
    for position, found in enumerate(recorded.get("logprobs", ())):
        other_logprobs = replayed.logprobs[position]
        if found != other_logprobs:
            return Difference(index, position, "the log probability", found, other_logprobs)
    score = recorded.get("score")
    if score is not None and score != replayed.score:
        return Difference(index, len(tokens), "the score", score, replayed.score)
    return None
