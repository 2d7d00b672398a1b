"""One prompt on its way through the engine: tokens in, `RequestOutput`s with what is new out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagec.runtime.engine import Engine
from pagec.runtime.llm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from pagec.runtime.loop import TokenOutput
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.grammar import GrammarState
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.sequence import Request
from pagec.runtime.text.choice import ChoiceText
from pagec.runtime.text.pieces import TokenTexts
from pagec.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and its text as far as that is known."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and all that the engine must know of what is asked for."""

    prompt: Prompt
    params: SamplingParams
    beam: BeamSearchParams | None = None
    bad_words: Sequence[Sequence[int]] = ()
    grammar: GrammarState | None = None

    def start(self, engine: Engine) -> Request:
        """Queues it."""
        return engine.add_request(
            self.prompt.ids,
            self.params.max_tokens,
            params=None if self.beam is not None else self.params,
            beam=self.beam,
            bad_words=self.bad_words,
            grammar=self.grammar,
        )


class Answer:
    """Reads what a request brings, in the engine's thread; `whole` is all so far, and `give` gets what is
    new. RequestError if the engine does not take the job."""

    def __init__(
        self,
        id: str,
        job: Job,
        engine: Engine,
        tokenizer: Tokenizer | None,
        give: Callable[[RequestOutput], None],
    ) -> None:
        self.request = job.start(engine)
        self._job = job
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._give = give
        self._readers = [
            ChoiceText(tokenizer, job.params, job.prompt.ids)
            for _ in range(job.params.n if not job.beam else 0)
        ]
        self._totals = [0.0] * job.params.n
        self._open = set(range(len(self._readers)))
        self._has_begun: set[int] = set()
        choices = [CompletionOutput(index) for index in range(len(self._readers))]
        self.whole = RequestOutput(id, job.prompt.text, job.prompt.ids, None, choices)

    def take(self, output: TokenOutput) -> None:
        """A step has brought something. A stop string in the text ends its choice."""
        if output.finish_reason == "error":
            self._end("error")
        elif self._job.beam is not None:
            if output.request.is_finished:
                self._tell([])
        elif output.choice in self._open:
            self._read(output)

    def give_up(self, error: Exception | None) -> None:
        """Nothing more will come. Does nothing if all that was to come has."""
        if self.whole.finished:
            return
        if error is not None:
            self.request.error = error
        self._end("abort" if error is None else "error")

    def _read(self, output: TokenOutput) -> None:
        index = output.choice
        reader, first = self._readers[index], len(self._readers[index].token_ids)
        piece = reader.add(output.token_ids, output.logprobs, output.finish_reason is not None)
        reason, stop = output.finish_reason, self.request.sequences[index].stop_reason
        new = CompletionOutput(index, piece.text, reader.token_ids[first:], None, None, reason, stop)
        if piece.stop_reason is not None:
            new.finish_reason, new.stop_reason = "stop", piece.stop_reason
            if reason is None:
                self._engine.abort(self.request, index, "stop")
        if self._job.params.logprobs is not None:
            found = reader.logprobs[first:]
            self._totals[index] += sum(one.own.logprob for one in found)
            new.logprobs = [self._shown(one) for one in found]
            new.cumulative_logprob = self._totals[index]
        if index not in self._has_begun:
            self._has_begun.add(index)
            self._put_prompt_first(new)
        if new.finish_reason is not None:
            self._open.remove(index)
        self._tell([new])

    def _put_prompt_first(self, new: CompletionOutput) -> None:
        """For `echo`."""
        if not self._job.params.echo:
            return
        prompt = self._job.prompt
        if self._job.params.detokenize and self._tokenizer is not None:
            text = self._tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
            new.text = text + new.text
        new.token_ids = prompt.ids + new.token_ids
        if new.logprobs is not None:
            new.logprobs = [*map(self._shown, self.request.prompt_logprobs), *new.logprobs]

    def _end(self, reason: str) -> None:
        """Ends all choices that are open; their text may have been held back."""
        ended = [
            CompletionOutput(
                index,
                self._rest(index),
                cumulative_logprob=self._totals[index] if self._job.params.logprobs is not None else None,
                finish_reason=reason,
            )
            for index in sorted(self._open)
        ]
        self._open.clear()
        self._tell(ended)

    def _rest(self, index: int) -> str:
        """The text that was held back; none if the reader itself is at fault."""
        try:
            return self._readers[index].add((), (), True).text
        except Exception:  # whoever waits must hear of the end all the same
            return ""

    def _tell(self, new: list[CompletionOutput]) -> None:
        request, job = self.request, self._job
        found = request.prompt_logprobs if job.params.prompt_logprobs is not None else None
        is_first = not self._has_begun or self._has_begun == {output.index for output in new}
        output = RequestOutput(
            self.whole.request_id,
            job.prompt.text,
            job.prompt.ids,
            [self._shown(one) for one in found] if found and is_first else None,
            new,
            not self._open and (job.beam is None or request.is_finished),
            request.num_cached_tokens,
            RequestMetrics(
                request.arrival,
                request.scheduled_at,
                request.first_token_at,
                request.finished_at,
                request.num_preemptions,
            ),
            request.seed,
            request.error,
        )
        self.whole.add(output)
        self._give(output)

    def _shown(self, found: TokenLogprobs | None) -> Logprobs | None:
        if found is None:
            return None
        tokens = {found.token: found.own, **found.top}
        return {
            token: Logprob(of.logprob, of.rank, self._texts.text(token) if self._texts is not None else None)
            for token, of in tokens.items()
        }
