"""The driver: a model, whatever form it comes in, compiled into an artifact.

    find the spec and the checkpoint -> graph -> passes -> plan -> sources -> binaries -> packed weights

Without an output directory artifacts go to a cache, named by all that goes into them, so that the same
request compiles once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pagec import configs, templates
from pagec.compiler import artifact as artifacts
from pagec.compiler.artifact import dump_json, file_entry
from pagec.compiler.backends.cpu.build import Progress, build_library
from pagec.compiler.backends.cpu.emit import emit_all
from pagec.compiler.backends.cpu.probes import probe_kernels
from pagec.compiler.backends.cpu.tiles import KEY_SPLIT, KEY_TILE
from pagec.compiler.backends.cuda.build import Cubin, triton_version
from pagec.compiler.backends.cuda.knobs import Choice, Chooser
from pagec.compiler.backends.cuda.output import numeric_choices, plan_and_compile, write_kernels
from pagec.compiler.backends.cuda.plan import GpuPlan, make_gpu_plan
from pagec.compiler.backends.targets import load_target
from pagec.compiler.backends.tuned import Tuned
from pagec.compiler.dims import Capacity, DType
from pagec.compiler.errors import CompileError
from pagec.compiler.importers import (
    Checkpoint,
    TokenizerFiles,
    WeightSource,
    import_model,
    locate,
    open_checkpoint,
    tokenizer_of,
)
from pagec.compiler.ir import Graph, to_json
from pagec.compiler.packing import Array, pack
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import Plan, derive_logit_rows, make_plan
from pagec.compiler.program import Kernel, Memory, PackedWeight
from pagec.compiler.random_weights import random_packed
from pagec.compiler.spec import ModelSpec, build_graph, load_spec, parse_spec, resolved_yaml, with_max_len
from pagec.compiler.target import CpuTarget, CudaTarget
from pagec.compiler.user_ops import load_ops

DEFAULT_STEP_TOKENS: Final = 512
DEFAULT_SEQS: Final = 64
GPU_STEP_TOKENS: Final = 4096
GPU_SEQS: Final = 256
GPU_LOGIT_BYTES: Final = 256 << 20
GPU_RESIDUAL: Final[DType] = "bf16"
BLOCK_SIZE: Final = 16
DTYPES: Final = ("bf16", "f32")
RANDOM: Final = "random:"
# Where compiled kernels for GPUs are kept, below cache_root.
CUBINS: Final = "cubins"


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What to compile and how; None means the default.

    `model`: a YAML file, a name in configs/models, a Hugging Face directory or a GGUF file. `weights`: a
    checkpoint's path, "none" or "random:SEED". `block_size`: tokens in a block of the KV pool. `ops`: Python
    files that register ops of the user's. `strict`: results of a GPU are the same bits in whatever company
    (a CPU's always are). `tuned`: choices of tables for the target.
    """

    model: str
    weights: str | None = None
    target: str = "cpu"
    dtype: str = "bf16"
    kv_dtype: str | None = None
    max_len: int | None = None
    max_step_tokens: int | None = None
    max_seqs: int | None = None
    block_size: int | None = None
    output: Path | None = None
    ops: tuple[Path, ...] = ()
    strict: bool = False
    tuned: Tuned = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Where the artifact is, whether it had to be compiled, and how long that took."""

    path: Path
    compiled: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Source:
    """A model found: its spec, and its checkpoint and tokenizer if there are any.

    `random_seed`: weights are made up from this seed.
    """

    spec: ModelSpec
    checkpoint: Checkpoint | None
    tokenizer: TokenizerFiles | None
    random_seed: int | None = None


def compile_model(options: CompileOptions, progress: Progress) -> CompileResult:
    """Compiles a model, or finds it compiled. PagecErrors say what is wrong with the request."""
    began = time.monotonic()
    progress("read the model", 0, 1)
    source = find_source(options)
    progress("read the model", 1, 1)
    target = load_target(options.target)
    path = options.output or _cache_path(source, options, target)
    if options.output is None and artifacts.Artifact.is_artifact(path):
        return CompileResult(path, False, time.monotonic() - began)
    _write_artifact(path, source, options, target, progress)
    return CompileResult(path, True, time.monotonic() - began)


# ----------------------------------------------------------------------------------- the source


def find_source(options: CompileOptions) -> Source:
    """The spec, checkpoint and tokenizer that the options name. The user's ops are known from here on."""
    load_ops(options.ops)
    if options.model.endswith((".yaml", ".yml")) or configs.find("models", options.model):
        source = _from_spec(options)
    else:
        source = _imported(options)
    if options.max_len is not None:
        source = Source(
            with_max_len(source.spec, options.max_len),
            source.checkpoint,
            source.tokenizer,
            source.random_seed,
        )
    return _with_weights(source, options.weights)


def _weights_path(weights: str | None) -> Path | None:
    """The checkpoint that --weights names, if it names one."""
    if weights is None or weights == "none" or weights.startswith(RANDOM):
        return None
    return locate(Path(weights))


def _from_spec(options: CompileOptions) -> Source:
    path = _weights_path(options.weights)
    spec = load_spec(options.model, path)
    if spec.checkpoint is None or (path is None and options.weights is not None):
        return Source(spec, None, None)
    checkpoint = open_checkpoint(locate(spec.checkpoint))
    return Source(spec, checkpoint, tokenizer_of(checkpoint))


def _imported(options: CompileOptions) -> Source:
    """A checkpoint's own model; other weights may be of another kind, whose tensors have other names."""
    imported = import_model(Path(options.model))
    path = _weights_path(options.weights)
    if path is None or path == imported.checkpoint.path:
        return Source(imported.spec, imported.checkpoint, imported.tokenizer)
    spec = parse_spec(imported.yaml_text, f"{imported.spec.name}.yaml", path)
    return Source(spec, open_checkpoint(path), imported.tokenizer)


def _with_weights(source: Source, weights: str | None) -> Source:
    if weights is None or _weights_path(weights) is not None:
        return source
    if weights == "none":
        return Source(source.spec, None, source.tokenizer)
    seed = weights.removeprefix(RANDOM)
    if not seed.isdecimal():
        raise CompileError(f"{seed!r} is not a seed", place="--weights", remedy="write random:0")
    return Source(source.spec, None, source.tokenizer, int(seed))


# ------------------------------------------------------------------------------------- the plan


def numbers_of(options: CompileOptions) -> Numbers:
    """The data types of the options, checked."""
    for option, value in (("--dtype", options.dtype), ("--kv-dtype", options.kv_dtype)):
        if value is not None and value not in DTYPES:
            raise CompileError(f"{value!r} is not a data type", place=option, remedy="use bf16 or f32")
    dtype: DType = "bf16" if options.dtype == "bf16" else "f32"
    kv_dtype: DType = dtype if options.kv_dtype is None else "bf16" if options.kv_dtype == "bf16" else "f32"
    return Numbers(dtype, kv_dtype)


def capacity_of(spec: ModelSpec, options: CompileOptions, *, gpu: bool = False) -> Capacity:
    """The most tokens T, sequences S and logit rows R of a step."""
    T = options.max_step_tokens or (GPU_STEP_TOKENS if gpu else DEFAULT_STEP_TOKENS)
    S = options.max_seqs or min(GPU_SEQS if gpu else DEFAULT_SEQS, T)
    if S > T:
        raise CompileError(
            f"{S} sequences cannot decode in a step of {T} tokens",
            place="--max-seqs",
            remedy=f"raise --max-step-tokens to at least {S}",
        )
    R = derive_logit_rows(spec.vocab, S, GPU_LOGIT_BYTES) if gpu else derive_logit_rows(spec.vocab, S)
    return Capacity(T, S, R)


def block_size_of(options: CompileOptions) -> int:
    """Tokens in a block of the KV pool."""
    size = options.block_size or BLOCK_SIZE
    if size % BLOCK_SIZE:
        raise CompileError(
            f"{size} is no multiple of {BLOCK_SIZE}, the tokens that lie together in the KV pool",
            place="--block-size",
            remedy=f"use {BLOCK_SIZE * (size // BLOCK_SIZE + 1)}",
        )
    return size


def plan_model(spec: ModelSpec, options: CompileOptions, target: CpuTarget) -> tuple[Graph, Plan]:
    """The graph before the passes, and the plan of the fused one."""
    graph = build_graph(spec)
    numbers = numbers_of(options)
    plan = make_plan(
        graph,
        run_passes(graph, numbers),
        model=spec.name,
        max_len=spec.max_len,
        capacity=capacity_of(spec, options),
        kv_dtype=numbers.kv_dtype,
        block_size=block_size_of(options),
        target=target,
        tuned=options.tuned,
    )
    return graph, plan


def plan_gpu_model(
    spec: ModelSpec, options: CompileOptions, target: CudaTarget, refused: frozenset[Choice] = frozenset()
) -> GpuPlan:
    """The plan for a GPU, without the tuned choices `refused`."""
    numbers, size = numbers_of(options), None
    if "f32" in (numbers.dtype, numbers.kv_dtype):
        raise CompileError(
            "GPUs compute in bf16", place=options.target, remedy="leave --dtype and --kv-dtype out"
        )
    if options.block_size is not None:
        size = block_size_of(options)
        if size & (size - 1):
            raise CompileError(
                f"{size} is no power of two", place="--block-size", remedy="GPUs take 16, 32, 64 or 128"
            )
    graph = build_graph(spec)
    return make_gpu_plan(
        graph,
        run_passes(graph, replace(numbers, residual=GPU_RESIDUAL)),
        model=spec.name,
        max_len=spec.max_len,
        capacity=capacity_of(spec, options, gpu=True),
        kv_dtype=numbers.kv_dtype,
        block_size=size,
        chooser=Chooser(target, options.tuned, strict=options.strict, refused=refused),
    )


def compile_gpu_model(
    spec: ModelSpec, options: CompileOptions, target: CudaTarget, directory: Path, progress: Progress
) -> tuple[GpuPlan, dict[str, Cubin]]:
    """The plan and its kernels, by the cache of kernels; their sources lie in `directory`."""

    def make_plan(refused: frozenset[Choice]) -> GpuPlan:
        progress("lower the model", 0, 1)
        plan = plan_gpu_model(spec, options, target, refused)
        progress("lower the model", 1, 1)
        return plan

    plan, cubins = plan_and_compile(make_plan, directory, target, cache_root() / CUBINS, progress)
    shutil.rmtree(directory / "__pycache__", ignore_errors=True)
    return plan, dict(cubins)


# ----------------------------------------------------------------------------------- the output


def _write_artifact(
    path: Path, source: Source, options: CompileOptions, target: CpuTarget | CudaTarget, progress: Progress
) -> None:
    """Writes into a directory beside `path` first, so that a failure leaves no half artifact."""
    if path.exists() and not artifacts.Artifact.is_artifact(path) and any(path.iterdir()):
        raise CompileError(
            "is not empty and no artifact", place=str(path), remedy="name a new directory with -o"
        )
    if source.checkpoint is not None:
        WeightSource(source.spec, source.checkpoint).check()
    fresh = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / artifacts.KERNELS).mkdir(parents=True)
    try:
        program, numerics, tuned = _write_kernels(fresh, source.spec, options, target, progress)
        (fresh / "spec.yaml").write_text(resolved_yaml(source.spec))
        (fresh / "graph.json").write_text(dump_json(to_json(build_graph(source.spec))))
        (fresh / "program.json").write_text(dump_json(program.to_json()))
        if source.tokenizer is not None:
            _write_tokenizer(fresh / "tokenizer", source.tokenizer)
        _write_weights(fresh, source, program, progress)
        (fresh / artifacts.MANIFEST).write_text(
            dump_json(_manifest(fresh, source.spec, program, options, target, numerics, tuned))
        )
        if options.output is not None and path.exists():
            shutil.rmtree(path)
        _put_in_place(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put_in_place(fresh: Path, path: Path) -> None:
    """If another process was faster with the same one, its artifact is as good."""
    try:
        fresh.rename(path)
    except OSError:
        if not artifacts.Artifact.is_artifact(path):
            raise


def _write_kernels(
    path: Path, spec: ModelSpec, options: CompileOptions, target: CpuTarget | CudaTarget, progress: Progress
) -> tuple[Memory, dict[str, Any], Tuned]:
    """Writes sources and binaries; the program, and what the manifest says of its numbers and of the tuned
    choices that its kernels took."""
    sources, dtype = path / artifacts.KERNELS, numbers_of(options).dtype
    if isinstance(target, CudaTarget):
        gpu, cubins = compile_gpu_model(spec, options, target, sources, progress)
        write_kernels(sources, cubins, target)
        taken = sorted({choice.key for choices in gpu.choices.values() for choice in choices})
        # Some choices are the planner's own (norms that linears do), and stand in no table.
        tuned = {key: options.tuned[key] for key in taken if key in options.tuned}
        return gpu.program, {"strict": options.strict, "choices": numeric_choices(gpu, cubins)}, tuned
    progress("lower the model", 0, 1)
    _, plan = plan_model(spec, options, target)
    progress("lower the model", 1, 1)
    kernels: tuple[Kernel, ...] = (*plan.program.kernels, *probe_kernels(target, dtype))
    for name, text in emit_all(kernels, target).items():
        (sources / name).write_text(text)
    build_library(kernels, sources, target, path, progress)
    shutil.rmtree(sources / "__pycache__", ignore_errors=True)
    numerics = {
        "linear": "one float32 sum per element, K ascending"
        + (", in pairs (vdpbf16ps)" if dtype == "bf16" and target.bf16_dot else ""),
        # The degree: of the polynomial for the probabilities (pagec_exp2_negative in vector.ll.jinja).
        "attention": {
            "key_tile": KEY_TILE,
            "key_split": KEY_SPLIT,
            "exp2_degree": 3 if plan.program.kv.dtype == "bf16" else 5,
        },
    }
    return plan.program, numerics, plan.tuned


def _write_tokenizer(path: Path, tokenizer: TokenizerFiles) -> None:
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    (path / "generation.json").write_text(dump_json(dict(tokenizer.generation)))
    if tokenizer.chat_template is not None:
        (path / "chat_template.jinja").write_text(tokenizer.chat_template)


def _write_weights(path: Path, source: Source, program: Memory, progress: Progress) -> None:
    if source.random_seed is not None:
        seed = source.random_seed
        packed: Iterator[Array] = (random_packed(seed, weight) for weight in program.weights)
    elif source.checkpoint is not None:
        packed = _packed(WeightSource(source.spec, source.checkpoint), program.weights)
    else:
        return
    artifacts.write_weights(
        path / artifacts.WEIGHTS, program.weights, _counted(packed, len(program.weights), progress)
    )


def _packed(source: WeightSource, weights: tuple[PackedWeight, ...]) -> Iterator[Array]:
    for weight in weights:
        yield pack(weight, [source.get(part) for part in weight.parts])


def _counted(items: Iterator[Array], total: int, progress: Progress) -> Iterator[Array]:
    for done, item in enumerate(items):
        progress("pack weights", done, total)
        yield item
    progress("pack weights", total, total)


def _manifest(
    path: Path,
    spec: ModelSpec,
    program: Memory,
    options: CompileOptions,
    target: CpuTarget | CudaTarget,
    numerics: dict[str, Any],
    tuned: Tuned,
) -> dict[str, Any]:
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != artifacts.MANIFEST)
    numbers = numbers_of(options)
    return {
        "format": artifacts.FORMAT,
        "pagec": importlib.metadata.version("pagec"),
        "model": spec.name,
        "spec_digest": hashlib.sha256(resolved_yaml(spec).encode()).hexdigest(),
        "target": target.to_json(),
        "tools": _tools(target),
        "numerics": {
            "dtype": numbers.dtype,
            "kv_dtype": numbers.kv_dtype,
            "residual": GPU_RESIDUAL if isinstance(target, CudaTarget) else "f32",
            **numerics,
        },
        "tuned": tuned,
        "capacity": asdict(program.capacity),
        "max_len": program.max_len,
        "ops": load_ops(options.ops),
        "kv": {
            **program.kv.to_json(),
            "block_bytes": program.kv.block_bytes,
            "layout_id": program.kv.layout_id,
        },
        "files": {str(p.relative_to(path)): file_entry(p) for p in files},
    }


def _tools(target: CpuTarget | CudaTarget) -> dict[str, str]:
    if isinstance(target, CudaTarget):
        return {"triton": triton_version()}
    return {"apache-tvm": importlib.metadata.version("apache-tvm")}


# ------------------------------------------------------------------------------------ the cache


def cache_root() -> Path:
    """Where compiled artifacts are kept: $PAGEC_CACHE, else the user's cache directory."""
    if "PAGEC_CACHE" in os.environ:
        return Path(os.environ["PAGEC_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagec"


def _cache_path(source: Source, options: CompileOptions, target: CpuTarget | CudaTarget) -> Path:
    chosen = {key: value for key, value in asdict(options).items() if key not in ("model", "output", "ops")}
    inputs = {
        "format": artifacts.FORMAT,
        "code": _code_digest(),
        "tools": _tools(target),
        "spec": resolved_yaml(source.spec),
        "target": target.to_json(),
        "options": chosen,
        "ops": load_ops(options.ops),
        "seed": source.random_seed,
        "checkpoint": _fingerprint(source.checkpoint.path) if source.checkpoint else None,
    }
    name = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "artifacts" / f"{source.spec.name}-{name}"


def _code_digest() -> str:
    """Of everything that decides what is emitted: the compiler and the templates."""
    found = hashlib.sha256()
    for package in (Path(__file__).parent, Path(templates.__file__).parent):
        for file in sorted((*package.rglob("*.py"), *package.rglob("*.jinja"), *package.rglob("*.c"))):
            found.update(file.read_bytes())
    return found.hexdigest()


def _fingerprint(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a checkpoint's files: reading gigabytes to name them is too slow."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    return [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
