"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from pagec.compiler.artifact import Artifact, open_artifact
from pagec.compiler.errors import RequestError
from pagec.runtime.batch import Batch, build_batch
from pagec.runtime.device import Device
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.setup import measure_cost, open_tiers
from pagec.runtime.kv.swap import HostSwapper
from pagec.runtime.loading import AnyArtifact, LoadOptions, load
from pagec.runtime.loop import Loop, TokenOutput
from pagec.runtime.policies import Policy, make_policy
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.sampling.beam import BeamSearch, BeamSearchParams
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Grammar, Sampler, draw_seed
from pagec.runtime.scheduler import Clock, Entry, Limits, Scheduler
from pagec.runtime.sequence import CommitHook, FinishReason, Request
from pagec.runtime.text.defaults import GenerationDefaults
from pagec.runtime.trace import NO_TRACE, Trace
from pagec.runtime.weights import WeightsMemory

# Steps in flight: a GPU computes one while the host schedules the next, a CPU has no time to spare for that.
GPU_DEPTH: Final = 2
GREEDY_PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=None)


class ForkingGrammar(Protocol):
    """A grammar at its beginning (grammar.py)."""

    def fork(self) -> Grammar:
        """One for a choice of its own."""


class Engine:
    """Generation from an artifact, greedy or sampled.

    `threads`: all cores if not given; `weights` and `weights_memory` as in load_weights; `num_blocks` or
    `kv_bytes` size the KV pool; `prefill_chunk` limits a prompt's tokens in one step, `max_seqs` the
    sequences that run at once; `eos_token_ids`: the artifact's own if not given; `prefix_cache`: prompts
    share the blocks of equal beginnings; `policy`: see policies.py; `depth`: steps in flight at most
    (1 on a CPU, 2 on a GPU if not given); `graph_rows` as in GpuRunner; `clock` gives seconds, for arrivals
    and deadlines.

    Below the pool: `kv_host_bytes` of host memory for cold blocks and preempted requests (`cost`: when those
    are swapped; measured if not given), and the directory `kv_dir`, where `kv_dir_bytes` of cached blocks
    outlive the engine. `close` writes what is cached there; an engine is a context manager, too.
    """

    def __init__(
        self,
        artifact: AnyArtifact | Path,
        *,
        threads: int | None = None,
        weights: str | None = None,
        weights_memory: WeightsMemory = "copy",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        prefill_chunk: int | None = None,
        max_seqs: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        prefix_cache: bool = True,
        policy: str | Policy = "fcfs",
        depth: int | None = None,
        kv_host_bytes: int = 0,
        kv_dir: Path | None = None,
        kv_dir_bytes: int | None = None,
        cost: PreemptionCost | None = None,
        clock: Clock = time.monotonic,
        device: Device | None = None,
        graph_rows: int | None = None,
    ) -> None:
        artifact = open_artifact(artifact) if isinstance(artifact, Path) else artifact
        self.program = program = artifact.program
        options = LoadOptions(weights, weights_memory, num_blocks, kv_bytes, threads, graph_rows)
        self.device, self.runner = load(artifact, options, device)
        if depth is None:
            depth = 1 if isinstance(artifact, Artifact) else GPU_DEPTH
        self.tiers = open_tiers(
            artifact,
            self.runner,
            weights,
            kv_dir=kv_dir,
            kv_dir_bytes=kv_dir_bytes,
            kv_host_bytes=kv_host_bytes,
        )
        limits_bytes = {n: t.limit_bytes for n, t in self.tiers.stats().items()} if self.tiers else {}
        self.ledger = replace(self.runner.ledger, kv_tiers=limits_bytes)
        rows = min(program.capacity.S, max_seqs or program.capacity.S)
        limits = Limits(program.capacity.T, rows, program.max_len, prefill_chunk, logits=program.capacity.R)
        windows = [group.window for group in program.kv.groups]
        blocks = BlockManager(
            self.runner.num_blocks,
            program.kv.block_size,
            windows,
            prefix_cache=prefix_cache,
            tiers=self.tiers,
        )
        swapper = HostSwapper(blocks, self.tiers) if self.tiers and kv_host_bytes else None
        if swapper and cost is None:
            cost = measure_cost(self.runner)
        chosen = make_policy(policy) if isinstance(policy, str) else policy
        self.scheduler = Scheduler(
            blocks, limits, chosen, cost=cost, swapper=swapper, clock=clock, depth=depth
        )
        if eos_token_ids is None:
            eos_token_ids = GenerationDefaults.read(artifact.path).eos_token_ids
        self.eos_token_ids = frozenset(eos_token_ids)
        self.loop = Loop(
            self.scheduler,
            self.runner,
            self._prepare,
            vocab=program.vocab,
            depth=depth,
            wait=self.tiers.wait if self.tiers else lambda: None,
        )
        self._ids = itertools.count()
        self._high_water = 0
        self.runner.expect_blocks(0)

    @property
    def trace(self) -> Trace:
        """Where steps are recorded."""
        return self.runner.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.runner.trace = self.loop.trace = trace or NO_TRACE

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.loop.has_work

    def add_request(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        *,
        params: SamplingParams | None = None,
        ignore_eos: bool | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        grammar: ForkingGrammar | None = None,
        beam: BeamSearchParams | None = None,
        want_logits: bool = False,
        prompt_logits: bool = False,
        salt: str = "",
        priority: int = 0,
        ttft_s: float | None = None,
        token_s: float | None = None,
        width: int = 1,
        on_commit: CommitHook | None = None,
        hook_logits: bool = False,
    ) -> Request:
        """Queues a request; RequestError if it is invalid or could never run.

        `params`: how tokens are chosen (greedily if not given) and when they end; what concerns text (stop
        strings, echo) is for whoever reads the tokens. `max_tokens` and `ignore_eos`, if given, stand in
        place of theirs; without any, there are as many tokens as the model's length leaves. `bad_words` are
        the tokens of params.bad_words, `grammar` is what params.structured_outputs says. `beam`, in place of
        `params`: a beam search, whose results are in `request.hypotheses`. `want_logits` keeps the logits of
        each generated token in `request.logits`, `prompt_logits` those of every prompt position as well. The
        rest as in Request.
        """
        if beam is not None and params is not None:
            raise RequestError("means nothing to a beam search", place="params", remedy="give beam alone")
        params = params or (beam.as_greedy if beam is not None else GREEDY_PARAMS)
        self._check_prompt(prompt)
        if max_tokens is None:
            max_tokens = params.max_tokens or max(self.program.max_len - len(prompt), 1)
        if max_tokens < 1:
            raise RequestError(f"{max_tokens} is less than 1", place="max_tokens")
        for name, seconds in (("ttft_s", ttft_s), ("token_s", token_s)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise RequestError(f"{seconds} is no number of seconds", place=name)
        params.check(vocab=self.program.vocab, max_choices=self.scheduler.limits.max_rows)
        ignores = params.ignore_eos if ignore_eos is None else ignore_eos
        seed = draw_seed() if params.seed is None else params.seed
        ends = frozenset() if ignores else self.eos_token_ids
        if beam is not None:
            beam.check(max_choices=self.scheduler.limits.max_rows)
            width, hook_logits, on_commit = beam.beam_width, True, BeamSearch(beam, max_tokens, ends)
            ends = frozenset()  # end beams, not sequences
        request = Request(
            next(self._ids),
            list(prompt),
            max_tokens,
            len(self.program.kv.groups),
            eos_token_ids=ends,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            n=params.n,
            seed=seed,
            needs_host=params.needs_host,
            logits_processors=tuple(params.logits_processors or ()),
            width=width,
            on_commit=on_commit,
            hook_logits=hook_logits,
            want_logits=want_logits,
            prompt_logits=prompt_logits,
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.num_prompt_logprobs,
            salt=salt,
            priority=priority,
            ttft_s=ttft_s,
            token_s=token_s,
        )
        self.scheduler.check(request)  # before anything is made for what is refused
        request.use_samplers(self._samplers(params, prompt, seed, bad_words, grammar))
        self.scheduler.add(request)
        return request

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("is empty", place="prompt", remedy="give one token at least")
        for token in prompt:
            if not 0 <= token < self.program.vocab:
                raise RequestError(f"token {token} is not in 0..{self.program.vocab - 1}", place="prompt")

    def _samplers(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        seed: int,
        bad_words: Sequence[Sequence[int]],
        grammar: ForkingGrammar | None,
    ) -> list[Sampler]:
        """One for each choice; none if each token is the argmax of the model's logits."""
        if not params.needs_sampling:
            return []
        if params.bad_words and not bad_words:
            raise RequestError("need their tokens", place="bad_words", remedy="see text.bad_word_ids")
        if (grammar is None) != (params.structured_outputs is None):
            raise RequestError(
                "needs a compiled grammar", place="structured_outputs", remedy="see GrammarCompiler"
            )
        return [
            Sampler(
                params,
                prompt,
                vocab=self.program.vocab,
                seed=seed,
                choice=choice,
                eos_token_ids=self.eos_token_ids,
                bad_words=bad_words,
                grammar=grammar.fork() if grammar is not None else None,
            )
            for choice in range(params.n)
        ]

    def abort(self, request: Request, choice: int | None = None, reason: FinishReason = "abort") -> None:
        """Ends a request, or one choice of it, in any state; its blocks are free when the steps in flight are
        done. Idempotent."""
        self.loop.abort(request, choice, reason)

    def step(self) -> list[TokenOutput]:
        """Keeps `depth` steps in flight and ends the oldest; what that brought."""
        return self.loop.step()

    def stream(self) -> Iterator[TokenOutput]:
        """Steps until no request is left."""
        return self.loop.stream()

    def close(self) -> None:
        """Keeps cached blocks in `kv_dir` and ends the engine's threads. Idempotent; no step may follow."""
        self.scheduler.blocks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, entries: Sequence[Entry]) -> Batch:
        blocks = self.scheduler.blocks
        if blocks.high_water > self._high_water:
            self._high_water = blocks.high_water
            self.runner.expect_blocks(self._high_water)
        return build_batch(entries, self.program, blocks.take_copies())
