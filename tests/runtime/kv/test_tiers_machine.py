"""Any order of operations on the block manager over host memory and a disk: blocks move down, are hit and
return, copies end late or fail, requests are swapped and aborted meanwhile, the engine starts anew."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support.block_machine import BLOCK, PROMPTS, BlockMachine
from support.tiers import DictStore, LateExecutor, SlotPool

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.swap import HostSwapper
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.sequence import Request, Sequence


class TierMachine(BlockMachine):
    """A small pool, host memory for `host` blocks (0: off) and a disk for `disk` (0: none)."""

    @initialize(
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (None, 8, 1), (3, None)]),
        hashing=st.sampled_from(["sha256", "sha256", "three values", "one value"]),
        num_blocks=st.integers(8, 30),
        tail_blocks=st.sampled_from([1, 2, 32]),
        host=st.sampled_from([0, 0, 3, 30]),
        disk=st.sampled_from([0, 8, 200, 200]),
    )
    def start(  # type: ignore[override]
        self,
        windows: tuple[int | None, ...],
        hashing: str,
        num_blocks: int,
        tail_blocks: int,
        host: int,
        disk: int,
    ) -> None:
        self.host = host
        self.store = DictStore(disk) if disk else None
        self.swapped: dict[Request, Sequence] = {}  # swapped out, or about to be
        self.returning: dict[Request, Sequence] = {}
        self.begin_machine(windows, hashing, num_blocks, True, tail_blocks)

    def make_blocks(
        self,
        num_blocks: int,
        windows: tuple[int | None, ...],
        prefix_cache: bool,
        hash_key: Callable[[bytes], bytes],
    ) -> BlockManager:
        self.copier, self.writer = LateExecutor(), LateExecutor()
        self.tiers = Tiers(
            SlotPool(self.slots),
            1,
            host_bytes=self.host,
            store=self.store,
            copier=self.copier,
            writer=self.writer,
        )
        blocks = BlockManager(
            num_blocks, BLOCK, windows, prefix_cache=prefix_cache, tiers=self.tiers, hash_key=hash_key
        )
        self.swapper = HostSwapper(blocks, self.tiers)
        return blocks

    @property
    def holders(self) -> list[Sequence]:
        return [*self.live, *self.swapped.values(), *self.returning.values()]

    def is_coming(self, own: Sequence) -> bool:
        self.tiers.poll()
        has_to_wait = not own.kv.has_looked and bool(self.tiers._coming)
        return has_to_wait or self.tiers.is_coming(key.hash for key in own.kv.keys)

    def take_prefix(self, own: Sequence, salt: str) -> None:
        super().take_prefix(own, salt)
        hit, blocks = own.num_computed, self.blocks
        before = blocks.num_free + blocks.num_cached
        end = blocks.load(own)
        assert end == own.num_computed
        assert hit <= end <= own.next_logit
        assert end % BLOCK == 0
        assert before - blocks.num_free - blocks.num_cached <= blocks.needed_at_full_length(end)
        self.read(own, end, end + 1)

    # -------------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.live) < 8)
    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from(["", "", "", "b"]),
        goes_on=st.booleans(),
        gives_up=st.none() | st.integers(0, 7),
    )
    def begin_when_it_has_come(
        self, tokens: list[int], salt: str, goes_on: bool, gives_up: int | None
    ) -> None:
        """What is sent for comes, or fails to; nothing is waited for twice. `gives_up`: who was about to
        write makes room, and what was ordered for it shall hit nobody."""
        if gives_up is not None and self.live:
            leaving = self.pick(gives_up)
            self.grow_only(leaving)
            self.blocks.release(leaving)
            self.live.remove(leaving)
        own = self.new(tokens, salt)
        if self.blocks.is_awaited(own, salt) and self.is_coming(own):
            self.copier.run_all()
            self.end_swaps()
            assert not self.is_coming(own)
        self.take_prefix(own, salt)
        self.make_copies()
        if goes_on:
            self.step(own, len(tokens), len(tokens))

    def grow_only(self, own: Sequence) -> None:
        """Its step is being scheduled, but will not run."""
        own.tokens += [1] * (own.num_computed + 1 - len(own.tokens))
        self.grow(own, own.num_computed + 1)

    def make_copies(self) -> None:
        """The next step makes the copies that are left."""
        self.tiers.pool.copy_blocks(self.blocks.take_copies())

    @rule()
    def flood(self) -> None:
        """Something large comes and goes: nothing stays in the cache."""
        own = self.new(
            [2] * ((self.blocks.num_free + self.blocks.num_cached) // len(self.windows) * BLOCK), None
        )
        if own.tokens:
            assert self.grow(own, len(own.tokens))
        self.blocks.release(own)
        self.live.remove(own)

    @precondition(lambda self: self.copier.jobs)
    @rule(fails=st.sampled_from([False, False, False, True]), count=st.integers(1, 3))
    def copies_end(self, fails: bool, count: int) -> None:
        for _ in range(count):
            # What goes back to the pool does not fail.
            self.copier.run_next(OSError("failed") if fails and not self.returning else None)
        self.end_swaps()

    @precondition(lambda self: self.writer.jobs)
    @rule(fails=st.sampled_from([False, False, False, True]), count=st.integers(1, 20))
    def writes_end(self, fails: bool, count: int) -> None:
        for _ in range(count):
            self.writer.run_next(OSError("failed") if fails else None)

    @precondition(lambda self: self.store is not None and self.store.blocks)
    @rule(number=st.integers(0, 50))
    def damage(self, number: int) -> None:
        self.store.damaged.add(list(self.store.blocks)[number % len(self.store.blocks)])

    @precondition(lambda self: self.live and self.host)
    @rule(number=st.integers(0, 7), grows=st.booleans())
    def swap_out(self, number: int, grows: bool) -> None:
        own = self.pick(number)
        if id(own) in self.in_flight or not own.num_computed:
            return  # only what no step uses is preempted
        request = Request(0, own.tokens, 1, len(self.windows))
        request.sequences = [own]
        request.is_swapped = True
        if grows:
            self.grow_only(own)
        if self.swapper.swap_out(request):
            self.live.remove(own)
            self.swapped[request] = own
        else:
            self.make_copies()

    @precondition(lambda self: self.swapped)
    @rule(number=st.integers(0, 7))
    def swap_in(self, number: int) -> None:
        request, own = list(self.swapped.items())[number % len(self.swapped)]
        if self.swapper.is_copying(request) or any(own.block_tables) or own.num_computed == 0:
            return
        own.tokens += [1] * (own.num_computed + 1 - len(own.tokens))
        del own.tokens[own.num_computed + 1 :]  # all that it has are made room for
        if self.swapper.swap_in(request):
            self.returning[request] = self.swapped.pop(request)
            return
        assert not any(own.block_tables)

    @precondition(lambda self: self.swapped)
    @rule(number=st.integers(0, 7))
    def abort_swapped(self, number: int) -> None:
        """As the scheduler does: a copy under way comes to its end first."""
        request, own = list(self.swapped.items())[number % len(self.swapped)]
        if self.swapper.is_copying(request):
            self.copier.run_all()
            self.end_swaps()
        if request in self.swapped:
            del self.swapped[request]
            self.swapper.drop(request)
            self.swapper.drop(request)
            self.blocks.release(own)

    def end_swaps(self) -> None:
        """What the scheduler does when copies have ended."""
        for request, own in list(self.swapped.items()):
            if not self.swapper.is_copying(request):
                computed = own.num_computed
                if any(own.block_tables):
                    self.blocks.release(own)
                if not request.is_swapped:  # the copy has failed
                    del self.swapped[request]
                    self.live.append(own)
                    computed = 0
                own.num_computed = computed
        for request, own in list(self.returning.items()):
            if not self.swapper.is_copying(request):
                del self.returning[request]
                self.live.append(own)

    @precondition(lambda self: self.store is not None)
    @rule(is_orderly=st.booleans())
    def restart(self, is_orderly: bool) -> None:
        """The engine ends, or its process is killed; another begins over the same disk."""
        if self.swapped or self.returning:
            return
        self.finish_all()
        if is_orderly:
            self.writer.run_all()
            self.blocks.close()
        for slots in self.slots:
            slots[:] = [None] * BLOCK
        old = self.blocks
        self.blocks = self.make_blocks(old.num_blocks, old.windows, True, old._index._hash)
        self.blocks._tail_blocks = old._tail_blocks

    @invariant()
    def host_memory_is_within_its_limit(self) -> None:
        if not hasattr(self, "live"):
            return
        host = self.tiers.stats().get("host")
        if host is not None:
            assert host.used_bytes + host.cached_bytes <= host.limit_bytes
            assert host.used_bytes == sum(len(s.places) for s in self.swapper._swapped.values())


TierMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
TestTierMachine = TierMachine.TestCase
