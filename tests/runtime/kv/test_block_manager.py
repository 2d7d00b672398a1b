"""Blocks are handed out once, shared by count, found again, and all come back."""

from __future__ import annotations

from array import array

import pytest
from support.sequences import compute, sequence, started, tables

from pagec.compiler.errors import CapacityError
from pagec.runtime.kv.block_manager import TAIL_BLOCKS, BlockManager
from pagec.runtime.sequence import Sequence

# ------------------------------------------------------------------------------------- growth


def test_grow_gives_neighbours_and_never_scratch() -> None:
    blocks, own = BlockManager(5, 16), sequence(33)
    assert blocks.grow(own, 33)
    assert tables(own) == [[1, 2, 3]]
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (1, 0, 3)
    assert own.num_slots == 48


def test_grow_within_a_block_takes_nothing() -> None:
    blocks, own = BlockManager(5, 16), sequence(16)
    assert blocks.grow(own, 1)
    assert blocks.grow(own, 16)
    assert blocks.num_used == 1


def test_grow_is_all_or_nothing() -> None:
    blocks, own = BlockManager(4, 16), sequence(32, groups=2)
    assert not blocks.grow(own, 32)
    assert tables(own) == [[], []]
    assert blocks.num_free == 3


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="1 blocks"):
        BlockManager(1, 16)


def test_tables_grow_in_pieces_of_doubling_length() -> None:
    blocks = BlockManager(1000, 1, prefix_cache=False)
    pair = [sequence(1), sequence(1)]
    for length in range(1, 65):
        for own in pair:
            compute(blocks, own, length)
    for own in pair:
        (table,) = tables(own)
        breaks = [n for n in range(1, 64) if table[n] != table[n - 1] + 1]
        assert breaks in ([2, 4, 8, 16, 32, 64][: len(breaks)], [2, 6, 14, 30, 62][: len(breaks)])
    assert blocks.mean_run() > 10
    blocks.check(pair)


def test_claims_do_not_count_and_go_to_whoever_needs_them() -> None:
    blocks = BlockManager(101, 1)
    first, second = sequence(8), sequence(92)
    assert blocks.grow(first, 8)
    assert any(first.kv.claims)
    assert blocks.num_free == 92
    assert blocks.grow(second, 92)
    assert blocks.num_free == 0
    assert not any(first.kv.claims)
    blocks.check([first, second])


def test_blocks_expected_soon_are_claimed_together() -> None:
    blocks = BlockManager(1000, 4)
    long, other = sequence(64), sequence(64)
    assert blocks.grow(long, 4, ahead=64)
    assert blocks.grow(other, 4)
    assert blocks.num_used == 2
    for end in range(8, 65, 4):
        assert blocks.grow(long, end)
    assert tables(long) == [list(range(1, 17))]


def test_freed_neighbours_become_one_run_again() -> None:
    blocks = BlockManager(65, 4, prefix_cache=False)
    many = [sequence(4) for _ in range(64)]
    for own in many:
        assert blocks.grow(own, 4)
    many.sort(key=lambda own: own.block_tables[0][0])
    for own in many[::2]:
        blocks.release(own)
    assert blocks.fragmentation() == 1 - 1 / 32
    for own in many[1::2]:
        blocks.release(own)
    assert blocks.fragmentation() == 0
    whole = sequence(256)
    assert blocks.grow(whole, 256)
    assert blocks.mean_run() == 64


def test_release_is_idempotent_and_may_be_followed_by_a_new_start() -> None:
    blocks, own = BlockManager(9, 4), sequence(10)
    started(blocks, own)
    blocks.release(own)
    blocks.release(own)
    assert blocks.num_used == 0
    assert blocks.begin(own) == 8
    blocks.check([own])


# ------------------------------------------------------------------------------------- prefixes


@pytest.mark.parametrize(("length", "hit"), [(11, 8), (12, 8), (13, 12), (14, 12)])
def test_a_prefix_hits_whole_blocks_and_never_the_last_token(length: int, hit: int) -> None:
    blocks = BlockManager(20, 4)
    first = started(blocks, sequence(14))
    second = sequence(length)
    assert blocks.begin(second) == second.num_computed == hit
    assert tables(second)[0] == tables(first)[0][: hit // 4]
    assert blocks.num_used == 4
    blocks.check([first, second])


def test_logits_that_are_wanted_limit_a_hit() -> None:
    blocks = BlockManager(20, 4)
    started(blocks, sequence(14))
    second = sequence(14)
    second.next_logit = 6
    assert blocks.begin(second) == 4


def test_blocks_outlive_their_sequence_until_they_are_needed() -> None:
    blocks = BlockManager(9, 4)
    blocks.release(started(blocks, sequence(14)))
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (5, 3, 0)
    other = sequence(24, first=5000)
    assert blocks.grow(other, 24)
    assert blocks.begin(sequence(14)) == 0  # the tail went, and nothing of it was kept
    blocks.check([other])


def test_tails_go_before_what_they_follow_and_old_before_new() -> None:
    blocks = BlockManager(21, 1)
    trunk = started(blocks, sequence(6))
    blocks.release(trunk)
    old = sequence(10)
    old.tokens[6:] = [1, 2, 3, 4]
    new = sequence(10)
    new.tokens[6:] = [5, 6, 7, 8]
    for own in (old, new):
        assert blocks.begin(own) == 6 - (own is trunk)
        compute(blocks, own)
    blocks.release(old)
    blocks.release(new)
    assert blocks.num_cached == 14
    filler = sequence(6 + 4, first=5000)
    assert blocks.grow(filler, 10)  # takes the 6 free ones and the old tail
    probe_old, probe_new = sequence(10), sequence(10)
    probe_old.tokens, probe_new.tokens = list(old.tokens), list(new.tokens)
    assert blocks.begin(probe_old) == 6
    blocks.release(probe_old)
    assert blocks.begin(probe_new) == 9


def test_an_eviction_frees_a_tail_as_one_run() -> None:
    blocks = BlockManager(17, 1)
    for first in (0, 100):
        blocks.release(started(blocks, sequence(8, first=first)))
    assert (blocks.num_free, blocks.num_cached) == (0, 16)
    assert blocks.grow(sequence(1, first=500), 1)
    assert (blocks.num_free, blocks.num_cached) == (7, 8)
    assert blocks.stats().evictions == 8
    assert blocks.begin(sequence(8, first=100)) == 7


def test_of_a_long_tail_the_beginning_stays() -> None:
    blocks = BlockManager(41, 1)
    blocks.release(started(blocks, sequence(40)))
    assert blocks.grow(sequence(1, first=500), 1)
    assert (blocks.num_free, blocks.num_cached) == (TAIL_BLOCKS - 1, 40 - TAIL_BLOCKS)
    assert blocks.begin(sequence(40)) == 40 - TAIL_BLOCKS


def test_another_salt_shares_nothing() -> None:
    blocks = BlockManager(20, 4)
    started(blocks, sequence(14), salt="a")
    assert blocks.begin(sequence(14), "b") == 0
    assert blocks.begin(sequence(14)) == 0
    assert blocks.begin(sequence(14), "a") == 12


def test_a_collision_hands_over_nothing() -> None:
    blocks = BlockManager(20, 4, hash_key=lambda data: b"same")  # noqa: ARG005
    first = started(blocks, sequence(14))
    second = sequence(14, first=2000)
    assert blocks.begin(second) == 0
    assert not blocks.is_awaited(second)
    compute(blocks, second)
    assert not set(tables(first)[0]) & set(tables(second)[0])
    assert blocks.begin(sequence(14)) == 4  # block 0 has the key, block 1 finds it taken
    blocks.check()


def test_a_collision_of_salts_hands_over_nothing() -> None:
    blocks = BlockManager(20, 4, hash_key=lambda data: data[-16:])
    started(blocks, sequence(14), salt="a")
    assert blocks.begin(sequence(14), "b") == 0
    assert blocks.begin(sequence(14), "a") == 12


def test_equal_blocks_computed_twice_become_one() -> None:
    blocks = BlockManager(20, 4)
    pair = [sequence(14), sequence(14)]
    for own in pair:
        assert blocks.begin(own) == 0
        assert blocks.grow(own, 14)
    for own in pair:
        own.num_computed = 14
        blocks.commit(own)
    assert tables(pair[0])[0][:3] == tables(pair[1])[0][:3]
    assert blocks.num_used == 3 + 2
    assert blocks.stats().shared == 3
    blocks.check(pair)


def test_a_step_in_flight_keeps_the_blocks_that_gave_way() -> None:
    blocks = BlockManager(20, 4)
    pair = [sequence(14), sequence(14)]
    for own in pair:
        blocks.begin(own)
        assert blocks.grow(own, 15)
    before = tables(pair[1])[0]
    for own in pair:
        own.num_computed = 14
        blocks.commit(own, in_flight=True)
    assert tables(pair[0])[0][:3] == tables(pair[1])[0][:3]
    assert all(blocks.references[block] for block in before)
    blocks.check(pair)
    pair[1].tokens += [0, 0]
    pair[1].num_computed = 16
    blocks.commit(pair[1], in_flight=True)
    assert not any(blocks.references[block] for block in before[:3])
    blocks.check(pair)


def test_who_needs_what_another_computes_waits_for_it() -> None:
    blocks = BlockManager(40, 4)
    first, same, short, other = sequence(30), sequence(30), sequence(4), sequence(30, first=2000)
    blocks.begin(first)
    assert not blocks.is_awaited(same)  # nobody has begun
    assert blocks.grow(first, 30)
    for computed in (10, 20):
        assert blocks.is_awaited(same)
        assert not blocks.is_awaited(same, "salt")
        assert not blocks.is_awaited(other)
        assert not blocks.is_awaited(short)  # it could take nothing
        first.num_computed = computed
        blocks.commit(first)
    same.tokens[23] = 7  # differs in block 5
    assert not blocks.is_awaited(same)
    assert blocks.begin(same) == 20
    first.num_computed = 30
    blocks.commit(first)
    assert not blocks.is_awaited(sequence(30))


def test_nobody_waits_for_one_that_is_gone() -> None:
    blocks = BlockManager(40, 4)
    first = sequence(30)
    blocks.begin(first)
    assert blocks.grow(first, 30)
    assert blocks.is_awaited(sequence(30))
    blocks.release(first)
    assert not blocks.is_awaited(sequence(30))


def test_generated_tokens_are_found_again() -> None:
    blocks = BlockManager(40, 4)
    first = started(blocks, sequence(5))
    for length in range(6, 18):
        compute(blocks, first, length)
    again = Sequence([*first.tokens, 3], 18, 17, [array("i")], 1 << 20)
    assert blocks.begin(again) == 16


def test_tokens_that_change_before_they_are_computed_are_indexed_as_they_were_computed() -> None:
    blocks = BlockManager(40, 4)
    first = sequence(8)
    blocks.begin(first)
    assert blocks.grow(first, 4)  # others may wait for the first block
    first.tokens[3] = 7
    first.num_computed = 4
    blocks.commit(first)
    assert blocks.begin(sequence(8)) == 0
    again = sequence(8)
    again.tokens[3] = 7
    assert blocks.begin(again) == 4


def test_hit_rate_is_counted_in_tokens() -> None:
    blocks = BlockManager(40, 4)
    started(blocks, sequence(14))
    started(blocks, sequence(14))
    blocks.begin(sequence(14))  # has not grown: will be asked again
    stats = blocks.stats()
    assert (stats.asked_tokens, stats.hit_tokens) == (28, 12)
    assert stats.hit_rate == 12 / 28


def test_without_the_cache_all_blocks_come_back() -> None:
    blocks = BlockManager(20, 4, prefix_cache=False)
    first = started(blocks, sequence(14))
    assert blocks.begin(sequence(14)) == 0
    assert not blocks.is_awaited(sequence(14))
    blocks.release(first)
    assert blocks.num_free == 19
