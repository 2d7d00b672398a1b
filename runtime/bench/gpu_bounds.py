"""What a GPU's launches must at least read, write and compute, from their arguments and their templates.

Every buffer that a launch names is read or written once, every weight read once. What a kernel leaves for
the next one beside buffers (pieces of sums along K, parts of decode attention) need not be, and is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.gpu_program import GpuKernel, GpuLaunch
from pagec.runtime.bench.cost import Chunk, ModelCost, model_cost

PREFILL, DECODE, MERGE = "attention_prefill", "attention_decode", "attention_merge"
WORD = 4


class GpuBounds:
    """As bounds.Bounds."""

    def __init__(self, artifact: GpuArtifact) -> None:
        self.cost: ModelCost = model_cost(artifact)
        self._program = program = artifact.program
        self._kernels = {kernel.key: kernel for kernel in program.kernels}
        self.templates = {kernel.key: kernel.template for kernel in program.kernels}
        self._launches = {
            (launch.name, launch.kernel): launch
            for span in (*program.body, *program.head)
            for launch in span.launches
        }
        self._rows = {b.name: b.stride * ITEM_BYTES[b.dtype] for b in program.buffers}
        self._weights = {weight.name: weight for weight in program.weights}
        self._tables = {table.name: 2 * WORD * len(table.frequencies) for table in program.tables}

    def of(self, launch: str, kernel: str, rows: int, chunks: Sequence[Chunk]) -> tuple[int, int]:
        one, made = self._launches[launch, kernel], self._kernels[kernel]
        match made.template:
            case "attention_prefill" | "attention_decode":
                return self._attention(one, [c for c in chunks if (c[1] == 1) == (made.template == DECODE)])
            case "attention_merge":
                rows = sum(count == 1 for _, count in chunks)
            case "linear":
                return self._bytes(one, made, rows), 2 * made.params["NP"] * made.params["KP"] * rows
            case "grouped_linear":
                p = made.params
                return self._bytes(one, made, rows), 2 * p["choices"] * p["n"] * p["KP"] * rows
        return self._bytes(one, made, rows), 0

    def reads_memory(self, launch: str, kernel: str) -> bool:
        one = self._launches[launch, kernel]
        return any(arg.startswith(("weight:", "kv:")) for arg in one.args)

    def _attention(self, launch: GpuLaunch, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """Of those chunks that this kernel takes: single tokens by decode, others by prefill."""
        (layer,) = (int(arg.removeprefix("kv:")) for arg in launch.args if arg.startswith("kv:"))
        cost = self.cost.layers[layer]
        nbytes = sum(cost.kv_bytes(*chunk, self.cost.kv_item_bytes) for chunk in chunks)
        tokens = sum(count for _, count in chunks)
        return nbytes + self._rows_bytes(launch) * tokens, sum(cost.flops(*chunk) for chunk in chunks)

    def _bytes(self, launch: GpuLaunch, kernel: GpuKernel, rows: int) -> int:
        names = [arg.removeprefix("weight:") for arg in launch.args if arg.startswith("weight:")]
        if kernel.template == "embed":
            (table,) = (self._weights[name] for name in names)
            return (self._rows_bytes(launch) + table.shape[-1] * ITEM_BYTES[table.dtype]) * rows
        fixed = sum(self._weights[name].nbytes for name in names)
        if kernel.template == "grouped_linear":  # of the experts no more than are chosen
            experts = kernel.params["experts"]
            fixed = fixed * min(rows * kernel.params["choices"], experts) // experts
        return fixed + self._rows_bytes(launch) * rows

    def _rows_bytes(self, launch: GpuLaunch) -> int:
        """Bytes of a row of all buffers, and of what belongs to a token beside them."""
        kv, total = self._program.kv, 0
        for arg in dict.fromkeys(launch.args):
            kind, _, name = arg.partition(":")
            if kind == "buffer":
                total += self._rows[name]
            elif kind == "table":
                total += self._tables[name]
            elif kind == "kv" and self.templates[launch.kernel] not in (PREFILL, DECODE):  # it is written
                total += 2 * kv.kv_heads * kv.head_dim * ITEM_BYTES[kv.dtype]
            elif kind == "step" and name.startswith(("tokens", "positions", "slot_mapping", "logit_rows")):
                total += WORD
        return total
