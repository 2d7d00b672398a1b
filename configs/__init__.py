"""Data that comes with pagec: families, models, targets and tuned kernels. Finds it; reads nothing."""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """The directory that holds the data."""
    return Path(__file__).resolve().parent


def names(kind: str) -> list[str]:
    """Names of the YAML files of a kind ("families", "models", "targets"), sorted."""
    return sorted(path.stem for path in (root() / kind).glob("*.yaml"))


def find(kind: str, name: str) -> Path | None:
    """The YAML file of this kind and name; None if there is none."""
    path = root() / kind / f"{name}.yaml"
    return path if name in names(kind) else None
