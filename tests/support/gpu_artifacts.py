"""Artifacts for a GPU without a compiler: float32, because Triton's interpreter has no bf16.

Everything is as a compilation writes it, but for the machine code: a cubin holds its kernel's key alone,
which is how FakeLibrary knows it, and what the kernel occupies is made up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pagec.compiler import artifact as artifacts
from pagec.compiler.artifact import CompiledKernel, GpuArtifact, dump_json, file_entry, look_at
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.knobs import Chooser
from pagec.compiler.backends.cuda.plan import GpuPlan, make_gpu_plan
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.dims import Capacity
from pagec.compiler.ir import Graph, to_json
from pagec.compiler.launch import COUNT_ALIGN, POINTER_ALIGN, LaunchMetadata
from pagec.compiler.packing import pack
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.spec import build_graph, parse_spec, resolved_yaml

# What some kernels are said to want: scratch memory, and more shared memory than comes without asking.
SCRATCH_BYTES, SCRATCH_ALIGN, SHARED_BYTES = 384, 128, 72 << 10


def gpu_artifact(
    spec_text: str,
    directory: Path,
    *,
    T: int = 64,
    S: int = 8,
    R: int = 8,
    strict: bool = False,
    target: str = "h100",
    block_size: int = 16,
    seed: int = 0,
    portable: bool = False,
) -> GpuArtifact:
    """Writes one, with random weights, and opens it. `portable`: with PTX beside the machine code."""
    spec = parse_spec(spec_text, "model.yaml")
    source = build_graph(spec)
    gpu = load_cuda_target(target)
    plan = make_gpu_plan(
        source,
        run_passes(source, Numbers("f32", "f32")),
        model=spec.name,
        max_len=spec.max_len,
        capacity=Capacity(T, S, R),
        kv_dtype="f32",
        block_size=block_size,
        chooser=Chooser(gpu, {}, strict=strict),
    )
    (directory / artifacts.KERNELS).mkdir(parents=True)
    (directory / "spec.yaml").write_text(resolved_yaml(spec))
    (directory / "graph.json").write_text(dump_json(to_json(source)))
    (directory / "program.json").write_text(dump_json(plan.program.to_json()))
    _write_kernels(directory / artifacts.KERNELS, plan, portable)
    weights = random_weights(source, seed)
    artifacts.write_weights(
        directory / artifacts.WEIGHTS,
        plan.program.weights,
        (pack(w, [weights[part] for part in w.parts]) for w in plan.program.weights),
    )
    _write_manifest(directory, plan, strict, gpu.to_json())
    found = look_at(directory)
    assert isinstance(found, GpuArtifact)
    return found


def bare_artifact(
    directory: Path, launches: Mapping[str, LaunchMetadata], *, target: str = "h100", portable: bool = False
) -> GpuArtifact:
    """One of kernels alone, by key, that has nothing to run them."""
    (directory / artifacts.KERNELS).mkdir(parents=True, exist_ok=True)
    for key in launches:
        _write_code(directory / artifacts.KERNELS, key, portable)
    manifest = {"target": load_cuda_target(target).to_json(), "files": {}}
    kernels = {key: CompiledKernel(launch, {}) for key, launch in launches.items()}
    return GpuArtifact(directory, manifest, None, kernels)  # type: ignore[arg-type]


def random_weights(source: Graph, seed: int) -> dict[str, Any]:
    """A graph's weights, float32, by name: large enough that tokens differ."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(t.inner) * (0.2 if len(t.inner) > 1 else 1.0)).astype(np.float32)
        for name, t in source.weights.items()
    }


def compiled_kernel(kernel: CudaKernel) -> CompiledKernel:
    """As if it had been compiled; what is split along K or multiplies experts wants scratch memory."""
    signature = tuple((name, _POINTERS[element]) for name, element in (*kernel.arrays, ("count", "i32")))
    large = kernel.template in ("linear", "attention_prefill", "grouped_linear")
    scratch = large and kernel.template != "attention_prefill"
    launch = LaunchMetadata(
        symbol=kernel.key,
        arguments=signature,
        align=(*[POINTER_ALIGN] * len(kernel.arrays), COUNT_ALIGN),
        warps=kernel.warps,
        shared_bytes=SHARED_BYTES if large else 1 << 10,
        grid=kernel.grid,
        scratch_bytes=SCRATCH_BYTES if scratch else 0,
        scratch_align=SCRATCH_ALIGN if scratch else 1,
    )
    mma = "HMMA" if large else ""
    resources = {"registers": 96, "stack_bytes": 0, "shared_bytes": launch.shared_bytes, "mma": mma}
    return CompiledKernel(launch, resources)


_POINTERS: Mapping[str, str] = {"f32": "*fp32", "i32": "*i32"}


def _write_kernels(directory: Path, plan: GpuPlan, portable: bool) -> None:
    for key, kernel in plan.kernels.items():
        kernel.write(directory)
        (directory / f"{key}.json").write_text(dump_json(compiled_kernel(kernel).to_json()))
        _write_code(directory, key, portable)


def _write_code(directory: Path, key: str, portable: bool) -> None:
    (directory / f"{key}.cubin").write_bytes(key.encode())
    if portable:
        (directory / f"{key}.ptx").write_text(f"ptx {key}")


def _write_manifest(directory: Path, plan: GpuPlan, strict: bool, target: Mapping[str, Any]) -> None:
    program = plan.program
    spec_digest = hashlib.sha256((directory / "spec.yaml").read_bytes()).hexdigest()
    manifest = {
        "format": artifacts.FORMAT,
        "pagec": "0",
        "model": program.model,
        "spec_digest": spec_digest,
        "target": target,
        "tools": {},
        "numerics": {"dtype": "f32", "kv_dtype": "f32", "residual": "f32", "strict": strict, "choices": {}},
        "capacity": asdict(program.capacity),
        "max_len": program.max_len,
        "ops": [],
        "kv": {
            **program.kv.to_json(),
            "block_bytes": program.kv.block_bytes,
            "layout_id": program.kv.layout_id,
        },
    }
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    manifest["files"] = {str(file.relative_to(directory)): file_entry(file) for file in files}
    (directory / artifacts.MANIFEST).write_text(dump_json(manifest))
