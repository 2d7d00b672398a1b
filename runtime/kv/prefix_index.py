"""Finds blocks by the tokens that they and all blocks before them hold.

    key of block n    sha256(key of block n - 1, its tokens); before block 0 stands sha256(salt)
    entry             a full, computed block: its key, the entry before it, its block in each KV group

A key only finds an entry. What is handed out is decided by comparing the salt and the tokens of every block
from the first on, so two prefixes with one key never share anything; the later one is not indexed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple


def sha256(data: bytes) -> bytes:
    """The hash of keys."""
    return hashlib.sha256(data).digest()


class BlockKey(NamedTuple):
    """A block's chained hash and its tokens (int32)."""

    hash: bytes
    tokens: bytes


@dataclass(slots=True, eq=False)
class IndexEntry:
    """A full block of a prefix. `blocks`: where it lies in each KV group, 0 where it is no longer."""

    key: BlockKey
    salt: str
    parent: IndexEntry | None
    blocks: list[int]
    num_children: int = 0
    is_indexed: bool = True


def prefix_of(entry: IndexEntry) -> bytes:
    """Salt and tokens of the prefix that ends with an entry's block."""
    parts, salt = [], entry.salt
    at: IndexEntry | None = entry
    while at is not None:
        parts.append(at.key.tokens)
        at = at.parent
    return _salt_bytes(salt) + b"".join(reversed(parts))


def _salt_bytes(salt: str) -> bytes:
    text = salt.encode()
    return len(text).to_bytes(4, "little") + text


@dataclass(slots=True, eq=False)
class KvState:
    """What the block manager notes about a sequence.

    `entry` is the index entry of the last of its `num_indexed` leading blocks; `keys` those of its leading
    full blocks, as far as they have been asked for; `salt` is None if it shares nothing. `computing` is the
    hash of the block that others wait for. `claims`: a run of blocks per table, see free_blocks. `retired`:
    blocks that only a step in flight still reads. No commit has anything to do before `commit_at` tokens.
    `has_looked`: lower tiers have been asked for its prefix.
    """

    salt: str | None = None
    keys: list[BlockKey] = field(default_factory=list)
    entry: IndexEntry | None = None
    num_indexed: int = 0
    computing: bytes | None = None
    claims: list[range] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    commit_at: int = 0
    has_looked: bool = False


class PrefixIndex:
    """All entries, by key and by block; and which blocks are being computed, by hash.

    `windows`: the window of each KV group, None for those whose layers see everything.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        hash_key: Callable[[bytes], bytes] = sha256,
    ) -> None:
        self.block_size = block_size
        self.by_block: list[IndexEntry | None] = [None] * num_blocks
        self.entries: dict[bytes, IndexEntry] = {}
        self._windows = windows
        self._windowed = [group for group, window in enumerate(windows) if window is not None]
        self._global = [group for group, window in enumerate(windows) if window is None]
        self._hash = hash_key
        self._pack = Struct(f"{block_size}i").pack
        self._computing: dict[bytes, int] = {}

    # ------------------------------------------------------------------------------- looking

    def key(self, state: KvState, tokens: Sequence[int], number: int) -> BlockKey:
        """The key of a sequence's block, whose tokens are known. To be asked for in order, from block 0 on.

        Keys are kept, but a token may change until it is computed: what is kept must be of these tokens.
        """
        keys, start = state.keys, number * self.block_size
        own = self._pack(*tokens[start : start + self.block_size])
        if number < len(keys):
            if keys[number].tokens == own:
                return keys[number]
            del keys[number:]
        before = keys[number - 1].hash if number else self._hash((state.salt or "").encode())
        key = BlockKey(self._hash(before + own), own)
        keys.append(key)
        return key

    def find(self, key: BlockKey, parent: IndexEntry | None, salt: str) -> IndexEntry | None:
        """The entry of the block with these tokens that follows `parent` (None: the first block)."""
        entry = self.entries.get(key.hash)
        if entry is None or entry.parent is not parent:
            return None
        return entry if entry.key.tokens == key.tokens and entry.salt == salt else None

    def match(self, state: KvState, tokens: Sequence[int], salt: str, most: int) -> list[IndexEntry]:
        """The longest prefix of at most so many blocks that can be used: all its blocks are there in global
        groups, those of the last window in the others."""
        if state.salt != salt:
            state.salt = salt
            state.keys.clear()
        entries: list[IndexEntry] = []
        usable, parent = 0, None
        present = [0] * len(self._windows)  # blocks up to here without a gap
        for number in range(most):
            parent = self.find(self.key(state, tokens, number), parent, salt)
            if parent is None or 0 in [parent.blocks[group] for group in self._global]:
                break
            entries.append(parent)
            fits = True
            for group in self._windowed:
                present[group] = present[group] + 1 if parent.blocks[group] else 0
                first = self.first_seen(group, (number + 1) * self.block_size)
                fits = fits and present[group] >= number + 1 - first
            if fits:
                usable = number + 1
        return entries[:usable]

    def reach(
        self, state: KvState, tokens: Sequence[int], most: int, has: Callable[[bytes, int], bool]
    ) -> list[IndexEntry | None]:
        """As `match`, of blocks that are in the pool or that a lower tier `has` (by hash and group); None
        for those that the pool knows nothing of."""
        entries: list[IndexEntry | None] = []
        usable, entry = 0, None
        present = [0] * len(self._windows)
        for number in range(most):
            key = self.key(state, tokens, number)
            is_known = number == 0 or entry is not None
            entry = self.find(key, entry, state.salt or "") if is_known else None
            blocks = entry.blocks if entry is not None else [0] * len(present)
            for group, block in enumerate(blocks):
                present[group] = present[group] + 1 if block or has(key.hash, group) else 0
            if any(present[group] <= number for group in self._global):
                break
            entries.append(entry)
            end = (number + 1) * self.block_size
            if all(present[group] > number - self.first_seen(group, end) for group in self._windowed):
                usable = number + 1
        return entries[:usable]

    def lacking(self, entries: Sequence[IndexEntry | None]) -> list[tuple[int, int]]:
        """(block number, group) of what the pool lacks of a prefix, if that is to be used."""
        end = len(entries) * self.block_size
        first = [self.first_seen(group, end) for group in range(len(self._windows))]
        return [
            (number, group)
            for number, entry in enumerate(entries)
            for group, start in enumerate(first)
            if number >= start and (entry is None or not entry.blocks[group])
        ]

    def prefix(self, state: KvState, number: int) -> bytes:
        """Salt and tokens of a sequence's first blocks, whose keys have been asked for."""
        return _salt_bytes(state.salt or "") + b"".join([key.tokens for key in state.keys[:number]])

    def prefix_length(self, state: KvState, number: int) -> int:
        """How many bytes those are."""
        return len(_salt_bytes(state.salt or "")) + 4 * number * self.block_size

    def first_seen(self, group: int, position: int) -> int:
        """The first block of a group that tokens from `position` on may read."""
        window = self._windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    # ------------------------------------------------------------------------------ changing

    def add(self, state: KvState, key: BlockKey, blocks: list[int]) -> IndexEntry | None:
        """A new entry after the sequence's last one. None if another prefix has this key, or if the last one
        is no longer indexed."""
        parent = state.entry
        if key.hash in self.entries or (parent is not None and not parent.is_indexed):
            return None
        entry = self.entries[key.hash] = IndexEntry(key, state.salt or "", parent, blocks)
        if parent is not None:
            parent.num_children += 1
        for block in blocks:
            if block:
                self.by_block[block] = entry
        return entry

    def enter(self, state: KvState, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Enters all blocks of a sequence's tables where the index lacks them. Places before a window get
        entries, too: who looks for a prefix follows it from its beginning."""
        state.entry, state.num_indexed = None, 0
        for number in range(len(tables[0])):
            key = self.key(state, tokens, number)
            entry = self.find(key, state.entry, state.salt or "") or self.add(state, key, [0] * len(tables))
            if entry is None:
                break  # another prefix has this key
            for group, table in enumerate(tables):
                if table[number] and not entry.blocks[group]:
                    self.put(entry, group, table[number])
            state.entry, state.num_indexed = entry, number + 1
        self.prune(state.entry)

    def put(self, entry: IndexEntry, group: int, block: int) -> None:
        """The entry's block in a group; 0: it has none there any more."""
        if old := entry.blocks[group]:
            self.by_block[old] = None
        entry.blocks[group] = block
        if block:
            self.by_block[block] = entry

    def prune(self, entry: IndexEntry | None) -> None:
        """Takes an entry out if it has neither blocks nor successors, then the one before it likewise."""
        while entry is not None and entry.is_indexed and not entry.num_children and not any(entry.blocks):
            del self.entries[entry.key.hash]
            entry.is_indexed = False
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    # ----------------------------------------------------------------------------- computing

    def announce(self, state: KvState, tokens: Sequence[int]) -> None:
        """The sequence computes the block after its indexed ones, if its tokens are known already."""
        self.retract(state)
        end = (state.num_indexed + 1) * self.block_size
        # Tokens that a step in flight computes are negative as yet.
        if end <= len(tokens) and tokens[end - 1] >= 0:
            state.computing = self.key(state, tokens, state.num_indexed).hash
            self._computing[state.computing] = self._computing.get(state.computing, 0) + 1

    def retract(self, state: KvState) -> None:
        """It computes nothing that others could wait for."""
        if state.computing is not None:
            self._computing[state.computing] -= 1
            if not self._computing[state.computing]:
                del self._computing[state.computing]
            state.computing = None

    def is_computed(self, key: BlockKey) -> bool:
        """Whether some sequence computes this block just now."""
        return key.hash in self._computing

    def check(self, occupied: set[int], states: Iterable[KvState]) -> None:
        """Asserts that entries, blocks and sequences agree (tests). `occupied`: the blocks with contents."""
        assert self._computing == Counter(state.computing for state in states if state.computing is not None)
        found: dict[int, IndexEntry] = {}
        children = dict.fromkeys(self.entries, 0)
        for key, entry in self.entries.items():
            assert entry.is_indexed
            assert entry.key.hash == key
            assert entry.num_children or any(entry.blocks), "an entry is of no use"
            found.update({block: entry for block in entry.blocks if block})
            if entry.parent is not None:
                assert self.entries.get(entry.parent.key.hash) is entry.parent, "the entry before is lost"
                children[entry.parent.key.hash] += 1
        assert all(entry.num_children == children[key] for key, entry in self.entries.items())
        assert found == {block: entry for block, entry in enumerate(self.by_block) if entry is not None}
        assert set(found) <= occupied, "the index names a block without contents"
