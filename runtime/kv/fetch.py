"""What of a prefix the tiers below the pool can bring: sends for it, and finds what has come."""

from __future__ import annotations

from typing import Any, NamedTuple

from pagec.runtime.kv.prefix_index import IndexEntry, KvState, PrefixIndex
from pagec.runtime.kv.store import BlockName
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.sequence import Sequence


class Found(NamedTuple):
    """A prefix that can be used: its blocks' entries in the index (None: not there), and the blocks that the
    pool lacks: places (block number, group), names and contents."""

    entries: list[IndexEntry | None]
    places: list[tuple[int, int]]
    names: list[BlockName]
    data: list[Any]


class Fetcher:
    """Looks for the blocks of prefixes in an index and the tiers below."""

    def __init__(self, index: PrefixIndex, tiers: Tiers) -> None:
        self._index, self.tiers = index, tiers

    def is_coming(self, sequence: Sequence, most: int) -> bool:
        """Whether blocks of a prefix of at most so many blocks are on their way to host memory. The first
        to ask sends for them, each sequence once until it starts: so none waits for ever."""
        state, index, tiers = sequence.kv, self._index, self.tiers
        tiers.poll()
        if not state.has_looked:
            entries = index.reach(state, sequence.tokens, most, tiers.has)
            wanted = [
                (name, index.prefix_length(state, number + 1))
                for number, name in _names(state, index.lacking(entries))
                if not tiers.is_ready(*name)
            ]
            state.has_looked = not wanted or tiers.fetch(wanted, index.prefix(state, len(entries)))
        return not state.has_looked or tiers.is_coming(key.hash for key in state.keys)

    def find(self, sequence: Sequence, most: int) -> Found:
        """The longest prefix of at most so many blocks that the pool and host memory have. A hash only finds
        a block; here the prefixes are compared."""
        state, index, tiers = sequence.kv, self._index, self.tiers
        while True:
            entries = index.reach(state, sequence.tokens, most, tiers.is_ready)
            prefix, places = index.prefix(state, len(entries)), index.lacking(entries)
            found = Found(entries, places, [], [])
            for number, name in _names(state, places):
                data = tiers.look(name, prefix, index.prefix_length(state, number + 1))
                if data is None:
                    break  # another's, and forgotten now
                found.names.append(name)
                found.data.append(data)
            else:
                return found

    def move_up(self, found: Found, blocks: list[int]) -> None:
        """Copies what was found into these blocks of the pool."""
        from_disk = self.tiers.move_up(found.names, blocks, found.data)
        numbers = {number for number, _ in found.places}
        disk = {n for (n, _), name in zip(found.places, found.names, strict=True) if name in from_disk}
        size = self._index.block_size
        self.tiers.count_hits((len(numbers) - len(disk)) * size, len(disk) * size)


def _names(state: KvState, places: list[tuple[int, int]]) -> list[tuple[int, BlockName]]:
    """Block numbers, and what the tiers call the blocks."""
    return [(number, BlockName(state.keys[number].hash, group)) for number, group in places]
