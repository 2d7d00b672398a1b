"""Swapping out and in on a pool of slots; the machine in test_kv_tiers_machine.py does it in any order."""

from __future__ import annotations

from array import array

from support.tiers import DirectExecutor, LateExecutor, SlotPool

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.swap import HostSwapper
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.sequence import Request, Sequence

BLOCK = 4


class Setup:
    """A pool of slots that hold (group, position), and a sequence of 30 computed tokens."""

    def __init__(self, windows: tuple[int | None, ...], copier: LateExecutor, host: int = 40) -> None:
        self.slots: list[list[object]] = [[None] * BLOCK for _ in range(60)]
        self.tiers = Tiers(SlotPool(self.slots), 1, host_bytes=host, copier=copier, writer=DirectExecutor())
        self.blocks = BlockManager(60, BLOCK, windows, tiers=self.tiers)
        self.swapper = HostSwapper(self.blocks, self.tiers)
        self.request = Request(0, list(range(30)), 4, len(windows))
        self.own = self.request.sequences[0]
        self.request.is_swapped = True
        self.blocks.begin(self.own)
        assert self.blocks.grow(self.own, 30)
        self.write(self.own)
        self.own.num_computed = 30
        self.blocks.commit(self.own)
        self.own.tokens.append(30)

    def write(self, own: Sequence) -> None:
        for group, table in enumerate(own.block_tables):
            for position in range(30):
                self.slots[table[position // BLOCK]][position % BLOCK] = (group, position)

    def seen(self, own: Sequence) -> list[list[object]]:
        """What the next token reads."""
        return [
            [
                self.slots[table[p // BLOCK]][p % BLOCK]
                for p in range(0 if window is None else max(own.num_computed - window + 1, 0), 30)
            ]
            for window, table in zip(self.blocks.windows, own.block_tables, strict=True)
        ]

    def vacate(self) -> None:
        """What the scheduler does when the copy out has ended; then all is overwritten."""
        assert not self.swapper.is_copying(self.request)
        self.blocks.release(self.own)
        self.own.num_computed = 30 if self.request.is_swapped else 0
        other = Sequence([9] * 100, 100, 99, [array("i") for _ in self.blocks.windows])
        assert self.blocks.grow(other, 59 // len(self.blocks.windows) * BLOCK)
        for slots in self.slots:
            slots[:] = ["other"] * BLOCK
        self.blocks.release(other)


def test_what_comes_back_is_what_went() -> None:
    setup = Setup((None, 6), DirectExecutor())
    before = setup.seen(setup.own)
    assert setup.swapper.swap_out(setup.request)
    setup.vacate()
    assert setup.blocks.num_used == 0
    assert setup.swapper.swap_in(setup.request)
    assert not setup.swapper.is_copying(setup.request)
    assert setup.seen(setup.own) == before
    setup.blocks.check()
    assert setup.tiers.stats()["host"].used_bytes == 0


def test_blocks_before_the_window_are_not_indexed_when_it_is_back() -> None:
    """They were not copied: what lies in them is no one's."""
    setup = Setup((6,), DirectExecutor(), host=3)
    assert setup.swapper.swap_out(setup.request)
    setup.vacate()
    assert setup.swapper.swap_in(setup.request)
    assert not setup.swapper.is_copying(setup.request)
    held = [block for block in setup.own.block_tables[0] if block]
    assert len(held) == 2  # those of positions 25 to 31
    setup.blocks.commit(setup.own)
    assert setup.blocks.begin(Request(1, list(range(13)), 1, 1).sequences[0]) == 0


def test_a_copy_out_that_fails_means_computing_again() -> None:
    copier = LateExecutor()
    setup = Setup((None,), copier)
    assert setup.swapper.swap_out(setup.request)
    assert setup.swapper.is_copying(setup.request)
    copier.run_next(MemoryError())
    setup.vacate()
    assert not setup.request.is_swapped
    assert setup.tiers.stats()["host"].used_bytes == 0


def test_without_room_nothing_is_swapped() -> None:
    setup = Setup((None,), DirectExecutor(), host=7)
    assert not setup.swapper.swap_out(setup.request)
    assert setup.tiers.stats()["host"].used_bytes == 0
    setup.swapper.drop(setup.request)


def test_an_abort_gives_the_room_back_once() -> None:
    copier = LateExecutor()
    setup = Setup((None,), copier)
    assert setup.swapper.swap_out(setup.request)
    assert setup.tiers.stats()["host"].used_bytes == 8
    copier.run_all()
    assert not setup.swapper.is_copying(setup.request)
    setup.swapper.drop(setup.request)
    setup.swapper.drop(setup.request)
    assert setup.tiers.stats()["host"].used_bytes == 0
