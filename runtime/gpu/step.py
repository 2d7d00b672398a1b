"""A step's numbers as a GPU's kernels read them. Plain numpy: nothing here knows a device.

Kernels, and the graphs that they are captured in, read from fixed places. All arrays of a step but block
tables and sampling's lie in one image, in the order of `image_words`, and are copied to the device together,
as far as the step fills it. What is padding up to a bucket names token 0 and slot 0, of the scratch block;
kernels read the true numbers from `counts` and do not even look there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagec.compiler.gpu_program import GpuProgram, Span
from pagec.compiler.launch import Counts
from pagec.runtime.batch import I32, Batch
from pagec.runtime.memory import starts

# Items of decode attention, beside one for each sequence, for which there is room: two million keys of 512.
MORE_ITEMS: Final = 4096
WORD: Final = 4


@dataclass(frozen=True, slots=True)
class Step:
    """What to launch: `span`, for so many `rows` (by Counts). `bucket`: how many tokens a captured graph of
    single new tokens has to be for, 0 if there is none. Of the image the first `used_bytes` are needed."""

    span: Span
    rows: tuple[int, ...]
    bucket: int
    used_bytes: int


def max_items(program: GpuProgram) -> int:
    """Items of decode attention that a step has at most; sequences beyond are computed as chunks are."""
    S, least = program.capacity.S, min((s.key_split for s in program.body if s.key_split), default=0)
    return S + min(S * (program.max_len // least), MORE_ITEMS) if least else 0


def max_copies(program: GpuProgram) -> int:
    """Copies of blocks that one launch does."""
    return program.capacity.S * max(len(program.kv.groups), 1)


def image_words(program: GpuProgram) -> dict[str, int]:
    """Words of the image's arrays, in its order: what every step fills comes first."""
    T, S, R = program.capacity.T, program.capacity.S, program.capacity.R
    return {
        "counts": len(Counts),
        "query_start": S + 1,
        "seq_lens": S,
        "split_start": S + 1,
        "logit_rows": R,
        "tokens": T,
        "positions": T,
        **{f"slot_mapping.{group}": T for group in range(len(program.kv.groups))},
        "splits": 2 * max_items(program),
        "tiles": 2 * T,
        "copies": 2 * max_copies(program),
    }


class StepImage:
    """The image of a step's arrays, filled from batches. `arrays` are views of `words`, by name."""

    def __init__(self, program: GpuProgram) -> None:
        self._program = program
        self._max_items = max_items(program)
        sizes = {name: WORD * words for name, words in image_words(program).items()}
        places = starts(sizes)
        last = list(sizes)[-1]
        self.words: I32 = np.zeros((places[last] + sizes[last]) // WORD, np.int32)
        self._starts = {name: at // WORD for name, at in places.items()}
        self.arrays = {name: self.words[self._starts[name] :][: size // WORD] for name, size in sizes.items()}

    def fill(self, batch: Batch, rows: I32, copies: I32) -> Step:
        """Writes a batch into the image, of its logit rows the first chunk, and the copies to make."""
        program = self._program
        bucket = bucket_of(program.buckets, batch.num_tokens)
        span = program.span(bucket)
        items = num_items(batch, span.key_split, self._max_items)
        tiles = batch.tiles[items[batch.tiles[:, 0]] == 0] if span.key_split else batch.tiles
        numbers = {
            Counts.T: batch.num_tokens,
            Counts.S: batch.num_sequences,
            Counts.R: len(rows),
            Counts.TILES: len(tiles),
            Counts.SPLITS: int(items.sum()),
            Counts.COPIES: len(copies),
        }
        counts = [numbers[count] for count in Counts]
        self._put("counts", counts)
        self._put("query_start", batch.query_start)
        self._put("seq_lens", batch.seq_lens)
        self._put("split_start", np.concatenate([np.zeros(1, np.int32), np.cumsum(items, dtype=np.int32)]))
        self._put("logit_rows", rows)
        self._put("tokens", batch.tokens, bucket)
        self._put("positions", batch.positions, bucket)
        for group, slots in enumerate(batch.slot_mapping):
            end = self._put(f"slot_mapping.{group}", slots, bucket)
        for name, array in (("splits", _items(items)), ("tiles", tiles), ("copies", copies)):
            if len(array):
                end = self._put(name, array.reshape(-1))
        is_decode = not len(tiles) and batch.num_tokens == batch.num_sequences
        return Step(span, tuple(counts), bucket if is_decode else 0, WORD * end)

    def graph_rows(self, bucket: int) -> tuple[int, ...]:
        """What a graph for steps of up to `bucket` single new tokens is captured for, by Counts."""
        numbers = {Counts.T: bucket, Counts.S: bucket, Counts.SPLITS: self._max_items}
        return tuple(numbers.get(count, 0) for count in Counts)

    def most_rows(self) -> tuple[int, ...]:
        """The most of each that a step has, by Counts."""
        T, S, R = self._program.capacity.T, self._program.capacity.S, self._program.capacity.R
        most = {Counts.T: T, Counts.S: S, Counts.R: R, Counts.TILES: T, Counts.SPLITS: self._max_items}
        return tuple(most.get(count, max_copies(self._program)) for count in Counts)

    def _put(self, name: str, values: Sequence[int] | I32, padded: int = 0) -> int:
        """Values, then zeros up to `padded`; where they end, in words of the image."""
        array = self.arrays[name]
        array[: len(values)] = values
        array[len(values) : padded] = 0
        return self._starts[name] + max(len(values), padded)


def bucket_of(buckets: Sequence[int], num_rows: int) -> int:
    """The least bucket that holds so many rows."""
    return buckets[bisect_left(buckets, num_rows)]


def num_items(batch: Batch, key_split: int, most: int) -> I32:
    """Items of decode attention of each sequence: its splits if it has one new token, in the order of the
    batch, as long as there is room for them; 0 for those that prefill attention takes."""
    if not key_split:
        return np.zeros(batch.num_sequences, np.int32)
    is_single = np.diff(batch.query_start) == 1
    items = np.where(is_single, -(-batch.seq_lens // np.int32(key_split)), 0)
    fitting: I32 = np.where(np.cumsum(items, dtype=np.int64) <= most, items, 0).astype(np.int32)
    return fitting


def _items(items: I32) -> I32:
    """[n, 2]: (sequence, which of its splits)."""
    owner = np.repeat(np.arange(len(items), dtype=np.int32), items)
    first = np.cumsum(items, dtype=np.int32) - items
    return np.stack([owner, np.arange(len(owner), dtype=np.int32) - np.repeat(first, items)], axis=1)


def is_chain(copies: I32) -> bool:
    """Whether some of these copies of blocks, (source, target), read or write what another one writes."""
    sources, targets = copies[:, 0], copies[:, 1]
    return len(np.unique(targets)) < len(targets) or bool(np.isin(sources, targets).any())
