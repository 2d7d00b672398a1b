"""Resolution: sizes, weights of each form, aliases, layer types, and the resolved file."""

from __future__ import annotations

import pytest

from pagec import configs
from pagec.compiler.errors import SpecError
from pagec.compiler.spec import (
    WeightSpec,
    build_graph,
    load_spec,
    parse_spec,
    resolved_yaml,
    with_max_len,
    with_params,
)


@pytest.mark.parametrize("name", configs.names("models"))
def test_models_that_come_with_pagec(name: str) -> None:
    spec = load_spec(name)
    graph = build_graph(spec)
    again = parse_spec(resolved_yaml(spec), f"{name}.yaml")
    assert again == spec
    assert build_graph(again) == graph
    assert resolved_yaml(again) == resolved_yaml(spec)
    assert "extends" not in resolved_yaml(spec)


def test_smollm2() -> None:
    spec = load_spec("smollm2-135m")
    assert (spec.name, spec.family, spec.layers, spec.vocab, spec.max_len) == (
        "smollm2-135m", "llama", 30, 49152, 8192,
    )  # fmt: skip
    assert spec.params["attn_scale"] == 0.125
    assert spec.aliases == {"lm_head": "embed"}
    assert len(spec.weights) == 2 + 30 * 9
    assert spec.weights["l29.k"] == WeightSpec(
        "l29.k", ("model.layers.29.self_attn.k_proj.weight",), (192, 576)
    )
    assert spec.weights["embed"].tensors == ("model.embed_tokens.weight", "lm_head.weight")


def test_max_len_is_lowered_and_tables_keep_their_size(tiny: str) -> None:
    text = tiny.replace("weights:", "weights:\n  pos: {name: pos, shape: [max_len, hidden]}").replace(
        "embed(tokens, $embed)", "embed(tokens, $embed) + embed(positions, $pos)"
    )
    spec = with_max_len(parse_spec(text, "tiny.yaml"), 16)
    assert (spec.max_len, spec.weights["pos"].shape) == (16, (64, 8))
    assert parse_spec(resolved_yaml(spec), "tiny.yaml") == spec
    for length in (0, 65):
        with pytest.raises(SpecError, match=r"max_len must be|beyond the model's 64"):
            with_max_len(spec, length)


def test_with_params() -> None:
    spec = with_params(load_spec("llama-3.1-8b"), layers=2, hidden=64, heads=4, kv_heads=2)
    assert spec.weights["l1.q"].shape == (64, 64)
    assert len(spec.weights) == 3 + 2 * 9


def extended(tiny: str, weight: str, use: str = "$new") -> str:
    """The small spec with one more weight, multiplied to the layers' result."""
    return tiny.replace("graph:", f"  new: {weight}\ngraph:").replace(
        "linear(h, $up)", f"linear(h, $up) * {use}"
    )


def test_forms_of_weights(tiny: str) -> None:
    names = 'name: ["a.{i}", "b.{i}"], shape: [hidden]'
    weight = f"{{{names}, rows: [hidden, 2 * hidden], stored: [transposed, plus_one]}}"
    spec = parse_spec(extended(tiny, weight), "tiny.yaml")
    assert spec.weights["l1.new"] == WeightSpec(
        "l1.new", ("a.1", "b.1"), (8,), (8, 16), ("transposed", "plus_one")
    )


def test_a_stack_of_experts(tiny: str) -> None:
    text = extended(tiny, '{name: "{i}.expert.{e}", shape: [hidden], stack: 3}', "1 if i < 0 else 2")
    text = text.replace("* 1 if i < 0 else 2", "* (2 if i >= 0 else $new)")
    weight = parse_spec(text, "tiny.yaml").weights["l0.new"]
    assert (weight.shape, weight.one_shape, weight.stack, weight.tensors) == (
        (3, 8),
        (8,),
        3,
        ("0.expert.{e}",),
    )
    assert weight.tensor_names(weight.tensors[0]) == ["0.expert.0", "0.expert.1", "0.expert.2"]


def test_rotary_interleaved_needs_heads(tiny: str) -> None:
    weight = "{name: a, shape: [hidden], stored: rotary_interleaved}"
    with pytest.raises(SpecError, match="rotary_interleaved needs a param 'head_dim'"):
        parse_spec(extended(tiny, weight), "tiny.yaml")
    text = extended(tiny, weight).replace("params:", "params:\n  head_dim: hidden // 2")
    assert parse_spec(text, "tiny.yaml").weights["new"].head_dim == 4
    with pytest.raises(SpecError, match="8 rows do not divide into heads of 3"):
        parse_spec(text.replace("hidden // 2", "3"), "tiny.yaml")


def test_weights_of_some_layers(tiny: str) -> None:
    text = extended(tiny, '{name: "{i}.new", shape: [hidden], when: i == 1}', "(1 if i < 1 else $new)")
    spec = parse_spec(text, "tiny.yaml")
    assert [name for name in spec.weights if "new" in name] == ["l1.new"]
    assert "$l1.new" in {i for node in build_graph(spec).nodes for i in node.inputs}


def test_aliases_follow_chains_and_refuse_circles(tiny: str) -> None:
    text = extended(tiny, "{name: new, shape: [hidden], same_as: {other: true}}").replace(
        "graph:", "  other: {name: other, shape: [hidden], same_as: {third: hidden == 8}}\n"
        "  third: {name: third, shape: [hidden]}\ngraph:",
    )  # fmt: skip
    spec = parse_spec(text, "tiny.yaml")
    assert spec.aliases == {"new": "third", "other": "third"}
    assert spec.weights["third"].tensors == ("third", "new", "other")
    circle = text.replace(
        "{name: third, shape: [hidden]}", "{name: third, shape: [hidden], same_as: {new: true}}"
    )
    with pytest.raises(SpecError, match="same_as goes in a circle: new -> other -> third -> new"):
        parse_spec(circle, "tiny.yaml")
    with pytest.raises(SpecError, match="cannot be the same as third, which is of shape"):
        parse_spec(text.replace("{name: third, shape: [hidden]}", "{name: third, shape: [9]}"), "tiny.yaml")
    with pytest.raises(SpecError, match="no weight is named 'gone'"):
        parse_spec(text.replace("{third: hidden", "{gone: hidden"), "tiny.yaml")


def test_layer_types_are_cycled_and_override_params(tiny: str) -> None:
    text = tiny.replace("layers: 2", "layers: 5").replace(
        "weights:", "layer_types: [a, a, b]\ntypes: {a: {}, b: {norm_eps: 2.0e-3}}\nweights:"
    )
    spec = parse_spec(text, "tiny.yaml")
    assert spec.layer_types == ("a", "a", "b", "a", "a")
    assert [n.attrs["eps"] for n in build_graph(spec).nodes if n.op == "rmsnorm"] == [
        1e-5,
        1e-5,
        2e-3,
        1e-5,
        1e-5,
    ]
    assert parse_spec(resolved_yaml(spec), "tiny.yaml") == spec


def test_a_type_overrides_part_of_a_map() -> None:
    text = (
        "extends: smollm2-135m\nparams: {layers: 2}\nlayer_types: [full, near]\n"
        "types: {near: {window: 32, rope: {base: 5.0}}}\n"
    )
    graph = build_graph(parse_spec(text, "x.yaml"))
    assert [n.attrs["base"] for n in graph.nodes if n.op == "rope"] == [100000.0, 5.0]
    assert [n.attrs.get("window") for n in graph.nodes if n.op == "attention"] == [None, 32]


def test_params_of_a_layer_have_no_value_outside() -> None:
    text = "extends: smollm2-135m\nparams: {attn_scale: 1 / (i + 1), layers: 2}\n"
    spec = parse_spec(text, "x.yaml")
    assert "attn_scale" not in spec.params
    assert [n.attrs["scale"] for n in build_graph(spec).nodes if n.op == "attention"] == [1.0, 0.5]
