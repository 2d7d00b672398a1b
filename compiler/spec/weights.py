"""Weights: what a spec declares about each of them, and the tensors that a checkpoint must hold.

name      the tensor in a checkpoint, or a list of which the first present wins; {i} layer, {e} expert
shape     of the logical weight ([N, K] for a linear), of one expert where there is a stack
when      a condition: otherwise the weight is absent
rows      [a, b]: it is these rows of a fused tensor
every     n: the rows are counted in each n rows of the tensor (heads of q, k and v in turns)
stored    how the checkpoint's tensor differs, one or a list: transposed ([K, N]), rotary_interleaved
          (the rows of each head are ordered in pairs), plus_one (w + 1)
stack     how many experts: tensors with {e} are stacked, a tensor without {e} holds all of them
same_as   {weight: condition}: where it holds, this weight is that other one
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagec.compiler.spec.expr import suggestion
from pagec.compiler.spec.family import must_be_map, texts_of
from pagec.compiler.spec.scope import Scope
from pagec.compiler.spec.source import List, Map, Node, Place, Scalar

KEYS: Final = ("name", "shape", "when", "rows", "every", "stored", "stack", "same_as")
STORED: Final = ("transposed", "rotary_interleaved", "plus_one")
MAX_EXPERTS: Final = 4096
_HEAD_DIM: Final = "head_dim"
_FIELD: Final = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One logical weight of a model.

    `shape` includes the experts where `stack` counts them; `tensors` are names in a checkpoint (they keep
    {e}), of which the first present wins. `rows` are those of the whole tensor, or of each `every` rows.
    `head_dim` is the length of the heads whose rows a tensor that is stored rotary_interleaved permutes, 0
    if it is not.
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    stored: tuple[str, ...] = ()
    stack: int | None = None
    head_dim: int = 0
    every: int | None = None

    @property
    def one_shape(self) -> tuple[int, ...]:
        """The shape without the experts."""
        return self.shape if self.stack is None else self.shape[1:]

    def tensor_names(self, pattern: str) -> list[str]:
        """The tensors that one of `tensors` stands for: one for each expert if it has {e}."""
        if "{e}" not in pattern:
            return [pattern]
        return [pattern.replace("{e}", str(e)) for e in range(self.stack or 0)]


@dataclass(frozen=True, slots=True)
class Declaration:
    """A line of the `weights:` section. `per_layer`: each layer has its own."""

    name: str
    names: tuple[str, ...]
    per_layer: bool
    fields: Map
    place: Place

    def full_name(self, layer: int | None) -> str:
        """The name in the graph: "l3.q", or "embed" for a weight of the whole model."""
        return f"l{layer}.{self.name}" if self.per_layer else self.name

    def expressions(self) -> Iterator[Node]:
        """The parts that hold expressions over params."""
        for key in ("shape", "when", "rows", "every", "stack"):
            if key in self.fields.entries:
                yield self.fields.entries[key]
        same = self.fields.get("same_as")
        if isinstance(same, Map):
            yield from same.entries.values()

    def targets(self) -> tuple[str, ...]:
        """Weights that this one may be the same as."""
        same = self.fields.get("same_as")
        return tuple(same.entries) if isinstance(same, Map) else ()


def declaration(name: str, node: Node, place: Place) -> Declaration:
    """Checks the form of one weight's declaration."""
    fields = must_be_map(node, place, f"the weight {name!r}")
    for key in fields.entries:
        if key not in KEYS:
            raise fields.places[key].error(f"a weight has no {key!r}", suggestion(key, list(KEYS)))
    for key in ("name", "shape"):
        if key not in fields.entries:
            raise place.error(f"the weight {name!r} has no {key}", f"add {key}: ...")
    names = texts_of(fields.entries["name"], "a tensor's name")
    if not names:
        raise fields.entries["name"].place.error("no tensor is named", "name at least one")
    if not isinstance(fields.entries["shape"], List):
        raise fields.entries["shape"].place.error("a shape is a list", "write [rows, columns]")
    if "same_as" in fields.entries:
        must_be_map(fields.entries["same_as"], place, "same_as")
    per_layer = _check_fields(names, fields)
    return Declaration(name, names, per_layer, fields, place)


def _check_fields(names: tuple[str, ...], fields: Map) -> bool:
    """Whether the names have {i}: all or none of them; and nothing else but {e}, where there is a stack."""
    place = fields.entries["name"].place
    found = [set(_FIELD.findall(name)) for name in names]
    allowed = {"i", "e"} if "stack" in fields.entries else {"i"}
    for name, keys in zip(names, found, strict=True):
        if keys - allowed:
            remedy = "{i} is the layer, {e} the expert of a weight with 'stack'"
            raise place.error(f"{name!r} has unknown {', '.join(sorted(keys - allowed))!r} in braces", remedy)
    per_layer = {"i" in keys for keys in found}
    if len(per_layer) != 1:
        raise place.error("some of the names have {i}, some do not", "give {i} to all or to none")
    return per_layer.pop()


def resolve(declared: Declaration, scope: Scope, layer: int | None) -> WeightSpec | None:
    """The weight in one layer (or of the whole model); None if its `when` says that it is absent."""
    fields = declared.fields
    when = fields.get("when")
    if when is not None and not scope.condition(when, "'when'"):
        return None
    shape_node = fields.entries["shape"]
    assert isinstance(shape_node, List)
    shape = tuple(scope.size(item, "a size") for item in shape_node.items)
    stack_node = fields.get("stack")
    stack = None if stack_node is None else scope.size(stack_node, "the number of experts")
    if stack_node is not None and stack is not None and stack > MAX_EXPERTS:
        raise stack_node.place.error(
            f"{stack} experts; at most {MAX_EXPERTS}", "check the params it comes from"
        )
    stored = _stored(fields.get("stored"))
    return WeightSpec(
        name=declared.full_name(layer),
        tensors=tuple(n if layer is None else n.replace("{i}", str(layer)) for n in declared.names),
        shape=shape if stack is None else (stack, *shape),
        rows=_rows(fields, shape, scope),
        every=_every(fields, scope),
        stored=stored,
        stack=stack,
        head_dim=_head_dim(declared, shape, scope) if "rotary_interleaved" in stored else 0,
    )


def _stored(node: Node | None) -> tuple[str, ...]:
    if node is None:
        return ()
    ways = texts_of(node, "a way of storing")
    for way in ways:
        if way not in STORED:
            raise node.place.error(f"no way of storing is named {way!r}", suggestion(way, list(STORED)))
    return ways


def _rows(fields: Map, shape: tuple[int, ...], scope: Scope) -> tuple[int, int] | None:
    node = fields.get("rows")
    if node is None:
        return None
    if not isinstance(node, List) or len(node.items) != 2:
        raise node.place.error("'rows' is [first, end]", "write e.g. [0, hidden]")
    first, end = scope.size(node.items[0], "the first row", 0), scope.size(node.items[1], "the end")
    count = end - first
    whole = shape[0] if shape else 0
    if count < 1 or (whole % count if "every" in fields.entries else whole != count):
        raise node.place.error(
            f"rows {first} to {end} are {count}, the shape has {whole}",
            "make rows and shape agree",
        )
    return first, end


def _every(fields: Map, scope: Scope) -> int | None:
    node, rows = fields.get("every"), fields.get("rows")
    if node is None:
        return None
    every = scope.size(node, "'every'")
    if not isinstance(rows, List):
        raise node.place.error("'every' stands without 'rows'", "add rows: [first, end] of each block")
    if every < scope.size(rows.items[1], "the end"):
        raise node.place.error(
            f"the rows end beyond each {every} rows", "let 'every' count the rows from one part to its next"
        )
    return every


def _head_dim(declared: Declaration, shape: tuple[int, ...], scope: Scope) -> int:
    place = declared.fields.entries["stored"].place
    if _HEAD_DIM not in scope:
        raise place.error("rotary_interleaved needs a param 'head_dim'", "declare head_dim in params")
    size = scope.size(Scalar(_HEAD_DIM, place), "head_dim")
    if size % 2 or not shape or shape[0] % size:
        raise place.error(
            f"{shape[0] if shape else 'no'} rows do not divide into heads of {size}, each of two halves",
            "check head_dim and the shape",
        )
    return size


def same_as(declared: Declaration, scope: Scope) -> str | None:
    """The weight that this one is the same as, by the conditions of its `same_as`."""
    node = declared.fields.get("same_as")
    if not isinstance(node, Map):
        return None
    for target, condition in node.entries.items():
        if scope.condition(condition, f"the condition of same_as {target}"):
            return target
    return None
