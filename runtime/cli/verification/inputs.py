"""Random steps: sequences that have some tokens before and get some now, and what their rows ask for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.program import Program
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Row as SamplingRow
from pagec.runtime.sampling.sampler import Sampler
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

# (tokens before, tokens now) of each sequence.
Step = Sequence[tuple[int, int]]


def fitting(program: Program | GpuProgram, step: Step) -> list[tuple[int, int]]:
    """As much of a step as the capacity allows."""
    room, found = program.capacity.T, []
    for before, now in step[: program.capacity.S]:
        before = min(before, program.max_len - 1)
        now = min(now, room, program.max_len - before)
        if now:
            found.append((before, now))
        room -= now
    return found


def random_entries(
    program: Program | GpuProgram, num_blocks: int, step: Step, rng: np.random.Generator
) -> list[Entry]:
    """Entries with random tokens, their blocks drawn at random from the pool."""
    kv = program.kv
    free = list(rng.permutation(np.arange(1, num_blocks)))
    room = program.capacity.R
    entries: list[Entry] = []
    for before, now in step:
        tokens = rng.integers(0, program.vocab, before + now).tolist()
        request = Request(len(entries), tokens, 1, len(kv.groups), want_logits=True)
        sequence = request.sequences[0]
        for table in sequence.block_tables:
            table.extend(int(free.pop()) for _ in range(-(-(before + now) // kv.block_size)))
        num_logits = min(now, room)
        room -= num_logits
        entries.append(Entry(request, sequence, before, now, num_logits))
    return entries


def random_sampling(vocab: int, num_rows: int, rng: np.random.Generator) -> list[SamplingRow]:
    """What each logit row asks of sampling: something of everything."""
    rows = []
    for i in range(num_rows):
        seen = rng.integers(0, vocab, 8).tolist()
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
            top_k=(0, 20)[i // 4 % 2],
            top_p=(1.0, 0.9)[i // 8 % 2],
            min_p=(0.0, 0.01)[i // 2 % 2],
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            logit_bias={seen[0]: 2.0},
            allowed_token_ids=range(i % 2, vocab, 2) if i % 3 == 0 else None,
            logprobs=0,
        )
        one = Sampler(params, seen[:4], vocab=vocab, seed=int(rng.integers(2**63)))
        rows.append(one.row(seen))
    return rows
