"""What the fusion passes share: views, and turning a list of nodes into one fused node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pagec.compiler.ir import Graph, Node
from pagec.compiler.verifier import VIEWS

__all__ = ["VIEWS", "absorb_views", "drop_unused_views", "fused", "reads_any"]


def absorb_views(body: Sequence[Node], producers: Mapping[str, Node]) -> list[Node]:
    """The body with the views that it reads, and those that they read, in front."""
    views: dict[str, Node] = {}

    def absorb(node: Node) -> None:
        for name in node.values():
            view = producers.get(name)
            if view is not None and view.op in VIEWS and view not in body and name not in views:
                absorb(view)
                views[name] = view

    for node in body:
        absorb(node)
    return [*views.values(), *body]


def fused(
    op: str,
    body: Sequence[Node],
    users: Mapping[str, list[Node]],
    outputs: Collection[str],
) -> Node:
    """One node for these: its inputs come from outside, its outputs are read outside.

    Views are no outputs, but for a view that is the last node: that one is copied.
    """
    made = [name for node in body for name in node.outputs]
    views = {name for node in body[:-1] if node.op in VIEWS for name in node.outputs}
    inputs = dict.fromkeys(n for node in body for n in node.inputs if n[0] == "$" or n[1:] not in made)
    members = {id(node) for node in body}

    def lives(name: str) -> bool:
        if name in views:
            return False
        return name in outputs or any(id(user) not in members for user in users.get(name, ()))

    return Node(op, tuple(inputs), tuple(name for name in made if lives(name)), body=tuple(body))


def drop_unused_views(graph: Graph) -> Graph:
    """Without views that nothing reads any more."""
    users = graph.users()
    kept = [
        n for n in graph.nodes if n.op not in VIEWS or users[n.outputs[0]] or n.outputs[0] in graph.outputs
    ]
    return graph if len(kept) == len(graph.nodes) else graph.with_nodes(kept)


def reads_any(node: Node, names: Iterable[str]) -> bool:
    """Whether a node reads one of these values."""
    return bool(set(node.values()) & set(names))
