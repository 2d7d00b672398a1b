"""What `LLM` gives back; names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Logprobs = dict[int, "Logprob"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, its rank among all (the likeliest has 1; None: not looked for), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `finish_reason`: "stop", "length", "abort", or "error"; None while it grows.

    `stop_reason`: the stop string or the stop token that ended it, None for the end of text. `token_ids` has
    those tokens, too. `logprobs` has for each token its own log probability, then those of the likeliest
    ones; None without SamplingParams.logprobs. With `echo` all three begin with the prompt's.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def add(self, new: CompletionOutput) -> None:
        """Appends what came since."""
        self.text += new.text
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            self.logprobs = self.logprobs if self.logprobs is not None else []
            self.logprobs += new.logprobs
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds until it was first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt. `prompt` is None if only its tokens are known; `seed` gives the same text
    again. `error`: the fault that ended it, of a logits processor for example; its choices then have the
    finish reason "error" and what they had got before."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    error: Exception | None = None

    def add(self, new: RequestOutput) -> None:
        """Appends what came since."""
        for output in new.outputs:
            self.outputs[output.index].add(output)
        if new.prompt_logprobs is not None:
            self.prompt_logprobs = new.prompt_logprobs
        self.finished, self.error = new.finished, new.error
        self.num_cached_tokens, self.metrics, self.seed = new.num_cached_tokens, new.metrics, new.seed

    def copy(self) -> RequestOutput:
        """One that does not grow with this one."""
        outputs = [
            replace(
                output,
                token_ids=list(output.token_ids),
                logprobs=None if output.logprobs is None else list(output.logprobs),
            )
            for output in self.outputs
        ]
        return replace(self, outputs=outputs)


@dataclass(slots=True)
class BeamSearchSequence:
    """A text that a beam search has found. `tokens` and `text` begin with the prompt; `logprobs` are those of
    the generated tokens, `cum_logprob` is their sum, `score` what the beams were ranked by."""

    tokens: list[int]
    logprobs: list[float]
    cum_logprob: float
    score: float
    text: str | None
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The texts that a beam search has found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
