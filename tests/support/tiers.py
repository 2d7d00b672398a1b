"""Tiers whose copies end when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from pagec.runtime.kv.store import BlockName, BlockStore


class LateExecutor(Executor):
    """Runs what it is given in order, each job when `run_next` is called; `shutdown` runs the rest."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: function(*args, **kwargs)))
        return future

    def run_next(self, error: Exception | None = None) -> None:
        """Runs a job, or lets it fail."""
        if not self.jobs:
            return
        future, job = self.jobs.pop(0)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(job())

    def run_all(self) -> None:
        while self.jobs:
            self.run_next()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures
        self.run_all()


class DirectExecutor(LateExecutor):
    """Runs each job at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(function, *args, **kwargs)
        self.run_all()
        return future


class SlotPool:
    """A pool whose blocks are lists of slots."""

    def __init__(self, slots: list[list[Any]]) -> None:
        self.slots = slots

    def read_blocks(self, blocks: Sequence[int], spare: list[Any] | None = None) -> list[Any]:
        found = []
        for block in blocks:
            data = spare.pop() if spare else []
            data[:] = self.slots[block]
            found.append(data)
        return found

    def write_blocks(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        for block, slots in zip(blocks, data, strict=True):
            self.slots[block] = list(slots)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            self.slots[target] = list(self.slots[source])


class DictStore(BlockStore):
    """A disk of at most `room` blocks, each of one byte. `damaged`: names whose blocks cannot be read."""

    def __init__(self, room: int) -> None:
        self.room, self.limit_bytes = room, room
        self.blocks: dict[BlockName, tuple[bytes, Any]] = {}
        self.damaged: set[BlockName] = set()
        self.used_bytes = self.written_bytes = self.read_bytes = 0
        self.num_damaged = self.num_removed = self.num_failed = 0

    def has(self, name: BlockName) -> bool:
        return name in self.blocks

    def write(self, name: BlockName, prefix: bytes, block: Any) -> None:
        if name not in self.blocks:
            while len(self.blocks) >= self.room:
                del self.blocks[next(iter(self.blocks))]
                self.num_removed += 1
            self.blocks[name] = prefix, list(block)
            self.written_bytes += 1

    def read(self, name: BlockName, prefix: bytes) -> Any:
        if name in self.damaged:
            self.damaged.remove(name)
            self.blocks.pop(name, None)
            self.num_damaged += 1
        found = self.blocks.get(name)
        return found[1] if found is not None and found[0] == prefix else None
