"""The artifacts that are made beforehand for a GPU. All hold kernels only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pagec.compiler.artifact import GpuArtifact, look_at
from pagec.compiler.errors import ArtifactError

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "gpu"
TUNE: Final = "tune"
LIMIT_BYTES: Final = 60 << 20


@dataclass(frozen=True, slots=True)
class Made:
    """A model as a spec, and how it is compiled."""

    spec: Mapping[str, object]
    strict: bool = False
    max_len: int | None = None


def _llama(name: str, layers: int | None = None) -> dict[str, object]:
    return {"extends": name} | ({} if layers is None else {"params": {"layers": layers}})


def _small(family: str, **params: object) -> dict[str, object]:
    """A model of few weights."""
    sizes = {"vocab": 1000, "hidden": 256, "layers": 3, "heads": 4, "max_len": 1024}
    return {"extends": family, "params": sizes | params}


# Whole models. The last one differs from the first in nothing but its limit.
MODELS: Final[Mapping[str, Made]] = {
    "1b": Made(_llama("llama-3.2-1b")),
    "1b-strict": Made(_llama("llama-3.2-1b"), strict=True),
    "8b": Made(_llama("llama-3.1-8b")),
    "1b-short": Made(_llama("llama-3.2-1b"), max_len=1024),
}

# Of few layers, whose kernels are compared one by one: every template, then those of Llama.
KERNELS: Final[Mapping[str, Made]] = {
    "windows": Made(_small("gemma2", kv_heads=2, head_dim=256, inter=512, sliding_window=128)),
    "head-norms": Made(_small("qwen3", kv_heads=1, head_dim=80, inter=512)),
    "layernorms": Made(_small("gpt2")),
    "experts": Made(_small("qwen3-moe", kv_heads=2, inter=192, experts=16, top_k=4, normalize_top_k=True)),
    "1b-layers": Made(_llama("llama-3.2-1b", 2)),
    "1b-layers-strict": Made(_llama("llama-3.2-1b", 2), strict=True),
    "8b-layers": Made(_llama("llama-3.1-8b", 2)),
}


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Those in a directory."""

    directory: Path
    models: Mapping[str, Made] = field(default_factory=lambda: MODELS)
    kernels: Mapping[str, Made] = field(default_factory=lambda: KERNELS)

    def open(self, name: str) -> GpuArtifact:
        """One of them; ArtifactError if it is not there."""
        path = self.directory / name
        if not path.is_dir():
            raise ArtifactError(
                "is not there", place=str(path), remedy="make it where Triton is: make gpu-artifacts"
            )
        found = look_at(path)
        if not isinstance(found, GpuArtifact):
            raise ArtifactError("is for a CPU", place=str(path), remedy="make it anew: make gpu-artifacts")
        return found

    @property
    def target(self) -> str:
        """The GPU that they are for, by name."""
        return self.open(next(iter(self.models))).target.name
