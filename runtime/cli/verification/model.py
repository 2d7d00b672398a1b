"""An opened artifact beside the reference's view of it: each kernel alone, then the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from pagec.compiler import reference
from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.compiler.ir import CacheType
from pagec.compiler.packing import unpack
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.user_ops import check_known
from pagec.runtime.batch import build_batch
from pagec.runtime.cli.verification.inputs import Step, fitting, random_entries
from pagec.runtime.cli.verification.row import Row, worse
from pagec.runtime.cli.verification.step import StepCheck
from pagec.runtime.loading import LoadOptions, load
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

# Two runs that round at the same points but sum in another order are two draws of the same noise; means over
# some hundred positions of random tokens lie within this factor of each other.
MODEL_SLACK = 3.0
STEPS: Final[tuple[Step, ...]] = (
    ((0, 1),),
    ((37, 1), (5, 1)),
    ((70, 1), (0, 3), (16, 5)),
    ((0, 65), (33, 20), (130, 1), (300, 16)),
)
Progress = Callable[[str, int, int], None]


class Verification:
    """`seed` < 0: another one each day."""

    def __init__(self, artifact: Artifact | GpuArtifact, weights: str | None = None, seed: int = -1) -> None:
        artifact.check_weights()
        self.artifact = artifact
        self.program = program = artifact.program
        self.rng = np.random.default_rng(seed if seed >= 0 else int(time.time()) // 86400)
        self.graph = artifact.graph()
        check_known(self.graph, str(artifact.path))
        numerics = artifact.manifest["numerics"]
        self.numbers = Numbers(numerics["dtype"], numerics["kv_dtype"], numerics["residual"])
        self.fused = run_passes(self.graph, self.numbers)
        self.steps = [fitting(program, step) for step in STEPS]
        tokens = max(sum(before + now for before, now in step) for step in self.steps)
        tokens = max(tokens, min(program.max_len, 2 * program.capacity.T))
        blocks = 1 + len(program.kv.groups) * (-(-tokens // program.kv.block_size) + program.capacity.S)
        self.device, self.runner = load(artifact, LoadOptions(weights, num_blocks=blocks))
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self._packed = {part: w for w in reversed(program.weights) for part in w.parts}
        self._read: dict[str, torch.Tensor] = {}

    def check(self, step: Step) -> StepCheck:
        """A step's kernels, to be run by this device."""
        raise NotImplementedError

    def more(self) -> list[Row]:
        """What else there is to compare on this device."""
        return []

    def chunks(self, length: int) -> list[int]:
        """Where the chunks begin and end in which a prompt is computed for the whole model."""
        return [0, length // 2, length]

    def run(self, progress: Progress) -> list[Row]:
        """All kernels at several numbers of rows, then the whole model."""
        rows: dict[tuple[str, int], Row] = {}
        for done, step in enumerate(self.steps):
            progress("verify kernels", done, len(self.steps))
            for row in self.check(step).rows():
                key = row.subject, row.num_rows
                rows[key] = worse(rows[key], row) if key in rows else row
        progress("verify kernels", len(self.steps), len(self.steps))
        progress("verify the model", 0, 1)
        model = [*self.more(), self._model()]
        progress("verify the model", 1, 1)
        return [*sorted(rows.values(), key=lambda r: (r.subject, r.num_rows)), *model]

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

    def entries(self, step: Step) -> list[Entry]:
        """Entries with random tokens, their blocks drawn at random from the pool."""
        return random_entries(self.program, self.runner.num_blocks, step, self.rng)

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
        inputs = reference.step_inputs(self.fused, prompts) | self.caches(len(prompts), max(lengths))
        inputs["logit_rows"] = torch.arange(len(mine), dtype=torch.int32)
        rounded = reference.run(self.fused, inputs, self.weight)["logits"]
        error, allowed = mean_kl(plain.double(), mine), mean_kl(plain.double(), rounded.double())
        return Row("model: mean KL from float32", len(mine), error, error / (MODEL_SLACK * allowed + 1e-12))

    def caches(self, num_sequences: int, length: int) -> dict[str, torch.Tensor]:
        types = {name: self.fused.types[name] for name in self.fused.inputs}
        return {
            name: reference.empty_cache(t, num_sequences, length)
            for name, t in types.items()
            if isinstance(t, CacheType)
        }

    def _logits(self, prompt: list[int]) -> Any:
        """All logits of a prompt, in chunks."""
        output: list[Any] = []
        entries = self.entries([(0, len(prompt))])
        entry = entries[0]._replace(
            request=Request(0, prompt, 1, len(self.program.kv.groups), want_logits=True)
        )
        entry.sequence.tokens[:] = prompt
        for start, end in pairwise(self.chunks(len(prompt))):
            if start < end:
                part = entry._replace(start=start, num_tokens=end - start, num_logits=end - start)
                output.append(self.runner.run(build_batch([part], self.program)).logits)
        return np.concatenate(output)


def mean_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Mean over rows of KL(p || q), float64."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
