"""Hands out the blocks of the KV pool.

    block 0    scratch: what unused entries of a block table point to; never handed out
    free       on a free run, or claimed ahead of need, which any allocation may take
    cached     in no table, but found by the prefix index; evicted when blocks lack
    used       in the tables of `references` sequences

free + cached + used + 1 = total. A sequence has one table per KV group; all groups draw from one pool, and
entry n of every table holds tokens n * block_size on. A group with a window holds its last window only: the
entries before are 0.

    begin   a prefix's cached blocks are taken           before a sequence's first step
    load    and those that have come from lower tiers    then, too
    grow    room for more tokens, blocks made private    before each step
    commit  full blocks are indexed, old ones let go     after each step
    fork    a second sequence over the same blocks
    release
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView
from collections.abc import Sequence as Items
from typing import Final

from pagec.compiler.errors import CapacityError
from pagec.runtime.kv.fetch import Fetcher
from pagec.runtime.kv.free_blocks import FreeBlocks
from pagec.runtime.kv.prefix_index import IndexEntry, KvState, PrefixIndex, sha256
from pagec.runtime.kv.stats import KvStats
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.sequence import Sequence

# An eviction takes so many blocks of one tail at once, so that they come back as a run.
TAIL_BLOCKS: Final = 32


class BlockManager:
    """The owner of all blocks. Tables are changed here only.

    `windows`: the window of each KV group, None for a group whose layers see everything. `tiers`: where
    evicted blocks go, and come back from. `hash_key` can be replaced to force collisions (tests).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Items[int | None] = (None,),
        *,
        prefix_cache: bool = True,
        tiers: Tiers | None = None,
        hash_key: Callable[[bytes], bytes] = sha256,
    ) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks holds no sequence; it needs 2 at least",
                place="num_blocks",
                remedy="give more memory to the KV pool",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.prefix_cache = prefix_cache
        self._tiers = tiers
        self.references = [0] * num_blocks
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._free = FreeBlocks(num_blocks)
        self._tail_blocks = TAIL_BLOCKS
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index = PrefixIndex(num_blocks, block_size, self.windows, hash_key)
        self._fetcher = Fetcher(self._index, tiers) if tiers is not None and prefix_cache else None
        self._copies: list[tuple[int, int]] = []
        self._leaving: list[tuple[IndexEntry, int, int]] = []
        self._live: dict[int, Sequence] = {}
        self._num_shared = self._allocations = self._evictions = self._num_copies = 0
        self._asked_tokens = self._hit_tokens = 0

    @property
    def high_water(self) -> int:
        """One more than the highest block that was ever given out or claimed."""
        return self._free.runs.high_water

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free - self.num_cached

    @property
    def cached(self) -> KeysView[int]:
        """The cached blocks."""
        return self._cached.keys()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks per group that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def needed_at_full_length(self, num_tokens: int, ahead: int | None = None) -> int:
        """Blocks of all groups that a sequence of this length ever holds at once.

        `ahead`: the most tokens between those computed and those that `grow` is asked for. A group with a
        window holds the blocks that a window and so many tokens touch at worst.
        """
        whole = self.blocks_for(num_tokens)
        if ahead is None:
            return whole * len(self.windows)
        total, size = 0, self.block_size
        for window in self.windows:
            total += whole if window is None else min(whole, (window + ahead + size - 3) // size + 1)
        return total

    # ------------------------------------------------------------------------------ prefixes

    def begin(self, sequence: Sequence, salt: str = "") -> int:
        """Takes the cached blocks of a sequence's prefix and sets `num_computed`; the number of tokens.

        They leave `next_logit` and what follows to be computed. Blocks that it has are given back first.
        Sequences of another salt share nothing with it.
        """
        self.release(sequence)
        state = sequence.kv
        sequence.num_computed = 0
        if not self.prefix_cache:
            return 0
        entries = self._index.match(state, sequence.tokens, salt, self._most_hits(sequence))
        if entries:
            state.entry, state.num_indexed = entries[-1], len(entries)
            sequence.num_computed = len(entries) * self.block_size
            for group, table in enumerate(sequence.block_tables):
                first = self._index.first_seen(group, sequence.num_computed)
                table.extend([0] * first)
                table.extend([self._share(entry.blocks[group]) for entry in entries[first:]])
            self._live[id(sequence)] = sequence
        return sequence.num_computed

    def is_awaited(self, sequence: Sequence, salt: str = "") -> bool:
        """Whether another sequence computes the block that follows the cached part of this one's prefix, or
        that is on its way up from a lower tier. The first to ask sends for it.

        Better wait than compute it, too. For a sequence that has not grown yet.
        """
        if not self.prefix_cache:
            return False
        state, most = sequence.kv, self._most_hits(sequence)
        number = len(self._index.match(state, sequence.tokens, salt, most))
        if number == most:
            return False
        is_computed = self._index.is_computed(self._index.key(state, sequence.tokens, number))
        return is_computed or (self._fetcher is not None and self._fetcher.is_coming(sequence, most))

    def load(self, sequence: Sequence) -> int:
        """After `begin`: copies what host memory has of the prefix behind the part in the pool's cache into
        the pool, and sets `num_computed`; the number of tokens. Nothing is done if blocks lack."""
        fetcher, state, index, size = self._fetcher, sequence.kv, self._index, self.block_size
        if fetcher is None or fetcher.tiers.is_empty or state.salt is None:
            return sequence.num_computed
        found = fetcher.find(sequence, self._most_hits(sequence))
        end, needed = len(found.entries), len(found.places)
        known = {block for entry in found.entries if entry for block in entry.blocks}
        available = self.num_free + self.num_cached - len(known & self._cached.keys())
        if end * size <= sequence.num_computed or needed > available:
            return sequence.num_computed
        before, lacking = sequence.block_tables, set(found.places)
        sequence.block_tables = tables = [array("i", [0] * end) for _ in before]
        for number, entry in enumerate(found.entries):
            for group, table in enumerate(tables):
                is_seen = number >= index.first_seen(group, end * size)
                if is_seen and entry is not None and (number, group) not in lacking:
                    table[number] = self._share(entry.blocks[group])
        self._live[id(sequence)] = sequence
        for table in before:
            for block in filter(None, table):
                self._drop(block)
        self._make_free(needed, 0)
        for number, group in found.places:
            block = self._free.take(tables[group][number - 1] if number else 0)
            self.references[block] = 1
            tables[group][number] = block
        self._allocations += needed
        # What was ordered before must neither read nor write these blocks later.
        self.flush_copies()
        fetcher.move_up(found, [tables[group][number] for number, group in found.places])
        sequence.num_computed = end * size
        index.enter(state, sequence.tokens, tables)
        return sequence.num_computed

    def _most_hits(self, sequence: Sequence) -> int:
        """Blocks that a hit may cover: the first position with logits is computed in any case."""
        return min(sequence.next_logit, len(sequence.tokens) - 1) // self.block_size

    def _share(self, block: int) -> int:
        if self.references[block] == 0:
            del self._cached[block]
        self._num_shared += self.references[block] == 1
        self.references[block] += 1
        return block

    # -------------------------------------------------------------------------------- growth

    def grow(self, sequence: Sequence, num_tokens: int, ahead: int = 0) -> bool:
        """Lets a sequence write up to `num_tokens` tokens. False, and nothing changed, if blocks lack.

        Its tables then hold so many tokens, and blocks that it will write are its own: one that a fork
        shares is copied (see take_copies). `ahead`: so many tokens are expected soon; their blocks are
        claimed as far as they are free.
        """
        if num_tokens <= sequence.num_slots:
            return True
        tables, size = sequence.block_tables, self.block_size
        have = len(tables[0]) if tables else 0
        missing = max(-(-num_tokens // size) - have, 0)
        first = sequence.num_computed // size
        shared = self._shared_from(tables, first) if first < have else []
        needed = len(shared) + missing * len(tables)
        if needed > self.num_free + self.num_cached:
            return False
        claims = sequence.kv.claims
        if not claims:
            claims = self._open(sequence)
        if needed > self._free.runs.num_free:
            self._make_free(needed, sum(map(len, claims)))
        self._allocations += needed
        for number, table in shared:
            self._make_private(table, number, is_computed=number * size < sequence.num_computed)
        expected = -(-ahead // size) - have - missing
        for group, table in enumerate(tables):
            for block in self._free.extend(have, table[-1] if have else 0, missing, claims, group, expected):
                self.references[block] = 1
                table.append(block)
        sequence.num_slots = (have + missing) * size
        return True

    def _shared_from(self, tables: Items[array[int]], first: int) -> list[tuple[int, array[int]]]:
        """The places, from block `first` on, that other tables share."""
        return [
            (number, table)
            for number in range(first, len(tables[0]))
            for table in tables
            if self.references[table[number]] > 1
        ]

    def _open(self, sequence: Sequence) -> list[range]:
        """Notes a sequence that is about to be computed."""
        state = sequence.kv
        self._live[id(sequence)] = sequence
        state.has_looked = False
        state.claims = [range(0)] * len(self.windows)
        if state.salt is not None:
            self._asked_tokens += len(sequence.tokens)
            self._hit_tokens += sequence.num_computed
            self._index.announce(state, sequence.tokens)
        return state.claims

    def _make_private(self, table: array[int], number: int, *, is_computed: bool) -> None:
        """Puts an own block in place of a shared one, with its contents if some of it is computed."""
        source = table[number]
        target = self._free.take(table[number - 1] if number else 0)
        self.references[target] = 1
        self.references[source] -= 1
        self._num_shared -= self.references[source] == 1
        table[number] = target
        if is_computed:
            self._copies.append((source, target))
            self._num_copies += 1

    def _make_free(self, needed: int, claimed: int) -> None:
        """Evicts until so many blocks are free; they are there, or cached. `claimed` of them are the table's
        own, the others' are left alone as long as claims are few."""
        free = self._free
        while free.num_free < needed or (
            free.runs.num_free + claimed < needed and free.may_claim and self._cached
        ):
            self._evict_tail()
        if self._leaving and self._fetcher is not None:
            self._fetcher.tiers.move_down(self._leaving)
        self._leaving.clear()

    def _evict_tail(self) -> None:
        """Frees the least recently used blocks, from the end of a prefix towards its beginning."""
        last: IndexEntry | None = None
        for _ in range(self._tail_blocks):
            block = next(iter(self._cached), 0)
            entry = self._index.by_block[block]
            # Blocks that have left a window follow each other the other way round.
            near = last is None or entry in (last, last.parent) or (entry and entry.parent is last)
            if entry is None or not near:
                return
            self._evict(entry, entry.blocks.index(block))
            last = entry

    def _evict(self, entry: IndexEntry, group: int) -> None:
        """Frees an entry's block, and those of all groups if prefixes cannot be found without it."""
        for g in [group] if self.windows[group] is not None else range(len(self.windows)):
            block = entry.blocks[g]
            if block and not self.references[block]:
                del self._cached[block]
                self._leaving.append((entry, g, block))
                self._index.put(entry, g, 0)
                self._free.add(block)
                self._evictions += 1
        self._index.prune(entry)

    # ------------------------------------------------------------------------- after a step

    def commit(self, sequence: Sequence, in_flight: bool = False) -> None:
        """Takes note of a sequence's `num_computed`.

        Blocks that have become full enter the index, or give way to equal ones that are there already;
        blocks that have left their group's window are let go. `in_flight`: one more step, which has begun,
        reads the tables as they are; blocks that gave way are let go at the next commit.
        """
        state, computed = sequence.kv, sequence.num_computed
        if computed < state.commit_at:
            return
        while state.retired:
            self._drop(state.retired.pop())
        full = computed // self.block_size
        if state.salt is not None and full > state.num_indexed:
            self._index_blocks(sequence, full)
            if not in_flight:
                while state.retired:
                    self._drop(state.retired.pop())
        state.commit_at = (full + 1) * self.block_size
        self.drop_behind_windows(sequence)

    def drop_behind_windows(self, sequence: Sequence) -> None:
        """Lets go of blocks that the tokens to come do not see."""
        state = sequence.kv
        for group, window in self._windowed:
            first = self._index.first_seen(group, sequence.num_computed)
            state.commit_at = min(state.commit_at, (first + 1) * self.block_size + window - 1)
            table, number = sequence.block_tables[group], first - 1
            while number >= 0 and table[number]:
                self._drop(table[number])
                table[number] = 0
                number -= 1

    def _index_blocks(self, sequence: Sequence, full: int) -> None:
        index, state, tables = self._index, sequence.kv, sequence.block_tables
        for number in range(state.num_indexed, full):
            key = index.key(state, sequence.tokens, number)
            blocks = [table[number] for table in tables]
            entry = index.add(state, key, blocks) if any(blocks) else None
            if entry is None:
                entry = index.find(key, state.entry, state.salt or "")
                if entry is not None:
                    self._repoint(state, entry, tables, number)
            if entry is None:  # cannot be indexed, so nobody need wait for it
                index.retract(state)
                return
            state.entry, state.num_indexed = entry, number + 1
        index.announce(state, sequence.tokens)

    def _repoint(self, state: KvState, entry: IndexEntry, tables: Items[array[int]], number: int) -> None:
        """Uses the blocks of the index in place of own ones with the same contents."""
        for group, table in enumerate(tables):
            own, known = table[number], entry.blocks[group]
            if own and known and own != known:
                table[number] = self._share(known)
                state.retired.append(own)
            elif own and not known:
                self._index.put(entry, group, own)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a new sequence with the same computed tokens the same blocks, until one of both writes."""
        state = parent.kv
        keep = self.blocks_for(parent.num_computed)
        child.block_tables = [table[:keep] for table in parent.block_tables]
        child.kv = KvState(
            salt=state.salt,
            keys=list(state.keys),
            entry=state.entry,
            num_indexed=state.num_indexed,
            claims=[range(0)] * len(self.windows),
            commit_at=state.commit_at,
        )
        for table in child.block_tables:
            for block in table:
                if block:
                    self._share(block)
        # Whoever writes first into the last block must copy it.
        child.num_slots = parent.num_slots = 0
        self._live[id(child)] = child

    def release(self, sequence: Sequence) -> None:
        """Empties a sequence's tables: indexed blocks that no other has become cached, the rest free.
        Idempotent."""
        state, tables = sequence.kv, sequence.block_tables
        self._index.retract(state)
        for group in range(len(state.claims)):
            self._free.unclaim(state.claims, group)
        while state.retired:
            self._drop(state.retired.pop())
        # The last block first: it is the first to be evicted.
        for number in range(len(tables[0]) - 1, -1, -1) if tables else ():
            for table in tables:
                if table[number]:
                    self._drop(table[number])
        for table in tables:
            del table[:]
        state.claims = []
        state.entry, state.num_indexed, state.commit_at = None, 0, 0
        sequence.num_slots = 0
        self._live.pop(id(sequence), None)

    def _drop(self, block: int) -> None:
        assert self.references[block] > 0, f"block {block} is not in use"
        self.references[block] -= 1
        self._num_shared -= self.references[block] == 1
        if self.references[block] == 0:
            if self._index.by_block[block] is not None:
                self._cached[block] = None
            else:
                self._free.add(block)

    # ----------------------------------------------------------------------------- reporting

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) of the blocks to copy before the next step, in order; each is given once."""
        copies, self._copies = self._copies, []
        return copies

    def flush_copies(self) -> None:
        """Has the ordered copies made now, between steps, because blocks are read or written outside one."""
        if self._copies and self._tiers is not None:
            self._tiers.pool.copy_blocks(self.take_copies())

    def close(self) -> None:
        """Moves all that the cache holds down to the disk, if there is one, and ends the copies."""
        if self._tiers is None or self._tiers.is_closed:
            return
        if self.prefix_cache:
            entries = self._index.entries.values()
            self._tiers.save([(e, g, block) for e in entries for g, block in enumerate(e.blocks) if block])
        self._tiers.close()

    def stats(self) -> KvStats:
        """The state of the pool and what has happened."""
        return KvStats(
            free=self.num_free,
            cached=self.num_cached,
            used=self.num_used,
            shared=self._num_shared,
            allocations=self._allocations,
            evictions=self._evictions,
            copies=self._num_copies,
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            tiers=self._tiers.stats() if self._tiers is not None else {},
        )

    def fragmentation(self) -> float:
        """1 - longest free run / free; 0 if nothing is free."""
        return self._free.fragmentation()

    def mean_run(self) -> float:
        """Blocks of a table that are neighbours, on average; looks at every table."""
        blocks = runs = 0
        for sequence in self._live.values():
            for table in sequence.block_tables:
                before = 0
                for block in table:
                    if block:
                        blocks += 1
                        runs += before == 0 or block != before + 1
                    before = block
        return blocks / runs if runs else 0.0

    def check(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Asserts that the books are right (tests). `sequences`: all that hold blocks."""
        counts = [0] * self.num_blocks
        live = list(self._live.values() if sequences is None else sequences)
        for sequence in live:
            for table in (*sequence.block_tables, sequence.kv.retired):
                for block in table:
                    counts[block] += block > 0
        assert counts == self.references, "reference counts differ from the tables"
        assert self._num_shared == sum(count > 1 for count in counts)
        free = self._free.check()
        used = [block for block, count in enumerate(counts) if count]
        assert (len(free), len(used)) == (self.num_free, self.num_used)
        everything = sorted([0, *free, *self._cached, *used])
        assert everything == list(range(self.num_blocks)), "a block is lost, or in two states"
        self._index.check({*self._cached, *used}, [sequence.kv for sequence in live])
