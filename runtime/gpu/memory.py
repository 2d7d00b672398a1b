"""A GPU program's device memory: the areas of any program, and what its kernels want beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.launch import Counts
from pagec.runtime.device import Device, Memory
from pagec.runtime.gpu.step import WORD, image_words, max_items
from pagec.runtime.ledger import Ledger
from pagec.runtime.memory import Areas, sampling_words, starts
from pagec.runtime.weights import WeightsMemory


class GpuAreas(Areas):
    """A GPU program's device memory by name. The step's arrays begin with those of a StepImage, in its order;
    `image` is the memory of these."""

    def __init__(
        self,
        artifact: GpuArtifact,
        device: Device,
        weights: str | None,
        weights_memory: WeightsMemory = "copy",
    ) -> None:
        program = artifact.program
        self._partial_bytes = [size * max_items(program) for size in program.split_bytes]
        self._graphs_bytes = 0
        image = {name: WORD * words for name, words in image_words(program).items()}
        capacity, groups = program.capacity, range(len(program.kv.groups))
        others = {
            **{f"block_tables.{group}": capacity.S * program.max_blocks for group in groups},
            **sampling_words(program),
            # Each token of a step may be a logit row, and each sequence have choices drawn from one.
            "chosen": capacity.T + capacity.S,
            "num_blocks": 1,
        }
        sizes = image | {name: WORD * words for name, words in others.items()}
        super().__init__(artifact, device, weights, weights_memory, step_bytes=sizes)
        self.image = self.step_area[: starts(sizes)[next(iter(others))]]
        self._partial = [device.allocate(size) for size in self._partial_bytes]

    def add_kv(self, num_blocks: int) -> None:
        super().add_kv(num_blocks)
        self._device.upload(self.steps["num_blocks"], np.array([num_blocks], np.int32))

    def find(self, argument: str) -> Memory:
        kind, _, name = argument.partition(":")
        match kind:
            case "scratch":
                return self.scratch[int(name) :]
            case "partial":
                return self._partial[("stats", "sums").index(name)]
            case "pool":
                return self.kv
        return super().find(argument)

    def count(self, count: Counts) -> Memory:
        """The word that says how many rows there are."""
        return self.steps["counts"][WORD * count : WORD * (count + 1)]

    def note_graphs(self, nbytes: int) -> None:
        """What captured graphs take, for the ledger."""
        self._graphs_bytes = nbytes

    def ledger(self, num_blocks: int) -> Ledger:
        found = super().ledger(num_blocks)
        workspace = found.workspace_bytes + sum(self._partial_bytes)
        return replace(found, workspace_bytes=workspace, graphs_bytes=self._graphs_bytes)
