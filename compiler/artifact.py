"""The artifact: a directory that a compilation writes and a runtime opens.

    manifest.json       format, versions, target, numerics contract, sizes and digests of all files
    spec.yaml           the resolved model spec, one file
    graph.json          the graph before the passes (what show, verify and the reference read)
    program.json        see program.py, for a GPU gpu_program.py
    kernels/<key>.py    each kernel's source, as emitted
    kernels.so          for a CPU: the kernels, compiled, with what runs them (step.c)
    kernels/<key>.cubin for a GPU: the kernel, compiled
    kernels/<key>.json  for a GPU: how it is launched (launch.py) and what it occupies
    kernels/<key>.ptx   for the oldest GPU: what newer ones can compile when they load it
    tokenizer/          tokenizer.json, chat_template.jinja, generation.json (absent if the model has none)
    weights.safetensors packed weights (absent: kernels only, weights are given at load)

The same input gives the same bytes. Opening checks the format, the machine, every file's size and the
digests of all but the weights; `pagec verify` checks those too. numpy and the standard library suffice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pagec.compiler.dims import BYTE_ALIGN, DType
from pagec.compiler.errors import ArtifactError
from pagec.compiler.ir import Graph, from_json
from pagec.compiler.packing import STORAGE, Array, nbytes
from pagec.compiler.program import PackedWeight, Program
from pagec.compiler.target import CpuTarget, CudaTarget, check_runs_on, host

if TYPE_CHECKING:
    from pagec.compiler.gpu_program import GpuProgram
    from pagec.compiler.launch import LaunchMetadata

FORMAT: Final = 6
MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "weights.safetensors"
KERNELS: Final = "kernels"
LIBRARY: Final = "kernels.so"
WEIGHTS_PAGE: Final = 4096

_SAFETENSORS_NAMES: Final[Mapping[DType, str]] = {"f32": "F32", "bf16": "BF16", "i32": "I32"}


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_json(data: Any) -> str:
    """JSON as artifacts hold it: the same data gives the same bytes."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class _Opened:
    """What artifacts of all targets have. `manifest` is the parsed manifest.json."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def has_weights(self) -> bool:
        return WEIGHTS in self.manifest["files"]

    def graph(self) -> Graph:
        """The graph before the passes."""
        return from_json(json.loads((self.path / "graph.json").read_text()))

    def check_weights(self) -> None:
        """Checks the digest of the weights (reads them all)."""
        if self.has_weights and digest(self.path / WEIGHTS) != self.manifest["files"][WEIGHTS]["sha256"]:
            raise _damaged(self.path / WEIGHTS, "its digest is not the manifest's")


@dataclass(frozen=True, slots=True)
class Artifact(_Opened):
    """An opened artifact for a CPU."""

    program: Program

    @staticmethod
    def is_artifact(path: Path) -> bool:
        """Whether this looks like an artifact directory (it may still be refused by open)."""
        return (path / MANIFEST).is_file()

    @staticmethod
    def open(path: Path) -> Artifact:
        """Reads and checks an artifact that this machine shall run; ArtifactError says what is wrong and what
        to do."""
        opened = open_artifact(path)
        if not isinstance(opened, Artifact):
            raise ArtifactError(
                f"made for {opened.target.name}, an NVIDIA GPU; this works on artifacts for CPUs only",
                place=str(path),
                remedy="compile the model again for this machine (--target cpu)",
            )
        return opened

    @property
    def target(self) -> CpuTarget:
        return CpuTarget.from_json(self.manifest["target"])


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel of a GPU artifact: how it is launched, and what it occupies, by name (see
    backends.cuda.resources)."""

    launch: LaunchMetadata
    resources: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"launch": self.launch.to_json(), "resources": dict(self.resources)}


@dataclass(frozen=True, slots=True)
class GpuArtifact(_Opened):
    """An opened artifact for a GPU. `kernels` are by key; a kernel's code lies in kernels/<key>.cubin."""

    program: GpuProgram
    kernels: Mapping[str, CompiledKernel]

    @property
    def target(self) -> CudaTarget:
        return CudaTarget.from_json(self.manifest["target"])


def open_artifact(path: Path) -> Artifact | GpuArtifact:
    """Reads and checks an artifact that this machine shall run; ArtifactError says what is wrong and what to
    do. Whether a GPU is the right one, its device finds out."""
    manifest = _read_manifest(path)
    target = _target_of(path, manifest)
    if isinstance(target, CpuTarget):
        check_runs_on(target, host())
    return look_at(path)


def look_at(path: Path) -> Artifact | GpuArtifact:
    """Reads and checks an artifact of whatever machine, to look at it only."""
    manifest = _read_manifest(path)
    target = _target_of(path, manifest)
    _check_files(path, manifest)
    file = path / "program.json"
    try:
        if isinstance(target, CpuTarget):
            return Artifact(path, manifest, Program.from_json(json.loads(file.read_text())))
        # Imported here: a process on a CPU starts without.
        from pagec.compiler.gpu_program import GpuProgram
        from pagec.compiler.launch import LaunchMetadata

        program = GpuProgram.from_json(json.loads(file.read_text()))
        kernels = {}
        for kernel in program.kernels:
            file = path / KERNELS / f"{kernel.key}.json"
            data = json.loads(file.read_text())
            kernels[kernel.key] = CompiledKernel(LaunchMetadata.from_json(data["launch"]), data["resources"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(file, str(error)) from error
    return GpuArtifact(path, manifest, program, kernels)


def _target_of(path: Path, manifest: Mapping[str, Any]) -> CpuTarget | CudaTarget:
    try:
        data = manifest["target"]
        return CudaTarget.from_json(data) if "sm" in data else CpuTarget.from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path / MANIFEST, f"not a manifest ({error})") from error


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"is damaged: {why}", place=str(path), remedy="compile the model again")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(
            f"has no {MANIFEST}: not an artifact",
            place=str(path),
            remedy="make one with: pagec compile MODEL",
        )
    try:
        manifest = json.loads(file.read_text())
        found = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"not a manifest ({error})") from error
    if found != FORMAT:
        raise ArtifactError(
            f"has format {found}, this pagec reads format {FORMAT}",
            place=str(path),
            remedy="compile the model again with this pagec, or use the pagec that wrote it",
        )
    missing = {"pagec", "model", "target", "tools", "numerics", "files"} - manifest.keys()
    if missing:
        raise _damaged(file, f"it lacks {', '.join(sorted(missing))}")
    return dict(manifest)


def _check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    """Sizes of all files, digests of all but the weights."""
    try:
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise _damaged(path / MANIFEST, f"not a manifest ({error})") from error
    for name, (size, sha256) in files.items():
        file = path / name
        if not file.is_file():
            raise _damaged(file, "the file is missing")
        found = file.stat().st_size
        if found != size:
            raise _damaged(file, f"{found} bytes, the manifest says {size}")
        if name != WEIGHTS and digest(file) != sha256:
            raise _damaged(file, "its digest is not the manifest's; it was changed after compiling")


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest records of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


# ------------------------------------------------------------------------------------ weights file


def weights_header(weights: tuple[PackedWeight, ...]) -> tuple[bytes, dict[str, int]]:
    """The head of the weights file, and each tensor's offset in the file.

    A safetensors file. Tensors are multiples of 64 bytes long, so without holes each starts on a cache
    line once the header is padded with spaces to a page.
    """
    entries: dict[str, Any] = {}
    end = 0
    for w in weights:
        size = nbytes(w.shape, w.dtype)
        assert size % BYTE_ALIGN == 0, w
        entries[w.name] = {
            "dtype": _SAFETENSORS_NAMES[w.dtype],
            "shape": list(w.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % WEIGHTS_PAGE
    head = (len(text) + padding).to_bytes(8, "little") + text + b" " * padding
    return head, {name: len(head) + e["data_offsets"][0] for name, e in entries.items()}


def write_weights(path: Path, weights: tuple[PackedWeight, ...], packed: Iterator[Array]) -> None:
    """Writes the weights file from packed tensors that come in the order of `weights`."""
    with path.open("wb") as file:
        file.write(weights_header(weights)[0])
        for w, array in zip(weights, packed, strict=True):
            assert array.nbytes == nbytes(w.shape, w.dtype), w.name
            array.tofile(file)


def read_packed(path: Path, weights: tuple[PackedWeight, ...], name: str) -> Array:
    """One packed tensor out of a weights file, read-only, mapped."""
    _, offsets = weights_header(weights)
    weight = next(w for w in weights if w.name == name)
    dtype = STORAGE[weight.dtype]
    return np.memmap(path, dtype=dtype, mode="r", offset=offsets[name], shape=weight.shape)
