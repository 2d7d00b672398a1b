"""What the front process and the engine process say to each other.

Each message is msgpack behind its length, four bytes with the lowest first, on a stream socket. Both ends
come from one installation: the form is nobody else's business and may change with any version.

    front -> engine    Start, Submit, Abort, AskSnapshot, Stop
    engine -> front    Ready or Failed, then News after each step, Snapshot when asked
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from pagec.runtime.kv.stats import TierStats
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.sequence import FinishReason

_LENGTH_BYTES: Final = 4


class Message(msgspec.Struct, array_like=True, tag=True):
    """Stands alone on the socket; its class's name leads it."""


class Part(msgspec.Struct, array_like=True):
    """Stands within a message."""


# --------------------------------------------------------------------------------- front -> engine


class Start(Message):
    """Open this artifact: keywords of `Engine`, paths as texts."""

    artifact: str
    options: dict[str, Any]


class Submit(Message):
    """A request. `params` and `beam` as `packed` (params.py) gives them; `bad_words` are token ids."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    beam: dict[str, Any] | None = None
    salt: str = ""
    priority: int = 0
    ttft_s: float | None = None
    token_s: float | None = None
    bad_words: list[list[int]] = []


class Abort(Message):
    """End a request, or one choice of it. One that is unknown has ended already."""

    id: str
    choice: int | None = None


class AskSnapshot(Message):
    """Tell how things stand, between two steps."""


class Stop(Message):
    """End everything and exit."""


# --------------------------------------------------------------------------------- engine -> front


class Ready(Message):
    """The engine is open and warm. `digest` names the artifact and its weights; `max_rows` sequences run at
    once; `memory` says where the memory goes, a line for each area."""

    model: str
    digest: str
    vocab: int
    max_len: int
    max_rows: int
    block_size: int
    num_blocks: int
    target: str
    memory: list[str]


class Failed(Message):
    """The engine could not be opened: a PagecError, or the text of another exception."""

    message: str
    place: str = ""
    remedy: str = ""


class Accepted(Part):
    """A request waits for its turn."""

    id: str
    seed: int | None


class Fault(Part):
    """An error of a request; `is_own`: it is the request that is wrong (RequestError)."""

    is_own: bool
    message: str
    place: str = ""
    remedy: str = ""


class Refused(Part):
    """A request is not taken."""

    id: str
    fault: Fault


class PromptLogprobs(Part):
    """Of a request that asked for them, once, before its first tokens."""

    id: str
    logprobs: list[TokenLogprobs | None]


class Tokens(Part):
    """What a step brought one choice. `stop_reason`: the stop token that ended it."""

    id: str
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Hypothesis(Part):
    """A result of a beam search."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason | None


class Timings(Part):
    """Seconds that a request waited, computed its prompt and decoded; tokens found in the cache; times it
    was preempted."""

    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    preemptions: int


class Finished(Part):
    """A request is over. `fault`: what ended it, if something went wrong."""

    id: str
    finish_reason: FinishReason
    timings: Timings
    fault: Fault | None = None
    hypotheses: list[Hypothesis] = []


class News(Message):
    """All that has happened since the last one, in the order of the fields."""

    accepted: list[Accepted]
    refused: list[Refused]
    prompt_logprobs: list[PromptLogprobs]
    tokens: list[Tokens]
    finished: list[Finished]


# -------------------------------------------------------------------------------------- snapshots


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request in the queue."""

    id: str
    prompt_tokens: int
    waited_s: float


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that has blocks; `output_tokens` of all its choices."""

    id: str
    prompt_tokens: int
    output_tokens: int
    blocks: int


class Blocks(msgspec.Struct, frozen=True):
    """The pool. `map` has a character per block: "." free, "c" cached, "u" used, "s" shared, "#" scratch;
    `owners` the blocks of each running request."""

    total: int
    free: int
    cached: int
    used: int
    shared: int
    block_size: int
    map: str
    owners: dict[str, list[int]]


class StepTimes(msgspec.Struct, frozen=True):
    """Milliseconds of the latest steps, in `recent` the newest last."""

    last: float
    mean: float
    p99: float
    recent: list[float]


class StepTotals(msgspec.Struct, frozen=True):
    """Since the start: steps, their seconds, how many took at most so many seconds (cumulative, in the
    order of meter.STEP_BOUNDS), tokens computed of prompts, tokens generated."""

    steps: int
    seconds: float
    buckets: list[int]
    prompt_tokens: int
    generated_tokens: int


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How the engine stands between two steps. Rates are those of the last seconds."""

    waiting: list[WaitingRequest]
    running: list[RunningRequest]
    blocks: Blocks
    tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float
    hit_tokens: int
    asked_tokens: int
    step_ms: StepTimes
    totals: StepTotals
    preemptions: int
    tiers: dict[str, TierStats]


ToEngine = Start | Submit | Abort | AskSnapshot | Stop
ToFront = Ready | Failed | News | Snapshot

# ---------------------------------------------------------------------------------------- framing

_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def frame(message: ToEngine | ToFront) -> bytes:
    """A message as it goes onto the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Frames(Generic[M]):
    """Turns the bytes of one direction back into its messages, however they were cut."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are complete with these bytes."""
        self._bytes += data
        messages: list[M] = []
        start = 0
        while len(self._bytes) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(self._bytes[start:body], "little")
            if len(self._bytes) < end:
                break
            messages.append(self._decoder.decode(bytes(self._bytes[body:end])))
            start = end
        del self._bytes[:start]
        return messages
