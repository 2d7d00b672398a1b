"""What a model becomes on a GPU: its graphs, its launches, and what its compiled kernels occupy."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import KERNELS, Artifact, CompiledKernel, GpuArtifact, look_at
from pagec.compiler.backends.cuda.build import Progress
from pagec.compiler.backends.cuda.fuse_norm import find_norms
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.backends.cuda.output import compiled_kernel
from pagec.compiler.backends.cuda.resources import Resources, occupancy
from pagec.compiler.backends.targets import load_target
from pagec.compiler.driver import CompileOptions, compile_gpu_model, find_source, plan_gpu_model
from pagec.compiler.fusion import format_fusion, fusion_rows
from pagec.compiler.gpu_program import GpuKernel, GpuProgram, Span
from pagec.compiler.ir import Graph
from pagec.compiler.launch import Counts
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.spec import build_graph
from pagec.compiler.target import CudaTarget
from pagec.compiler.user_ops import check_known


@dataclass(frozen=True, slots=True)
class GpuModel:
    """An artifact for a GPU, or a model compiled for one. `kernels` are by key, `sources` too."""

    graph: Graph
    program: GpuProgram
    target: CudaTarget
    kernels: Mapping[str, CompiledKernel]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GpuGraphs:
    """A model's graph before and after the passes, and the program for a GPU."""

    graph: Graph
    fused: Graph
    program: GpuProgram
    target: CudaTarget


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel: its tile, what it occupies, and the most rows that a launch of it has."""

    kernel: GpuKernel
    resources: Resources
    occupancy: int
    rows: int

    @property
    def tile(self) -> str:
        """Of matrix products: rows, columns, and a step along K or the keys of a split."""
        p = self.kernel.params
        sizes = [p.get(name) for name in ("BM", "BN", "BK")]
        return "x".join(str(size) for size in sizes if size)

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.kernel.key,
            "template": self.kernel.template,
            "tile": self.tile,
            "warps": self.kernel.warps,
            "stages": self.kernel.stages,
            "registers": self.resources.registers,
            "shared_bytes": self.resources.shared_bytes,
            "spills": self.resources.stack_bytes,
            "occupancy": self.occupancy,
            "mma": self.resources.mma,
            "rows": self.rows,
        }


def is_for_gpu(model: str, target: str) -> bool:
    """Whether `model` is an artifact for a GPU, or else `target` is one."""
    if Artifact.is_artifact(Path(model)):
        return isinstance(look_at(Path(model)), GpuArtifact)
    return isinstance(load_target(target), CudaTarget)


def load_gpu_model(options: CompileOptions, progress: Progress) -> GpuModel:
    """Reads an artifact, or compiles the kernels of what `options` name."""
    if Artifact.is_artifact(Path(options.model)):
        artifact = look_at(Path(options.model))
        assert isinstance(artifact, GpuArtifact)
        sources = {key: (artifact.path / KERNELS / f"{key}.py").read_text() for key in artifact.kernels}
        return GpuModel(artifact.graph(), artifact.program, artifact.target, artifact.kernels, sources)
    target, spec = _gpu(options), find_source(options).spec
    with tempfile.TemporaryDirectory() as directory:
        plan, cubins = compile_gpu_model(spec, options, target, Path(directory), progress)
    kernels = {key: compiled_kernel(cubin) for key, cubin in cubins.items()}
    sources = {key: kernel.source() for key, kernel in plan.kernels.items()}
    return GpuModel(build_graph(spec), plan.program, target, kernels, sources)


def load_gpu_graphs(options: CompileOptions) -> GpuGraphs:
    """Of an artifact, or of what `options` name; nothing is compiled."""
    if Artifact.is_artifact(Path(options.model)):
        artifact = look_at(Path(options.model))
        assert isinstance(artifact, GpuArtifact)
        graph, numerics = artifact.graph(), artifact.manifest["numerics"]
        check_known(graph, str(artifact.path))
        numbers = Numbers(numerics["dtype"], numerics["kv_dtype"], numerics["residual"])
        fused = fuse_writes(run_passes(graph, numbers))
        return GpuGraphs(graph, fused, artifact.program, artifact.target)
    spec, target = find_source(options).spec, _gpu(options)
    plan = plan_gpu_model(spec, options, target)
    return GpuGraphs(build_graph(spec), plan.graph, plan.program, target)


def _gpu(options: CompileOptions) -> CudaTarget:
    target = load_target(options.target)
    assert isinstance(target, CudaTarget)
    return target


# -------------------------------------------------------------------------------------- kernels


def kernel_rows(model: GpuModel) -> list[KernelRow]:
    """All kernels, in the order of first use."""
    most = _most_rows(model.program)
    rows = []
    for kernel in model.program.kernels:
        resources = Resources(**model.kernels[kernel.key].resources)
        held = occupancy(resources, kernel.warps, model.target)
        rows.append(KernelRow(kernel, resources, held, most[kernel.key]))
    return rows


def _most_rows(program: GpuProgram) -> dict[str, int]:
    """By kernel, the rows (or sequences) of the largest span that launches it."""
    most = {program.copy.kernel: program.capacity.S}
    for span in (*program.body, *program.head):
        for launch in span.launches:
            sequences = launch.counts in (Counts.S, Counts.SPLITS)
            rows = min(span.rows, program.capacity.S) if sequences else span.rows
            most[launch.kernel] = max(most.get(launch.kernel, 0), rows)
    return most


# ----------------------------------------------------------------------------------------- plan


def plan_rows(model: GpuGraphs) -> dict[str, Any]:
    """Launches by span, the memory that the program asks for, what was fused and what was not."""
    program = model.program
    return {
        "capacity": asdict(program.capacity),
        "weights_bytes": sum(w.nbytes for w in program.weights),
        "workspace_bytes": program.slot_offsets()[1] + program.scratch_bytes,
        "kv_block_bytes": program.kv.block_bytes,
        "buckets": list(program.buckets),
        "spans": [
            {
                "part": part,
                "rows": span.rows,
                "key_split": span.key_split,
                "launches": [{"kernel": key, "count": n, "launches": many} for key, n, many in counted(span)],
            }
            for part, spans in (("body", program.body), ("head", program.head))
            for span in spans
        ],
        "fusion": fusion_rows(model.fused, model.target, rows_of_norms(model)),
    }


def rows_of_norms(model: GpuGraphs) -> dict[str, int]:
    """Of each norm that a linear may do itself: the rows of the largest span that does not launch it."""
    names = [norm.node.outputs[0] for norm in find_norms(model.fused).values()]
    found = dict.fromkeys(names, 0)
    for spans in (model.program.body, model.program.head):
        launched = {span.rows: {launch.name for launch in span.launches} for span in spans}
        for name in set(names) & set().union(*launched.values()):
            found[name] = max((rows for rows, there in launched.items() if name not in there), default=0)
    return found


def counted(span: Span) -> Iterator[tuple[str, str, int]]:
    """(kernel, what its rows are, launches) of a span, in the order of first use."""
    counts = Counter((launch.kernel, launch.count) for launch in span.launches)
    return ((kernel, count, many) for (kernel, count), many in counts.items())


def format_plan(model: GpuGraphs) -> str:
    """The plan as text: kernels by number of rows, then the memory, then fusion."""
    program, rows = model.program, plan_rows(model)
    lines = []
    for span in rows["spans"]:
        lines.append(f"{span['part']}, up to {span['rows']:,} rows")
        lines += [f"{n['launches']:>6} x {n['count']:6} {n['kernel']}" for n in span["launches"]]
    T, S, R = program.capacity.T, program.capacity.S, program.capacity.R
    return "\n".join(
        [
            *lines,
            "",
            f"weights      {rows['weights_bytes']:,} bytes packed",
            f"workspace    {rows['workspace_bytes']:,} bytes for T = {T}, S = {S}, R = {R}",
            f"KV           {rows['kv_block_bytes']:,} bytes per block of {program.kv.block_size} tokens",
            "",
            format_fusion(model.fused, model.target, rows_of_norms(model)),
        ]
    )
