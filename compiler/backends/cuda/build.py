"""Kernel sources -> cubins, by Triton and its ptxas, without a GPU. The only file that imports Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pagec.compiler.backends.cuda.resources import Resources, check, mma_kind, parse_usage
from pagec.compiler.errors import CompileError
from pagec.compiler.launch import COUNT_ALIGN, POINTER_ALIGN, GridRule, LaunchMetadata
from pagec.compiler.target import CudaTarget

Progress = Callable[[str, int, int], None]
# Raised when what is kept of a kernel, or how it is compiled, changes.
CACHE_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A kernel to compile: `symbol` in the Triton source `file`.

    `signature`: argument names and types ("*bf16"), in order, constants left out; those named in `divisible`
    are promised to be multiples of 16. `checked`: False to let pass what spills or is too large (the tuner
    wants to know by how much).
    """

    key: str
    file: Path
    symbol: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[str, ...]
    grid: GridRule
    warps: int
    stages: int
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    checked: bool = True


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel: its machine code, the PTX that this came from, how to launch it, what it takes."""

    binary: bytes
    ptx: str
    launch: LaunchMetadata
    resources: Resources


def compile_kernel(request: CompileRequest, target: CudaTarget, cache: Path | None = None) -> Cubin:
    """The kernel for the target, from the cache if it is there. CompileError names the kernel's key."""
    entry = None if cache is None else cache / digest(request, target)
    cubin = None if entry is None else _read(entry)
    if cubin is None:
        cubin = _compile(request, target)
        if entry is not None:
            _write(entry, cubin)
    if request.checked:
        check(cubin.resources, request.warps, target, request.key)
    return cubin


def compile_all(
    requests: Sequence[CompileRequest],
    target: CudaTarget,
    *,
    cache: Path | None = None,
    workers: int = 0,
    progress: Progress = lambda *_: None,
) -> dict[str, Cubin]:
    """The kernels by key, compiled by `workers` processes (0: one for each core that this one may use)."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(requests))
    if workers <= 1:
        results: Iterable[Cubin] = (compile_kernel(request, target, cache) for request in requests)
        return _collected(requests, results, progress)
    _triton()  # imported once, for all of them
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(compile_kernel, request, target, cache) for request in requests]
        try:
            return _collected(requests, (future.result() for future in futures), progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _collected(
    requests: Sequence[CompileRequest], results: Iterable[Cubin], progress: Progress
) -> dict[str, Cubin]:
    cubins = {}
    progress("compile kernels", 0, len(requests))
    for done, (request, cubin) in enumerate(zip(requests, results, strict=True), 1):
        cubins[request.key] = cubin
        progress("compile kernels", done, len(requests))
    return cubins


# ------------------------------------------------------------------------------------ compiling


def _triton() -> Any:
    os.environ.setdefault("TRITON_DEFAULT_BACKEND", "nvidia")  # else Triton looks for a driver
    try:
        import triton
    except ImportError as e:
        raise _no_triton() from e
    return triton


def triton_version() -> str:
    """Of the installed Triton, which is not imported for it; it is part of every kernel's identity."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as e:
        raise _no_triton() from e


def _no_triton() -> CompileError:
    return CompileError(
        "kernels for NVIDIA GPUs are compiled by Triton, which is not installed",
        remedy="pip install 'pagec[cuda]'",
    )


def _compile(request: CompileRequest, target: CudaTarget) -> Cubin:
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name, _ in request.signature]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in request.divisible}
    options = {
        "num_warps": request.warps,
        "num_stages": request.stages,
        # Products and sums are fused where the source says so, and nowhere else.
        "enable_fp_fusion": False,
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as scopes:
        scopes.enter_context(triton.knobs.compilation.scope())
        scopes.enter_context(triton.knobs.cache.scope())
        triton.knobs.compilation.disable_line_info = True  # file and line would be part of the bytes
        triton.knobs.cache.dir = scratch
        try:
            function = load_function(request.file, request.symbol)
            source = ASTSource(function, dict(request.signature), dict(request.constexprs), attrs)
            compiled = triton.compile(source, target=GPUTarget("cuda", target.sm, 32), options=options)
        except (
            Exception
        ) as e:  # Triton raises what its passes raise: its own types, RuntimeError, AssertionError
            raise CompileError(f"Triton cannot compile it for {target.name}: {e}", place=request.key) from e
        binary, ptx, metadata = compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata
        registers, stack, shared = parse_usage(_resource_usage(binary, Path(scratch)))
    launch = LaunchMetadata(
        symbol=metadata.name,
        arguments=request.signature,
        align=tuple(POINTER_ALIGN if name in request.divisible else COUNT_ALIGN for name in names),
        warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        grid=request.grid,
        scratch_bytes=metadata.global_scratch_size,
        scratch_align=metadata.global_scratch_align,
    )
    shared_bytes = max(metadata.shared, shared)
    return Cubin(binary, ptx, launch, Resources(registers, stack, shared_bytes, mma_kind(ptx)))


def load_function(file: Path, symbol: str) -> Any:
    """The @triton.jit function in a source (Triton reads its text from the file)."""
    spec = importlib.util.spec_from_file_location(f"pagec_kernel_{symbol}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, symbol)


def _resource_usage(binary: bytes, directory: Path) -> str:
    path = directory / "kernel.cubin"
    path.write_bytes(binary)
    tool = _triton().knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------------------------- cache


def digest(request: CompileRequest, target: CudaTarget) -> str:
    """Names all that decides a kernel's bytes."""
    parts = {
        "format": CACHE_FORMAT,
        "triton": triton_version(),
        "source": request.file.read_text(),
        "symbol": request.symbol,
        "signature": request.signature,
        "divisible": request.divisible,
        "constexprs": dict(request.constexprs),
        "grid": asdict(request.grid),
        "sm": target.sm,
        "warps": request.warps,
        "stages": request.stages,
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write(entry: Path, cubin: Cubin) -> None:
    """The entry's files; the JSON comes last and is whole or absent."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.with_suffix(".cubin").write_bytes(cubin.binary)
    text = json.dumps(
        {
            "sha256": sha256(cubin.binary).hexdigest(),
            "launch": cubin.launch.to_json(),
            "resources": asdict(cubin.resources),
            "ptx": cubin.ptx,
        }
    )
    part = entry.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(entry.with_suffix(".json"))


def _read(entry: Path) -> Cubin | None:
    """What the cache holds; None if that is nothing, or damaged."""
    try:
        data = json.loads(entry.with_suffix(".json").read_text())
        binary = entry.with_suffix(".cubin").read_bytes()
        launch, resources = LaunchMetadata.from_json(data["launch"]), Resources(**data["resources"])
        good = data["sha256"] == sha256(binary).hexdigest()
        return Cubin(binary, data["ptx"], launch, resources) if good else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
