"""What happened when in a step, as a Chrome trace (chrome://tracing, Perfetto).

    row "engine"    schedule, prepare, upload, body, head, commit
    row "kernels"   each launch with its kernel's key and number of rows (Recorder(kernels=True))

Every event carries the step's number; `Recorder.steps` has the shape of each step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pagec.compiler.program import Launch
    from pagec.runtime.batch import Batch

Row = Literal["engine", "kernels"]
_ROWS: Final[tuple[Row, ...]] = ("engine", "kernels")
_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time; microseconds since the trace began."""

    name: str
    row: Row
    step: int
    start_us: float
    duration_us: float
    args: dict[str, Any]


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

    def span(self, name: str) -> AbstractContextManager[None]:
        """The time inside a `with`."""
        del name
        return _NOTHING

    def batch(self, batch: Batch) -> None:
        """A step's batch, before it runs."""

    def head(self, num_rows: int) -> None:
        """The head is about to run on so many logit rows."""

    def launches(self, launches: Sequence[Launch], counts: Sequence[int], times_us: Sequence[float]) -> None:
        """Launches that have just ended, what rows each took, and how long."""


NO_TRACE: Final = Trace()


class Recorder(Trace):
    """Records everything; `kernels`: each launch by itself."""

    def __init__(self, *, kernels: bool = False) -> None:
        self.kernels = kernels
        self.events: list[Event] = []
        self.steps: list[StepShape] = []
        self._began = time.perf_counter()
        self._step = 0

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.events.clear()
        self.steps.clear()
        self._step = 0

    def now_us(self) -> float:
        return (time.perf_counter() - self._began) * 1e6

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.now_us()
        try:
            yield
        finally:
            self._add(name, "engine", start, self.now_us() - start, {})
            if name == "commit":
                self._step += 1

    def batch(self, batch: Batch) -> None:
        counts = (batch.query_start[1:] - batch.query_start[:-1]).tolist()
        ends = batch.seq_lens.tolist()
        chunks = tuple((end - count, count) for end, count in zip(ends, counts, strict=True))
        self.steps.append(StepShape(chunks, len(batch.tiles)))

    def head(self, num_rows: int) -> None:
        self.steps[-1].head_rows.append(num_rows)

    def launches(self, launches: Sequence[Launch], counts: Sequence[int], times_us: Sequence[float]) -> None:
        start = self.now_us() - sum(times_us)
        for launch, count, duration in zip(launches, counts, times_us, strict=True):
            args = {"kernel": launch.key_for(count), "rows": count}
            self._add(launch.name, "kernels", start, duration, args)
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
        return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}

    def _shape(self, event: Event) -> dict[str, Any]:
        if event.name != "body" or event.step >= len(self.steps):
            return {}
        shape = self.steps[event.step]
        return {"tokens": shape.num_tokens, "sequences": len(shape.chunks), "chunks": shape.chunks}

    def write(self, path: Path) -> None:
        """Writes the trace to a file."""
        path.write_text(json.dumps(self.to_json()) + "\n")
