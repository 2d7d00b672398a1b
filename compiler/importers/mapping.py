"""How a kind of checkpoint describes a family's params: the family's `import:` section, read and applied.

    import:
      hf:                     (or gguf)
        model_type: [llama]   what config.json calls it (gguf: `arch`, general.architecture)
        params:               param: key, or a list of which the first present and not null wins
          hidden: hidden_size
          rope.base: [rope_parameters.rope_theta, rope_theta]
        words:                {param: {its word: ours}}
        defaults:             {key: value} where the key is left out
        expects:              {key: [values]}: any other value would change the arithmetic, so it is refused
        layer_types: {key: layer_types, names: {sliding_attention: local}}

Dots go into nested maps, of the checkpoint's configuration as of the params. In GGUF keys {arch} is the
architecture's name. Beside keys there are facts that the tensors tell:

    {tensor: NAME, axis: n}   a size of a tensor         {tensor: NAME}   its values, as a list
    {present: NAME, value: v} v (or true) where there is such a tensor     {absent: NAME}   the opposite
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pagec import configs
from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.checkpoint import Checkpoint
from pagec.compiler.rope import KINDS, settings_of
from pagec.compiler.spec.family import Document, read_document, section_of
from pagec.compiler.spec.naming import KIND_KEY, Kind, check_imports, named_for
from pagec.compiler.spec.source import Scalar, to_plain


class Facts(Protocol):
    """What a checkpoint says of its model: configuration values and tensors."""

    place: str
    checkpoint: Checkpoint

    def value(self, key: str) -> Any:
        """The value of a key; None if there is none."""

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""


@dataclass(frozen=True, slots=True)
class ImportMap:
    """One family's `import.hf` or `import.gguf`, as plain data. `tensors` are the family's first names."""

    family: str
    kinds: tuple[str, ...]
    params: Mapping[str, tuple[Any, ...]]
    words: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Any]
    expects: Mapping[str, tuple[Any, ...]]
    layer_types: Mapping[str, Any]
    tensors: tuple[tuple[str, ...], ...]


def known_maps(kind: Kind) -> list[ImportMap]:
    """The import sections of all families that have one of this kind."""
    found = []
    for name in configs.names("families"):
        path = configs.find("families", name)
        assert path is not None
        one = import_map(name, read_document(path), kind)
        if one is not None:
            found.append(one)
    return found


def import_map(family: str, document: Document, kind: Kind) -> ImportMap | None:
    """A family's section, if it names checkpoints of its own; SpecError if its form is wrong."""
    own = section_of(section_of(document.own, "import"), kind).get(KIND_KEY[kind])
    section = section_of(section_of(document.tree, "import"), kind)
    if own is None or not section.entries:
        return None
    check_imports(document.tree)
    plain = to_plain(section)
    weights = to_plain(section_of(named_for(document.tree, kind), "weights"))
    return ImportMap(
        family,
        tuple(map(str, _listed(to_plain(own)))),
        {
            name: _listed(sources)
            for name, sources in plain.get("params", {}).items()
            if not _is_inside_expression(name, document)
        },
        plain.get("words", {}),
        plain.get("defaults", {}),
        {key: _listed(values) for key, values in plain.get("expects", {}).items()},
        plain.get("layer_types", {}),
        tuple(names for w in weights.values() if (names := _always_there(w))),
    )


def _is_inside_expression(name: str, document: Document) -> bool:
    """Whether "rope.base" is inherited by a family whose rope is an expression: there is no map to fill."""
    root = section_of(document.tree, "params").get(name.split(".")[0])
    return "." in name and isinstance(root, Scalar)


def _always_there(weight: Any) -> tuple[str, ...]:
    """The tensors of a weight without conditions (whose form is checked where a spec is resolved)."""
    plain = isinstance(weight, dict) and "when" not in weight
    return tuple(map(str, _listed(weight.get("name", [])))) if plain else ()


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


# ------------------------------------------------------------------------------------- applying


def imported_params(mapping: ImportMap, facts: Facts) -> dict[str, Any]:
    """The params that the checkpoint gives, nested as in a spec (words still bare)."""
    _check_expected(mapping, facts)
    params: dict[str, Any] = {}
    for name, sources in mapping.params.items():
        value = next((v for s in sources if (v := _source(s, mapping, facts)) is not None), None)
        if value is None:
            continue
        value = mapping.words.get(name, {}).get(value, value) if isinstance(value, str) else value
        *maps, last = name.split(".")
        inner = params
        for part in maps:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {name: _without_unused_scaling(value) for name, value in params.items()}


def _without_unused_scaling(value: Any) -> Any:
    """A map of rope settings without those that only other kinds read (configs often carry them along)."""
    if not isinstance(value, dict):
        return value
    kind = value.get("kind", "default")
    scaling = {key for known in KINDS for key in settings_of(known)}
    if kind not in KINDS:
        return value
    return {k: v for k, v in value.items() if k in settings_of(kind) or k not in scaling}


def imported_layer_types(mapping: ImportMap, facts: Facts) -> list[str] | None:
    """The layers' types, where the checkpoint lists them."""
    if not mapping.layer_types:
        return None
    found = facts.value(str(mapping.layer_types["key"]))
    if found is None:
        return None
    names = mapping.layer_types.get("names", {})
    if not isinstance(found, list) or any(t not in names for t in found):
        raise CheckpointError(
            f"layer types {found!r:.80}, family {mapping.family!r} knows {', '.join(names)}",
            place=facts.place,
            remedy="write a family that has these types",
        )
    return [names[t] for t in found]


def _value(key: str, mapping: ImportMap, facts: Facts) -> Any:
    return facts.value(key) if facts.has(key) else mapping.defaults.get(key)


def _source(source: Any, mapping: ImportMap, facts: Facts) -> Any:
    if isinstance(source, str):
        return _value(source, mapping, facts)
    there = facts.checkpoint.names()
    if "tensor" in source:
        name = source["tensor"]
        if name not in there:
            return None
        if "axis" in source:
            return facts.checkpoint.shape(name)[source["axis"]]
        return [float(str(v)) for v in np.asarray(facts.checkpoint.read(name), np.float32).ravel()]
    if "present" in source:
        return source.get("value", True) if source["present"] in there else None
    return source.get("value", True) if source["absent"] not in there else None


def _check_expected(mapping: ImportMap, facts: Facts) -> None:
    for message in _unexpected(mapping, facts):
        raise CheckpointError(message, place=facts.place, remedy="write a family for this architecture")


def _unexpected(mapping: ImportMap, facts: Facts) -> Iterator[str]:
    """What the checkpoint says that would change the family's arithmetic."""
    for key, allowed in mapping.expects.items():
        value = facts.value(key)
        values = [facts.value(a) if isinstance(a, str) and a.startswith("{arch}") else a for a in allowed]
        if value is not None and value not in values:
            yield f"{key} is {value!r}, family {mapping.family!r} is for {', '.join(map(repr, values))}"


# ------------------------------------------------------------------------------------- choosing


def choose(maps: list[ImportMap], kind: str | None, facts: Facts, what: str) -> ImportMap:
    """The family whose section names this kind of checkpoint; CheckpointError says which is the nearest.

    Of several that name it, the first whose expectations hold.
    """
    fitting = [mapping for mapping in maps if kind in mapping.kinds]
    for mapping in fitting:
        if not any(_unexpected(mapping, facts)):
            return mapping
    if fitting:
        return fitting[0]  # the params are refused with what was expected
    known = sorted(k for mapping in maps for k in mapping.kinds)
    raise CheckpointError(
        f"{what} is {kind!r}, which no family knows; known: {', '.join(known)}",
        place=facts.place,
        remedy=_nearest(maps, facts),
    )


def nearest(maps: list[ImportMap], facts: Facts) -> ImportMap:
    """The family of which the checkpoint has the greatest shares of keys and tensors."""

    def share(mapping: ImportMap) -> float:
        keys, tensors = matches(mapping, facts)
        return keys / max(1, len(mapping.params)) + tensors / max(1, len(mapping.tensors))

    return max(maps, key=share)


def _nearest(maps: list[ImportMap], facts: Facts) -> str:
    if not maps:
        return "write a family with an import section"
    best = nearest(maps, facts)
    keys, tensors = matches(best, facts)
    return (
        f"the nearest family is {best.family!r}: it finds {keys} of its {len(best.params)} config keys and "
        f"{tensors} of its {len(best.tensors)} tensors here. Write a family with 'extends: {best.family}' "
        "that says what differs, and name this kind in its import section; `pagec import --draft` begins it"
    )


def matches(mapping: ImportMap, facts: Facts) -> tuple[int, int]:
    """How many of a family's params have a key here, and how many of its weights a tensor."""
    keys = sum(
        any(isinstance(source, str) and facts.has(source) for source in sources)
        for sources in mapping.params.values()
    )
    there = facts.checkpoint.names()
    return keys, sum(any(n.replace("{i}", "0") in there for n in names) for names in mapping.tensors)
