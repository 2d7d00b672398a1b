"""What a request may ask of sampling. Every value is checked: nothing behind this has to fear it."""

from __future__ import annotations

import json as json_format
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from pagec.compiler.sampling import MAX_BIASES
from pagec.runtime.sampling import checks

MAX_TOP_LOGPROBS: Final = 20
MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
# More than any vocabulary has: who names so many tokens names some twice.
MAX_ALLOWED_TOKENS: Final = 1 << 19
REPETITION_RANGE: Final = (0.01, 100.0)
# Gets the output so far and one row of logits (float32, a copy of its own), and gives what to sample from.
LogitsProcessor = Callable[[list[int], Any], Any]


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text must be: exactly one of a JSON schema (text or mapping), a regular expression, one of
    several texts, a grammar, or any JSON object."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        place = "structured_outputs"
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            expected = "exactly one of json, regex, choice, grammar, json_object"
            checks.bad(place, given, expected)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                checks.bad(f"{place}.{name}", getattr(self, name), "a text")
        if self.json_object is not None and self.json_object is not True:
            checks.bad(f"{place}.json_object", self.json_object, "true")
        if self.choice is not None:
            choice = checks.texts(f"{place}.choice", self.choice, "a list of texts")
            if not choice or isinstance(self.choice, str):
                checks.bad(f"{place}.choice", self.choice, "a list of texts")
            object.__setattr__(self, "choice", choice)
        if self.json is not None:
            self._check_schema(f"{place}.json")

    def _check_schema(self, place: str) -> None:
        expected = "a JSON schema"
        try:
            schema = json_format.loads(self.json) if isinstance(self.json, str) else self.json
            json_format.dumps(schema)
        except (ValueError, TypeError, RecursionError):
            checks.bad(place, self.json, expected)
        if not isinstance(schema, Mapping | bool):
            checks.bad(place, self.json, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a text ends; names and meanings are vLLM's.

    n                   choices for a prompt
    temperature         0: always the likeliest token; any other is exact, however small
    top_k               the k likeliest tokens (0 or -1: all); with equals of the last one
    top_p               the likeliest tokens that together reach this probability
    min_p               tokens of at least this share of the likeliest one's probability
    repetition_penalty  divides logits above 0 of tokens seen in prompt or output, multiplies others
    presence_penalty    is taken off the logits of tokens in the output, frequency_penalty once for each time
    logit_bias          token id -> what is added to its logit, -100 to 100; ids may be texts, as in JSON
    allowed_token_ids   no other token may come; bad_words: texts that may not
    seed                the same seed gives the same text; None: one is drawn, and reported
    stop                texts that end the output, stop_token_ids tokens that do
    include_stop_str_in_output   the stop stays in the text
    min_tokens          before so many tokens nothing ends the output
    max_tokens          None: as many as the model's length leaves; ignore_eos: the end of text ends nothing
    logprobs            log probabilities of the token and of so many likeliest ones (None: not even its own),
                        from the model's own logits; prompt_logprobs the same of the prompt's tokens
    echo                the prompt comes first in the output
    logits_processors   functions (output token ids, logits) -> logits, in this process only
    structured_outputs  see StructuredOutputsParams
    skip_special_tokens, detokenize   what becomes of tokens in the text

    Parameters cannot be set afterwards: `clone(**changes)` makes others of them.

    Masks, biases, penalties, temperature, min_p, top_k and top_p apply in this order. RequestError for a
    value of the wrong type or out of range; what depends on the model is checked by `check`.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        self._check_lists()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "echo",
            "skip_special_tokens",
            "detokenize",
        ):
            checks.flag(name, getattr(self, name))
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, StructuredOutputsParams
        ):
            checks.bad("structured_outputs", self.structured_outputs, "StructuredOutputsParams")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        low, high = REPETITION_RANGE
        largest = 3e38  # of float32
        for name, least, most, expected in (
            ("temperature", 0.0, largest, f"a finite number of at least 0 and at most {largest:g}"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1"),
            ("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1"),
            ("repetition_penalty", low, high, f"a number from {low:g} to {high:g}"),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY, "a number from -2 to 2"),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, "a number from -2 to 2"),
        ):
            self._set(name, checks.number(name, getattr(self, name), least, most, expected))

    def _check_counts(self) -> None:
        self._set("n", checks.whole("n", self.n, 1, None, "a whole number of at least 1"))
        expected = "a whole number of at least 1, or 0 or -1 for all tokens"
        self._set("top_k", max(checks.whole("top_k", self.top_k, -1, None, expected), 0))
        expected = "a whole number of at least 0"
        self._set("min_tokens", checks.whole("min_tokens", self.min_tokens, 0, None, expected))
        if self.max_tokens is not None:
            expected = "a whole number of at least 1"
            self._set("max_tokens", checks.whole("max_tokens", self.max_tokens, 1, None, expected))
            if self.min_tokens > self.max_tokens:
                checks.bad("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.seed is not None:
            expected = "a whole number of at most 64 bits"
            self._set("seed", checks.whole("seed", self.seed, -(2**63), 2**64 - 1, expected))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                expected = f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
                self._set(name, checks.whole(name, getattr(self, name), 0, MAX_TOP_LOGPROBS, expected))

    def _check_lists(self) -> None:
        self._set("stop", checks.texts("stop", self.stop, "a text or a list of texts, none of them empty"))
        self._set(
            "bad_words", checks.texts("bad_words", self.bad_words, "a list of texts, none of them empty")
        )
        ids = checks.token_ids("stop_token_ids", self.stop_token_ids, MAX_BIASES // 8)
        self._set("stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = checks.token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not ids:
                checks.bad("allowed_token_ids", self.allowed_token_ids, "a list of at least one token id")
            self._set("allowed_token_ids", tuple(dict.fromkeys(ids)))
        self._check_bias()
        processors = checks.items("logits_processors", self.logits_processors, "a list of functions")
        for processor in processors:
            if not callable(processor):
                checks.bad("logits_processors", processor, "a function")
        self._set("logits_processors", processors)

    def _check_bias(self) -> None:
        bias = self.logit_bias if self.logit_bias is not None else {}
        if not isinstance(bias, Mapping):
            checks.bad("logit_bias", bias, "a map of token ids to numbers")
        checks.at_most("logit_bias", bias, MAX_BIASES // 2)
        checked: dict[int, float] = {}
        for token, value in bias.items():
            key = _bias_key(token)
            if key in checked:
                checks.bad("logit_bias", token, "the only key of its token")
            expected = "a number from -100 to 100"
            checked[key] = checks.number(f"logit_bias[{key}]", value, -MAX_BIAS, MAX_BIAS, expected)
        self._set("logit_bias", checked)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy, with changes; parameters themselves never change."""
        return replace(self, **changes)

    def check(self, *, vocab: int, max_choices: int) -> None:
        """RequestError for what a model of `vocab` tokens cannot do, or an engine that runs at most
        `max_choices` sequences at once."""
        if self.n > max_choices:
            checks.bad("n", self.n, f"at most {max_choices}, the sequences that run at once")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab:
                    checks.bad(name, token, f"a token id from 0 to {vocab - 1}")

    @property
    def is_greedy(self) -> bool:
        """Whether chance has no part in it."""
        return self.temperature == 0.0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted beside each of the prompt's; `echo` treats it as output."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen before are treated differently."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_sampling(self) -> bool:
        """Whether a token is more than the argmax of the model's logits, or its log probability is wanted."""
        return (
            not self.is_greedy
            or self.has_penalties
            or self.needs_host
            or self.min_tokens > 0
            or self.logprobs == 0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
        )

    @property
    def needs_host(self) -> bool:
        """Whether the host must know all tokens so far before the next one can be chosen."""
        return (
            self.has_penalties
            or bool(self.bad_words)
            or bool(self.logits_processors)
            or self.structured_outputs is not None
        )


def _bias_key(key: object) -> int:
    """A token id, or its text as JSON's maps have it: digits as they are written plainly."""
    if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,18}", key):
        return int(key)
    return checks.whole("logit_bias", key, 0, None, "a token id")
