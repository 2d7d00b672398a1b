"""A draft of a spec for an architecture that no family knows: the nearest family, and what differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pagec import configs
from pagec.compiler.errors import SpecError
from pagec.compiler.importers import mapping as mappings
from pagec.compiler.importers.checkpoint import Checkpoint, WeightSource
from pagec.compiler.importers.gguf import GgufFacts
from pagec.compiler.importers.hf import HfFacts
from pagec.compiler.importers.model import as_expression, locate
from pagec.compiler.spec import ModelSpec, parse_spec
from pagec.compiler.spec.family import read_document
from pagec.compiler.spec.source import to_plain

# Keys of config.json that say nothing about the arithmetic.
_SILENT = re.compile(
    r"architectures|auto_map|.*dropout|.*token_id|dtype|torch_dtype|transformers_version|use_cache"
)


def draft(path: Path) -> str:
    """YAML to complete: known keys mapped, all else as comments."""
    path = locate(path)
    is_gguf = path.suffix == ".gguf"
    facts: HfFacts | GgufFacts = GgufFacts(path) if is_gguf else HfFacts(path)
    maps = mappings.known_maps("gguf" if is_gguf else "hf")
    nearest = replace(mappings.nearest(maps, facts), expects={})
    kind = facts.architecture if isinstance(facts, GgufFacts) else str(facts.config.get("model_type"))
    params = mappings.imported_params(nearest, facts)
    data = {
        "family": kind,
        "extends": nearest.family,
        "checkpoint": str(path.resolve()),
        "params": {key: as_expression(value, key) for key, value in params.items()},
    }
    text = yaml.safe_dump(data, sort_keys=False, width=10**6, allow_unicode=True)
    keys, tensors = mappings.matches(nearest, facts)
    head = (
        f"# A draft for {kind!r}: family {nearest.family!r} is the nearest (it finds {keys} of its "
        f"{len(nearest.params)} keys and {tensors} of its {len(nearest.tensors)} tensors).\n"
        "# Say below what differs, then compile this file; `pagec compile` names what still does not fit.\n"
    )
    return head + text + "".join(_notes(text, nearest, facts))


def _notes(text: str, nearest: mappings.ImportMap, facts: HfFacts | GgufFacts) -> Iterable[str]:
    if isinstance(facts, HfFacts):
        yield from _comments("Keys that no param reads:", _unread_keys(nearest, facts.config))
    try:
        spec = parse_spec(text, "draft.yaml")
    except SpecError as error:
        yield from _comments("What is wrong so far:", [f"{p.path}: {p.message}" for p in error.problems])
        yield from _comments("Tensors:", _tensor_lines(facts.checkpoint, facts.checkpoint.names()))
    else:
        yield from _tensor_notes(spec, facts.checkpoint)
    yield from _family_graph(nearest.family)


def _unread_keys(nearest: mappings.ImportMap, config: Mapping[str, Any], path: str = "") -> list[str]:
    """Keys of the configuration, those of nested maps with dots."""
    read = {s for sources in nearest.params.values() for s in sources if isinstance(s, str)}
    read |= {"model_type", str(nearest.layer_types.get("key"))}
    found = []
    for name, value in config.items():
        key = path + name
        if key in read or value is None or _SILENT.fullmatch(name):
            continue
        if isinstance(value, dict):
            found += _unread_keys(nearest, value, f"{key}.")
        else:
            found.append(f"{key}: {value!r}")
    return found


def _tensor_notes(spec: ModelSpec, checkpoint: Checkpoint) -> Iterable[str]:
    source = WeightSource(spec, checkpoint)
    problems = source.problems()
    wrong = [p for p in problems if not p.startswith("surplus: ")]
    surplus = {p.removeprefix("surplus: ").split(" [")[0] for p in problems if p.startswith("surplus: ")}
    yield from _comments("Weights of the family that do not fit:", map(_pattern, wrong))
    lines = _tensor_lines(checkpoint, surplus & checkpoint.names())
    yield from _comments("Tensors that no weight reads:", lines)


def _tensor_lines(checkpoint: Checkpoint, names: set[str]) -> list[str]:
    return [f"{_pattern(name)} {list(checkpoint.shape(name))}" for name in sorted(names)]


def _pattern(text: str) -> str:
    """A name with {i} for the layer, and {e} for what is numbered inside it."""
    text = re.sub(r"\bl\d+(?=\.)", "l{i}", text)
    text = re.sub(r"(?<=\.)\d+(?=\.)", "{i}", text, count=1)
    return re.sub(r"(?<=\.)\d+(?=\.)", "{e}", text)


def _family_graph(family: str) -> Iterable[str]:
    """The statements that the draft inherits, to copy and change."""
    path = configs.find("families", family)
    assert path is not None
    graph: dict[str, Any] = to_plain(read_document(path).tree.entries["graph"])
    yield f"# The graph of {family!r}, to be copied and changed:\n# graph:\n"
    for part, statements in graph.items():
        yield f"#   {part}:\n"
        yield from (f"#     - {statement}\n" for statement in statements)


def _comments(title: str, lines: Iterable[str]) -> Iterable[str]:
    unique = list(dict.fromkeys(lines))
    if unique:
        yield f"# {title}\n"
        yield from (f"#   {line}\n" for line in unique)
