"""What a model becomes, as text or JSON: its graph, its fused graph, its plan, its kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import Artifact, look_at
from pagec.compiler.backends.cpu.emit import emit_kernel
from pagec.compiler.backends.targets import load_cpu_target
from pagec.compiler.dims import Capacity
from pagec.compiler.driver import CompileOptions, find_source, plan_model
from pagec.compiler.fusion import format_fusion, fusion_rows
from pagec.compiler.ir import Graph, format_graph, to_json
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import Plan, make_plan
from pagec.compiler.program import Kernel, Launch, Program
from pagec.compiler.target import CpuTarget
from pagec.compiler.user_ops import check_known, load_ops


def show(what: str, options: CompileOptions, as_json: bool) -> str:
    """`what`: graph, fused, plan or kernels; `options`: of a model as it would be compiled for a CPU (of GPUs
    see show_gpu.py), or with an artifact in the model's place."""
    load_ops(options.ops)
    graph, plan, cpu = _load(options)
    match what:
        case "graph" | "fused":
            chosen = graph if what == "graph" else plan.graph
            return _json(to_json(chosen)) if as_json else format_graph(chosen)
        case "plan":
            if as_json:
                return _json({**plan_rows(plan), "fusion": fusion_rows(plan.graph, cpu)})
            return f"{format_plan(plan)}\n{format_fusion(plan.graph, cpu)}"
        case "kernels":
            tuned = tuned_kernels(plan)
            if as_json:
                return _json([kernel_row(kernel, tuned) for kernel in plan.program.kernels])
            return "\n\n".join(_source(kernel, cpu, tuned) for kernel in plan.program.kernels)
    raise ValueError(what)


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _load(options: CompileOptions) -> tuple[Graph, Plan, CpuTarget]:
    if Artifact.is_artifact(path := Path(options.model)):
        artifact = look_at(path)
        assert isinstance(artifact, Artifact), "of a GPU's artifact show_gpu.py tells"
        return artifact.graph(), plan_of(artifact), artifact.target
    target = load_cpu_target(options.target)
    graph, plan = plan_model(find_source(options).spec, options, target)
    return graph, plan, target


def plan_of(artifact: Artifact) -> Plan:
    """An artifact's plan, made again from its graph."""
    graph, numerics = artifact.graph(), artifact.manifest["numerics"]
    check_known(graph, str(artifact.path))
    program = artifact.program
    return make_plan(
        graph,
        run_passes(graph, Numbers(numerics["dtype"], numerics["kv_dtype"])),
        model=program.model,
        max_len=program.max_len,
        capacity=Capacity(**artifact.manifest["capacity"]),
        kv_dtype=program.kv.dtype,
        block_size=program.kv.block_size,
        target=artifact.target,
        # An artifact of before this was kept has none.
        tuned=artifact.manifest.get("tuned", {}),
    )


# ----------------------------------------------------------------------------------------- plan


def tuned_kernels(plan: Plan) -> dict[str, str]:
    """By kernel, the tuned choice that its schedule comes from. A linear that does the norm before it itself
    has the default tile."""
    found = {}
    for call in (*plan.body, *plan.head):
        for kernel in call.kernels():
            if call.tuned and not kernel.params.get("before"):
                found[kernel.key] = call.tuned
    return found


def kernel_row(kernel: Kernel, tuned: Mapping[str, str]) -> dict[str, Any]:
    """What is known of a kernel without running it."""
    row = asdict(kernel)
    del row["signature"]
    return {**row, "tuned": tuned.get(kernel.key)}


def _source(kernel: Kernel, target: CpuTarget, tuned: Mapping[str, str]) -> str:
    head = f"# Tuned: {tuned[kernel.key]}\n" if kernel.key in tuned else ""
    return head + emit_kernel(kernel, target)


def plan_rows(plan: Plan) -> dict[str, Any]:
    """Launches with the bytes and FLOPs of each kernel, and the memory that the program asks for."""
    program = plan.program
    tuned = {call.name: call.tuned for call in (*plan.body, *plan.head)}
    kernels = {kernel.key: kernel for kernel in program.kernels}
    offsets, slots_end = program.slot_offsets()
    return {
        "capacity": asdict(program.capacity),
        "weights_bytes": sum(w.nbytes for w in program.weights),
        "workspace_bytes": slots_end + program.scratch_bytes,
        "kv_block_bytes": program.kv.block_bytes,
        "slots": [
            {**asdict(slot), "offset": offset} for slot, offset in zip(program.slots, offsets, strict=True)
        ],
        "launches": [
            {**_launch_row(part, launch, kernels), "tuned": tuned[launch.name] or None}
            for part, launches in (("body", program.body), ("head", program.head))
            for launch in launches
        ],
    }


def _launch_row(part: str, launch: Launch, kernels: dict[str, Kernel]) -> dict[str, Any]:
    kernel = kernels[launch.variants[-1][1]]
    return {
        "part": part,
        "name": launch.name,
        "rows": launch.rows,
        "kernels": [key for _, key in launch.variants],
        "template": kernel.template,
        "flops_per_row": kernel.flops_per_row,
        "bytes_per_row": kernel.bytes_per_row,
        "bytes_fixed": kernel.bytes_fixed,
    }


def format_plan(plan: Plan) -> str:
    """The plan as a table: one line per kernel with how often a step launches it, then the memory."""
    rows = plan_rows(plan)
    counts = Counter((r["part"], r["kernels"][-1]) for r in rows["launches"])
    first = {(r["part"], r["kernels"][-1]): r for r in reversed(rows["launches"])}
    order = dict.fromkeys((r["part"], r["kernels"][-1]) for r in rows["launches"])
    lines = [
        f"{'part':5} {'launches':>8} {'rows':5} {'FLOP/row':>12} {'bytes/row':>10} {'weight bytes':>12}  "
        "kernel"
    ]
    for key in order:
        row = first[key]
        tuned = ", tuned" if row["tuned"] else ""
        lines.append(
            f"{row['part']:5} {counts[key]:>8} {row['rows']:5} {row['flops_per_row']:>12,} "
            f"{row['bytes_per_row']:>10,} {row['bytes_fixed']:>12,}  {_variants(row['kernels'])}{tuned}"
        )
    lines += ["", *_totals(plan.program, rows)]
    return "\n".join(lines) + "\n"


def _variants(keys: list[str]) -> str:
    return keys[-1] if len(keys) == 1 else f"{keys[-1]} and {len(keys) - 1} for fewer rows"


def _totals(program: Program, rows: dict[str, Any]) -> list[str]:
    launches = rows["launches"]
    # Logits are computed once, whether they are stored or not.
    per_token = sum(r["flops_per_row"] for r in launches if r["rows"] != "greedy")
    T, S, R = program.capacity.T, program.capacity.S, program.capacity.R
    return [
        f"launches     {len(program.body)} in the body, {len(program.head)} in the head",
        f"per token    {per_token:,} FLOP (attention comes on top, with the context)",
        f"weights      {rows['weights_bytes']:,} bytes packed",
        f"workspace    {rows['workspace_bytes']:,} bytes for T = {T}, S = {S}, R = {R}",
        f"KV           {program.kv.block_bytes:,} bytes per block of {program.kv.block_size} tokens, "
        f"{len(program.kv.groups)} group{'s' if len(program.kv.groups) > 1 else ''}",
    ]
