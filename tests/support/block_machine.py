"""Any order of operations on the block manager, against a pool whose slots know what they hold.

A slot holds (group, salt, all tokens up to its own). A step first makes the copies that were ordered, then
writes its slots, then reads all that its tokens see; so blocks shared wrongly, given away too early or copied
wrongly are seen by what they hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.prefix_index import sha256
from pagec.runtime.sequence import Sequence

BLOCK = 4
# A part of one trunk and a little more, so that prefixes are often equal.
PROMPTS = st.builds(
    lambda length, tail: [1] * length + tail,
    st.integers(0, 26),
    st.lists(st.integers(1, 2), min_size=1, max_size=5),
)
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "sha256": sha256,
    "three values": lambda data: bytes([sha256(data)[0] % 3]),
    "one value": lambda data: b"",  # noqa: ARG005
}


class BlockMachine(RuleBasedStateMachine):
    """One block manager, the pool it stands for, and the sequences that live."""

    @initialize(
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (None, 8, 1), (3, None)]),
        hashing=st.sampled_from(["sha256", "sha256", "three values", "one value"]),
        num_blocks=st.integers(6, 40),
        prefix_cache=st.sampled_from([True, True, True, False]),
        tail_blocks=st.sampled_from([1, 2, 32]),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        hashing: str,
        num_blocks: int,
        prefix_cache: bool,
        tail_blocks: int,
    ) -> None:
        self.begin_machine(windows, hashing, num_blocks, prefix_cache, tail_blocks)

    def begin_machine(
        self,
        windows: tuple[int | None, ...],
        hashing: str,
        num_blocks: int,
        prefix_cache: bool,
        tail_blocks: int,
    ) -> None:
        self.slots: list[list[Any]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.blocks = self.make_blocks(num_blocks, windows, prefix_cache, HASHES[hashing])
        self.blocks._tail_blocks = tail_blocks
        self.windows = windows
        self.exact = hashing == "sha256"
        self.live: list[Sequence] = []
        self.salts: dict[int, str | None] = {}
        self.in_flight: dict[int, list[list[int]]] = {}  # tables that a step in flight reads

    def make_blocks(
        self,
        num_blocks: int,
        windows: tuple[int | None, ...],
        prefix_cache: bool,
        hash_key: Callable[[bytes], bytes],
    ) -> BlockManager:
        return BlockManager(num_blocks, BLOCK, windows, prefix_cache=prefix_cache, hash_key=hash_key)

    @property
    def holders(self) -> list[Sequence]:
        """All that may have blocks."""
        return self.live

    def is_coming(self, own: Sequence) -> bool:  # noqa: ARG002
        """Whether blocks of its prefix come from elsewhere."""
        return False

    def pick(self, number: int) -> Sequence:
        return self.live[number % len(self.live)]

    def new(self, tokens: list[int], salt: str | None) -> Sequence:
        own = Sequence(
            list(tokens), len(tokens), len(tokens) - 1, [array("i") for _ in self.windows], max_len=1 << 20
        )
        self.live.append(own)
        self.salts[id(own)] = salt
        return own

    # -------------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.live) < 8)
    @rule(tokens=PROMPTS, salt=st.sampled_from(["", "", "", "b"]), count=st.sampled_from([0, 3, 4, 9, 40]))
    def begin(self, tokens: list[int], salt: str, count: int) -> None:
        own = self.new(tokens, salt)
        self.take_prefix(own, salt)
        if count:
            self.step(own, min(own.num_computed + count, len(tokens)), len(tokens))

    @precondition(lambda self: len(self.live) < 8)
    @rule(tokens=PROMPTS)
    def begin_without_sharing(self, tokens: list[int]) -> None:
        self.step(self.new(tokens, None), len(tokens))

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 7))
    def begin_again(self, number: int) -> None:
        """As after a preemption."""
        own = self.pick(number)
        self.blocks.release(own)
        self.in_flight.pop(id(own), None)
        salt = self.salts[id(own)]
        own.next_logit = len(own.tokens) - 1
        own.num_computed = 0
        if salt is not None:
            self.take_prefix(own, salt)

    @precondition(lambda self: self.live)
    @rule(
        number=st.integers(0, 7),
        count=st.integers(1, 9),
        token=st.sampled_from([1, 1, 1, 2]),
        ahead=st.sampled_from([0, 0, 30]),
    )
    def write(self, number: int, count: int, token: int, ahead: int) -> None:
        own = self.pick(number)
        end = own.num_computed + count
        own.tokens += [token] * (end - len(own.tokens))
        self.step(own, end, ahead)

    @precondition(lambda self: self.live)
    @rule(
        numbers=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
        token=st.sampled_from([1, 1, 1, 2]),
    )
    def decode(self, numbers: list[int], token: int) -> None:
        """A token each, several times over."""
        for own in {id(own): own for own in map(self.pick, numbers)}.values():
            for _ in range(3):
                end = own.num_computed + 1
                own.tokens += [token] * (end - len(own.tokens))
                if not self.step(own, end):
                    break

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 7), first=st.integers(1, 6), token=st.sampled_from([1, 2]))
    def overlap(self, number: int, first: int, token: int) -> None:
        """A step is committed while the next one, which reads the tables as they were, is in flight."""
        own = self.pick(number)
        end = own.num_computed + first + 1
        own.tokens += [token] * (end - len(own.tokens))
        if self.grow(own, end):
            self.execute(own, end - 1)
            tables = [list(table) for table in own.block_tables]
            self.execute(own, end, own.num_computed + first)
            own.num_computed = end - 1
            self.commit(own, in_flight=True)
            self.in_flight[id(own)] = tables

    @precondition(lambda self: 0 < len(self.live) < 8)
    @rule(number=st.integers(0, 7))
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        if id(parent) in self.in_flight:
            return  # forks are made with no step in flight
        child = self.new(parent.tokens[: parent.num_computed + 1], self.salts[id(parent)])
        child.num_computed = parent.num_computed
        self.blocks.fork(parent, child)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 7))
    def finish(self, number: int) -> None:
        own = self.pick(number)
        self.blocks.release(own)
        self.blocks.release(own)
        assert not any(own.block_tables)
        self.live.remove(own)
        self.in_flight.pop(id(own), None)

    @rule()
    def finish_all(self) -> None:
        while self.live:
            self.finish(0)
        assert self.blocks.num_used == 0 or len(self.holders) > 0

    # ------------------------------------------------------------------------------- checks

    def take_prefix(self, own: Sequence, salt: str) -> None:
        awaited = self.blocks.is_awaited(own, salt)
        hit = self.blocks.begin(own, salt)
        assert hit == own.num_computed
        assert hit % BLOCK == 0
        assert hit <= own.next_logit
        if self.exact and self.blocks.prefix_cache:
            end = hit + BLOCK
            expected = (
                end <= own.next_logit
                and any(
                    other is not own
                    and other.kv.computing is not None  # it has grown, and its tokens are known
                    and self.salts[id(other)] == salt
                    and other.kv.num_indexed * BLOCK == hit
                    and other.tokens[:end] == own.tokens[:end]
                    for other in self.holders
                )
            )
            assert awaited == (expected or (self.is_coming(own) and end <= own.next_logit))
        self.read(own, hit, hit + 1)

    def step(self, own: Sequence, end: int, ahead: int = 0) -> bool:
        before = own.num_computed
        if not self.grow(own, end, ahead):
            return False
        self.execute(own, end)
        own.num_computed = end
        self.commit(own)
        for table in own.block_tables:
            assert len(table) * BLOCK - end < BLOCK
        held = sum(block > 0 for table in own.block_tables for block in table)
        assert held <= self.blocks.needed_at_full_length(end, end - before)
        return True

    def grow(self, own: Sequence, end: int, ahead: int = 0) -> bool:
        """What is promised: it fails only if it must, and then nothing has changed."""
        blocks = self.blocks
        self.in_flight.pop(id(own), None)
        tables, references = [list(t) for t in own.block_tables], list(blocks.references)
        state = own.num_slots, blocks.num_free, list(blocks._cached), list(blocks._copies)
        have = len(tables[0])
        needed = max(-(-end // BLOCK) - have, 0) * len(tables)
        written = {t[n] for t in tables for n in range(own.num_computed // BLOCK, have)}
        needed += sum(references[block] > 1 for block in written)
        fits = blocks.grow(own, end, ahead)
        assert fits == (needed <= state[1] + len(state[2]))
        if not fits:
            assert [list(t) for t in own.block_tables] == tables
            assert blocks.references == references
            assert state == (own.num_slots, blocks.num_free, list(blocks._cached), list(blocks._copies))
            return False
        assert own.num_slots >= end
        for table in own.block_tables:
            assert len(table) >= -(-end // BLOCK)
            assert all(blocks.references[b] == 1 for b in table[own.num_computed // BLOCK :])
        return True

    def execute(self, own: Sequence, end: int, start: int | None = None) -> None:
        """A step on the pool: copies, writes, reads."""
        for source, target in self.blocks.take_copies():
            self.slots[target] = list(self.slots[source])
        start = own.num_computed if start is None else start
        for position in range(start, end):
            for group, table in enumerate(own.block_tables):
                block = table[position // BLOCK]
                assert block > 0
                self.slots[block][position % BLOCK] = self.contents(own, group, position)
        self.read(own, start, end)

    def commit(self, own: Sequence, in_flight: bool = False) -> None:
        before = [list(table) for table in own.block_tables]
        self.blocks.commit(own, in_flight)
        if in_flight:
            for group, table in enumerate(before):
                seen = range(self.first_seen(group, own.num_computed) // BLOCK, len(table))
                assert all(self.blocks.references[table[n]] for n in seen)

    def first_seen(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0)

    def contents(self, own: Sequence, group: int, position: int) -> Any:
        return group, self.salts[id(own)], tuple(own.tokens[: position + 1])

    def read(self, own: Sequence, start: int, end: int) -> None:
        """What tokens start .. end - 1 see before themselves, and themselves if they are written."""
        for group, table in enumerate(own.block_tables):
            for position in range(self.first_seen(group, start), min(end, own.num_computed)):
                block = table[position // BLOCK]
                assert block > 0
                found = self.slots[block][position % BLOCK]
                assert found == self.contents(own, group, position)

    @invariant()
    def the_next_tokens_would_read_what_they_should(self) -> None:
        for own in getattr(self, "live", ()):
            self.read(own, own.num_computed, own.num_computed + 1)

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "live"):
            self.blocks.check(self.holders)

    @invariant()
    def no_block_was_evicted_before_its_successors(self) -> None:
        everywhere = [g for g, window in enumerate(getattr(self, "windows", ())) if window is None]
        for group in everywhere:
            for entry in self.blocks._index.entries.values():
                assert entry.blocks[group]
