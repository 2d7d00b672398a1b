"""A model: a spec file resolved into sizes, weights and statements.

load_spec("smollm2-135m")       a name in configs/models, or a path to a YAML file
parse_spec(text, "my.yaml")     the same from a text
resolved_yaml(spec)             one file without parents that gives the same model
with_max_len(spec, 2048)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pagec import configs
from pagec.compiler.errors import SpecError
from pagec.compiler.spec import weights as weights_section
from pagec.compiler.spec.expr import is_number, suggestion
from pagec.compiler.spec.family import Document, document_of, merged, read_text, section_of, text_of
from pagec.compiler.spec.names import SIZES, Reach, check_names, reach
from pagec.compiler.spec.naming import check_imports, named_for
from pagec.compiler.spec.outline import Outline, outline
from pagec.compiler.spec.scope import LayerNeededError, Scope, overridden
from pagec.compiler.spec.source import Map, Place, Problems, from_plain, to_plain
from pagec.compiler.spec.weights import Declaration, WeightSpec
from pagec.compiler.spec.write import write

MAX_LAYERS: Final = 1024


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A resolved model.

    `params` are those that have a value outside the layers; `weights` all that the graph reads, by their
    names in the graph ("embed", "l3.q"), without absent ones; `aliases` say which of them others are the
    same as ({"lm_head": "embed"}). `ignored` are patterns of tensors that a checkpoint may carry unread.
    """

    name: str
    family: str
    layers: int
    vocab: int
    max_len: int
    params: Mapping[str, Any]
    layer_types: tuple[str, ...]
    weights: Mapping[str, WeightSpec]
    aliases: Mapping[str, str]
    checkpoint: Path | None
    ignored: tuple[str, ...]
    outline: Outline = field(repr=False, compare=False)

    def scope(self, layer: int | None = None) -> Scope:
        """The params' values, outside the layers or in one of them."""
        return _scope(self.outline, self.layer_types, layer)

    def weight(self, name: str, layer: int | None) -> WeightSpec | None:
        """The weight that `$name` stands for in a layer; None if it is absent there."""
        full = self.outline.weights[name].full_name(layer)
        return self.weights.get(self.aliases.get(full, full))


def load_spec(model: str | Path, checkpoint: Path | None = None) -> ModelSpec:
    """The model of a YAML file, or of a name in configs/models.

    `checkpoint` replaces the one that the file names. SpecError holds every mistake that was found.
    """
    path = _find(model)
    return parse_spec(read_text(path), str(path), checkpoint)


def _find(model: str | Path) -> Path:
    name = str(model)
    if isinstance(model, Path) or name.endswith((".yaml", ".yml")):
        return Path(model)
    found = configs.find("models", name)
    if found:
        return found
    raise Place(name, "", 0, 0).error(
        "is neither a YAML file nor a model that pagec knows", suggestion(name, configs.names("models"))
    )


def parse_spec(text: str, file: str, checkpoint: Path | None = None) -> ModelSpec:
    """The model of a spec's text; `file` names it in errors, and is where relative paths start."""
    try:
        return _resolve(document_of(text, file), Path(file), checkpoint)
    except RecursionError:
        raise Place(file, "", 0, 0).error("nested too deeply", "write plainer expressions") from None


def _resolve(document: Document, file: Path, checkpoint: Path | None) -> ModelSpec:
    checkpoint = checkpoint or _checkpoint(document.tree)
    is_gguf = checkpoint is not None and checkpoint.suffix == ".gguf"
    problems = Problems()
    with problems:
        check_imports(document.tree)
    with problems:
        parts = outline(named_for(document.tree, "gguf" if is_gguf else "hf"))
    problems.raise_if_any()
    used = reach(parts)
    check_names(document, parts, used)
    own_name = document.own.get("name")
    name = text_of(own_name, "'name'") if own_name else file.stem
    return _evaluate(parts, used, name, checkpoint)


def _checkpoint(tree: Map) -> Path | None:
    node = tree.get("checkpoint")
    return Path(node.place.file).parent / text_of(node, "the checkpoint") if node else None


def _evaluate(parts: Outline, used: Reach, name: str, checkpoint: Path | None) -> ModelSpec:
    scope = Scope(parts.params, parts.expressions)
    problems = Problems()
    sizes = {}
    for key in SIZES:
        with problems:
            sizes[key] = scope.size(parts.params[key], key)
    with problems:
        sizes["max_len"] = _max_len(parts.tree, scope, sizes.get("max_len", 0))
    if sizes.get("layers", 0) > MAX_LAYERS:
        problems.add(parts.params["layers"].place, f"{sizes['layers']} layers; at most {MAX_LAYERS}")
    params = _values(parts, used, scope, problems)
    problems.raise_if_any()
    kinds = parts.layer_types or ("",)
    layer_types = tuple(kinds[i % len(kinds)] for i in range(sizes["layers"]))
    weights, aliases = _weights(parts, used, layer_types, problems)
    problems.raise_if_any()
    return ModelSpec(
        name=name,
        family=text_of(family, "'family'") if (family := parts.tree.get("family")) else name,
        params=params,
        layer_types=layer_types,
        weights=weights,
        aliases=aliases,
        checkpoint=checkpoint,
        ignored=parts.ignore,
        outline=_pruned(parts, used),
        **sizes,
    )


def _max_len(tree: Map, scope: Scope, own: int) -> int:
    """The greatest length that is asked for (top-level `max_len`), or else the model's own."""
    node = tree.get("max_len")
    if node is None:
        return own
    asked = scope.size(node, "max_len")
    own = _reach(scope, own)
    if asked > own:
        raise node.place.error(
            f"a maximum length of {asked} is beyond the model's {own}", f"ask for {own} at most"
        )
    return asked


def _reach(scope: Scope, own: int) -> int:
    """How far positions go: the model's own length, `factor` times as far with rope of kind dynamic."""
    try:
        rope = scope.get("rope") if "rope" in scope else None
    except SpecError:
        return own
    if not isinstance(rope, dict) or rope.get("kind") != "dynamic" or not is_number(rope.get("factor")):
        return own
    return max(own, int(own * rope["factor"]))


def _values(parts: Outline, used: Reach, scope: Scope, problems: Problems) -> dict[str, Any]:
    values = {}
    for name in parts.params:
        if name in used.params:
            with problems:
                try:
                    values[name] = scope.get(name)
                except LayerNeededError:
                    continue
    return values


def _scope(parts: Outline, layer_types: tuple[str, ...], layer: int | None) -> Scope:
    if layer is None:
        return Scope(parts.params, parts.expressions)
    override = parts.types.get(layer_types[layer])
    return Scope(overridden(parts.params, override), parts.expressions, layer)


def _weights(
    parts: Outline, used: Reach, layer_types: tuple[str, ...], problems: Problems
) -> tuple[dict[str, WeightSpec], dict[str, str]]:
    declared = [d for name, d in parts.weights.items() if name in used.weights]
    weights: dict[str, WeightSpec] = {}
    aliases: dict[str, str] = {}
    for layer in (None, *range(len(layer_types))):
        scope = _scope(parts, layer_types, layer)
        for one in declared:
            if one.per_layer == (layer is not None):
                with problems:
                    _add_weight(one, parts, scope, layer, weights, aliases)
        if problems:
            break  # further layers would only repeat it
    if not problems:
        with problems:
            _resolve_aliases(parts, weights, aliases)
    return weights, aliases


def _add_weight(
    one: Declaration,
    parts: Outline,
    scope: Scope,
    layer: int | None,
    weights: dict[str, WeightSpec],
    aliases: dict[str, str],
) -> None:
    weight = weights_section.resolve(one, scope, layer)
    if weight is None:
        return
    weights[weight.name] = weight
    target = weights_section.same_as(one, scope)
    if target is not None:
        other = parts.weights[target]
        if other.per_layer and layer is None:
            raise one.fields.entries["same_as"].place.error(
                f"{target!r} belongs to the layers, {one.name!r} to the whole model",
                "name a weight of the model",
            )
        aliases[weight.name] = other.full_name(layer)


def _resolve_aliases(parts: Outline, weights: dict[str, WeightSpec], aliases: dict[str, str]) -> None:
    """Follows chains of aliases to their end, and moves the aliased weights' tensors to the weights they
    are: a checkpoint may hold a tied tensor under either name."""
    for name in list(aliases):
        seen = [name]
        while seen[-1] in aliases:
            seen.append(aliases[seen[-1]])
            if seen[-1] == name:
                raise _same_as_place(parts, name).error(
                    f"same_as goes in a circle: {' -> '.join(seen)}", "let one of them have a tensor"
                )
        target = weights.get(seen[-1])
        if target is None or target.shape != weights[name].shape:
            what = "absent" if target is None else f"of shape {list(target.shape)}"
            raise _same_as_place(parts, name).error(
                f"{name} {list(weights[name].shape)} cannot be the same as {seen[-1]}, which is {what}",
                "let both have one shape, or mend the condition",
            )
    for name in aliases:
        while aliases[name] in aliases:
            aliases[name] = aliases[aliases[name]]
    for name, target_name in aliases.items():
        alias, target = weights.pop(name), weights[target_name]
        names = (*target.tensors, *(t for t in alias.tensors if t not in target.tensors))
        weights[target_name] = replace(target, tensors=names)


def _same_as_place(parts: Outline, full_name: str) -> Place:
    return parts.weights[full_name.rsplit(".", 1)[-1]].fields.entries["same_as"].place


# --------------------------------------------------------------------------- changed and written again


def _pruned(parts: Outline, used: Reach) -> Outline:
    """The outline with a tree that holds only what the model uses, and neither parents nor imports."""
    kept = {"params": used.params, "weights": used.weights, "types": used.types}
    entries = {}
    for key, node in parts.tree.entries.items():
        if key in ("extends", "required", "checkpoint", "import"):
            continue
        entries[key] = _only(section_of(parts.tree, key), kept[key]) if key in kept else node
    types = entries.get("types")
    if isinstance(types, Map):
        pruned = {name: _only(section_of(types, name), used.params) for name in types.entries}
        entries["types"] = Map(pruned, types.places, types.place)
    return replace(parts, tree=Map(entries, parts.tree.places, parts.tree.place))


def _only(section: Map, names: frozenset[str]) -> Map:
    return Map({k: v for k, v in section.entries.items() if k in names}, section.places, section.place)


def resolved_yaml(spec: ModelSpec) -> str:
    """One self-contained YAML file that loads to the same model. It names no checkpoint."""
    return write({"name": spec.name, "family": spec.family} | to_plain(_unnamed(spec.outline.tree)))


def _unnamed(tree: Map) -> Map:
    return Map(
        {k: v for k, v in tree.entries.items() if k not in ("name", "family")}, tree.places, tree.place
    )


def with_params(spec: ModelSpec, **params: Any) -> ModelSpec:
    """The same model with other values of some params, e.g. with_params(spec, layers=2)."""
    return _changed(spec, {"params": params})


def with_max_len(spec: ModelSpec, max_len: int) -> ModelSpec:
    """The same model for sequences of at most `max_len` tokens (at most those that it can take).

    The param of that name stays as it is: a table of position embeddings keeps its size.
    """
    return _changed(spec, {"max_len": max_len})


def _changed(spec: ModelSpec, changes: Mapping[str, Any]) -> ModelSpec:
    """The model of the spec's own tree with some entries replaced."""
    place = Place("<changed>", "", 0, 0)
    tree = merged(spec.outline.tree, from_plain(changes, place))
    parts = outline(tree)
    used = reach(parts)
    found = _evaluate(parts, used, spec.name, spec.checkpoint)
    return replace(found, family=spec.family)
