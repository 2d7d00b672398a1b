"""What a case's kernels read and write, and which numbers are right, by torch on the GPU.

    linear     x[M, K] w[N, K] -> out0[M, N]; partial[splits, M, N] where K is split
    attention  tiles[n, 2] or splits[n, 2] and split_start[S + 1]; query_start[S + 1], seq_lens[S],
               block_tables[S, max_blocks]; q[T, stride],
               kv[blocks, 2, kv_heads, block_size, D] -> out[T, stride];
               stats[n, heads, 2] and sums[n, heads, D] between decode attention and its merge

Values are normal with fixed seeds, blocks lie in random order, and what no kernel may read, or has not
written yet, is NaN. Nothing of a result is taken from a kernel: torch computes it in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any, Final, Protocol

from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.launch import Counts

Tensor = Any
# A bf16 has 8 bits of mantissa: rounding to the nearest errs by 2^-9 of the value at most.
ROUNDING: Final[Mapping[str, float]] = {"bf16": 2.0**-9, "f32": 2.0**-24}
# What sums in float32 of thousands of products may be off by, of the result's size.
SUMMING: Final = 2.0**-10


class Memory(Protocol):
    """What is asked of runtime.device.cuda.gpu.TorchGpu here."""

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed bytes."""


class Arrays:
    """Makes arrays in a GPU's memory."""

    def __init__(self, gpu: Memory, dtype: str, seed: int) -> None:
        import torch

        self.torch: Any = torch
        self._types = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}
        self._gpu, self.dtype, self._seed = gpu, dtype, seed
        self._generator: Any = None
        self._between: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """NaN where it is not for integers."""
        kind = self._types[dtype]
        tensor = self._gpu.allocate(prod(shape) * kind.itemsize).view(kind).view(shape)
        return tensor if dtype == "i32" else tensor.fill_(float("nan"))

    def between(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """float32 memory from one launch of a trial to its next: the same for all trials."""
        if (name, shape) not in self._between:
            self._between[name, shape] = self.empty(shape, "f32")
        return self._between[name, shape].fill_(float("nan"))

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Of the case's type."""
        return self.empty(shape, self.dtype).normal_(generator=self.generator)

    def integers(self, values: Tensor) -> Tensor:
        """A copy of integers, in any shape."""
        return self.empty(tuple(values.shape), "i32").copy_(values)

    def order(self, count: int) -> Tensor:
        """0 .. count - 1 in random order, on the host."""
        return self.torch.randperm(count, generator=self.torch.Generator().manual_seed(self._seed))

    @property
    def generator(self) -> Any:
        """Of the device that memory lies on."""
        if self._generator is None:
            device = self._gpu.allocate(1).device
            self._generator = self.torch.Generator(device).manual_seed(self._seed)
        return self._generator


class Inputs(Protocol):
    """The inputs of a case; `arrays` gives them as a trial's kernels take them."""

    def arrays(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """By name; results are NaN."""

    def counts(self, sizes: Mapping[str, int], /) -> list[int]:
        """How many there are of what launch.Counts counts."""

    def wrong(self, arrays: Mapping[str, Tensor]) -> str:
        """What is wrong with a result; empty if nothing is."""


def inputs_of(problem: Problem, arrays: Arrays) -> Inputs:
    """Of a case."""
    return LinearInputs(problem, arrays) if isinstance(problem, Linear) else AttentionInputs(problem, arrays)


def _counts(**found: int) -> list[int]:
    return [found.get(count.name, 0) for count in Counts]


class LinearInputs:
    """Of y = x w^T."""

    def __init__(self, problem: Linear, arrays: Arrays) -> None:
        self._problem, self._make = problem, arrays
        self._x, self._w = arrays.normal((problem.M, problem.K)), arrays.normal((problem.N, problem.K))
        self._out = arrays.empty((problem.M, problem.N), arrays.dtype)
        self._expected: Tensor = None

    def arrays(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        found = {"x": self._x, "w": self._w, "out0": self._out.fill_(float("nan"))}
        if sizes["splits"] > 1:
            shape = (sizes["splits"], self._problem.M, self._problem.N)
            found["partial"] = self._make.between("partial", shape)
        return found

    def counts(self, _: Mapping[str, int]) -> list[int]:
        return _counts(T=self._problem.M)

    def wrong(self, arrays: Mapping[str, Tensor]) -> str:
        """An element may err by two roundings of its type, and by what sums of K products may."""
        if self._expected is None:
            # Products in full: no TF32.
            self._make.torch.set_float32_matmul_precision("highest")
            self._expected = self._x.float() @ self._w.float().T
        allowed = self._expected.abs() * (2 * ROUNDING[self._make.dtype])
        allowed += SUMMING * self._expected.square().mean().sqrt()
        return _compared(arrays["out0"].float() - self._expected, allowed)


class AttentionInputs:
    """Of attention over the cache: prompts from an empty one, or a new token of each sequence."""

    def __init__(self, problem: Prefill | Decode, arrays: Arrays) -> None:
        self._problem, self._make = problem, arrays
        if isinstance(problem, Prefill):
            self._new = self._length = problem.tokens
        else:
            self._new, self._length = 1, problem.context
        self._head = padded_last((problem.head_dim,))
        self._stride = row_stride((problem.heads, problem.head_dim))
        lines = (problem.sequences, self._length, problem.kv_heads, problem.head_dim)
        self._keys, self._values = arrays.normal(lines), arrays.normal(lines)
        tokens = problem.sequences * self._new
        self._q = arrays.empty((tokens, self._stride), arrays.dtype).zero_()
        self._heads(self._q).normal_(generator=arrays.generator)
        self._out = arrays.empty((tokens, self._stride), arrays.dtype)
        self._pools: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._expected: Tensor = None

    def _heads(self, rows: Tensor) -> Tensor:
        """Rows as [T, heads, head_dim], padding left out."""
        heads = rows[:, : self._problem.heads * self._head].unflatten(1, (self._problem.heads, self._head))
        return heads[..., : self._problem.head_dim]

    # ---------------------------------------------------------------------------------- arrays

    def arrays(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        kv, tables = self._pool(sizes["block_size"], sizes["max_blocks"])
        torch, problem = self._make.torch, self._problem
        found = {
            "query_start": self._make.integers(torch.arange(problem.sequences + 1) * self._new),
            "seq_lens": self._make.integers(torch.full((problem.sequences,), self._length)),
            "block_tables": tables,
            "q": self._q,
            "kv": kv,
            "out": self._out.fill_(float("nan")),
        }
        items = self._items(self._step(sizes))
        if isinstance(problem, Prefill):
            # Those with most keys first, as a step has them.
            found["tiles"] = self._make.integers(items[torch.argsort(-items[:, 1], stable=True)])
            return found
        each = -(-self._length // sizes["split"])
        return {
            **found,
            "splits": self._make.integers(items),
            "split_start": self._make.integers(torch.arange(problem.sequences + 1) * each),
            "stats": self._make.between("stats", (len(items), problem.heads, 2)),
            "sums": self._make.between("sums", (len(items), problem.heads, self._head)),
        }

    def counts(self, sizes: Mapping[str, int]) -> list[int]:
        items, problem = len(self._items(self._step(sizes))), self._problem
        if isinstance(problem, Prefill):
            return _counts(T=problem.sequences * self._new, S=problem.sequences, TILES=items)
        return _counts(T=problem.sequences, S=problem.sequences, SPLITS=items)

    def _step(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """(from one item of a sequence to the next, what is counted up)."""
        if isinstance(self._problem, Prefill):
            return sizes["query_tile"], sizes["query_tile"]
        return sizes["split"], 1

    def _items(self, step: tuple[int, int]) -> Tensor:
        """(sequence, first row or number of the split) of each item, on the host."""
        torch = self._make.torch
        each = -(-self._length // step[0])
        sequence = torch.arange(self._problem.sequences).repeat_interleave(each)
        number = torch.arange(each).repeat(self._problem.sequences)
        return torch.stack([sequence, number * step[1]], 1)

    def _pool(self, size: int, max_blocks: int) -> tuple[Tensor, Tensor]:
        """The cache in blocks of `size` tokens, and the tables of them. Block 0 is nobody's."""
        if (size, max_blocks) not in self._pools:
            problem, make = self._problem, self._make
            each = -(-self._length // size)
            blocks = make.order(problem.sequences * each) + 1
            pool = make.empty((len(blocks) + 1, 2, problem.kv_heads, size, self._head), make.dtype)
            place = blocks.to(pool.device)
            for which, lines in enumerate((self._keys, self._values)):
                whole = lines.new_full((problem.sequences, each * size, *lines.shape[2:]), float("nan"))
                whole[:, : self._length] = lines
                in_blocks = whole.view(-1, size, *lines.shape[2:]).transpose(1, 2)
                pool[place, which, :, :, : problem.head_dim] = in_blocks
                pool[place, which, :, :, problem.head_dim :] = 0
            tables = make.torch.zeros((problem.sequences, max_blocks), dtype=make.torch.int32)
            tables[:, :each] = blocks.view(problem.sequences, each)
            self._pools[size, max_blocks] = pool, make.integers(tables)
        return self._pools[size, max_blocks]

    # --------------------------------------------------------------------------------- numbers

    def wrong(self, arrays: Mapping[str, Tensor]) -> str:
        """A head's result errs by the rounding of weights and of itself, together less than 2^-9 of its size
        in the mean over its elements; twice that is allowed, so that a key too many or too few is seen. What
        float32 makes of exponents and sums is little beside it, but all there is in float32."""
        if self._expected is None:
            self._expected = self._attention()
        off = (self._heads(arrays["out"]).float() - self._expected).square().mean(-1).sqrt()
        allowed = self._expected.square().mean(-1).sqrt() * (2 * ROUNDING[self._make.dtype] + 2.0**-16)
        return _compared(off, allowed)

    def _attention(self) -> Tensor:
        """[T, heads, head_dim] in float32."""
        problem, torch = self._problem, self._make.torch
        torch.set_float32_matmul_precision("highest")
        # [sequences, new, KV heads, group, head_dim]
        queries = self._heads(self._q).unflatten(1, (problem.kv_heads, problem.group))
        queries = queries.unflatten(0, (problem.sequences, self._new))
        expected = torch.empty_like(queries, dtype=torch.float32)
        at = torch.arange(self._length, device=queries.device)
        hidden = at[None, :] > at[self._length - self._new :, None]
        for sequence, head in product(range(problem.sequences), range(problem.kv_heads)):
            keys, values = (lines[sequence, :, head].float() for lines in (self._keys, self._values))
            # [group, new, keys]
            scores = queries[sequence, :, head].float().transpose(0, 1) @ keys.T * problem.head_dim**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            expected[sequence, :, head] = (weights @ values).transpose(0, 1)
        return expected.flatten(2, 3).flatten(0, 1)


def _compared(off: Tensor, allowed: Tensor) -> str:
    """Says how many elements are off by more than is allowed; NaN is."""
    bad = ~(off.abs() <= allowed)
    count = int(bad.sum())
    if count == 0:
        return ""
    worst = float((off.abs() / allowed).max())
    return f"{count:,} of {bad.numel():,} results are wrong, the worst by {worst:.3g} of what is allowed"
