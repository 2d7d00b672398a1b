"""The tiers below the pool: host memory, then files. Cold blocks move down, and return on a hit.

    pool --evicted, if host memory is on--> host --least recently used--> disk
    pool --evicted, if it is off-------------------------------------> disk
    pool <--when a request starts-- host <--ahead of that, in a thread-- disk

What is moved down is what the pool's cache evicts, least recently used first, out-of-window blocks like all
others: they are cached when they leave their window. A copy is made only of what no lower tier holds; what
moves up stays below, too, so it is written once. `BlockManager.close` moves down whatever is cached.

A block moves down before its place in the pool is used again, by a copy to host memory (0.1 ms for 360 KB);
files are written in a thread, and if that falls behind, blocks are dropped rather than a step held up. Files
are read and checked in another thread while the request waits, and others run. Then the engine copies them
into the pool: no block of the pool is held for a copy that has not ended, so none is lost if it fails.

All methods are called by the engine's thread. The bytes of a block are opaque.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from pagec.runtime.kv.prefix_index import IndexEntry, prefix_of
from pagec.runtime.kv.stats import TierStats
from pagec.runtime.kv.store import BlockName, BlockStore

# With host memory off, blocks from disk that a request is about to take may hold so much of it.
STAGING_BYTES: Final = 256 << 20
# Blocks that wait to be written to disk may hold so much; more are dropped.
WRITING_BYTES: Final = 256 << 20
# Buffers kept to be used again: fresh memory costs ten times the copy, by page faults (0.7 ms for 360 KB).
_SPARE: Final = 64
# So many blocks are read at once when all are saved.
_SAVED_AT_ONCE: Final = 32


class Pool(Protocol):
    """The blocks' memory, as the tiers see it. Calls take effect in order with the steps'."""

    def read_blocks(self, blocks: Sequence[int], spare: list[Any] | None = None) -> list[Any]:
        """Copies of blocks in host memory, each a buffer of its own; those in `spare` are used up first."""

    def write_blocks(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        """Puts such copies into blocks."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks within the pool, (source, target), one after the other."""


class Held(NamedTuple):
    """A block in host memory. `prefix`: what it is the last block of. `is_from_disk`: it was read from there,
    `is_new`: and has not been counted as a hit."""

    prefix: bytes
    data: Any
    is_from_disk: bool
    is_new: bool = False


class Tiers:
    """Host memory of `host_bytes` (0: only what passes through) and a disk.

    `copier` brings blocks up, `writer` takes them to disk: a thread each if not given (tests).
    """

    def __init__(
        self,
        pool: Pool,
        block_bytes: int,
        *,
        host_bytes: int = 0,
        store: BlockStore | None = None,
        copier: Executor | None = None,
        writer: Executor | None = None,
    ) -> None:
        self.pool = pool
        self._store = store
        self._block_bytes = max(block_bytes, 1)
        self._is_host_on = host_bytes > 0
        self._num_places = (host_bytes or STAGING_BYTES) // self._block_bytes
        self._num_swapped = 0
        self._memory: OrderedDict[BlockName, Held] = OrderedDict()  # least recently used first
        self._coming: dict[BlockName, Future[dict[BlockName, Held]]] = {}
        self._writing: dict[BlockName, tuple[Held, Future[None]]] = {}
        self._spare: list[Any] = []
        self._jobs: set[Future[Any]] = set()
        self._copier = copier or ThreadPoolExecutor(1, "pagec-kv-copy")
        self._writer = writer or ThreadPoolExecutor(1, "pagec-kv-write")
        self._host, self._disk = TierStats(host_bytes), TierStats()
        self.is_closed = False

    # ------------------------------------------------------------------------------- looking

    @property
    def is_empty(self) -> bool:
        """Whether no block is in host memory, so that none can move up at once."""
        return not self._memory and not self._writing

    def is_ready(self, hash_: bytes, group: int) -> bool:
        """Whether a block can move up at once."""
        return (hash_, group) in self._memory or (hash_, group) in self._writing

    def has(self, hash_: bytes, group: int) -> bool:
        """Whether some tier has a block with this hash."""
        name = BlockName(hash_, group)
        return self.is_ready(hash_, group) or (self._store is not None and self._store.has(name))

    def is_coming(self, hashes: Iterable[bytes]) -> bool:
        """Whether one of these blocks is on its way from disk to host memory."""
        if not self._coming:
            return False
        coming = {name.hash for name in self._coming}
        return any(hash_ in coming for hash_ in hashes)

    def look(self, name: BlockName, prefix: bytes, length: int) -> Any | None:
        """The block that ends the first `length` bytes of `prefix`; None, and what has its name forgotten,
        if that is another's."""
        held = self._memory.get(name) or (self._writing[name][0] if name in self._writing else None)
        if held is not None and len(held.prefix) == length and prefix.startswith(held.prefix):
            return held.data
        self._memory.pop(name, None)
        self._writing.pop(name, None)
        return None

    # -------------------------------------------------------------------------------- moving

    def fetch(self, wanted: Sequence[tuple[BlockName, int]], prefix: bytes) -> bool:
        """Begins to bring blocks from disk to host memory, each with the length of its prefix. False if
        that has to wait until others have come. No more come than there is room for."""
        store, places = self._store, self._num_places - self._num_swapped
        wanted = [item for item in wanted if item[0] not in self._coming][:places]
        if not wanted or store is None:
            return True
        if len(wanted) + len(self._coming) > places:
            return False
        job = self.start(_read, store, wanted, prefix)
        self._coming.update(dict.fromkeys((name for name, _ in wanted), job))
        return True

    def move_up(
        self, names: Sequence[BlockName], blocks: Sequence[int], data: Sequence[Any]
    ) -> set[BlockName]:
        """Copies blocks that `look` has found into the pool; those that came from disk."""
        self.pool.write_blocks(blocks, data)
        self._host.bytes_out += len(blocks) * self._block_bytes
        from_disk = set()
        for name in names:
            if (held := self._memory.get(name)) is None:
                continue  # is being written
            if held.is_new:
                from_disk.add(name)
            if self._is_host_on:
                self._memory.move_to_end(name)
                self._memory[name] = held._replace(is_new=False)
            else:
                del self._memory[name]
                self._drop(held)
        return from_disk

    def count_hits(self, host_tokens: int, disk_tokens: int) -> None:
        """So many tokens of a prefix moved up."""
        self._host.hit_tokens += host_tokens
        self._disk.hit_tokens += disk_tokens

    def move_down(self, leaving: Sequence[tuple[IndexEntry, int, int]]) -> None:
        """Takes blocks that the pool evicts, (entry, group, block), before they are used again."""
        wanted = []
        for entry, group, block in leaving:
            name = BlockName(entry.key.hash, group)
            if name in self._memory:
                self._memory.move_to_end(name)
            elif not (self.is_ready(*name) if self._is_host_on else self.has(*name)):
                wanted.append((name, entry, block))
        if not wanted:
            return
        data = self.pool.read_blocks([block for _, _, block in wanted], self._spare)
        self._host.bytes_in += len(wanted) * self._block_bytes
        for (name, entry, _), block_data in zip(wanted, data, strict=True):
            held = Held(prefix_of(entry), block_data, is_from_disk=False)
            if self._is_host_on:
                self._memory[name] = held
            else:
                self._write(name, held)
        self._shrink(0)

    def _shrink(self, needed: int) -> None:
        """Moves the least recently used blocks to disk until there is room for so many more."""
        while self._memory and len(self._memory) + self._num_swapped + needed > self._num_places:
            name, held = self._memory.popitem(last=False)
            self._host.evictions += 1
            self._write(name, held)

    def _write(self, name: BlockName, held: Held) -> None:
        """Begins to write a block to disk if that has none of this name."""
        store = self._store
        if store is None or held.is_from_disk or name in self._writing or store.has(name):
            self._drop(held)
            return
        if (len(self._writing) + 1) * self._block_bytes > WRITING_BYTES:
            self._disk.failures += 1
            self._drop(held)
            return
        self._writing[name] = held, self._writer.submit(store.write, name, held.prefix, held.data)

    def _drop(self, held: Held) -> None:
        """Keeps a block's buffer for the next `move_down`: what `look` has found must be used before that."""
        if not held.is_from_disk and len(self._spare) < _SPARE:
            self._spare.append(held.data)

    # --------------------------------------------------------------------- requests swapped out

    def reserve(self, num_blocks: int) -> bool:
        """Takes room for a swapped-out request; False if there is not so much."""
        if not self._is_host_on or self._num_swapped + num_blocks > self._num_places:
            return False
        self._shrink(num_blocks)
        self._num_swapped += num_blocks
        self._host.bytes_in += num_blocks * self._block_bytes
        return True

    def give_back(self, num_blocks: int, *, has_moved_up: bool) -> None:
        """Room that is no longer needed."""
        self._num_swapped -= num_blocks
        if has_moved_up:
            self._host.bytes_out += num_blocks * self._block_bytes

    # ---------------------------------------------------------------------------------- jobs

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs a copy in the thread that brings blocks up."""
        job = self._copier.submit(function, *args)
        self._jobs.add(job)
        return job

    def poll(self) -> None:
        """Takes note of the copies that have ended."""
        if self._jobs:
            self._jobs = {job for job in self._jobs if not job.done()}
        for name, job in [(name, job) for name, job in self._coming.items() if job.done()]:
            del self._coming[name]
            held = None if job.exception() else job.result().get(name)
            if held is not None:  # else it will be computed
                self._memory[name] = held
                self._disk.bytes_out += self._block_bytes
                self._host.bytes_in += self._block_bytes
        self._shrink(0)
        # The writer takes them in order, so those that are done come first.
        for name in [name for name, (_, job) in self._writing.items() if job.done()]:
            self._drop(self._writing.pop(name)[0])

    def wait(self, timeout_s: float = 1.0) -> None:
        """Until a copy has ended that a request waits for, if there is one."""
        self.poll()
        if self._jobs:
            wait_for(self._jobs, timeout_s, FIRST_COMPLETED)

    def save(self, leaving: Sequence[tuple[IndexEntry, int, int]]) -> None:
        """Writes blocks of the pool and all that host memory caches to disk; returns when that is done."""
        store = self._store
        if store is None:
            return
        wait_for([job for _, job in self._writing.values()])
        for name, held in self._memory.items():
            if not held.is_from_disk:
                store.write(name, held.prefix, held.data)
        lacking = [item for item in leaving if not store.has(BlockName(item[0].key.hash, item[1]))]
        for start in range(0, len(lacking), _SAVED_AT_ONCE):
            part = lacking[start : start + _SAVED_AT_ONCE]
            data = self.pool.read_blocks([block for _, _, block in part])
            for (entry, group, _), block_data in zip(part, data, strict=True):
                name = BlockName(entry.key.hash, group)
                store.write(name, prefix_of(entry), block_data)
        self.poll()

    def close(self) -> None:
        """Ends the threads, once what they have begun is done. Idempotent; nothing may move after it."""
        self.is_closed = True
        self._copier.shutdown()
        self._writer.shutdown()

    def stats(self) -> dict[str, TierStats]:
        """Of the tiers that are on, from the top."""
        self.poll()
        host, disk, store = self._host, self._disk, self._store
        host.used_bytes = self._num_swapped * self._block_bytes
        host.cached_bytes = len(self._memory) * self._block_bytes
        found = {"host": replace(host)} if self._is_host_on else {}
        if store is not None:
            disk.limit_bytes, disk.cached_bytes = store.limit_bytes, store.used_bytes
            disk.bytes_in, disk.evictions = store.written_bytes, store.num_removed
            failures = disk.failures + store.num_failed + store.num_damaged
            found["disk"] = replace(disk, failures=failures)
        return found


def _read(store: BlockStore, wanted: Sequence[tuple[BlockName, int]], prefix: bytes) -> dict[BlockName, Held]:
    """Blocks from disk (in a thread), those that are there and whole."""
    found = {}
    for name, length in wanted:
        own = prefix[:length]
        data = store.read(name, own)
        if data is not None:
            found[name] = Held(own, data, is_from_disk=True, is_new=True)
    return found
