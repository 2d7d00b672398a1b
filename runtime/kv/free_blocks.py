"""Free blocks: runs of neighbours that nobody wants yet, and runs that a block table has claimed.

A table grows into its claim, then into the blocks that follow its last one, then into the longest run. Each
time it takes blocks from a run it claims as many more as it then has, so its pieces double in length. A claim
is a hint: its blocks are free, and go to whoever finds nothing else.

Both ends of a run know it (boundary tags, Knuth, The Art of Computer Programming 1, 2.5), so that a block
that comes back finds its neighbours at once; runs of equal length lie together, so that the longest is found
without a search. Every operation costs the same however many blocks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

# The most blocks of a claim.
MAX_CLAIM: Final = 32
# A claim takes this part of what is left, or as much as all claims together have this part of the pool.
CLAIM_SHARE: Final = 1 / 8


class FreeRuns:
    """A set of block ids below `num_blocks`; 0 is never among them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self.high_water = 0  # one more than the highest block that was ever taken
        # By the first block of a run: its length; by its last block: its first. 0 elsewhere.
        self._length = [0] * (num_blocks + 1)
        self._first = [0] * (num_blocks + 1)
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []  # a heap of negated lengths; may name some that are gone
        self.add(1, num_blocks)

    def __iter__(self) -> Iterator[range]:
        """All runs, in no order."""
        for length, starts in self._by_length.items():
            for start in starts:
                yield range(start, start + length)

    def add(self, start: int, stop: int) -> None:
        """Blocks start .. stop - 1, none of which is free, become free."""
        assert 0 < start <= stop
        self.num_free += stop - start
        if start == stop:
            return
        if before := self._first[start - 1]:
            self._remove(before)
            start = before
        if after := self._length[stop]:
            self._remove(stop)
            stop += after
        self._insert(start, stop - start)

    def take(self, start: int, count: int) -> range:
        """Takes at most `count` blocks of the run that begins with `start`."""
        length = self._length[start]
        assert length > 0, f"no free run begins with block {start}"
        count = min(count, length)
        self._remove(start)
        if count < length:
            self._insert(start + count, length - count)
        self.num_free -= count
        self.high_water = max(self.high_water, start + count)
        return range(start, start + count)

    def begins(self, block: int) -> bool:
        """Whether a run begins here: so it is with a free block behind one that is not."""
        return self._length[block] > 0

    def longest(self) -> range:
        """A run that no other exceeds; empty if nothing is free."""
        while self._lengths:
            length = -self._lengths[0]
            if starts := self._by_length.get(length):
                start = next(iter(starts))
                return range(start, start + length)
            heappop(self._lengths)
        return range(0)

    def _insert(self, start: int, length: int) -> None:
        self._length[start] = length
        self._first[start + length - 1] = start
        starts = self._by_length.get(length)
        if starts is None:
            starts = self._by_length[length] = {}
            heappush(self._lengths, -length)
        starts[start] = None

    def _remove(self, start: int) -> None:
        length = self._length[start]
        self._length[start] = self._first[start + length - 1] = 0
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            del self._by_length[length]


class FreeBlocks:
    """All free blocks. A table's claim stands in `claims[group]` of whoever owns the table."""

    def __init__(self, num_blocks: int) -> None:
        self.runs = FreeRuns(num_blocks)
        self.num_claimed = 0
        self._claims: dict[int, tuple[list[range], int]] = {}  # by the end of the claim, newest last
        self._allowance = int(num_blocks * CLAIM_SHARE)

    @property
    def num_free(self) -> int:
        return self.runs.num_free + self.num_claimed

    @property
    def may_claim(self) -> bool:
        """Whether claims are few enough that cached blocks rather than they should give way."""
        return self.num_claimed < self._allowance

    def add(self, block: int) -> None:
        """A block that nobody holds any more."""
        self.runs.add(block, block + 1)

    def take(self, last: int) -> int:
        """One block, the one behind `last` if possible (0: any). There must be one."""
        return self.runs.take(self._place(last), 1).start

    def claimed(self, claims: list[range], group: int) -> int:
        """The next block of a claim; 0 if it is used up."""
        claim = claims[group]
        if not claim:
            return 0
        block, stop = claim.start, claim.stop
        self.num_claimed -= 1
        if block + 1 == stop:
            del self._claims[stop]
        claims[group] = range(block + 1, stop)
        return block

    def extend(
        self, num_blocks: int, last: int, count: int, claims: list[range], group: int, ahead: int
    ) -> list[int]:
        """`count` blocks for a table of `num_blocks` that ends with block `last`. There must be as many.

        `ahead`: so many more will be wanted soon, which are claimed like those of a doubling.
        """
        if count == 1 and (block := self.claimed(claims, group)):
            return [block]
        taken: list[int] = []
        while count:
            claim = claims[group]
            if not claim:
                start = self._place(last)
                claim = self.runs.take(start, count + self._more(num_blocks + count, count, ahead))
                self._claims[claim.stop] = claims, group
                self.num_claimed += len(claim)
            now, claims[group] = claim[:count], claim[count:]
            self.num_claimed -= len(now)
            if not claims[group]:
                del self._claims[claim.stop]
            taken.extend(now)
            last = now[-1]
            num_blocks += len(now)
            count -= len(now)
        return taken

    def _more(self, num_blocks: int, count: int, ahead: int) -> int:
        """How many blocks a table that will have `num_blocks` claims, when it takes `count`."""
        left = int((self.runs.num_free - count) * CLAIM_SHARE)
        return max(
            min(max(num_blocks, ahead), max(MAX_CLAIM, ahead), max(left, self._allowance - self.num_claimed)),
            0,
        )

    def unclaim(self, claims: list[range], group: int) -> None:
        """Gives a claim up."""
        if claim := claims[group]:
            del self._claims[claim.stop]
            self.num_claimed -= len(claim)
            self.runs.add(claim.start, claim.stop)
            claims[group] = range(0)

    def _place(self, last: int) -> int:
        """Where a run begins, behind `last` if possible."""
        if last and self.runs.begins(last + 1):
            return last + 1
        if not self.runs.num_free:
            # The newest claim is the one of which least has been used.
            self.unclaim(*self._claims[next(reversed(self._claims))])
        return self.runs.longest().start

    def fragmentation(self) -> float:
        """1 - longest free run / free, claimed blocks included; 0 if nothing is free."""
        longest = end = length = 0
        claimed = (claims[group] for claims, group in self._claims.values())
        for run in sorted([*self.runs, *claimed], key=lambda run: run.start):
            length = length + len(run) if run.start == end else len(run)
            longest, end = max(longest, length), run.stop
        return 1 - longest / self.num_free if self.num_free else 0.0

    def check(self) -> list[int]:
        """Asserts that the books are right (tests); all free blocks."""
        claimed = [claims[group] for claims, group in self._claims.values()]
        assert [claim.stop for claim in claimed] == list(self._claims)
        assert all(claimed)
        assert sum(len(claim) for claim in claimed) == self.num_claimed
        runs = sorted(self.runs, key=lambda run: run.start)
        assert all(a.stop < b.start for a, b in pairwise(runs)), "neighbouring runs"
        assert max(map(len, runs), default=0) == len(self.runs.longest())
        assert sum(map(len, runs)) == self.runs.num_free
        free = [block for run in (*runs, *claimed) for block in run]
        assert len(set(free)) == len(free), "a block is free twice"
        return free
