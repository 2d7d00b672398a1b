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
        ("{dims: 4}", "rope's base must be a number above zero, not None"),
        ("{base: 1.0, dims: 2.5}", "rope's dims must be a positive even number, not 2.5"),
        ("{base: 1.0, dims: 3}", "rope turns 3 of 4 dims of q"),
        ("{base: 1.0, dims: 8}", "rope turns 8 of 4 dims of q"),
        (
            "{base: 1.0, dims: 4, kind: mrope}",
            "there is no rope kind 'mrope'; known: default, linear, dynamic, llama3, yarn",
        ),
        ("{base: 1.0, dims: 4, kind: linear}", "rope's factor must be a number above zero, not None"),
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
