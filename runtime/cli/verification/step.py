"""One step: the reference's values, and each kernel run alone on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagec.compiler import reference
from pagec.compiler.dims import padded_last
from pagec.compiler.ir import CacheType, Node
from pagec.compiler.ops.sampling import outside
from pagec.compiler.packing import buffer_to_rows, from_bf16, kv_elements, rows_to_buffer, to_bf16
from pagec.compiler.passes.sample import INPUTS
from pagec.compiler.program import Buffer
from pagec.runtime.batch import build_batch
from pagec.runtime.cli.verification.bounds import BF16_ULP, SAMPLING_SLACK, Bounds, U
from pagec.runtime.cli.verification.inputs import Step, random_sampling
from pagec.runtime.cli.verification.row import Row, worse
from pagec.runtime.sampling.sampler import sampling_inputs

if TYPE_CHECKING:
    from pagec.runtime.cli.verification.model import Verification


@dataclass(frozen=True, slots=True)
class NodeLaunches:
    """What computes a node of the fused graph: its kernels with their numbers of rows, the arguments of all
    launches, and what runs them."""

    node: str
    kernels: tuple[tuple[str, int], ...]
    args: tuple[str, ...]
    run: Callable[[], None]


class StepCheck:
    """Compares the kernels of a step; what runs them is a matter of the device."""

    def __init__(self, verification: Verification, step: Step) -> None:
        self.v = verification
        self.program, self.fused = verification.program, verification.fused
        self.entries = verification.entries(step)
        self.batch = build_batch(self.entries, self.program)
        asked = random_sampling(self.program.vocab, len(self.batch.logit_rows), verification.rng)
        self.sampling = sampling_inputs(asked, self.program.vocab)
        self.caches = self._random_caches()
        self.values = reference.run(self.fused, self._inputs(), verification.weight)
        self.bounds = Bounds(
            self.fused,
            self.values,
            verification.weight,
            verification.rng,
            keys=max(e.start + e.num_tokens for e in self.entries),
            kv_dtype=self.program.kv.dtype,
        )

    def launches(self) -> Iterator[NodeLaunches]:
        """All that the step runs, each kernel with its number of rows; the step's arrays are in place
        when they come."""
        raise NotImplementedError

    def rows(self) -> list[Row]:
        """Each kernel of the step."""
        nodes = {node.outputs[0]: node for node in self.fused.nodes}
        rows: dict[str, Row] = {}
        for group in self.launches():
            if all(key in rows for key, _ in group.kernels):
                continue
            error, of_bound = self._compare(nodes[group.node], group)
            for key, count in group.kernels:
                found = Row(key, count, error, of_bound)
                rows[key] = worse(rows[key], found) if key in rows else found
        return list(rows.values())

    def _inputs(self) -> dict[str, torch.Tensor]:
        chunks = [entry.token_ids for entry in self.entries]
        inputs = reference.step_inputs(self.fused, chunks, [entry.start for entry in self.entries])
        inputs["logit_rows"] = torch.from_numpy(self.batch.logit_rows)
        arrays = (self.sampling.settings, self.sampling.edits, self.sampling.masks)
        inputs |= {name: torch.from_numpy(array) for name, array in zip(INPUTS, arrays, strict=True)}
        return inputs | self.caches

    def _random_caches(self) -> dict[str, torch.Tensor]:
        """Keys and values of the tokens before this step, already rounded; the rest is NaN."""
        length = max(entry.start + entry.num_tokens for entry in self.entries)
        caches = self.v.caches(len(self.entries), length)
        for cache in caches.values():
            for s, entry in enumerate(self.entries):
                shape = (2, entry.start, *cache.shape[3:])
                noise = torch.from_numpy(self.v.rng.standard_normal(shape, dtype=np.float32))
                cache[:, s, : entry.start] = noise.bfloat16().float()
        return caches

    # ----------------------------------------------------------------------- running one kernel

    def _compare(self, node: Node, group: NodeLaunches) -> tuple[float, float]:
        """(largest error, largest error over its bound) of a node's launches."""
        read = {arg.removeprefix("buffer:") for arg in group.args if arg.startswith("buffer:")}
        for name in read - set(node.outputs):
            self._put(self.v.buffers[name], self.values[name])
        if any(arg.startswith("kv:") for arg in group.args):
            self.v.runner.fill_kv_with_nan()
            self._put_cache(node)
        for name in node.outputs:
            if name in self.v.buffers:
                self.v.device.fill_nan(self.v.runner.memory.buffers[name])
        group.run()
        linear = node.find("linear")
        self.bounds.norms_itself = linear is not None and linear.inputs[0][1:] not in read
        worst = [self._judge(node, name) for name in node.outputs]
        return max(error for error, _ in worst), max((b for _, b in worst), key=lambda b: (b != b, b))

    def _put(self, buffer: Buffer, value: torch.Tensor) -> None:
        raw = rows_to_buffer(value.numpy(), buffer.dtype)
        self.v.device.upload(self.v.runner.memory.buffers[buffer.name], raw)

    def _get(self, buffer: Buffer, count: int) -> torch.Tensor:
        kind = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32}[buffer.dtype]
        raw = self.v.device.download(self.v.runner.memory.buffers[buffer.name], kind)
        raw = raw.reshape(-1, buffer.stride)[:count] if buffer.inner else raw[:count]
        return torch.from_numpy(np.ascontiguousarray(buffer_to_rows(raw, buffer.inner, buffer.dtype)))

    def _cache_type(self, node: Node) -> tuple[str, CacheType]:
        for name in node.values():
            t = self.fused.types[name]
            if isinstance(t, CacheType):
                return name, t
        raise AssertionError(node)

    def _layer(self, cache: CacheType) -> Any:
        """A copy of a layer's slice of the pool."""
        kind = np.uint16 if self.program.kv.dtype == "bf16" else np.float32
        return self.v.device.download(self.v.runner.memory.layers[cache.layer], kind)

    def _slots(self, cache: CacheType, s: int, start: int, end: int) -> Any:
        group, _ = self.program.kv.place(cache.layer)
        table = np.array(self.entries[s].sequence.block_tables[group], np.int32)
        size = self.program.kv.block_size
        positions = np.arange(start, end)
        return table[positions // size] * size + positions % size

    def _put_cache(self, node: Node) -> None:
        """The reference's keys and values into the pool; what it does not know stays NaN."""
        name, cache = self._cache_type(node)
        pool = self._layer(cache)
        padded = padded_last((cache.head_dim,))
        layout = replace(self.program.kv, head_dim=padded)  # the padding of a head is zero, as when written
        for s, entry in enumerate(self.entries):
            end = entry.start if node.find("kv_write") else entry.start + entry.num_tokens
            places = kv_elements(layout, self._slots(cache, s, 0, end))
            for place, part in zip(places, self.values[name], strict=True):
                x = np.pad(part[s, :end].numpy(), ((0, 0), (0, 0), (0, padded - cache.head_dim)))
                pool[place] = to_bf16(x) if self.program.kv.dtype == "bf16" else x
        self.v.device.upload(self.v.runner.memory.layers[cache.layer], pool)

    def _read_cache(self, cache: CacheType) -> torch.Tensor:
        """Keys and values that this step wrote: [2, tokens, kv_heads, head_dim]."""
        pool, parts = self._layer(cache), []
        for s, entry in enumerate(self.entries):
            slots = self._slots(cache, s, entry.start, entry.start + entry.num_tokens)
            both = np.stack([pool[place] for place in kv_elements(self.program.kv, slots)])
            parts.append(buffer_bits(both, self.program.kv.dtype))
        return torch.from_numpy(np.concatenate(parts, axis=1))

    # --------------------------------------------------------------------------------- judging

    def _judge(self, node: Node, name: str) -> tuple[float, float]:
        t = self.fused.types[name]
        if isinstance(t, CacheType):
            mine = self._read_cache(t)
            rows = [
                self.values[name][:, s, e.start : e.start + e.num_tokens] for s, e in enumerate(self.entries)
            ]
            expected, dtype = torch.cat(rows, 1), self.program.kv.dtype
            sums = expected.shape[-1] * sum(inner.op == "rmsnorm" for inner in node.body)
            bound = (16 + sums) * U * expected.abs().amax(-1, keepdim=True)
            bound = bound + self.bounds.behind_linear(node).reshape(1, -1, 1, 1)
        else:
            expected, dtype = self.values[name], t.dtype
            mine = self._get(self.v.buffers[name], len(expected))
            if node.op == "argmax":
                return self._judge_argmax(node, mine)
            if node.op == "sample":
                return self._judge_sample(node, name, mine)
            bound = self.bounds.of(node, t, expected)
        if dtype == "bf16":
            bound = bound + BF16_ULP * expected.abs()
        difference = (mine - expected).abs()
        over = torch.where(difference == 0, torch.zeros(()), difference / bound)
        return float(difference.max()), float(over.max())

    def _judge_argmax(self, node: Node, mine: torch.Tensor) -> tuple[float, float]:
        """Any index of the greatest logit is right; the first is what the kernel gives."""
        same = bool((mine == self.values[node.outputs[0]]).all())
        return 0.0, 0.0 if same else float("inf")

    def _judge_sample(self, node: Node, name: str, mine: torch.Tensor) -> tuple[float, float]:
        """A token is right whose piece of the distribution the uniform number meets, up to the rounding of
        float32 weights; a log probability belongs to the token that was drawn."""
        x, settings, edits, masks = (self.values[reference[1:]] for reference in node.inputs)
        tokens = self._get(self.v.buffers[node.outputs[0]], len(x)).long()
        if name == node.outputs[0]:
            rows = enumerate(tokens.tolist())
            error = max(outside(token, x[i], settings[i], edits, masks) for i, token in rows)
        else:
            exact = x.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            error = float((mine - exact).abs().max())
        return error, error / SAMPLING_SLACK


def buffer_bits(raw: Any, dtype: str) -> Any:
    """Float32 values of bf16 bit patterns, or the float32 values themselves."""
    return from_bf16(raw) if dtype == "bf16" else raw
