"""A program's device memory: weights, tables, step arrays, workspace and KV pool, laid out at load."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.compiler.dims import BYTE_ALIGN, ITEM_BYTES, round_up
from pagec.compiler.program import Buffer, Program, RopeTable
from pagec.compiler.program import Memory as MemoryPlan
from pagec.compiler.rope import cos_sin_of
from pagec.compiler.sampling import MAX_BIASES, NUM_WORDS, mask_words
from pagec.runtime.device import Device, Memory
from pagec.runtime.ledger import Ledger, check_fits
from pagec.runtime.weights import WeightsMemory, load_weights


class Areas:
    """A program's device memory, by name: weights, tables, step arrays, buffers, the pool's layers.

    `step_bytes`: sizes of the step's arrays, which lie one after the other in `step_area`.
    """

    def __init__(
        self,
        artifact: Artifact | GpuArtifact,
        device: Device,
        weights: str | None,
        weights_memory: WeightsMemory = "copy",
        *,
        step_bytes: Mapping[str, int],
    ) -> None:
        self._program: MemoryPlan = artifact.program
        program = self._program
        self._device = device
        self._weights_memory = weights_memory
        self._step_bytes = step_bytes
        check_fits(self.ledger(0), device.free_bytes())
        self.weights = load_weights(device, artifact, weights, weights_memory)
        self.tables = {table.name: _rope_table(device, table) for table in program.tables}
        self.step_area = device.allocate(sum(round_up(size, BYTE_ALIGN) for size in step_bytes.values()))
        self.steps = {
            name: self.step_area[at : at + step_bytes[name]] for name, at in starts(step_bytes).items()
        }
        self.buffers = _workspace(device, program)
        self.scratch = device.allocate(program.scratch_bytes)
        buffers = {buffer.name: buffer for buffer in program.buffers}
        self.outputs: Mapping[str, Buffer] = {k: buffers[name] for k, name in program.outputs.items()}

    def add_kv(self, num_blocks: int) -> None:
        """The pool, [spans][num_blocks][span_bytes]; a layer sees the slice of its index in its group."""
        kv = self._program.kv
        self.kv = self._device.allocate(num_blocks * kv.block_bytes, parts=kv.spans)
        size = num_blocks * kv.span_bytes
        self.layers = {
            layer: self.kv[index * size : (index + 1) * size]
            for group in kv.groups
            for index, layer in enumerate(group.layers)
        }

    def find(self, argument: str) -> Memory:
        """The memory behind a launch's argument, "kind:NAME"."""
        kind, _, name = argument.partition(":")
        match kind:
            case "kv":
                return self.layers[int(name)]
            case "buffer":
                return self.buffers[name]
            case "weight":
                return self.weights[name]
            case "table":
                return self.tables[name]
            case "scratch":
                return self.scratch
            case "step":
                return self.steps[name]
        raise KeyError(argument)

    def ledger(self, num_blocks: int) -> Ledger:
        """What all areas take, with a pool of so many blocks."""
        program = self._program
        return Ledger(
            weights_bytes=sum(w.nbytes for w in program.weights),
            tables_bytes=sum(8 * t.length * len(t.frequencies) for t in program.tables),
            workspace_bytes=program.slot_offsets()[1] + program.scratch_bytes,
            step_bytes=sum(self._step_bytes.values()),
            kv_bytes=num_blocks * program.kv.block_bytes,
            kv_blocks=num_blocks,
            kv_tokens=max(num_blocks - 1, 0) // max(len(program.kv.groups), 1) * program.kv.block_size,
            weights_memory=self._weights_memory,
        )


def step_bytes(program: Program) -> dict[str, int]:
    """Bytes of the step's arrays at capacity."""
    T, S, R = program.capacity.T, program.capacity.S, program.capacity.R
    sizes = {
        "tokens": T,
        "positions": T,
        "logit_rows": R,
        "query_start": S + 1,
        "seq_lens": S,
        "tiles": 2 * T,
    }
    if any(launch.rows == "sampled" for launch in program.head):
        sizes |= sampling_words(program)
    for group in range(len(program.kv.groups)):
        sizes[f"slot_mapping.{group}"] = T
        sizes[f"block_tables.{group}"] = S * program.max_blocks
    return {name: 4 * size for name, size in sizes.items()}


def sampling_words(program: MemoryPlan) -> dict[str, int]:
    """Words of what the sampling kernel reads, at capacity."""
    R = program.capacity.R
    return {
        "sampling.settings": NUM_WORDS * R,
        "sampling.edits": 2 * (min(program.vocab, program.max_len) + MAX_BIASES) * R,
        "sampling.masks": mask_words(program.vocab) * R,
    }


def starts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Where areas of these sizes begin, in bytes, each aligned, if they lie one after the other."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at
        at += round_up(size, BYTE_ALIGN)
    return found


def _workspace(device: Device, program: MemoryPlan) -> dict[str, Memory]:
    """Every buffer's memory at capacity; buffers of one slot share it."""
    offsets, nbytes = program.slot_offsets()
    memory = device.allocate(nbytes)
    views = {}
    for buffer in program.buffers:
        size = buffer.stride * ITEM_BYTES[buffer.dtype] * program.capacity.rows(buffer.rows)
        views[buffer.name] = memory[offsets[buffer.slot] :][:size]
    return views


def _rope_table(device: Device, table: RopeTable) -> Memory:
    cos_sin = np.stack(cos_sin_of(np.array(table.frequencies, np.float32), table.length, table.scale))
    memory = device.allocate(prod(cos_sin.shape) * 4)
    device.upload(memory, cos_sin)
    return memory
