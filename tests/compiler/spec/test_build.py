"""Graphs: names, attributes, absent weights, arithmetic."""

from __future__ import annotations

import pytest

from pagec.compiler.errors import SpecError
from pagec.compiler.ir import Type, format_graph
from pagec.compiler.spec import build_graph, parse_spec


def lines(text: str) -> list[str]:
    """The nodes of a spec's graph, without types."""
    graph = build_graph(parse_spec(text, "tiny.yaml"))
    return [line for line in format_graph(graph).replace(": T x 8 f32", "").splitlines() if line[0] == "%"]


def test_the_small_graph(tiny: str) -> None:
    graph = build_graph(parse_spec(tiny, "tiny.yaml"))
    assert (graph.inputs, graph.outputs) == (("tokens", "positions", "sequences"), ("logits",))
    assert {graph.types[name] for name in graph.inputs} == {Type("T", (), "i32")}
    assert graph.weights["l1.norm"] == Type(None, (8,), "f32")
    assert lines(tiny) == [
        "%x = embed(%tokens, $embed)",
        "%l0.h = rmsnorm(%x, $l0.norm, eps=1e-05)",
        "%l0.x.linear = linear(%l0.h, $l0.up)",
        "%l0.x = add(%x, %l0.x.linear)",
        "%l1.h = rmsnorm(%l0.x, $l1.norm, eps=1e-05)",
        "%l1.x.linear = linear(%l1.h, $l1.up)",
        "%l1.x = add(%l0.x, %l1.x.linear)",
        "%logits: T x 32 f32 = linear(%l1.x, $embed)",
    ]


def layer(tiny: str, expression: str) -> list[str]:
    """The nodes of `x = expression + linear(h, $up)` in a one-layer model, without the addition."""
    text = tiny.replace("layers: 2", "layers: 1").replace(
        "x = x + linear(h, $up)", f"x = {expression} + linear(h, $up)"
    )
    return [line.replace("l0.", "") for line in lines(text)][2:-2]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x * 2", ["mul(%x, scalar=2.0)"]),
        ("2 * x", ["mul(%x, scalar=2.0)"]),
        ("(1 - x)", ["rsub(%x, scalar=1.0)"]),
        ("x / hidden ** 0.5", ["div(%x, scalar=2.8284271247461903)"]),
        ("1 / x", ["rdiv(%x, scalar=1.0)"]),
        ("-x", ["mul(%x, scalar=-1.0)"]),
        ("$norm * x", ["mul(%x, $norm)"]),
        ("($norm - x)", ["rsub(%x, $norm)"]),
        ("(x if hidden > 3 else h)", []),
        ("softcap(x, none)", []),
        ("softcap(x, 30)", ["softcap(%x, cap=30.0)"]),
        ("activation(x, 'gelu_new')", ["activation(%x, name='gelu_tanh')"]),
        ("rmsnorm(x, none, eps=1, offset=0)", ["rmsnorm(%x, eps=1.0)"]),
        ("rmsnorm(x, $norm, 1, 1)", ["rmsnorm(%x, $norm, eps=1.0, offset=1.0)"]),
        ("layernorm(x, $norm, b=none, eps=1)", ["layernorm(%x, $norm, eps=1.0)"]),
        ("layernorm(x, $norm, eps=1, offset=1)", ["layernorm(%x, $norm, eps=1.0, offset=1.0)"]),
        ("linear(x, $up, b=$norm)", ["linear(%x, $up, $norm)"]),
    ],
)
def test_expressions(tiny: str, expression: str, expected: list[str]) -> None:
    *found, _ = layer(tiny, expression)  # the last is the linear beside it
    assert [line.split(" = ")[1] for line in found] == expected


def test_the_ops_own_names_are_what_parts_are_called(tiny: str) -> None:
    assert [line.split(" = ")[0] for line in layer(tiny, "(1 - x) * x")] == ["%x.rsub", "%x.mul", "%x.linear"]


def test_absent_tensors_may_only_come_last(tiny: str) -> None:
    text = tiny.replace("x + linear", "layernorm(x, none, $norm, eps=1) + linear")
    with pytest.raises(SpecError, match="layernorm's w is absent, and a later one is given"):
        build_graph(parse_spec(text, "tiny.yaml"))


def test_the_result_is_called_logits_whatever_was_bound_to_the_name(tiny: str) -> None:
    for last in (
        "    - y = linear(x, $embed)\n    - logits = y\n",
        "    - logits = linear(x, $embed)\n    - logits = logits * 2\n",
        "    - logits = softcap(linear(x, $embed), none)\n",
        "    - a, logits = x, linear(x, $embed)\n    - logits = logits + 0 * linear(a, $embed)\n",
    ):
        graph = build_graph(parse_spec(tiny.replace("    - logits = linear(x, $embed)\n", last), "tiny.yaml"))
        assert graph.outputs == ("logits",)
        assert graph.nodes[-1].outputs == ("logits",)
        assert len({name for node in graph.nodes for name in node.outputs}) == len(graph.nodes)
        assert graph.type("logits") == Type("T", (32,), "f32")


GATE = "  gate: {name: gate, shape: [1, hidden]}\ngraph:"


@pytest.mark.parametrize("product", ["x * linear(h, $gate)", "linear(h, $gate) * x"])
def test_a_value_of_one_element_weighs_the_rows_of_another(tiny: str, product: str) -> None:
    text = tiny.replace("graph:", GATE).replace("x + linear(h, $up)", f"linear({product}, $up)")
    assert [line.split(" = ")[1] for line in lines(text)[2:5]] == [
        "linear(%l0.h, $gate)",
        "heads_of(%x, head_dim=8)",
        "weighted_sum(%l0.x.heads_of, %l0.x.linear)",
    ]


def test_values_that_only_some_layers_have(tiny: str) -> None:
    """Several names can be none together."""
    text = tiny.replace(
        "    - h = ", "    - w, e = top_k_of(softmax(linear(x, $up)), 2) if i > 0 else none\n    - h = "
    ).replace("x + linear", "x + (weighted_sum(heads_of(linear(x, $up), 4), w) if i > 0 else none) + linear")
    with pytest.raises(SpecError, match="none is not a number"):
        build_graph(parse_spec(text, "tiny.yaml"))
    text = text.replace("if i > 0 else none) + linear", "if i > 0 else linear(x, $up)) + linear")
    with pytest.raises(SpecError, match="operands differ: T x 8 f32 and T x 4 f32"):
        build_graph(parse_spec(text, "tiny.yaml"))
    text = text.replace("heads_of(linear(x, $up), 4)", "heads_of(linear(x, $wide), hidden)")
    text = text.replace("graph:", "  wide: {name: wide, shape: [2 * hidden, hidden]}\ngraph:")
    graph = build_graph(parse_spec(text, "tiny.yaml"))
    assert [node.outputs for node in graph.nodes if node.op == "top_k_of"] == [("l1.w", "l1.e")]


def test_what_the_result_does_not_come_from_leaves_no_trace(tiny: str) -> None:
    """A value that is used in another layer only."""
    text = tiny.replace("    - h = ", "    - y = linear(x, $other)\n    - h = ").replace(
        "x + linear", "(x if i > 0 else y) + linear"
    )
    text = text.replace("graph:", '  other: {name: "{i}.other", shape: [hidden, hidden]}\ngraph:')
    graph = build_graph(parse_spec(text, "tiny.yaml"))
    assert {name for name in graph.weights if "other" in name} == {"l0.other"}
    assert "l1.y" not in graph.types


def test_scalars_can_be_named_in_a_graph(tiny: str) -> None:
    text = tiny.replace(
        "    - x = embed(tokens, $embed)", "    - s = hidden * 2\n    - x = embed(tokens, $embed) * s"
    )
    assert lines(text)[:2] == ["%x.embed = embed(%tokens, $embed)", "%x = mul(%x.embed, scalar=16.0)"]


ROPE = "    - q, k = rope(heads_of(h, 4), heads_of(h, 4), positions, rope)\n"


def rope_attrs(tiny: str, rope: str) -> dict[str, object]:
    attention = "    - h = attention(q, k, k, scale=1, window=none)\n"
    text = tiny.replace("  norm_eps", f"  rope: {rope}\n  norm_eps").replace(
        "    - x = x", ROPE + attention + "    - x = x"
    )
    graph = build_graph(parse_spec(text, "tiny.yaml"))
    (attend, *_) = [n for n in graph.nodes if n.op == "attention"]
    assert attend.inputs == ("%l0.q", "%l0.k", "%l0.k", "%positions", "%sequences")
    assert attend.attrs == {"scale": 1.0}
    return dict(next(n for n in graph.nodes if n.op == "rope").attrs)


def test_rope_settings_become_attributes(tiny: str) -> None:
    assert rope_attrs(tiny, "{base: 100, dims: 4, kind: default, interleaved: false}") == {
        "base": 100.0,
        "dims": 4,
    }
    assert rope_attrs(tiny, "{base: 100, dims: 2, kind: linear, interleaved: true, factor: 2}") == {
        "base": 100.0, "dims": 2, "kind": "linear", "interleaved": True, "factor": 2.0,
    }  # fmt: skip
    assert rope_attrs(tiny, "{base: 100, dims: 4, kind: factors, factors: [1, 8.0]}")["factors"] == (1.0, 8.0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("{dims: 4}", "rope's base is missing"),
        ("{base: 1.0, dims: 2.5}", "rope's dims must be a positive even number, not 2.5"),
        ("{base: 1.0, dims: 3}", "rope turns 3 of 4 dims of q"),
        ("{base: 1.0, dims: 8}", "rope turns 8 of 4 dims of q"),
        (
            "{base: 1.0, dims: 4, kind: mrope}",
            "there is no rope kind 'mrope'; known: default, linear, dynamic, llama3, yarn",
        ),
        ("{base: 1.0, dims: 4, kind: linear}", "rope's factor is missing"),
        ("{base: 1.0, dims: 4, factor: 2.0}", "rope of kind default takes no factor"),
        ("{base: 1.0, dims: 4, kind: factors, factors: [1.0]}", "rope's factors must be a list of 2 numbers"),
        ("3", "rope's settings must be a map"),
    ],
)
def test_rope_settings_that_are_wrong(tiny: str, rope: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("{", r"\{")):
        rope_attrs(tiny, rope)


@pytest.mark.parametrize("rows", [9, 7])
def test_heads_that_do_not_divide(rows: int) -> None:
    text = f"extends: smollm2-135m\nparams: {{kv_heads: {rows - 2}, layers: 2}}\n"
    with pytest.raises(SpecError, match=f"9 query heads do not divide by {rows - 2} KV heads"):
        build_graph(parse_spec(text, "x.yaml"))
