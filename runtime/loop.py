"""The steps themselves: schedule, submit, collect, commit, with up to `depth` steps in flight.

    depth 1    schedule n, submit n, collect n, commit n
    depth 2    schedule n + 1, submit n + 1, collect n, commit n: the device never waits for the host

What is scheduled while a step is in flight takes that step's tokens from the device. Rows that turn out not
to be needed (an end of text found late, an abort) are discarded. The loop knows no artifact and no device:
`prepare` makes a batch of a schedule, and `runner` runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pagec.compiler.errors import RequestError
from pagec.runtime.logprobs import log_probability
from pagec.runtime.scheduler import Entry, Scheduler
from pagec.runtime.sequence import FinishReason, Request, Status
from pagec.runtime.sequence import Sequence as TokenSequence
from pagec.runtime.trace import NO_TRACE, Trace


class RequestOutput(NamedTuple):
    """What a step brought a request: new tokens of one choice, and why that has ended if it has."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    choice: int = 0


class Output(Protocol):
    """What a step gives: for each logit row a token and, if the batch wants them, logits [n, vocab]."""

    @property
    def tokens(self) -> Any: ...
    @property
    def logits(self) -> Any: ...
    @property
    def logprobs(self) -> Any: ...


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
        eos_token_ids: Collection[int] = (),
        depth: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.trace: Trace = NO_TRACE
        self._runner = runner
        self._prepare = prepare
        self._vocab = vocab
        self._eos = frozenset(eos_token_ids)
        self._depth = depth
        self._wait = wait
        self._flights: deque[_Flight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._flights) or self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
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

    def stream(self) -> Iterator[RequestOutput]:
        """Steps until no request is left."""
        while self.has_work:
            yield from self.step()

    def abort(self, request: Request) -> None:
        """Ends a request in any state; its blocks are free when the steps in flight are done. Idempotent."""
        if not request.is_finished:
            self._finish(request, "abort")

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

    def _commit(self, entries: Sequence[Entry], output: Output) -> list[RequestOutput]:
        """Enters a step's results into its sequences."""
        outputs: list[RequestOutput] = []
        tokens, row = output.tokens.tolist(), 0
        now, vocab, eos = self.scheduler.clock(), self._vocab, self._eos
        running, finished, new = Status.RUNNING, Status.FINISHED, tuple.__new__
        hooked: dict[Request, list[tuple[TokenSequence, int]]] = {}
        for entry in entries:
            request, sequence, start, count, num_logits = entry
            row += num_logits
            sequence.num_in_flight -= 1
            if count == num_logits and request.is_plain and request.num_emitted and request.status is running:
                # By far the most frequent: a decode with nothing special about it, in as few steps as can be.
                end, token = start + 1, tokens[row - 1]
                is_ordinary = 0 <= token < vocab and token not in eos
                if is_ordinary and end < sequence.kv.commit_at and end + 1 < sequence.max_len:
                    sequence.num_computed = end
                    sequence.tokens[end] = token
                    request.num_emitted += 1
                    request.is_shielded = False
                    outputs.append(new(RequestOutput, (request, (token,), None, 0)))
                    continue
            if request.status is not finished and sequence.finish_reason is None:
                try:
                    token = self._advance(entry, tokens, output, row)
                    if token is not None:
                        if request.on_commit is not None:
                            hooked.setdefault(request, []).append((sequence, row - 1))
                        outputs.append(self._emit(request, sequence, token, now))
                except Exception as error:  # whatever went wrong, it ends this request only
                    outputs.append(self._end_by_error(request, error))
            has_ended = request.status is not running or sequence.finish_reason is not None
            if has_ended and not sequence.num_in_flight and request not in hooked:
                self.scheduler.settle(request, sequence)
        for request, rows in hooked.items():
            outputs += self._run_hook(request, rows, output)
        return outputs

    def _advance(self, entry: Entry, tokens: list[int], output: Output, row: int) -> int | None:
        """A sequence has computed its part; its new token if it has one. `row`: its last logit row + 1."""
        request, sequence, start, count, num_logits = entry
        end = start + count
        sequence.num_computed = end
        if end >= sequence.kv.commit_at:  # a block has become full, or has left its window
            self.scheduler.blocks.commit(sequence, in_flight=sequence.num_in_flight > 0)
        known = sequence.tokens
        if num_logits and request.want_logits and sequence is request.sequences[0]:
            request.logits.append(_copy(output.logits, row - num_logits, row))
        if known[end] >= 0:
            return None
        token = tokens[row - 1]
        if not 0 <= token < self._vocab:
            raise RequestError(f"the model's logits are not numbers (token {token})", place="model")
        known[end] = token
        if sequence.sampler is not None and output.logprobs is not None:
            sequence.logprobs.append(float(output.logprobs[row - 1]))
        elif request.want_logprobs:
            sequence.logprobs.append(log_probability(output.logits[row - 1], token))
        return token

    def _emit(self, request: Request, sequence: TokenSequence, token: int, now: float) -> RequestOutput:
        """A request has a new token, and has ended if that was its last."""
        request.num_emitted += 1
        request.is_shielded = False
        if request.first_token_at is None:
            request.first_token_at = now
        reason: FinishReason | None = None
        if token in self._eos and not request.ignore_eos:
            reason = "stop"
        elif sequence.num_computed + 1 == sequence.max_len:
            reason = "length"
        index = request.sequences.index(sequence)
        if reason is not None:
            if any(s.finish_reason is None for s in request.sequences if s is not sequence):
                self.scheduler.end(sequence, reason)
            else:
                sequence.finish_reason = reason
                self._finish(request, request.sequences[0].finish_reason or reason)
        return RequestOutput(request, (token,), reason, index)

    def _run_hook(
        self, request: Request, rows: list[tuple[TokenSequence, int]], output: Output
    ) -> list[RequestOutput]:
        """Lets a request change its sequences; only then may its blocks go, if it was preempted meanwhile."""
        outputs = []
        if not request.is_finished:
            try:
                self._change(request, rows, output)
            except Exception as error:  # the hook's fault is its request's own
                outputs.append(self._end_by_error(request, error))
        for sequence in [sequence for sequence, _ in rows]:
            if request.status is not Status.RUNNING or sequence.finish_reason is not None:
                self.scheduler.settle(request, sequence)
        return outputs

    def _change(self, request: Request, rows: list[tuple[TokenSequence, int]], output: Output) -> None:
        """Forks and drops as the request's hook says."""
        assert request.on_commit is not None
        changes = request.on_commit(request, [sequence.tokens[-1] for sequence, _ in rows])
        dropped = [request.sequences[index] for index in changes.drops]
        for fork in changes.forks:
            parent = request.sequences[fork.parent]
            if not 0 <= fork.token < self._vocab:
                raise RequestError(f"token {fork.token} is not in 0..{self._vocab - 1}", place="fork")
            child = self.scheduler.fork(request, fork)
            if request.want_logprobs:
                row = next(row for sequence, row in rows if sequence is parent)
                child.logprobs[-1] = log_probability(output.logits[row], fork.token)
        self.scheduler.drop(request, dropped)
        if all(sequence.finish_reason is not None for sequence in request.sequences):
            self._finish(request, "stop")

    # ------------------------------------------------------------------------------- the end

    def _fail(self, entries: Sequence[Entry], error: Exception | None) -> list[RequestOutput]:
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

    def _end_by_error(self, request: Request, error: Exception) -> RequestOutput:
        request.error = error
        self._finish(request, "error")
        return RequestOutput(request, (), "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.finished_at = self.scheduler.clock()
        self.scheduler.finish(request)


def _copy(logits: Any, start: int, end: int) -> Any:
    """A request's own rows: a view would keep the whole step's logits alive."""
    assert logits is not None
    return logits[start:end].copy()
