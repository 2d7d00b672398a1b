"""Keys are chained hashes that anyone can compute; entries are found by tokens, not by keys."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.prefix_index import KvState, PrefixIndex, sha256
from pagec.runtime.sequence import Sequence

TOKENS = list(range(100, 120))


def make(*, windows: tuple[int | None, ...] = (None,), hash_key: object = sha256) -> PrefixIndex:
    return PrefixIndex(50, 4, windows, hash_key)  # type: ignore[arg-type]


def fill(index: PrefixIndex, tokens: list[int], salt: str = "", first: int = 1) -> KvState:
    """Indexes all blocks of a prefix; block n of group g is first + n * groups + g."""
    state, groups = KvState(salt=salt), len(index._windows)
    for number in range(len(tokens) // 4):
        blocks = [first + number * groups + group for group in range(groups)]
        state.entry = index.add(state, index.key(state, tokens, number), blocks)
        assert state.entry is not None
        state.num_indexed += 1
    return state


def found(index: PrefixIndex, tokens: list[int], salt: str = "", most: int = 9) -> list[list[int]]:
    most = min(most, len(tokens) // 4)
    return [entry.blocks for entry in index.match(KvState(), tokens, salt, most)]


def test_keys_are_chained_from_the_salt() -> None:
    state = KvState(salt="tenant")
    index = make()
    index.key(state, TOKENS, 0)
    last = index.key(state, TOKENS, 1)
    root = hashlib.sha256(b"tenant").digest()
    first = hashlib.sha256(root + array("i", TOKENS[:4]).tobytes()).digest()
    assert last.hash == hashlib.sha256(first + array("i", TOKENS[4:8]).tobytes()).digest()
    assert last.tokens == array("i", TOKENS[4:8]).tobytes()


def test_keys_follow_tokens_that_change() -> None:
    index, state, tokens = make(), KvState(salt=""), list(TOKENS)
    keys = [index.key(state, tokens, number) for number in range(3)]
    tokens[5] = 0
    assert index.key(state, tokens, 0) == keys[0]
    changed = [index.key(state, tokens, number) for number in (1, 2)]
    assert changed[0] != keys[1]
    assert changed[1].tokens == keys[2].tokens
    assert changed[1].hash != keys[2].hash


def test_the_longest_prefix_is_found() -> None:
    index = make()
    fill(index, TOKENS[:12])
    assert found(index, TOKENS) == [[1], [2], [3]]
    assert found(index, TOKENS, most=2) == [[1], [2]]
    assert found(index, [*TOKENS[:7], 0, *TOKENS[8:]]) == [[1]]
    assert found(index, TOKENS[4:]) == []
    assert found(index, TOKENS, "salt") == []


def test_equal_blocks_after_different_ones_differ() -> None:
    index = make()
    fill(index, [1, 1, 1, 1, *TOKENS[:4]], first=1)
    fill(index, [2, 2, 2, 2, *TOKENS[:4]], first=11)
    assert found(index, [2, 2, 2, 2, *TOKENS[:4]]) == [[11], [12]]


@pytest.mark.parametrize("hash_key", [lambda data: b"", lambda data: data[-16:]])  # noqa: ARG005
def test_equal_keys_do_not_make_equal_prefixes(hash_key: object) -> None:
    """The second hash sees only a block's own tokens: the block before it decides."""
    index = make(hash_key=hash_key)
    fill(index, [1, 1, 1, 1])
    state = KvState(salt="")
    other = [2, 2, 2, 2, 1, 1, 1, 1]
    state.entry = index.add(state, index.key(state, other, 0), [7])
    for number in range(2):
        index.add(state, index.key(state, other, number), [7 + number])
    assert found(index, other) in ([], [[7]])
    assert found(index, [1, 1, 1, 1]) == [[1]]


def test_what_is_computed_is_known_by_key_while_somebody_computes_it() -> None:
    index, pair = make(), [KvState(salt=""), KvState(salt="")]
    key = index.key(KvState(salt=""), TOKENS, 0)
    for state in pair:
        index.announce(state, TOKENS)
    index.retract(pair[0])
    index.retract(pair[0])
    assert index.is_computed(key)
    index.retract(pair[1])
    assert not index.is_computed(key)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, -1]])
def test_a_block_whose_tokens_are_not_known_is_not_awaited(tokens: list[int]) -> None:
    index, state = make(), KvState(salt="")
    index.announce(state, tokens)
    assert state.computing is None


def test_an_entry_stays_as_long_as_its_successors() -> None:
    index = make(windows=(5,))
    state = fill(index, TOKENS[:8])
    last = state.entry
    assert last is not None
    assert last.parent is not None
    index.put(last.parent, 0, 0)
    index.prune(last.parent)
    index.check({2}, [])
    assert found(index, TOKENS[:8]) == [[0], [2]]
    index.put(last, 0, 0)
    index.prune(last)
    assert not index.entries
    assert index.add(state, index.key(state, TOKENS, 2), [3]) is None  # after nothing


def test_a_block_is_hashed_once() -> None:
    calls = []

    def count(data: bytes) -> bytes:
        calls.append(data)
        return sha256(data)

    blocks = BlockManager(3000, 16, hash_key=count)
    crowd = [Sequence([n] * 40, 40, 39, [array("i")], 1 << 20) for n in range(64)]
    for own in crowd:
        blocks.is_awaited(own)
        blocks.begin(own)
        blocks.begin(own)
        assert blocks.grow(own, 40)
        own.num_computed = 40
        blocks.commit(own)
    assert len(calls) == 64 * 3  # salt and two blocks
    for _ in range(16):
        for own in crowd:
            own.tokens.append(5)
            assert blocks.grow(own, own.num_computed + 1)
            own.num_computed += 1
            blocks.commit(own)
    assert len(calls) == 64 * 4


def test_a_shared_prefix_is_stored_once() -> None:
    used = {}
    for prefix_cache in (True, False):
        blocks = BlockManager(3000, 16, prefix_cache=prefix_cache)
        for number in range(32):
            tokens = [*range(512), *[10_000 + number] * 100]
            own = Sequence(tokens, 612, 611, [array("i")], 1 << 20)
            blocks.begin(own)
            assert blocks.grow(own, 612)
            own.num_computed = 612
            blocks.commit(own)
        used[prefix_cache] = blocks.num_used
    assert used == {True: 32 + 32 * 7, False: 32 * 39}
    assert used[True] < 0.4 * used[False]
