"""Imports a model: from a checkpoint to the spec that describes it.

import_model(Path("SmolLM2-135M"))            a Hugging Face directory
import_model(Path("smollm2-135m.gguf"))       a GGUF file
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pagec.compiler.errors import CheckpointError, SpecError
from pagec.compiler.importers import mapping as mappings
from pagec.compiler.importers.checkpoint import Checkpoint
from pagec.compiler.importers.gguf import GgufFacts
from pagec.compiler.importers.hf import HfFacts
from pagec.compiler.importers.tokenizer import TokenizerFiles, tokenizer_of
from pagec.compiler.spec import ModelSpec, build_graph, parse_spec
from pagec.compiler.spec.scope import WORD_KEYS
from pagec.compiler.spec.source import Map, Scalar


@dataclass(frozen=True, slots=True)
class Imported:
    """`yaml_text` is the spec (it extends a family and names the checkpoint), `spec` the same resolved."""

    yaml_text: str
    spec: ModelSpec
    checkpoint: Checkpoint
    tokenizer: TokenizerFiles | None


def import_model(path: Path) -> Imported:
    """The model of a checkpoint; CheckpointError if no family fits or something is wrong with its files."""
    path = locate(path)
    facts: HfFacts | GgufFacts
    if path.suffix == ".gguf":
        facts = GgufFacts(path)
        mapping = mappings.choose(
            mappings.known_maps("gguf"), facts.architecture, facts, "general.architecture"
        )
        name = path.stem
    else:
        facts = HfFacts(path)
        mapping = mappings.choose(
            mappings.known_maps("hf"), facts.config.get("model_type"), facts, "model_type"
        )
        name = path.resolve().name
    params = mappings.imported_params(mapping, facts)
    layer_types = mappings.imported_layer_types(mapping, facts)

    def described() -> tuple[str, ModelSpec]:
        text = _spec_text(name, mapping.family, path, params, layer_types)
        return text, _checked_spec(text, f"{name}.yaml", facts.place)

    text, spec = described()
    untied = _untied(spec, facts.checkpoint)
    if untied:
        params |= dict.fromkeys(untied, False)
        text, spec = described()
    return Imported(text, spec, facts.checkpoint, tokenizer_of(facts.checkpoint))


def locate(path: Path) -> Path:
    """The GGUF file, or the directory with config.json, that a path means."""
    if path.suffix == ".safetensors" or path.name == "config.json":
        path = path.parent
    if path.suffix == ".gguf" and path.is_file():
        return path
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} GGUF files" if found else "no config.json and no GGUF file"
    raise CheckpointError(
        f"there is {what}" if path.exists() else "does not exist",
        place=str(path),
        remedy="give a .gguf file, or a Hugging Face directory with config.json and safetensors",
    )


def _spec_text(
    name: str, family: str, path: Path, params: dict[str, Any], layer_types: list[str] | None
) -> str:
    data: dict[str, Any] = {"name": name, "extends": family, "checkpoint": str(path.resolve())}
    data["params"] = {key: as_expression(value, key) for key, value in params.items()}
    if layer_types is not None:
        data["layer_types"] = layer_types
    return yaml.safe_dump(data, sort_keys=False, width=10**6, allow_unicode=True)


def as_expression(value: Any, key: str) -> Any:
    """A value as a spec writes it: words in quotes of their own, but for those that stand as they are."""
    if isinstance(value, dict):
        return {k: as_expression(v, k) for k, v in value.items()}
    return repr(value) if isinstance(value, str) and key not in WORD_KEYS else value


def _checked_spec(text: str, file: str, place: str) -> ModelSpec:
    """The spec, if its graph can be built; otherwise the checkpoint asks for something that we lack."""
    try:
        spec = parse_spec(text, file)
        build_graph(spec)
    except SpecError as error:
        problems = "\n  ".join(f"{p.path}: {p.message}" for p in error.problems)
        raise CheckpointError(
            f"its configuration describes no model that pagec can build:\n  {problems}",
            place=place,
            remedy="mend the configuration, or write a spec for this model",
        ) from error
    return spec


def _untied(spec: ModelSpec, checkpoint: Checkpoint) -> list[str]:
    """Params that tie weights whose tensors are both there and differ. As in transformers, tensors win."""
    there = checkpoint.names()
    found = []
    for alias in spec.aliases:
        declared = spec.outline.weights[alias.rsplit(".", 1)[-1]]
        layer = alias.split(".")[0][1:] if declared.per_layer else ""
        own = [name for n in declared.names if (name := n.replace("{i}", layer)) in there]
        others = [t for t in spec.weights[spec.aliases[alias]].tensors if t in there and t not in own]
        same = declared.fields.get("same_as")
        if not own or not others or _equal(checkpoint, own[0], others[0]) or not isinstance(same, Map):
            continue
        found += [
            node.value
            for node in same.entries.values()
            if isinstance(node, Scalar) and isinstance(node.value, str) and node.value in spec.params
        ]
    return found


def _equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    return checkpoint.shape(a) == checkpoint.shape(b) and np.array_equal(
        checkpoint.read(a), checkpoint.read(b)
    )
