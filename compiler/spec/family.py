"""Inheritance: a spec file, its parents, and the one tree that they make together.

Maps merge deeply, lists are replaced whole (but `required` adds up), null deletes what was inherited. In
`params`, and in the overrides of a type, null is a value: the param is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagec import configs
from pagec.compiler.spec.expr import suggestion
from pagec.compiler.spec.source import List, Map, Node, Place, Problems, Scalar, read

TOP_KEYS: Final = (
    "name",
    "family",
    "extends",
    "required",
    "checkpoint",
    "max_len",
    "params",
    "layer_types",
    "types",
    "weights",
    "graph",
    "ignore",
    "import",
)
MAX_PARENTS: Final = 16
# Where null is a value: at this depth below the top.
_NULL_IS_VALUE: Final = {"params": 2, "types": 3}
# Where deleting what is not there must be a mistyped name.
_MUST_EXIST: Final = ("weights", "graph")


@dataclass(frozen=True, slots=True)
class Document:
    """`tree` is the file merged into its parents, `own` the file alone, `inherited` its parents alone."""

    tree: Map
    own: Map
    inherited: Map | None

    def declares(self, section: str, name: str) -> bool:
        """Whether this file itself introduces a name in a section (its parents do not)."""
        return name in section_of(self.own, section).entries and (
            self.inherited is None or name not in section_of(self.inherited, section).entries
        )


def section_of(tree: Map, name: str) -> Map:
    """A map inside a map; an empty one if it is absent, or no map (outline.py reports that)."""
    node = tree.get(name)
    return node if isinstance(node, Map) else Map({}, {}, tree.place)


def read_document(path: Path) -> Document:
    """A spec file and its parents, merged."""
    return document_of(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A spec file's text; SpecError if it cannot be read."""
    place = Place(str(path), "", 0, 0)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise place.error(f"cannot be read: {reason}", "give the path of a YAML file") from None


def document_of(text: str, file: str) -> Document:
    """The same from a text; `file` names it, and is where relative parents are looked for."""
    return _load(text, file, ())


def _load(text: str, file: str, children: tuple[str, ...]) -> Document:
    own = read(text, file)
    problems = Problems()
    for key in own.entries.keys() - set(TOP_KEYS):
        problems.add(own.places[key], f"unknown key {key!r}", suggestion(key, list(TOP_KEYS)))
    inherited: Map | None = None
    with problems:
        inherited = _parent(own, file, children)
    tree = own
    with problems:
        tree = _merge(inherited or _empty(own), own, (), problems)
    problems.raise_if_any()
    return Document(tree, own, inherited)


def merged(parent: Map, child: Node) -> Map:
    """A tree with some entries replaced, by the rules of inheritance."""
    problems = Problems()
    assert isinstance(child, Map)
    tree = _merge(parent, child, (), problems)
    problems.raise_if_any()
    return tree


def _empty(like: Map) -> Map:
    return Map({}, {}, like.place)


def _parent(own: Map, file: str, children: tuple[str, ...]) -> Map | None:
    node = own.get("extends")
    if node is None:
        return None
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        raise node.place.error("'extends' takes one name", "name a family, a model, or a path to a YAML file")
    path = _find_parent(node.value, node.place, Path(file).parent)
    chain = (*children, str(Path(file).resolve()))
    if str(path.resolve()) in chain or len(chain) > MAX_PARENTS:
        loop = " -> ".join(Path(name).stem for name in (*chain, str(path)))
        raise node.place.error(f"cyclic extends: {loop}", "a file cannot extend itself")
    return _load(read_text(path), str(path), chain).tree


def _find_parent(name: str, place: Place, directory: Path) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = directory / name
        if "\0" not in name and path.is_file():
            return path
        raise place.error(f"there is no file {str(path)!r}", "the path is relative to this file")
    found = configs.find("families", name) or configs.find("models", name)
    if found:
        return found
    known = {*configs.names("families"), *configs.names("models")}
    raise place.error(f"no family or model is named {name!r}", suggestion(name, known))


def _merge(parent: Map, child: Map, path: tuple[str, ...], problems: Problems) -> Map:
    entries, places = dict(parent.entries), dict(parent.places)
    for key, node in child.entries.items():
        here = (*path, key)
        if _deletes(node, here):
            if key not in entries and here[0] in _MUST_EXIST:
                problems.add(
                    child.places[key],
                    f"nothing named {key!r} is inherited, so null deletes nothing",
                    suggestion(key, set(entries)),
                )
            entries.pop(key, None)
            places.pop(key, None)
            continue
        inherited = entries.get(key)
        if isinstance(node, Map):
            base = inherited if isinstance(inherited, Map) else _empty(node)
            node = _merge(base, node, here, problems)
        elif here == ("required",) and isinstance(node, List) and isinstance(inherited, List):
            node = _joined(inherited, node)
        entries[key], places[key] = node, child.places[key]
    return Map(entries, places, child.place)


def _deletes(node: Node, path: tuple[str, ...]) -> bool:
    is_null = isinstance(node, Scalar) and node.value is None
    return is_null and _NULL_IS_VALUE.get(path[0]) != len(path)


def _joined(first: List, second: List) -> List:
    seen = {item.value for item in first.items if isinstance(item, Scalar)}
    new = [i for i in second.items if not (isinstance(i, Scalar) and i.value in seen)]
    return List((*first.items, *new), second.place)


def must_be_map(node: Node | None, place: Place, what: str) -> Map:
    """`node` as a map; SpecError otherwise."""
    if isinstance(node, Map):
        return node
    raise (node.place if node else place).error(f"{what} must be a map", "write key: value pairs")


def text_of(node: Node, what: str) -> str:
    """`node` as a text that is not empty; SpecError otherwise."""
    if isinstance(node, Scalar) and isinstance(node.value, str) and node.value:
        return node.value
    raise node.place.error(f"{what} must be a name", "write a text")


def texts_of(node: Node, what: str) -> tuple[str, ...]:
    """`node` as one text, or a list of texts."""
    items = node.items if isinstance(node, List) else (node,)
    return tuple(text_of(item, what) for item in items)
