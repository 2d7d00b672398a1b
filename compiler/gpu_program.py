"""The program for a GPU: as program.py, with launches listed by how many rows a step has.

A step is padded to the next of `buckets`, and takes the launches of the first Span of `body` that holds as
many tokens; then, for chunks of at most R logit rows, those of `head`. Kernels read how many rows there
really are from the device array `counts` (launch.Counts), so a bucket's launches can be captured in a graph.

Arguments are those of program.py, and

    scratch:N                       memory for within a launch and the one after it, from byte N on
    partial:stats, partial:sums     what decode attention's items leave, `split_bytes` each, for as many as
                                    there may be: pool tokens / the span's key_split + S
    step:splits[n, 2], step:split_start[S + 1]      these items (sequence, which split), each sequence's first
    step:chosen[n]                  the tokens that the logit rows of the step before have chosen
    step:copies[n, 2], step:num_blocks[1], pool:    of `copy`: blocks (from, to); how many the pool has; it

After them a kernel takes the address of its word of `counts`; then what launch.py says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagec.compiler.launch import Counts
from pagec.compiler.program import Memory, memory_from_json


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """An emitted kernel: its template and parameters, and (name, element type) of its arrays."""

    key: str
    template: str
    params: Mapping[str, Any]
    arrays: tuple[tuple[str, str], ...]
    warps: int
    stages: int


# In which steps a launch is wanted: all, or those that take each row's greatest logit, or those that sample.
When = Literal["always", "greedy", "sampled"]


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """A kernel, its arguments, and the name of the word of `counts` that says how many rows it has."""

    name: str
    kernel: str
    count: str
    args: tuple[str, ...]
    when: When = "always"

    @property
    def counts(self) -> Counts:
        return Counts[self.count]


@dataclass(frozen=True, slots=True)
class Span:
    """The launches of steps of up to `rows` rows. `key_split`: keys of an item of decode attention, 0 where
    there is none."""

    rows: int
    key_split: int
    launches: tuple[GpuLaunch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgram(Memory):
    """Everything a launcher needs beside the kernels' binaries and the weights' bytes.

    `query_tile`: tokens of an item of prefill attention. `split_bytes`: what an item of decode attention
    leaves, of stats and of sums. `copy` runs before a step that has blocks to copy.
    """

    strict: bool
    buckets: tuple[int, ...]
    query_tile: int
    split_bytes: tuple[int, int]
    kernels: tuple[GpuKernel, ...]
    body: tuple[Span, ...]
    head: tuple[Span, ...]
    copy: GpuLaunch

    def span(self, rows: int, *, head: bool = False) -> Span:
        """The launches for so many tokens, or logit rows."""
        return next(span for span in (self.head if head else self.body) if rows <= span.rows)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GpuProgram:
        return GpuProgram(
            **memory_from_json(data),
            strict=data["strict"],
            buckets=tuple(data["buckets"]),
            query_tile=data["query_tile"],
            split_bytes=(data["split_bytes"][0], data["split_bytes"][1]),
            kernels=tuple(
                GpuKernel(**{**k, "arrays": tuple((name, kind) for name, kind in k["arrays"])})
                for k in data["kernels"]
            ),
            body=_spans(data["body"]),
            head=_spans(data["head"]),
            copy=_launch(data["copy"]),
        )


def _launch(data: Mapping[str, Any]) -> GpuLaunch:
    return GpuLaunch(**{**data, "args": tuple(data["args"])})


def _spans(items: Sequence[Mapping[str, Any]]) -> tuple[Span, ...]:
    return tuple(Span(d["rows"], d["key_split"], tuple(map(_launch, d["launches"]))) for d in items)
