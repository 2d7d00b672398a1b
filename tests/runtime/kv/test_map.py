"""The pool's picture says what the block manager's own books say."""

from __future__ import annotations

from collections import Counter

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.map import block_map, owned_blocks
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Fork, Request


def test_every_state_has_its_character() -> None:
    blocks = BlockManager(20, 4, (None, 8))
    scheduler = Scheduler(blocks, Limits(32, 4, 64))
    assert block_map(blocks) == "#" + "." * 19
    done = Request(0, list(range(9)), 1, 2)
    scheduler.add(done)
    (entry,) = scheduler.schedule()
    entry.sequence.num_computed = 9
    blocks.commit(entry.sequence)
    scheduler.finish(done)
    entry.sequence.num_in_flight = 0
    scheduler.settle(done, entry.sequence)
    assert Counter(block_map(blocks))["c"] == blocks.num_cached == 4
    request = Request(1, [50, 51, 52, 53, 54], 6, 2, width=2)
    scheduler.add(request)
    (entry,) = scheduler.schedule()
    entry.sequence.num_computed = 5
    entry.sequence.num_in_flight = 0
    entry.sequence.tokens[5] = 7
    assert "s" not in block_map(blocks)
    scheduler.fork(request, Fork(0, 8))
    counts = Counter(block_map(blocks))
    assert (counts["#"], counts["s"], counts["u"]) == (1, 4, 0)
    assert owned_blocks(request) == [i for i, state in enumerate(block_map(blocks)) if state == "s"]
