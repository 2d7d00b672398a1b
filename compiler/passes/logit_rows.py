"""Only rows whose logits are wanted go through what follows the last attention."""

from __future__ import annotations

from dataclasses import replace

from pagec.compiler.ir import Graph, Node, Type

LOGIT_ROWS = "logit_rows"


def take_logit_rows(graph: Graph) -> Graph:
    """Everything that no attention depends on runs on R rows instead of T.

    That is the last layer's output projection and MLP, the final norm and the logits. What they read of
    the T rows is taken once, where the two parts meet.

    before:  %y: T x 576 = linear(%a, $o)               after:  %a.rows: R x 576 = take_rows(%a, %logit_rows)
                                                                %y: R x 576 = linear(%a.rows, $o)
    """
    early = _needed_by_attention(graph)
    late = [node for node in graph.nodes if node.outputs[0] not in early]
    made_late = {name for node in late for name in node.outputs}
    read = dict.fromkeys(name for node in late for name in node.values() if name not in made_late)
    taken = {name: f"{name}.rows" for name in read}

    types = dict(graph.types)
    types[LOGIT_ROWS] = Type("R", (), "i32")
    for name, new in taken.items():
        types[new] = replace(graph.type(name), rows="R")
    for name in made_late:
        types[name] = replace(graph.type(name), rows="R")
    takes = [Node("take_rows", (f"%{name}", f"%{LOGIT_ROWS}"), (new,)) for name, new in taken.items()]
    renamed = [replace(node, inputs=tuple(_rename(name, taken) for name in node.inputs)) for node in late]
    kept = [node for node in graph.nodes if node.outputs[0] in early]
    return graph.with_nodes([*kept, *takes, *renamed], types, inputs=(*graph.inputs, LOGIT_ROWS))


def _needed_by_attention(graph: Graph) -> set[str]:
    """Values that some attention reads or gives, and all that they are made from; also what reads numbers of
    a row (its token, its position), which lie where the step puts them."""
    needed: set[str] = set()
    for node in reversed(graph.nodes):
        whole = any(not graph.type(name).inner for name in node.values())
        if node.op == "attention" or whole or needed & set(node.outputs):
            needed |= set(node.outputs) | set(node.values())
    return needed


def _rename(name: str, taken: dict[str, str]) -> str:
    return f"%{taken[name[1:]]}" if name[0] == "%" and name[1:] in taken else name
