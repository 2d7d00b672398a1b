"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import RequestError
from pagec.runtime.batch import build_batch
from pagec.runtime.block_manager import BlockManager
from pagec.runtime.device import Device
from pagec.runtime.device.cpu import CpuDevice
from pagec.runtime.generation import GenerationDefaults
from pagec.runtime.runner import Runner, StepOutput
from pagec.runtime.scheduler import Entry, Limits, Scheduler
from pagec.runtime.sequence import FinishReason, Request
from pagec.runtime.trace import NO_TRACE, Trace
from pagec.runtime.weights import WeightsMemory


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step brought a request: new tokens, and why it has ended if it has."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Engine:
    """Greedy generation from an artifact.

    `threads`: all cores if not given; `weights` and `weights_memory` as in load_weights; `num_blocks` or
    `kv_bytes` size the KV pool; `prefill_chunk` limits a prompt's tokens in one step; `eos_token_ids`: the
    artifact's own if not given.
    """

    def __init__(
        self,
        artifact: Artifact | Path,
        *,
        threads: int | None = None,
        weights: str | None = None,
        weights_memory: WeightsMemory = "copy",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        prefill_chunk: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        device: Device | None = None,
    ) -> None:
        artifact = Artifact.open(artifact) if isinstance(artifact, Path) else artifact
        self.program = program = artifact.program
        self.device = device or CpuDevice(artifact.path, threads)
        self.runner = Runner(
            artifact,
            self.device,
            weights=weights,
            weights_memory=weights_memory,
            num_blocks=num_blocks,
            kv_bytes=kv_bytes,
        )
        self.ledger = self.runner.ledger
        limits = Limits(program.capacity.T, program.capacity.S, program.max_len, prefill_chunk)
        self.scheduler = Scheduler(BlockManager(self.runner.num_blocks, program.kv.block_size), limits)
        if eos_token_ids is None:
            eos_token_ids = GenerationDefaults.read(artifact.path).eos_token_ids
        self.eos_token_ids = frozenset(eos_token_ids)
        self._ids = itertools.count()

    @property
    def trace(self) -> Trace:
        """Where steps are recorded."""
        return self.runner.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.runner.trace = trace or NO_TRACE

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add_request(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        *,
        ignore_eos: bool = False,
        want_logits: bool = False,
        prompt_logits: bool = False,
    ) -> Request:
        """Queues a request; RequestError if it is invalid or could never run.

        `max_tokens` None: as many as the model's length leaves. `want_logits` keeps the logits of each
        generated token in `request.logits`, `prompt_logits` those of every prompt position as well.
        """
        if not prompt:
            raise RequestError("is empty", place="prompt", remedy="give one token at least")
        for token in prompt:
            if not 0 <= token < self.program.vocab:
                raise RequestError(f"token {token} is not in 0..{self.program.vocab - 1}", place="prompt")
        if max_tokens is None:
            max_tokens = max(self.program.max_len - len(prompt), 1)
        if max_tokens < 1:
            raise RequestError(f"{max_tokens} is less than 1", place="max_tokens")
        request = Request(
            next(self._ids),
            list(prompt),
            max_tokens,
            len(self.program.kv.groups),
            ignore_eos=ignore_eos,
            want_logits=want_logits,
            prompt_logits=prompt_logits,
        )
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request in any state; its blocks are free at once. Idempotent."""
        if not request.is_finished:
            self._finish(request, "abort")

    def step(self) -> list[RequestOutput]:
        """Schedules and runs one step; the outputs of the requests that it brought forward."""
        trace = self.trace
        with trace.span("schedule"):
            entries = self.scheduler.schedule()
        if not entries:
            return []
        with trace.span("prepare"):
            batch = build_batch(entries, self.program)
        self.runner.submit(batch)
        output = self.runner.collect()
        with trace.span("commit"):
            return self._commit(entries, output)

    def stream(self) -> Iterator[RequestOutput]:
        """Steps until no request is left."""
        while self.has_work:
            yield from self.step()

    def _commit(self, entries: Sequence[Entry], output: StepOutput) -> list[RequestOutput]:
        outputs, row = [], 0
        for entry in entries:
            rows = slice(row, row + entry.num_logits)
            row += entry.num_logits
            try:
                token = self._advance(entry, output, rows)
            except Exception as error:  # whatever went wrong, it ends this request only
                entry.request.error = error
                self._finish(entry.request, "error")
                token = None
            if token is not None or entry.request.is_finished:
                tokens = () if token is None else (token,)
                outputs.append(RequestOutput(entry.request, tokens, entry.request.finish_reason))
        return outputs

    def _advance(self, entry: Entry, output: StepOutput, rows: slice) -> int | None:
        """Enters a step's results into a sequence; its new token if it has one."""
        request, sequence = entry.request, entry.sequence
        sequence.num_computed = entry.start + entry.num_tokens
        if entry.num_logits:
            sequence.next_logit = sequence.num_computed
            if request.want_logits:
                request.logits.append(_copy(output.logits, rows))
        if sequence.num_pending:
            return None
        token = int(output.tokens[rows.stop - 1])
        if not 0 <= token < self.program.vocab:
            raise RequestError(f"the model's logits are not numbers (token {token})", place="model")
        sequence.tokens.append(token)
        if token in self.eos_token_ids and not request.ignore_eos:
            self._finish(request, "stop")
        elif len(sequence) == request.max_len:
            self._finish(request, "length")
        return token

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.finish(request)


def _copy(logits: Any, rows: slice) -> Any:
    """A request's own rows: a view would keep the whole step's logits alive."""
    assert logits is not None
    return logits[rows].copy()
