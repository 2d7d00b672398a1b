"""What `pagec verify` compares: each kernel alone, fed with the reference's values, then the whole model.

A kernel's bound is what its arithmetic allows between two orders of summation: for a float32 sum of n
products 2 n u sum |a b| (u = 2^-24; Higham, Accuracy and Stability, section 3.1), and one unit in the last
place wherever a result is rounded to bf16, since two sums a hair apart may round apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagec.compiler import ops, reference
from pagec.compiler.artifact import Artifact
from pagec.compiler.dims import padded_last
from pagec.compiler.ir import CacheType, Node, Type
from pagec.compiler.ops.sampling import outside
from pagec.compiler.packing import buffer_to_rows, from_bf16, kv_elements, rows_to_buffer, to_bf16, unpack
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.passes.sample import INPUTS
from pagec.compiler.program import HEAD_COUNTS, Buffer, Launch
from pagec.compiler.user_ops import check_known
from pagec.runtime.batch import build_batch
from pagec.runtime.device.cpu import CpuDevice
from pagec.runtime.runner import Runner
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Row as SamplingRow
from pagec.runtime.sampling.sampler import Sampler, sampling_inputs
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

U = 2.0**-24
BF16_ULP = 2.0**-7
# Two runs that round at the same points but sum in another order are two draws of the same noise; means over
# some hundred positions of random tokens lie within this factor of each other.
MODEL_SLACK = 3.0
# How far float32 weights and their sums may shift the pieces of a distribution, and log probabilities.
SAMPLING_SLACK = 1e-4
Progress = Callable[[str, int, int], None]
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: a kernel's key (or "model"), its number of rows, its largest absolute error, and the
    error over the bound where that is greatest."""

    subject: str
    num_rows: int
    error: float
    of_bound: float

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1  # NaN is not


class Verification:
    """An opened artifact beside the reference's view of it. `seed` < 0: another one each day."""

    def __init__(self, path: Path, weights: str | None = None, seed: int = -1) -> None:
        self.artifact = Artifact.open(path)
        self.artifact.check_weights()
        self.program = program = self.artifact.program
        self.rng = np.random.default_rng(seed if seed >= 0 else int(time.time()) // 86400)
        self.graph = self.artifact.graph()
        check_known(self.graph, str(path))
        numerics = self.artifact.manifest["numerics"]
        self.numbers = Numbers(numerics["dtype"], numerics["kv_dtype"])
        self.fused = run_passes(self.graph, self.numbers)
        tokens = max(sum(before + now for before, now in step) for step in self._steps())
        tokens = max(tokens, min(program.max_len, 2 * program.capacity.T))
        blocks = 1 + len(program.kv.groups) * (-(-tokens // program.kv.block_size) + program.capacity.S)
        self.device = CpuDevice(path)
        self.runner = Runner(self.artifact, self.device, weights=weights, num_blocks=blocks)
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self._packed = {part: w for w in reversed(program.weights) for part in w.parts}
        self._read: dict[str, torch.Tensor] = {}

    def run(self, progress: Progress) -> list[Row]:
        """All kernels at several numbers of rows, then the whole model."""
        rows: dict[tuple[str, int], Row] = {}
        steps = self._steps()
        for done, step in enumerate(steps):
            progress("verify kernels", done, len(steps))
            for row in _StepCheck(self, step).rows():
                rows.setdefault((row.subject, row.num_rows), row)
        progress("verify kernels", len(steps), len(steps))
        progress("verify the model", 0, 1)
        model = self._model()
        progress("verify the model", 1, 1)
        return [*sorted(rows.values(), key=lambda r: (r.subject, r.num_rows)), model]

    def weight(self, name: str) -> torch.Tensor:
        """A weight of the model, unpacked from the device's memory."""
        if name not in self._read:
            packed = self._packed[name]
            raw = self.device.download(
                self.runner.memory.weights[packed.name], np.uint16 if packed.dtype == "bf16" else np.float32
            )
            for part, x in unpack(packed, raw).items():
                self._read[part] = torch.from_numpy(np.ascontiguousarray(x))
        return self._read[name]

    def _steps(self) -> list[list[tuple[int, int]]]:
        """Steps to try, as (tokens before, tokens now) of each sequence, within the capacity."""
        T, S = self.program.capacity.T, self.program.capacity.S
        wanted = [
            [(0, 1)],
            [(37, 1), (5, 1)],
            [(70, 1), (0, 3), (16, 5)],
            [(0, 65), (33, 20), (130, 1), (300, 16)],
        ]
        steps = []
        for step in wanted:
            room, fitting = T, []
            for before, now in step[:S]:
                before = min(before, self.program.max_len - 1)
                now = min(now, room, self.program.max_len - before)
                if now:
                    fitting.append((before, now))
                room -= now
            steps.append(fitting)
        return steps

    def entries(self, step: Sequence[tuple[int, int]]) -> list[Entry]:
        """Entries with random tokens, their blocks drawn at random from the pool."""
        kv = self.program.kv
        free = list(self.rng.permutation(np.arange(1, self.runner.num_blocks)))
        room = self.program.capacity.R
        entries: list[Entry] = []
        for before, now in step:
            tokens = self.rng.integers(0, self.program.vocab, before + now).tolist()
            request = Request(len(entries), tokens, 1, len(kv.groups), want_logits=True)
            sequence = request.sequences[0]
            for table in sequence.block_tables:
                table.extend(int(free.pop()) for _ in range(-(-(before + now) // kv.block_size)))
            num_logits = min(now, room)
            room -= num_logits
            entries.append(Entry(request, sequence, before, now, num_logits))
        return entries

    def _model(self) -> Row:
        """Logits of a few prompts: float32 by the largest difference; rounded ones by how far they are from
        float32 (mean KL divergence), against how far the reference with the same rounding is."""
        lengths = [n for n in (1, 15, 17, 70) if n < self.program.max_len]
        prompts = [self.rng.integers(0, self.program.vocab, n).tolist() for n in lengths]
        mine = torch.from_numpy(np.concatenate([self._logits(p) for p in prompts])).double()
        plain = reference.run(self.graph, reference.step_inputs(self.graph, prompts), self.weight)["logits"]
        if self.numbers.dtype == self.numbers.kv_dtype == "f32":
            error = float((mine - plain).abs().max())
            return Row("model: largest error of logits", len(mine), error, error / 1e-3)
        inputs = reference.step_inputs(self.fused, prompts) | self._caches(len(prompts), max(lengths))
        inputs["logit_rows"] = torch.arange(len(mine), dtype=torch.int32)
        rounded = reference.run(self.fused, inputs, self.weight)["logits"]
        error, allowed = mean_kl(plain.double(), mine), mean_kl(plain.double(), rounded.double())
        return Row("model: mean KL from float32", len(mine), error, error / (MODEL_SLACK * allowed + 1e-12))

    def _caches(self, num_sequences: int, length: int) -> dict[str, torch.Tensor]:
        types = {name: self.fused.types[name] for name in self.fused.inputs}
        return {
            name: reference.empty_cache(t, num_sequences, length)
            for name, t in types.items()
            if isinstance(t, CacheType)
        }

    def _logits(self, prompt: list[int]) -> Any:
        """All logits of a prompt, in two chunks where it has two tokens."""
        output: list[Any] = []
        entries = self.entries([(0, len(prompt))])
        entry = entries[0]._replace(
            request=Request(0, prompt, 1, len(self.program.kv.groups), want_logits=True)
        )
        entry.sequence.tokens[:] = prompt
        middle = len(prompt) // 2
        for start, end in ((0, middle), (middle, len(prompt))):
            if start < end:
                part = entry._replace(start=start, num_tokens=end - start, num_logits=end - start)
                output.append(self.runner.run(build_batch([part], self.program)).logits)
        return np.concatenate(output)


def mean_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Mean over rows of KL(p || q), float64."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class _StepCheck:
    """One step: the reference's values, and each kernel run alone on them."""

    def __init__(self, verification: Verification, step: Sequence[tuple[int, int]]) -> None:
        self.v = verification
        self.program, self.fused = verification.program, verification.fused
        self.entries = verification.entries(step)
        self.batch = build_batch(self.entries, self.program)
        self.sampling = sampling_inputs(self._random_rows(), self.program.vocab)
        self.caches = self._random_caches()
        self.values = reference.run(self.fused, self._inputs(), verification.weight)

    def rows(self) -> list[Row]:
        """Each kernel of the step, once."""
        self.v.runner.upload(self.batch)
        self.v.runner.upload_logit_rows(self.batch.logit_rows)
        self.v.runner.upload_sampling(self.sampling)
        nodes = {node.outputs[0]: node for node in self.fused.nodes}
        rows: dict[str, Row] = {}
        for launch, *more in self._launches(nodes.keys()):
            count = self._count(launch)
            if launch.key_for(count) and launch.key_for(count) not in rows:
                error, of_bound = self._compare(nodes[launch.name], [launch, *more], count)
                for one in (launch, *more):
                    rows[one.key_for(count)] = Row(one.key_for(count), count, error, of_bound)
        return list(rows.values())

    def _count(self, launch: Launch) -> int:
        if launch.rows in HEAD_COUNTS:
            return len(self.batch.logit_rows)
        return self.batch.num_tokens if launch.rows == "T" else len(self.batch.tiles)

    def _launches(self, nodes: Collection[str]) -> list[list[Launch]]:
        """The launches of each node: one, and what else belongs to it."""
        found: list[list[Launch]] = []
        for launch in (*self.program.body, *self.program.head):
            if launch.name in nodes:
                found.append([launch])
            else:
                found[-1].append(launch)
        return found

    def _inputs(self) -> dict[str, torch.Tensor]:
        chunks = [entry.token_ids for entry in self.entries]
        inputs = reference.step_inputs(self.fused, chunks, [entry.start for entry in self.entries])
        inputs["logit_rows"] = torch.from_numpy(self.batch.logit_rows)
        arrays = (self.sampling.settings, self.sampling.edits, self.sampling.masks)
        inputs |= {name: torch.from_numpy(array) for name, array in zip(INPUTS, arrays, strict=True)}
        return inputs | self.caches

    def _random_rows(self) -> list[SamplingRow]:
        """What each logit row asks of sampling: something of everything."""
        rng, vocab = self.v.rng, self.program.vocab
        rows = []
        for i in range(len(self.batch.logit_rows)):
            seen = rng.integers(0, vocab, 8).tolist()
            params = SamplingParams(
                temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
                top_k=(0, 20)[i // 4 % 2],
                top_p=(1.0, 0.9)[i // 8 % 2],
                min_p=(0.0, 0.01)[i // 2 % 2],
                repetition_penalty=1.1,
                frequency_penalty=0.2,
                logit_bias={seen[0]: 2.0},
                allowed_token_ids=range(i % 2, vocab, 2) if i % 3 == 0 else None,
                logprobs=0,
            )
            one = Sampler(params, seen[:4], vocab=vocab, seed=int(rng.integers(2**63)))
            rows.append(one.row(seen))
        return rows

    def _random_caches(self) -> dict[str, torch.Tensor]:
        """Keys and values of the tokens before this step, already rounded; the rest is NaN."""
        length = max(entry.start + entry.num_tokens for entry in self.entries)
        caches = self.v._caches(len(self.entries), length)
        for cache in caches.values():
            for s, entry in enumerate(self.entries):
                shape = (2, entry.start, *cache.shape[3:])
                noise = torch.from_numpy(self.v.rng.standard_normal(shape, dtype=np.float32))
                cache[:, s, : entry.start] = noise.bfloat16().float()
        return caches

    # ----------------------------------------------------------------------- running one kernel

    def _compare(self, node: Node, launches: Sequence[Launch], count: int) -> tuple[float, float]:
        """(largest error, largest error over its bound) of one launch."""
        args = [arg for launch in launches for arg in launch.args]
        read = {arg.removeprefix("buffer:") for arg in args if arg.startswith("buffer:")}
        for name in read - set(node.outputs):
            self._put(self.v.buffers[name], self.values[name])
        if any(arg.startswith("kv:") for arg in launches[0].args):
            self.v.runner.fill_kv_with_nan()
            self._put_cache(node)
        for name in node.outputs:
            if name in self.v.buffers:
                self.v.device.fill_nan(self.v.runner.memory.buffers[name])
        for launch in launches:
            self.v.runner.launch(launch.name, count)
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
        kind = np.uint16 if self.program.kv.dtype == "bf16" else np.float32
        return self.v.runner.memory.layers[cache.layer].view(kind)

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
            end = entry.start if node.op == "fused.kv_write" else entry.start + entry.num_tokens
            places = kv_elements(layout, self._slots(cache, s, 0, end))
            for place, part in zip(places, self.values[name], strict=True):
                x = np.pad(part[s, :end].numpy(), ((0, 0), (0, 0), (0, padded - cache.head_dim)))
                pool[place] = to_bf16(x) if self.program.kv.dtype == "bf16" else x

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
        else:
            expected, dtype = self.values[name], t.dtype
            mine = self._get(self.v.buffers[name], len(expected))
            if node.op == "argmax":
                return self._judge_argmax(node, mine)
            if node.op == "sample":
                return self._judge_sample(node, name, mine)
            bound = self._bound(node, t, expected)
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

    def _bound(self, node: Node, t: Type, expected: torch.Tensor) -> torch.Tensor:
        """What float32 arithmetic allows, element by element."""
        if node.op in ("embed", "expert_lists"):
            return torch.zeros_like(expected)
        if node.op == "top_k_of":  # indices exactly; values are divided by a sum at most
            return 2 * t.inner[-1] * U * expected.abs() if t.dtype == "f32" else torch.zeros_like(expected)
        if node.op == "grouped_linear":
            x, chosen = (self.values[node.inputs[i][1:]] for i in (0, 2))
            w = reference.read(node.inputs[1][1:], self.v.weight).abs()
            (sums,) = ops.run("expert_linear", [x.abs(), w, chosen], {})
            return torch.as_tensor(2 * x.shape[-1] * U * sums + 1e-30)
        if node.op == "linear":
            return self._linear_bound(node).reshape(expected.shape)
        if node.op == "fused.linear":
            return self._epilogue_bound(node, expected)
        if node.op == "fused.attention":
            keys = max(e.start + e.num_tokens for e in self.entries)
            values = self.values[node.inputs[1][1:]][1].nan_to_num().abs().max()
            rounding = BF16_ULP if self.program.kv.dtype == "bf16" else 0.0
            return torch.full_like(expected, float(values) * (rounding + 8 * (keys + 64) * U))
        # Row-wise: a few roundings per op, and a sum over the row where there is a norm.
        sums = sum(inner.op in ("rmsnorm", "layernorm", "softmax") for inner in node.body)
        roundings = 16 * max(1, len(node.body)) + sums * t.inner[-1]
        scale = expected.abs().flatten(1).amax(-1)
        for value in node.values():
            source, kind = self.values[value], self.fused.types[value]
            if isinstance(kind, Type) and kind.rows == t.rows and kind.dtype != "i32":
                scale = torch.maximum(scale, source.abs().flatten(1).amax(-1))
        return (2 * roundings * U * scale).reshape(-1, *[1] * (expected.ndim - 1)).expand_as(expected)

    def _linear_bound(self, linear: Node) -> torch.Tensor:
        x = self.values[linear.inputs[0][1:]].flatten(1).abs()
        w = reference.read(linear.inputs[1][1:], self.v.weight).abs()
        return 2 * x.shape[1] * U * (x @ w.T) + 1e-30

    def _epilogue_bound(self, node: Node, expected: torch.Tensor) -> torch.Tensor:
        """How far the epilogue carries the linear's bound: tried with random signs, before any rounding."""
        linear = node.find("linear") or node
        rest = [inner for inner in node.body if inner is not linear and inner.op != "cast"]
        name = linear.outputs[0]
        exact = reference.run_node(linear, self.values, self.v.weight)[name]
        slack = self._linear_bound(linear).reshape(exact.shape)

        def result(y: torch.Tensor) -> torch.Tensor:
            values = {**self.values, name: y}
            for inner in rest:
                values.update(reference.run_node(inner, values, self.v.weight))
            return values[rest[-1].outputs[0]] if rest else y

        def magnitude(y: torch.Tensor) -> torch.Tensor:
            """Of what is rounded on the way: an activation near 0 may come from a large sum (GELU's tail)."""
            values = {**self.values, name: y}
            for inner in rest:
                if inner.op == "activation":
                    values[inner.outputs[0]] = values[inner.inputs[0][1:]].abs()
                else:
                    values.update(reference.run_node(inner, values, self.v.weight))
            return (values[rest[-1].outputs[0]] if rest else y).abs()

        middle = result(exact)
        spread = torch.zeros_like(middle)
        for _ in range(4):
            signs = torch.from_numpy(self.v.rng.choice([-1.0, 1.0], exact.shape).astype(np.float32))
            spread = torch.maximum(spread, (result(exact + slack * signs) - middle).abs())
        return 4 * spread + 16 * len(node.body) * U * (expected.abs() + spread + magnitude(exact)) + 1e-30


def buffer_bits(raw: Any, dtype: str) -> Any:
    """Float32 values of bf16 bit patterns, or the float32 values themselves."""
    return from_bf16(raw) if dtype == "bf16" else raw
