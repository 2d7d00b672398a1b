"""Writes plain data as YAML in the style of a spec: a param, a weight, a statement to the line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

_REPRESENTER: Final = yaml.representer.SafeRepresenter()
_TAG: Final = "tag:yaml.org,2002:"
_WIDTH: Final = 10**6  # lines are never folded: places in errors stay exact


def write(data: Mapping[str, Any]) -> str:
    """YAML of a map of sections; the same data gives the same text."""
    nodes = [(_node(key, True), _section(value)) for key, value in data.items()]
    root = yaml.MappingNode(_TAG + "map", nodes, flow_style=False)
    text: str = yaml.serialize(root, Dumper=yaml.SafeDumper, width=_WIDTH, allow_unicode=True)
    return text


def _section(value: Any) -> yaml.Node:
    """A section's entries stand below each other; lists of statements too; everything further in a line."""
    if not isinstance(value, dict):
        return _node(value, True)
    pairs = [(_node(key, True), _node(entry, not _is_statements(entry))) for key, entry in value.items()]
    return yaml.MappingNode(_TAG + "map", pairs, flow_style=not value)


def _is_statements(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and "=" in item for item in value)


def _node(value: Any, flow: bool) -> yaml.Node:
    if isinstance(value, dict):
        pairs = [(_node(key, True), _node(entry, True)) for key, entry in value.items()]
        return yaml.MappingNode(_TAG + "map", pairs, flow_style=flow)
    if isinstance(value, list):
        return yaml.SequenceNode(_TAG + "seq", [_node(item, True) for item in value], flow_style=flow)
    return _REPRESENTER.represent_data(value)
