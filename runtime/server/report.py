"""What the engine process tells the front: news of its requests, and snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.kv.map import block_map, owned_blocks
from pagec.runtime.loop import TokenOutput
from pagec.runtime.sequence import Request
from pagec.runtime.server.messages import (
    Accepted,
    Blocks,
    Fault,
    Finished,
    Hypothesis,
    News,
    PromptLogprobs,
    Refused,
    RunningRequest,
    Snapshot,
    Timings,
    Tokens,
    WaitingRequest,
)
from pagec.runtime.server.meter import Meter


class Reporter:
    """Collects news between two messages. `open`: the requests that are not over, by the front's names."""

    def __init__(self) -> None:
        self.open: dict[str, Request] = {}
        self._names: dict[Request, str] = {}
        self._owe_prompt: set[Request] = set()
        self._news = News([], [], [], [], [])

    def accept(self, id: str, request: Request) -> None:
        """The engine has a new request."""
        self.open[id] = request
        self._names[request] = id
        if request.num_prompt_logprobs is not None:
            self._owe_prompt.add(request)
        self._news.accepted.append(Accepted(id, request.seed))

    def refuse(self, id: str, error: Exception) -> None:
        """The engine does not take one."""
        self._news.refused.append(Refused(id, fault(error)))

    def note(self, outputs: Iterable[TokenOutput]) -> None:
        """What a step brought."""
        for output in outputs:
            request = output.request
            name = self._names.get(request)
            if name is None or request.on_commit is not None:
                continue  # of a beam search only the end counts
            if request in self._owe_prompt and output.token_ids:
                self._owe_prompt.remove(request)
                self._news.prompt_logprobs.append(PromptLogprobs(name, request.prompt_logprobs))
            if output.token_ids:
                stop = request.sequences[output.choice].stop_reason if output.finish_reason else None
                self._news.tokens.append(
                    Tokens(name, output.choice, output.token_ids, output.finish_reason, stop, output.logprobs)
                )

    def take(self) -> News | None:
        """All news since the last time; None if there are none."""
        for name, request in [(n, r) for n, r in self.open.items() if r.is_finished]:
            self._news.finished.append(_finished(name, request))
            del self.open[name], self._names[request]
            self._owe_prompt.discard(request)
        news, self._news = self._news, News([], [], [], [], [])
        has_any = news.accepted or news.refused or news.prompt_logprobs or news.tokens or news.finished
        return news if has_any else None


def _finished(name: str, request: Request) -> Finished:
    assert request.finish_reason is not None
    found = [
        Hypothesis(list(h.tokens), h.score, h.cumulative_logprob, h.finish_reason) for h in request.hypotheses
    ]
    return Finished(
        name,
        request.finish_reason,
        timings(request),
        fault(request.error) if request.error is not None else None,
        found,
    )


def fault(error: Exception) -> Fault:
    """An error as the front is told."""
    if isinstance(error, PagecError):
        return Fault(isinstance(error, RequestError), error.message, error.place, error.remedy)
    return Fault(False, f"{type(error).__name__}: {error}")


def timings(request: Request) -> Timings:
    """Of a request that is over; phases that it never reached took no time."""
    end = request.finished_at or request.arrival
    scheduled = end if request.scheduled_at is None else request.scheduled_at
    first = end if request.first_token_at is None else request.first_token_at
    return Timings(
        scheduled - request.arrival,
        first - scheduled,
        end - first,
        request.num_cached_tokens,
        request.num_preemptions,
    )


def snapshot(engine: Engine, meter: Meter, reporter: Reporter) -> Snapshot:
    """How the engine stands now."""
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    stats, now = blocks.stats(), scheduler.clock()
    names = {request: name for name, request in reporter.open.items()}
    waiting = [
        WaitingRequest(names[r], len(r.prompt), round(now - r.arrival, 3))
        for r in scheduler.waiting
        if r in names
    ]
    owners = {names[r]: owned_blocks(r) for r in scheduler.running if r in names}
    running = [
        RunningRequest(
            names[r], len(r.prompt), sum(len(s.output) for s in r.sequences), len(owners[names[r]])
        )
        for r in scheduler.running
        if r in names
    ]
    generated, prompt = meter.rates()
    return Snapshot(
        waiting=waiting,
        running=running,
        blocks=Blocks(
            blocks.num_blocks,
            stats.free,
            stats.cached,
            stats.used,
            stats.shared,
            blocks.block_size,
            block_map(blocks),
            owners,
        ),
        tokens_per_s=generated,
        prompt_tokens_per_s=prompt,
        hit_rate=stats.hit_rate,
        hit_tokens=stats.hit_tokens,
        asked_tokens=stats.asked_tokens,
        step_ms=meter.times(),
        totals=meter.totals(),
        preemptions=scheduler.num_preemptions,
        tiers=stats.tiers,
    )
