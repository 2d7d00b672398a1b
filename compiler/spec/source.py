"""YAML with a place (file, path, line, column) for every node, and the values that a spec may hold.

`read` gives a tree of Scalar, List and Map. Values are read as PyYAML reads them, since a user's other
tools do; its traps (1e-5 is a string, duplicate keys are dropped) become problems with a remedy. Anchors,
aliases, tags and merge keys are refused: a spec says what it means where it stands, and `extends` is
there for sharing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from pagec.compiler.errors import Problem, SpecError

Plain = None | bool | int | float | str

_ALMOST_FLOAT: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_TAG: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands: line and column count from 1; 0 means the file as a whole."""

    file: str
    path: str
    line: int
    column: int

    def problem(self, message: str, remedy: str = "") -> Problem:
        """A mistake that stands here."""
        return Problem(self.file, self.path, self.line, self.column, message, remedy)

    def error(self, message: str, remedy: str = "") -> SpecError:
        """The same as an error of its own."""
        return SpecError([self.problem(message, remedy)])


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value. `text_column` is the column of the text's first character, 0 where the text does not
    stand in the file as it is (escapes, several lines)."""

    value: Plain
    place: Place
    text_column: int = 0

    def at(self, offset: int) -> Place:
        """The place of the text's character number `offset`."""
        if not self.text_column:
            return self.place
        return Place(self.place.file, self.place.path, self.place.line, self.text_column + offset)


@dataclass(frozen=True, slots=True)
class List:
    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Map:
    """`places` are the keys' places."""

    entries: Mapping[str, Node]
    places: Mapping[str, Place]
    place: Place

    def get(self, key: str) -> Node | None:
        return self.entries.get(key)


Node = Scalar | List | Map


class Problems:
    """Collects mistakes, each one once, so that a user sees all of them together."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, place: Place, message: str, remedy: str = "") -> None:
        self._found.setdefault(place.problem(message, remedy))

    def extend(self, error: SpecError) -> None:
        for problem in error.problems:
            self._found.setdefault(problem)

    def raise_if_any(self) -> None:
        """Raises a SpecError that holds all problems found so far, in the order of the file's lines."""
        if self._found:
            raise SpecError(sorted(self._found, key=lambda p: (p.file, p.line, p.column)))

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """`with problems:` notes the SpecErrors of its body and goes on after it."""
        if isinstance(error, SpecError):
            self.extend(error)
            return True
        return False


def read(text: str, file: str) -> Map:
    """The tree of a spec file; SpecError names what YAML or the spec language does not take."""
    top = Place(file, "", 0, 0)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, file) from error
    except (yaml.YAMLError, ValueError) as error:
        raise top.error(f"not YAML: {error}", "write the file as UTF-8 text") from error
    except RecursionError as error:
        raise top.error("nested too deeply", "a spec is a few levels deep") from error
    if not isinstance(root, yaml.MappingNode):
        raise top.error("a spec is a map of keys like 'extends' and 'params'", "see the spec language")
    problems = Problems()
    tree = _convert(root, file, "", problems)
    problems.raise_if_any()
    assert isinstance(tree, Map)
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses aliases while composing: they can be cyclic, or grow without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases are not part of the spec language", event.start_mark
            )
        return super().compose_node(parent, index)


def _yaml_error(error: yaml.MarkedYAMLError, file: str) -> SpecError:
    mark = error.problem_mark or error.context_mark
    what = " ".join(part for part in (error.context, error.problem) if part)
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    remedy = "mend the YAML; text that holds ': ' or starts with a special character needs quotes"
    return Place(file, "", line, column).error(f"not YAML: {what}", remedy)


def _convert(node: yaml.Node, file: str, path: str, problems: Problems) -> Node:
    place = Place(file, path, node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode):
        _check_tag(node, "map", place, problems)
        return _convert_map(node, place, problems)
    if isinstance(node, yaml.SequenceNode):
        _check_tag(node, "seq", place, problems)
        items = [_convert(n, file, f"{path}[{i}]", problems) for i, n in enumerate(node.value)]
        return List(tuple(items), place)
    return _convert_scalar(node, place, problems)


def _check_tag(node: yaml.Node, kind: str, place: Place, problems: Problems) -> None:
    if node.tag != _TAG + kind:
        problems.add(place, f"the tag {node.tag} is not part of the spec language", "leave the tag out")


def _convert_map(node: yaml.MappingNode, place: Place, problems: Problems) -> Map:
    entries: dict[str, Node] = {}
    places: dict[str, Place] = {}
    for key, value in node.value:
        at = Place(place.file, place.path, key.start_mark.line + 1, key.start_mark.column + 1)
        if not isinstance(key, yaml.ScalarNode) or key.tag == _TAG + "merge":
            problems.add(at, "a key must be a name", "share settings with 'extends'")
            continue
        name = key.value
        path = f"{place.path}.{name}" if place.path else name
        at = Place(at.file, path, at.line, at.column)
        if name in entries:
            first = places[name]
            problems.add(
                at, f"the key {name!r} stands twice (first in line {first.line})", "keep one of them"
            )
            continue
        entries[name], places[name] = _convert(value, place.file, path, problems), at
    return Map(entries, places, place)


def _convert_scalar(node: yaml.Node, place: Place, problems: Problems) -> Scalar:
    assert isinstance(node, yaml.ScalarNode)
    plain = node.style is None
    implied: str = _SAFE.resolve(yaml.ScalarNode, node.value, (plain, not plain))  # type: ignore[no-untyped-call]
    if node.tag != implied:
        problems.add(place, f"the tag {node.tag} is not part of the spec language", "leave the tag out")
        return Scalar(None, place)
    return Scalar(_value(node, place, problems), place, _text_column(node, place))


def _text_column(node: yaml.Node, place: Place) -> int:
    """The column at which a node's text stands letter by letter in its line; 0 if it does not."""
    start, end = node.start_mark, node.end_mark
    raw = str(start.buffer or "")[start.pointer : end.pointer]
    if raw == node.value:
        return place.column
    return place.column + 1 if raw[1:-1] == node.value and "\n" not in raw else 0


def _value(node: yaml.Node, place: Place, problems: Problems) -> Plain:
    reader = _CONSTRUCT.get(node.tag.removeprefix(_TAG))
    if reader is None:
        return str(node.value)
    try:
        return reader(node)
    except (ValueError, OverflowError) as error:
        problems.add(
            place, f"{node.value[:40]!r} is not a number: {error}", "write an ordinary decimal number"
        )
        return None


_SAFE: Final = yaml.SafeLoader("")
_CONSTRUCT: Final[Mapping[str, Callable[[Any], Plain]]] = {
    "null": lambda node: None,  # noqa: ARG005
    "bool": _SAFE.construct_yaml_bool,
    "int": _SAFE.construct_yaml_int,
    "float": _SAFE.construct_yaml_float,
}


def almost_float(text: str) -> str | None:
    """How to write a number that YAML reads as a string ("1e-5" -> "1.0e-5"); None if it is no number."""
    if not _ALMOST_FLOAT.fullmatch(text.strip()):
        return None
    mantissa, exponent = re.split("[eE]", text.strip())
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    mantissa = mantissa + "0" if mantissa.endswith(".") else mantissa
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa}e{sign}{exponent}"


def to_plain(node: Node) -> Any:
    """A tree as plain Python data."""
    if isinstance(node, Map):
        return {key: to_plain(value) for key, value in node.entries.items()}
    if isinstance(node, List):
        return [to_plain(item) for item in node.items]
    return node.value


def from_plain(data: Any, place: Place) -> Node:
    """A tree whose nodes all claim one place."""
    if isinstance(data, dict):
        entries = {str(key): from_plain(value, place) for key, value in data.items()}
        return Map(entries, dict.fromkeys(entries, place), place)
    if isinstance(data, (list, tuple)):
        return List(tuple(from_plain(item, place) for item in data), place)
    return Scalar(data, place)
