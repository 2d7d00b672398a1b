"""Which tensors a kind of checkpoint holds: a family's `import:` section applied to its weights.

The `weights:` section names tensors as Hugging Face's checkpoints do. `import.gguf.names` and
`import.gguf.stored` replace names and ways of storing where the checkpoint is a GGUF file, and
`import.<kind>.ignore` lists tensors that such checkpoints may carry and no model reads.
"""

from __future__ import annotations

from typing import Literal

from pagec.compiler.spec.expr import suggestion
from pagec.compiler.spec.family import must_be_map, section_of
from pagec.compiler.spec.source import List, Map, Node, Problems

Kind = Literal["hf", "gguf"]


def named_for(tree: Map, kind: Kind) -> Map:
    """The tree with weights as this kind of checkpoint has them. A tree without `import` stays as it is."""
    imports = section_of(section_of(tree, "import"), kind)
    if not imports.entries:
        return tree
    problems = Problems()
    weights = dict(section_of(tree, "weights").entries)
    for key, field in (("names", "name"), ("stored", "stored")):
        for weight, node in section_of(imports, key).entries.items():
            with problems:
                place = section_of(imports, key).places[weight]
                if weight not in weights:
                    raise place.error(f"no weight is named {weight!r}", suggestion(weight, set(weights)))
                weights[weight] = _with_field(must_be_map(weights[weight], place, "a weight"), field, node)
    problems.raise_if_any()
    section = section_of(tree, "weights")
    entries: dict[str, Node] = {**tree.entries, "weights": Map(weights, section.places, section.place)}
    ignore = imports.get("ignore")
    if ignore is not None:
        entries["ignore"] = ignore
    return Map(entries, {**tree.places, "ignore": tree.place}, tree.place)


def _with_field(weight: Map, field: str, node: Node) -> Map:
    entries, places = {**weight.entries, field: node}, {**weight.places, field: node.place}
    if field == "stored" and isinstance(node, List) and not node.items:  # stored plainly
        del entries[field], places[field]
    return Map(entries, places, weight.place)
