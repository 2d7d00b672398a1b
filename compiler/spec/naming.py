"""The `import:` section: its form, and which tensors a kind of checkpoint holds.

The `weights:` section names tensors as Hugging Face's checkpoints do. `import.gguf.names` and
`import.gguf.stored` replace names and ways of storing where the checkpoint is a GGUF file, and
`import.<kind>.ignore` lists tensors that such checkpoints may carry and no model reads. How the other keys
describe params: importers/mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from pagec.compiler.spec.expr import suggestion
from pagec.compiler.spec.family import must_be_map, section_of, text_of, texts_of
from pagec.compiler.spec.source import List, Map, Node, Place, Problems, Scalar

Kind = Literal["hf", "gguf"]
# What a checkpoint of a kind calls itself by.
KIND_KEY: Final[Mapping[Kind, str]] = {"hf": "model_type", "gguf": "arch"}
_KEYS: Final = ("params", "words", "defaults", "expects", "layer_types", "names", "stored", "ignore")
# A fact that tensors tell: which of these keys it must have one of, and what it may have beside.
_FACTS: Final = ("tensor", "present", "absent")
_FACT_KEYS: Final = (*_FACTS, "axis", "value")


def check_imports(tree: Map) -> None:
    """SpecError lists what has a wrong form in the `import:` section, and what it names in vain.

    Names that are inherited may be of weights and types that the file has deleted.
    """
    problems = Problems()
    with problems:
        imports = must_be_map(tree.get("import") or Map({}, {}, tree.place), tree.place, "'import'")
        for name in imports.entries:
            with problems:
                _check_section(name, imports, tree, problems)
    problems.raise_if_any()


def _check_section(kind: str, imports: Map, tree: Map, problems: Problems) -> None:
    place = imports.places[kind]
    if kind not in get_args(Kind):
        raise place.error(f"no kind of checkpoint is named {kind!r}", suggestion(kind, list(get_args(Kind))))
    section = must_be_map(imports.entries[kind], place, f"'{kind}'")
    own = [key for known, key in KIND_KEY.items() if known == kind]
    for key, node in section.entries.items():
        with problems:
            if key not in (*_KEYS, *own):
                raise section.places[key].error(f"unknown key {key!r}", suggestion(key, [*_KEYS, *own]))
            if key in ("ignore", *own):
                texts_of(node, "a tensor's name" if key == "ignore" else f"'{key}'")
            else:
                _check_map(key, must_be_map(node, section.places[key], f"'{key}'"), tree, problems)


def _check_map(key: str, section: Map, tree: Map, problems: Problems) -> None:
    for name, node in section.entries.items():
        place = section.places[name]
        with problems:
            match key:
                case "params":
                    _check_param(name.split(".")[0], place, tree)
                    for source in node.items if isinstance(node, List) else (node,):
                        _check_source(source)
                case "words":
                    for word in must_be_map(node, place, "the words of a param").entries.values():
                        text_of(word, "a word")
                case "layer_types":
                    _check_layer_types(name, node, place, tree)
                case "names" | "stored":
                    _check_name(name, place, tree, "weight")
                    texts_of(node, "a tensor's name" if key == "names" else "a way of storing")


def _check_param(name: str, place: Place, tree: Map) -> None:
    required = tree.get("required")
    listed = required.items if isinstance(required, List) else ()
    known = {item.value for item in listed if isinstance(item, Scalar) and isinstance(item.value, str)}
    known |= section_of(tree, "params").entries.keys()
    if name not in known:
        raise place.error(f"no param is named {name!r}", suggestion(name, known))


def _check_name(name: str, place: Place, tree: Map, what: str) -> None:
    known = section_of(tree, f"{what}s").entries.keys()
    if name not in known and place.file == tree.place.file:
        raise place.error(f"no {what} is named {name!r}", suggestion(name, set(known)))


def _check_source(node: Node) -> None:
    """A key of the checkpoint's configuration, or a fact about its tensors."""
    if isinstance(node, Map):
        for key in node.entries:
            if key not in _FACT_KEYS:
                raise node.places[key].error(f"unknown key {key!r}", suggestion(key, list(_FACT_KEYS)))
        facts = [key for key in _FACTS if key in node.entries]
        if len(facts) != 1:
            raise node.place.error("not one fact about a tensor", f"give one of {', '.join(_FACTS)}")
        text_of(node.entries[facts[0]], "a tensor's name")
        axis = node.get("axis")
        if axis is not None and not (isinstance(axis, Scalar) and axis.value in (0, 1, 2)):
            raise axis.place.error("an axis is 0, 1 or 2", "count axes from the rows on")
    else:
        text_of(node, "a key")


def _check_layer_types(key: str, node: Node, place: Place, tree: Map) -> None:
    if key == "key":
        text_of(node, "a key")
    elif key == "names":
        for name in must_be_map(node, place, "the types' names").entries.values():
            _check_name(text_of(name, "a type's name"), name.place, tree, "type")
    else:
        raise place.error(f"unknown key {key!r}", "known: key, names")


def named_for(tree: Map, kind: Kind) -> Map:
    """The tree with weights as this kind of checkpoint has them. A tree without `import` stays as it is."""
    imports = section_of(section_of(tree, "import"), kind)
    if not imports.entries:
        return tree
    section = must_be_map(tree.get("weights") or Map({}, {}, tree.place), tree.place, "'weights'")
    weights = dict(section.entries)
    for key, field in (("names", "name"), ("stored", "stored")):
        for name, node in section_of(imports, key).entries.items():
            if isinstance(weight := weights.get(name), Map):
                weights[name] = _with_field(weight, field, node)
    entries: dict[str, Node] = {**tree.entries, "weights": Map(weights, section.places, section.place)}
    ignored = [*_items(tree.get("ignore")), *_items(imports.get("ignore"))]
    if ignored:
        entries["ignore"] = List(tuple(ignored), ignored[0].place)
    return Map(entries, {**tree.places, "ignore": tree.place}, tree.place)


def _items(node: Node | None) -> tuple[Node, ...]:
    if node is None:
        return ()
    return node.items if isinstance(node, List) else (node,)


def _with_field(weight: Map, field: str, node: Node) -> Map:
    entries, places = {**weight.entries, field: node}, {**weight.places, field: node.place}
    if field == "stored" and isinstance(node, List) and not node.items:  # stored plainly
        del entries[field], places[field]
    return Map(entries, places, weight.place)
