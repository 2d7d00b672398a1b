"""The steps themselves: schedule, submit, collect, commit, with up to `depth` steps in flight.

    depth 1    schedule n, submit n, collect n, commit n
    depth 2    schedule n + 1, submit n + 1, collect n, commit n: the device never waits for the host

What is scheduled while a step is in flight takes that step's tokens from the device. Rows that turn out not
to be needed (an end of text found late, an abort) are discarded. The loop knows no artifact and no device:
`prepare` makes a batch of a schedule, and `runner` runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.sampler import Logprob, TokenLogprobs, token_logprobs
from pagec.runtime.scheduler import Entry, Scheduler
from pagec.runtime.sequence import FinishReason, Fork, Request, Status
from pagec.runtime.sequence import Sequence as TokenSequence
from pagec.runtime.trace import NO_TRACE, Trace


class TokenOutput(NamedTuple):
    """What a step brought one choice of a request: new tokens, and why it has ended if it has.

    `logprobs`: one for each token if they were asked for. Of a request with a hook it only says that a step
    was made, and whether it was the last one.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Output(Protocol):
    """What a step gives: for each logit row a token and, if the batch wants them, logits [n, vocab]; and
    the errors of rows whose own code has failed."""

    @property
    def tokens(self) -> Any: ...
    @property
    def logits(self) -> Any: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def errors(self) -> Mapping[int, Exception]: ...


class StepRunner(Protocol):
    """Runs batches in order."""

    def submit(self, batch: Any) -> None:
        """Begins a step; a token -1 - r of the batch is what row r of the step before gives."""

    def collect(self) -> Output:
        """Waits for the oldest step in flight."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step in flight. `error`: why it could not even be submitted."""

    number: int
    entries: list[Entry]
    began_us: float
    error: Exception | None


class Loop:
    """Runs the requests of a scheduler to their end."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        prepare: Callable[[Sequence[Entry]], Any],
        *,
        vocab: int,
        depth: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.trace: Trace = NO_TRACE
        self._runner = runner
        self._prepare = prepare
        self._vocab = vocab
        self._depth = depth
        self._wait = wait
        self._flights: deque[_Flight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._flights) or self.scheduler.has_work

    def step(self) -> list[TokenOutput]:
        """Keeps `depth` steps in flight and ends the oldest; what that brought."""
        while len(self._flights) < self._depth and self._submit():
            pass
        if not self._flights:
            self._wait()
            return []
        flight, output, error = self._flights.popleft(), None, None
        try:
            error = flight.error
            if error is None:
                output = self._runner.collect()
        except Exception as raised:  # it ends the requests of this step only
            error = raised
        self.trace.at(flight.number)
        self.trace.execute(flight.entries, flight.began_us)
        with self.trace.span("commit"):
            if output is not None:
                outputs = self._commit(flight.entries, output)
            else:
                outputs = self._fail(flight.entries, error)
        self.trace.blocks(self.scheduler.blocks)
        return outputs

    def stream(self) -> Iterator[TokenOutput]:
        """Steps until no request is left."""
        while self.has_work:
            yield from self.step()

    def abort(self, request: Request, choice: int | None = None, reason: FinishReason = "abort") -> None:
        """Ends a request, or one choice of it, in any state; its blocks are free when the steps in flight are
        done. Idempotent."""
        if request.is_finished:
            return
        if choice is None:
            self._finish(request, reason)
        elif self.scheduler.is_beyond_the_pool(request):
            request.sequences[choice].ends_as = reason
        elif request.sequences[choice].finish_reason is None:
            self._end(request, request.sequences[choice], reason)

    def _submit(self) -> bool:
        """Schedules and submits a step; False if there is nothing to run."""
        if self._flights and self._flights[-1].error is not None:
            return False  # nothing may build on it; its requests are about to end
        trace = self.trace
        number = trace.at(None)
        with trace.span("schedule"):
            entries = self.scheduler.schedule()
        if not entries:
            return False
        began, error = trace.now_us(), None
        try:
            with trace.span("prepare"):
                batch = self._prepare(entries)
            self._runner.submit(batch)
        except Exception as raised:  # told when its turn comes
            error = raised
        self._flights.append(_Flight(number, entries, began, error))
        return True

    # -------------------------------------------------------------------------------- commit

    def _commit(self, entries: Sequence[Entry], output: Output) -> list[TokenOutput]:
        """Enters a step's results into its sequences."""
        outputs: list[TokenOutput] = []
        tokens, row = output.tokens.tolist(), 0
        now, vocab = self.scheduler.clock(), self._vocab
        running, finished, new = Status.RUNNING, Status.FINISHED, tuple.__new__
        hooked: dict[Request, list[tuple[TokenSequence, int]]] = {}
        for entry in entries:
            request, sequence, start, count, num_logits, num_draws = entry
            row += num_logits
            sequence.num_in_flight -= 1
            if count == num_logits and request.is_plain and request.num_emitted and request.status is running:
                # By far the most frequent: a decode with nothing special about it, in as few steps as can be.
                end, token = start + 1, tokens[row - 1]
                is_ordinary = 0 <= token < vocab and token not in request.ends
                if is_ordinary and end < sequence.kv.commit_at and end + 1 < sequence.max_len:
                    sequence.num_computed = end
                    sequence.tokens[end] = token
                    request.num_emitted += 1
                    request.is_shielded = False
                    outputs.append(new(TokenOutput, (request, (token,), None, 0, ())))
                    continue
            if request.status is not finished and sequence.finish_reason is None:
                try:
                    if self._advance(entry, output, row):
                        if request.on_commit is not None:
                            hooked.setdefault(request, []).append((sequence, row - 1))
                            self._note(request, now)
                        else:
                            outputs += self._draw(request, sequence, output, range(row - num_draws, row), now)
                except Exception as error:  # whatever went wrong, it ends this request only
                    outputs.append(self._end_by_error(request, error))
            has_ended = request.status is not running or sequence.finish_reason is not None
            if has_ended and not sequence.num_in_flight and request not in hooked:
                self.scheduler.settle(request, sequence)
        for request, rows in hooked.items():
            outputs.append(self._run_hook(request, rows, output))
        return outputs

    def _advance(self, entry: Entry, output: Output, row: int) -> bool:
        """A sequence has computed its part; whether it has a new token. `row`: its last logit row + 1."""
        request, sequence, start, count, num_logits, num_draws = entry
        end = start + count
        sequence.num_computed = end
        if end >= sequence.kv.commit_at:  # a block has become full, or has left its window
            self.scheduler.blocks.commit(sequence, in_flight=sequence.num_in_flight > 0)
        if num_logits and sequence is request.sequences[0]:
            rows = slice(row - num_logits, row - num_draws + 1)
            if request.want_logits:
                request.logits.append(_copy(output.logits, rows))
            if request.num_prompt_logprobs is not None:
                self._add_prompt_logprobs(request, output.logits[rows], end, request.num_prompt_logprobs)
        known = sequence.tokens
        if known[end] >= 0:
            return False
        known[end] = self._token(output, row - num_draws)
        return True

    def _token(self, output: Output, row: int) -> int:
        """What a logit row has chosen."""
        if row in output.errors:
            raise output.errors[row]
        token = int(output.tokens[row])
        if not 0 <= token < self._vocab:
            raise RequestError(
                f"the model's logits are not numbers, or no token is allowed (token {token})", place="model"
            )
        return token

    def _add_prompt_logprobs(self, request: Request, logits: Any, end: int, count: int) -> None:
        """Those of the tokens that follow the positions of these rows, of which the last one is end - 1."""
        found, prompt = request.prompt_logprobs, request.prompt
        first = end - len(logits) + 1
        tokens = prompt[first : end + 1]
        if not found:
            found.append(None)
        found += token_logprobs(logits[: len(tokens)], tokens, count)

    def _note(self, request: Request, now: float) -> None:
        """A request has a new token."""
        request.num_emitted += 1
        request.is_shielded = False
        if request.first_token_at is None:
            request.first_token_at = now

    def _draw(
        self, request: Request, sequence: TokenSequence, output: Output, rows: range, now: float
    ) -> list[TokenOutput]:
        """Enters what these rows have chosen: a sequence's new token, and those of its forks."""
        tokens = [self._token(output, row) for row in rows]
        choices = [sequence, *(self.scheduler.fork(request, Fork(0, token)) for token in tokens[1:])]
        outputs = []
        for one, token, row in zip(choices, tokens, rows, strict=True):
            self._note(request, now)
            logprobs = self._logprobs(request, output, row, token)
            one.logprobs += logprobs
            reason = self._judge(request, one, token)
            index = request.sequences.index(one)
            if reason is not None:
                self._end(request, one, reason)
            outputs.append(TokenOutput(request, (token,), reason, index, logprobs))
        return outputs

    def _logprobs(self, request: Request, output: Output, row: int, token: int) -> tuple[TokenLogprobs, ...]:
        """The log probabilities of one token, if they are wanted."""
        if request.num_logprobs is None:
            return ()
        if request.num_logprobs == 0:  # from the sampling kernel, whatever else the step has brought back
            return (TokenLogprobs(token, Logprob(float(output.logprobs[row]), None)),)
        return tuple(token_logprobs(output.logits[row : row + 1], [token], request.num_logprobs))

    def _judge(self, request: Request, sequence: TokenSequence, token: int) -> FinishReason | None:
        """Why a sequence ends with the token that it has just got, if it does."""
        if sequence.ends_as is not None:
            return sequence.ends_as
        if token in request.ends:
            sequence.stop_reason = None if token in request.eos_token_ids else token
            return "stop"
        if sequence.sampler is not None and sequence.sampler.accept(token):
            return "stop"
        return "length" if sequence.num_computed + 1 == sequence.max_len else None

    def _run_hook(
        self, request: Request, rows: list[tuple[TokenSequence, int]], output: Output
    ) -> TokenOutput:
        """Lets a request change its sequences; only then may its blocks go, if it was preempted meanwhile."""
        done = TokenOutput(request, (), None)
        if not request.is_finished:
            try:
                self._change(request, rows, output)
                done = TokenOutput(request, (), request.finish_reason)
            except Exception as error:  # the hook's fault is its request's own
                done = self._end_by_error(request, error)
        for sequence in [sequence for sequence, _ in rows]:
            if request.status is not Status.RUNNING or sequence.finish_reason is not None:
                self.scheduler.settle(request, sequence)
        return done

    def _change(self, request: Request, rows: list[tuple[TokenSequence, int]], output: Output) -> None:
        """Forks and drops as the request's hook says; those that are left end as all sequences do."""
        assert request.on_commit is not None
        logits = output.logits[[row for _, row in rows]] if request.hook_logits else None
        changes = request.on_commit(request, [sequence.tokens[-1] for sequence, _ in rows], logits)
        dropped = [request.sequences[index] for index in changes.drops]
        advanced = [sequence for sequence, _ in rows]
        for sequence, row in rows:
            sequence.logprobs += self._logprobs(request, output, row, sequence.tokens[-1])
        for fork in changes.forks:
            parent = request.sequences[fork.parent]
            if not 0 <= fork.token < self._vocab:
                raise RequestError(f"token {fork.token} is not in 0..{self._vocab - 1}", place="fork")
            child = self.scheduler.fork(request, fork, len(dropped))
            advanced.append(child)
            if request.num_logprobs is not None:
                row = next(row for sequence, row in rows if sequence is parent)
                child.logprobs[-1:] = self._logprobs(request, output, row, fork.token)
        self.scheduler.drop(request, dropped)
        for sequence in advanced:
            if sequence not in dropped and (reason := self._judge(request, sequence, sequence.tokens[-1])):
                self._end(request, sequence, reason)
        if not request.is_finished and all(s.finish_reason is not None for s in request.sequences):
            self._finish(request, "stop")

    # ------------------------------------------------------------------------------- the end

    def _fail(self, entries: Sequence[Entry], error: Exception | None) -> list[TokenOutput]:
        """A whole step has failed: its requests end, the others go on."""
        assert error is not None
        outputs = []
        for entry in entries:
            entry.sequence.num_in_flight -= 1
            if not entry.request.is_finished:
                outputs.append(self._end_by_error(entry.request, error))
            if not entry.sequence.num_in_flight:
                self.scheduler.settle(entry.request, entry.sequence)
        return outputs

    def _end_by_error(self, request: Request, error: Exception) -> TokenOutput:
        request.error = error
        self._finish(request, "error")
        return TokenOutput(request, (), "error")

    def _end(self, request: Request, sequence: TokenSequence, reason: FinishReason) -> None:
        """A sequence has ended, and its request if it was the last one."""
        if any(other.finish_reason is None for other in request.sequences if other is not sequence):
            self.scheduler.end(sequence, reason)
        else:
            sequence.finish_reason = reason
            self._finish(request, request.sequences[0].finish_reason or reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.finished_at = self.scheduler.clock()
        self.scheduler.finish(request)


def _copy(logits: Any, rows: slice) -> Any:
    """A request's own rows: a view would keep the whole step's logits alive."""
    assert logits is not None
    return logits[rows].copy()
