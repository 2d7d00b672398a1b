"""Requests of a live server, written so that each can be run again alone, and compared.

A record is a line of JSON:

    id, model, digest        the request's name; the model, and the digest of artifact and weights
    artifact                 the artifact's directory
    weights                  as --weights said, null: the artifact's own
    prompt, params, beam     all that decides the tokens; `params` with the seed that was drawn
    salt, bad_words          `bad_words` as token ids
    choices                  of each: token_ids, logprobs (if asked for), finish_reason, stop_reason, score
    outcome, time            what ended it; seconds since 1970
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagec.compiler.errors import PagecError
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.server.generation import Choice, Generation
from pagec.runtime.server.params import packed
from pagec.runtime.text.choice import bad_word_ids
from pagec.runtime.text.tokenizer import Tokenizer


class Recorder:
    """Appends a line for each request that has had tokens (an Observer of the service)."""

    def __init__(self, file: Path, tokenizer: Tokenizer, head: Mapping[str, Any]) -> None:
        """`head`: what stands in every line: model, artifact, digest, weights."""
        self._head = dict(head)
        self._tokenizer = tokenizer
        try:
            self._file = file.open("a", encoding="utf-8")
        except OSError as error:
            raise PagecError(f"cannot be written: {error.strerror}", place=str(file)) from error

    def refused(self, error: PagecError) -> None:
        """Nothing to run again."""

    def finished(self, generation: Generation) -> None:
        """A generation is over."""
        if not generation.choices:
            return
        call = generation.call
        params = replace(call.params, seed=generation.seed)
        record = {
            "id": generation.id,
            **self._head,
            "prompt": list(call.prompt),
            "params": packed(params),
            "beam": packed(call.beam) if call.beam is not None else None,
            "salt": call.salt,
            "bad_words": bad_word_ids(self._tokenizer, params.bad_words or ()),
            "choices": [_choice(choice) for choice in generation.choices],
            "outcome": generation.outcome,
            "time": time.time(),
        }
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:  # serving goes on
            print(f"{self._file.name}: recording has ended: {error.strerror}", file=sys.stderr)
            self.close()

    def close(self) -> None:
        """Ends the file."""
        with contextlib.suppress(OSError):  # of what could not be written a moment ago
            self._file.close()


def _choice(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {
        "token_ids": choice.reader.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.reader.logprobs:
        found["logprobs"] = [plain_logprobs(one) for one in choice.reader.logprobs]
    if choice.score is not None:
        found["score"] = choice.score
    return found


def plain_logprobs(found: TokenLogprobs) -> dict[str, Any]:
    """As a record holds them: JSON keeps every bit of a float."""
    top = {str(token): [of.logprob, of.rank] for token, of in found.top.items()}
    return {"own": [found.own.logprob, found.own.rank], "top": top}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a file."""

    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.data["id"])


def read_records(file: Path) -> Iterator[Record]:
    """The records of a file; PagecError names a line that is none. The last one may be cut off."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PagecError(f"cannot be read: {error}", place=str(file)) from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            data = json.loads(line)
            missing = {"id", "digest", "prompt", "params", "choices"} - data.keys()
        except (ValueError, AttributeError) as error:
            raise PagecError("is no record", place=f"{file}:{number}") from error
        if missing:
            raise PagecError(f"lacks {', '.join(sorted(missing))}", place=f"{file}:{number}")
        yield Record(data)


def find_records(file: Path, id: str) -> list[Record]:
    """The records of an answer: one for each of its prompts. PagecError if there is none."""
    found = [r for r in read_records(file) if r.id == id or r.id.rpartition("-")[0] == id]
    if not found:
        raise PagecError(f"has no request {id}", place=str(file), remedy="pagec replay FILE --list")
    return found
