"""Forks, shared prefixes and windows on a real pool: every logit is, bit by bit, that of the sequence alone.

The pool is filled with NaN first. What lies in the blocks is checked by what the model makes of it.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import llama_text
from support.small import small_artifact

from pagec.compiler.artifact import Artifact
from pagec.runtime.batch import build_batch
from pagec.runtime.device.cpu import CpuDevice
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.runner import Runner
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request, Sequence

NUM_BLOCKS = 40


def windowed_artifact(path: Path) -> Path:
    from pagec.compiler.driver import CompileOptions, compile_model

    (path / "spec.yaml").write_text(llama_text(max_len=1024, window=40))
    options = CompileOptions(
        model=str(path / "spec.yaml"), weights="random:1", output=path / "out", max_step_tokens=64
    )
    return compile_model(options, lambda *_: None).path


class Model:
    """A runner whose sequences a test drives step by step."""

    def __init__(self, path: Path) -> None:
        artifact = Artifact.open(path)
        self.program = artifact.program
        self.windows = [group.window for group in self.program.kv.groups]
        self.runner = Runner(artifact, CpuDevice(path, threads=2), num_blocks=NUM_BLOCKS)

    def start(self, *, prefix_cache: bool = True, num_blocks: int = NUM_BLOCKS) -> BlockManager:
        """A fresh block manager over a poisoned pool."""
        self.runner.fill_kv_with_nan()
        self.blocks = BlockManager(
            num_blocks, self.program.kv.block_size, self.windows, prefix_cache=prefix_cache
        )
        return self.blocks

    def new(self, tokens: list[int]) -> Sequence:
        tables = [array("i") for _ in self.windows]
        return Sequence(list(tokens), len(tokens), len(tokens) - 1, tables, max_len=self.program.max_len)

    def fork(self, parent: Sequence, token: int) -> Sequence:
        """A second sequence that goes on with another token."""
        child = self.new([*parent.tokens[: parent.num_computed], token])
        child.num_computed = parent.num_computed
        self.blocks.fork(parent, child)
        return child

    def step(self, steps: list[tuple[Sequence, int]]) -> list[Any]:
        """So many tokens of each sequence; their logits. Those that find no blocks are left out."""
        entries = []
        for own, count in steps:
            request = Request(0, own.tokens, 1, len(self.windows), want_logits=True)
            if self.blocks.grow(own, own.num_computed + count):
                entries.append(Entry(request, own, own.num_computed, count, count))
        if not entries:
            return []
        output = self.runner.run(build_batch(entries, self.program, self.blocks.take_copies()))
        for entry in entries:
            entry.sequence.num_computed += entry.num_tokens
            self.blocks.commit(entry.sequence)
        self.blocks.check()
        assert output.logits is not None
        return np.split(output.logits, np.cumsum([entry.num_tokens for entry in entries])[:-1])

    def alone(self, tokens: list[int]) -> Any:
        """The logits of all positions, computed by itself."""
        self.start(prefix_cache=False)
        own = self.new(tokens)
        rows = []
        while own.num_computed < len(tokens):
            rows += self.step([(own, min(64, len(tokens) - own.num_computed))])
        return np.concatenate(rows)


@pytest.fixture(scope="module", params=["global", "window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("tvm")
    is_global = request.param == "global"
    return Model(small_artifact() if is_global else windowed_artifact(tmp_path_factory.mktemp("window")))


class Rows:
    """The logits of each sequence by position, to be compared with those of the sequence alone."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], int, bytes]] = []

    def add(self, own: Sequence, logits: Any) -> None:
        for number, row in enumerate(logits, own.num_computed - len(logits)):
            self.rows.append((own.tokens[: number + 1], number, row.tobytes()))

    def check(self, model: Model) -> None:
        """Against the longest sequences that contain them."""
        longest: dict[tuple[int, ...], Any] = {}
        for tokens, number, row in sorted(self.rows, key=lambda r: -len(r[0])):
            key = next((k for k in longest if list(k[: len(tokens)]) == tokens), None)
            if key is None:
                key = tuple(tokens)
                longest[key] = model.alone(tokens)
            assert longest[key][number].tobytes() == row, (len(tokens), number)


@pytest.mark.parametrize("length", [31, 32, 33, 45])
def test_forks_go_on_as_if_alone(model: Model, length: int) -> None:
    rng, rows = random.Random(length), Rows()
    model.start()
    family = [model.new([rng.randrange(256) for _ in range(length)])]
    rows.add(family[0], *model.step([(family[0], length)]))
    for number in range(40):
        if number in (0, 1, 9, 20):
            family.append(model.fork(family[number % 3 % len(family)], rng.randrange(256)))
        rng.shuffle(family)
        for own in family:
            if own.num_computed == len(own.tokens):
                own.tokens.append(rng.randrange(256))
        for own, logits in zip(family, model.step([(own, 1) for own in family]), strict=True):
            rows.add(own, logits)
    assert 1 <= model.blocks.stats().copies <= 4  # at most one per fork, none at the end of a block
    rows.check(model)


def test_a_prefix_hit_gives_the_same_bits(model: Model) -> None:
    rng, rows = random.Random(0), Rows()
    trunk = [rng.randrange(256) for _ in range(100)]
    model.start()
    for length in (100, 64, 65, 90, 100):
        own = model.new(trunk[:length] + [rng.randrange(256) for _ in range(20)])
        hit = model.blocks.begin(own)
        assert hit == (0 if not rows.rows else length // 16 * 16)
        while own.num_computed < len(own.tokens):
            rows.add(own, *model.step([(own, min(30, len(own.tokens) - own.num_computed))]))
        model.blocks.release(own)
    rows.check(model)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_gives_the_same_bits(model: Model, seed: int) -> None:
    """Starts, hits, forks, steps and ends in a pool that is too small."""
    rng, rows = random.Random(seed), Rows()
    model.start(num_blocks=24)
    trunk = [rng.randrange(256) for _ in range(150)]
    live: list[Sequence] = []
    for _ in range(120):
        action = rng.random()
        if action < 0.15 and len(live) < 6:
            live.append(model.new(trunk[: rng.randrange(1, 150)] + [rng.randrange(256) for _ in range(10)]))
            model.blocks.begin(live[-1])
        elif action < 0.25 and live and len(live) < 6:
            live.append(model.fork(rng.choice(live), rng.randrange(256)))
        elif action < 0.35 and live:
            model.blocks.release(live.pop(rng.randrange(len(live))))
        for own in live:
            count = min(len(own.tokens) - own.num_computed, 10) or 1
            own.tokens += [rng.randrange(256)] * (own.num_computed + count - len(own.tokens))
            for logits in model.step([(own, count)]):
                rows.add(own, logits)
    stats = model.blocks.stats()
    assert stats.hit_tokens > 0
    assert stats.evictions > 0
    assert stats.copies > 0
    rows.check(model)
