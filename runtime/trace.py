"""What happened when in a step, as a Chrome trace (chrome://tracing, Perfetto).

    row "engine"    schedule, prepare, copy, upload, body, head, commit; on a CPU `body` has the head of the
                    first logit rows with it
    row "steps"     execute: from a step's submission until its results are there, with what it computes
    row "kernels"   each launch with its kernel's key and number of rows (Recorder(kernels=True))
    "blocks"        used, cached and free blocks after each step; "block events": since the step before,
                    how many were allocated, copied, evicted, and tokens found in the cache;
                    "KV on TIER": see kv/stats.py

Every event carries the step's number; `Recorder.steps` has the shape of each step. Steps may overlap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pagec.runtime.batch import Batch
    from pagec.runtime.kv.block_manager import BlockManager
    from pagec.runtime.scheduler import Entry

Row = Literal["engine", "steps", "kernels"]
_ROWS: Final[tuple[Row, ...]] = ("engine", "steps", "kernels")
_NOTHING: Final = nullcontext()
# What happens to blocks, and where the block manager counts it.
_BLOCK_EVENTS: Final = {
    "allocated": "allocations",
    "copied": "copies",
    "evicted": "evictions",
    "hit_tokens": "hit_tokens",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time; microseconds since the trace began."""

    name: str
    row: Row
    step: int
    start_us: float
    duration_us: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers at a moment; microseconds since the trace began."""

    name: str
    step: int
    at_us: float
    values: dict[str, int]


@dataclass(slots=True)
class StepShape:
    """What a step computed: `chunks` are (first position, tokens) of each sequence, `head_rows` the logit
    rows of each run of the head."""

    chunks: tuple[tuple[int, int], ...]
    num_tiles: int
    head_rows: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


class Trace:
    """Records nothing."""

    kernels: bool = False

    def at(self, step: int | None) -> int:
        """Turns to a step, None: to one that has not begun. Its number."""
        del step
        return 0

    def now_us(self) -> float:
        """Microseconds since the trace began."""
        return 0.0

    def span(self, name: str) -> AbstractContextManager[None]:
        """The time inside a `with`."""
        del name
        return _NOTHING

    def execute(self, entries: Sequence[Entry], began_us: float) -> None:
        """A step of these entries, submitted at this time, has just been collected."""

    def blocks(self, blocks: BlockManager) -> None:
        """The state of the blocks after a step."""

    def batch(self, batch: Batch) -> None:
        """A step's batch, before it runs."""

    def head(self, num_rows: int) -> None:
        """The head is about to run on so many logit rows."""

    def launches(self, launches: Sequence[tuple[str, str, int]], times_us: Sequence[float]) -> None:
        """Launches that have just ended: name, kernel's key and rows of each, and how long it took."""


NO_TRACE: Final = Trace()


class Recorder(Trace):
    """Records everything; `kernels`: each launch by itself."""

    def __init__(self, *, kernels: bool = False) -> None:
        self.kernels = kernels
        self.events: list[Event] = []
        self.counts: list[Count] = []
        self.steps: list[StepShape] = []
        self._began = time.perf_counter()
        self._step = 0
        self._totals = dict.fromkeys(_BLOCK_EVENTS, 0)

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.events.clear()
        self.counts.clear()
        self.steps.clear()
        self._step = 0

    def at(self, step: int | None) -> int:
        self._step = len(self.steps) if step is None else step
        return self._step

    def now_us(self) -> float:
        return (time.perf_counter() - self._began) * 1e6

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.now_us()
        try:
            yield
        finally:
            self._add(name, "engine", start, self.now_us() - start, {})

    def execute(self, entries: Sequence[Entry], began_us: float) -> None:
        args = {
            "requests": [entry.request.id for entry in entries],
            "decode_tokens": sum(entry.num_tokens for entry in entries if entry.num_tokens == 1),
            "prefill_tokens": sum(entry.num_tokens for entry in entries if entry.num_tokens > 1),
        }
        self._add("execute", "steps", began_us, self.now_us() - began_us, args)

    def blocks(self, blocks: BlockManager) -> None:
        stats, now = asdict(blocks.stats()), self.now_us()
        self.counts.append(
            Count("blocks", self._step, now, {name: stats[name] for name in ("used", "cached", "free")})
        )
        totals = {name: int(stats[key]) for name, key in _BLOCK_EVENTS.items() if key in stats}
        since = {name: total - self._totals[name] for name, total in totals.items()}
        self.counts.append(Count("block events", self._step, now, since))
        for tier, values in stats["tiers"].items():
            self.counts.append(Count(f"KV on {tier}", self._step, now, values))
        self._totals = totals

    def batch(self, batch: Batch) -> None:
        counts = (batch.query_start[1:] - batch.query_start[:-1]).tolist()
        ends = batch.seq_lens.tolist()
        chunks = tuple((end - count, count) for end, count in zip(ends, counts, strict=True))
        self.steps.append(StepShape(chunks, len(batch.tiles)))

    def head(self, num_rows: int) -> None:
        self.steps[-1].head_rows.append(num_rows)

    def launches(self, launches: Sequence[tuple[str, str, int]], times_us: Sequence[float]) -> None:
        start = self.now_us() - sum(times_us)
        for (name, key, count), duration in zip(launches, times_us, strict=True):
            if key and count:  # else it was passed over
                self._add(name, "kernels", start, duration, {"kernel": key, "rows": count})
            start += duration

    def _add(self, name: str, row: Row, start: float, duration: float, args: dict[str, Any]) -> None:
        self.events.append(Event(name, row, self._step, start, duration, args))

    def to_json(self) -> dict[str, Any]:
        """The trace in Chrome's format: times in microseconds, a row per thread."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": row}}
            for tid, row in enumerate(_ROWS)
        ]
        spans = [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.row,
                "ts": round(event.start_us, 3),
                "dur": round(event.duration_us, 3),
                "pid": 1,
                "tid": _ROWS.index(event.row),
                "args": {"step": event.step, **event.args, **self._shape(event)},
            }
            for event in sorted(self.events, key=lambda e: e.start_us)
        ]
        counts = [
            {
                "ph": "C",
                "name": count.name,
                "ts": round(count.at_us, 3),
                "pid": 1,
                "args": count.values,
            }
            for count in self.counts
        ]
        return {"traceEvents": [*names, *spans, *counts], "displayTimeUnit": "ms"}

    def _shape(self, event: Event) -> dict[str, Any]:
        if event.name != "body" or event.step >= len(self.steps):
            return {}
        shape = self.steps[event.step]
        return {"tokens": shape.num_tokens, "sequences": len(shape.chunks), "chunks": shape.chunks}

    def write(self, path: Path) -> None:
        """Writes the trace to a file."""
        path.write_text(json.dumps(self.to_json()) + "\n")
