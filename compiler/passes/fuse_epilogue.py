"""Element-wise work behind a linear is done while its results are in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.passes.regions import absorb_views, drop_unused_views, fused

ELEMENTWISE: Final = frozenset({"add", "sub", "mul", "div", "rsub", "rdiv", "activation", "softcap", "cast"})
# A merged linear of this many equal parts can have them side by side in a register tile.
PARTS: Final = 2


def fuse_epilogue(graph: Graph) -> Graph:
    """A linear takes in the element-wise chain that alone reads it: bias, product of activations, residual
    sum, soft cap, rounding. Sums over a row (norms) stay outside. Rounding points stay as they are.

    before:  %gu: T x 2 x 128 = linear(%h, $gate+up)   after:  %m.bf16 = fused.linear(%h, $gate+up) {
             %g = slice(%gu, 0); %u = slice(%gu, 1)                all of them }
             %m.bf16 = cast(mul(activation(%g), %u))
    """
    users, producers = graph.users(), graph.producers()
    order = {name: at for at, node in enumerate(graph.nodes) for name in node.outputs}
    order |= dict.fromkeys(graph.inputs, -1)
    regions: dict[str, Node] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        if node.op == "linear" and node.outputs[0] not in graph.outputs:
            body = _grown(node, graph, users, order, producers)
            if len(body) > 1:
                # What the linear itself reads must lie in memory; what follows it reads views in place.
                rest = [n for n in absorb_views(body[1:], producers) if n not in body]
                region = fused("fused.linear", [*rest, *body], users, graph.outputs)
                regions[node.outputs[0]] = region
                gone |= {name for inner in body for name in inner.outputs}
    nodes = []
    for node in graph.nodes:
        if node.outputs[0] in regions:
            nodes.append(regions[node.outputs[0]])
        elif not set(node.outputs) & gone:
            nodes.append(node)
    return drop_unused_views(graph.with_nodes(nodes))


def _grown(
    linear: Node,
    graph: Graph,
    users: Mapping[str, list[Node]],
    order: Mapping[str, int],
    producers: Mapping[str, Node],
) -> list[Node]:
    """The linear and the longest chain behind it of which only the last value is read elsewhere."""
    start = order[linear.outputs[0]]
    body = [linear, *_parts(linear, graph, users)]
    made = {name for node in body for name in node.outputs}
    if len(body) > 1:
        made.discard(linear.outputs[0])
    shape = _shape(body[-1].outputs[0], graph)
    best = [linear]

    def at_hand(name: str) -> bool:
        """Whether a value is there when the linear runs (a view: whether what it looks at is)."""
        view = producers.get(name)
        if view is not None and view.op == "take_rows":
            return all(order[source] < start for source in view.values())
        return order[name] < start

    for node in graph.nodes[start + 1 :]:
        if node.op not in ELEMENTWISE or not set(node.values()) & made:
            continue
        others = [name for name in node.values() if name not in made]
        if _shape(node.outputs[0], graph) != shape or not all(map(at_hand, others)):
            break
        if any(len(graph.weights[name].inner) != 1 for name in node.weights()):
            break
        body.append(node)
        made |= set(node.outputs)
        if _escaping(body, users, graph) == {node.outputs[0]}:
            best = list(body)
    return best


def _parts(linear: Node, graph: Graph, users: Mapping[str, list[Node]]) -> list[Node]:
    """The slices of a linear that is read in equal parts only."""
    out = graph.type(linear.outputs[0])
    slices = users[linear.outputs[0]]
    whole = [node.op == "slice" and bool(node.attrs.get("drop_axis")) for node in slices]
    equal = len(out.inner) == 2 and out.inner[0] == PARTS == len(slices)
    return slices if equal and all(whole) else []


def _shape(name: str, graph: Graph) -> tuple[object, ...] | None:
    """Rows and width of flat rows; heads are left to the kernels that know them."""
    t = graph.types[name]
    return (t.rows, t.inner) if isinstance(t, Type) and len(t.inner) == 1 else None


def _escaping(body: list[Node], users: Mapping[str, list[Node]], graph: Graph) -> set[str]:
    """Values of the body that something outside reads."""
    members = {id(node) for node in body}
    return {
        name
        for node in body
        for name in node.outputs
        if name in graph.outputs or any(id(user) not in members for user in users[name])
    }
