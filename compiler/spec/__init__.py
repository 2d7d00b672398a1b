"""The spec language: YAML files that describe models, resolved into a ModelSpec and built into a Graph."""

from __future__ import annotations

from pagec.compiler.spec.build import build_graph
from pagec.compiler.spec.model import (
    ModelSpec,
    load_spec,
    parse_spec,
    resolved_yaml,
    with_max_len,
    with_params,
)
from pagec.compiler.spec.weights import WeightSpec

__all__ = [
    "ModelSpec",
    "WeightSpec",
    "build_graph",
    "load_spec",
    "parse_spec",
    "resolved_yaml",
    "with_max_len",
    "with_params",
]
