"""Every kind of mistake: what it says, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mistakes import Mistake, check, problems_of

from pagec.compiler.errors import SpecError
from pagec.compiler.spec import load_spec, parse_spec

LAST = "    - logits = linear(x, $embed)\n"
MISTAKES = {
    # YAML
    "not yaml": Mistake("params:\n", "params: [\n", ": 8", "not YAML"),
    "key twice": Mistake(
        "  hidden: 8\n",
        "  hidden: 8\n  hidden: 9\n",
        "hidden: 9",
        "the key 'hidden' stands twice (first in line 4)",
    ),
    "alias": Mistake("vocab: 32", "vocab: *v", "*v", "anchors and aliases are not part"),
    "anchor": Mistake("vocab: 32", "vocab: &v 32", "&v", "anchors and aliases are not part"),
    "tag": Mistake(
        "vocab: 32", "vocab: !!str 32", "!!str", "the tag tag:yaml.org,2002:str is not part", "leave"
    ),
    "merge key": Mistake("  vocab: 32", "  <<: {a: 1}\n  vocab: 32", "<<", "a key must be a name"),
    "number as string": Mistake(
        "1.0e-5", "1e-5", "1e-5", "YAML reads 1e-5 as a string, not as a number", "write 1.0e-5"
    ),
    "exponent without sign": Mistake(
        "1.0e-5", "1.5e5", "1.5e5", "YAML reads 1.5e5 as a string", "write 1.5e+5"
    ),
    # keys and forms
    "unknown key": Mistake(
        "params:", "parms: {}\nparams:", "parms", "unknown key 'parms'", "did you mean 'params'?"
    ),
    "section no map": Mistake(
        "weights:\n", "types: 3\nweights:\n", "3", "'types' must be a map", "write key: value pairs"
    ),
    "unknown weight key": Mistake(
        "name: embed.weight,", "nam: embed.weight,", "nam:", "a weight has no 'nam'"
    ),
    "no shape": Mistake(", shape: [vocab, hidden]}", "}", "", "the weight 'embed' has no shape", "add shape"),
    "braces": Mistake(
        "{i}.up.weight", "{j}.up.weight", '"{j}', "has unknown 'j' in braces", "{i} is the layer"
    ),
    "stored": Mistake(
        'up.weight",',
        'up.weight", stored: transpose,',
        "transpose",
        "no way of storing is named 'transpose'",
        "did you mean 'transposed'?",
    ),
    "rows": Mistake(
        'up.weight",', 'up.weight", rows: [0, 4],', "[0, 4]", "rows 0 to 4 are 4, the shape has 8", "agree"
    ),
    "graph part": Mistake(
        "  first:", "  frist:", "frist", "a graph has no part 'frist'", "first, layer, last"
    ),
    "statement map": Mistake(
        LAST,
        "    - logits: linear\n",
        "logits",
        "a statement is one line of text",
        "quote it if it holds ': '",
    ),
    "param name": Mistake("  norm_eps", "  i: 1\n  norm_eps", "i: 1", "'i' has a meaning of its own"),
    "underscore": Mistake("  norm_eps", "  _a: 1\n  norm_eps", "_a", "'_a' cannot be a param's name"),
    # expressions
    "syntax": Mistake(
        "x + linear(h, $up)", "x + linear(h, $up", "(h", "cannot be read: '(' was never closed"
    ),
    "no assignment": Mistake(
        "logits = linear(x, $e", "linear(x, $e", "linear", "a statement is one assignment", "name = expr"
    ),
    "attribute": Mistake(
        "hidden: 8", "hidden: vocab.b", "vocab.b", "x.y is not part of an expression", "use + - *"
    ),
    "call in scalar": Mistake("hidden: 8", "hidden: abs(8)", "abs", "nothing can be called in a scalar"),
    "weight in scalar": Mistake("hidden: 8", "hidden: $up", "$up", "a weight cannot stand in a scalar"),
    "too long": Mistake(
        "hidden: 8", f"hidden: 1{'+1' * 1000}", "1+1", "2001 characters in one expression", "split"
    ),
    "too deep": Mistake("hidden: 8", f"hidden: 1{'+1' * 100}", "1+1", "nested too deeply"),
    "not a size": Mistake(
        "hidden: 8", "hidden: 17 / 2", "hidden]", "a size must be a whole number", "use //"
    ),
    "division by zero": Mistake("hidden: 8", "hidden: 8 // 0", "8 // 0", "8 // 0: integer division"),
    "root of negative": Mistake("1.0e-5", "(0 - 8) ** 0.5", "(0 - 8)", "a root of a negative number"),
    "power": Mistake("hidden: 8", "hidden: 9 ** 9 ** 9", "9 ** 9", "9 ** 387420489: too large"),
    "no condition": Mistake('up.weight",', 'up.weight", when: 3,', "3,", "'when' is 3, not true or false"),
    "index outside layers": Mistake(
        "hidden: 8", "hidden: i + 8", "i + 8", "'i', the layer's index, has no value"
    ),
    # names
    "undefined": Mistake(
        "eps=norm_eps", "eps=norm_epz", "norm_epz", "'norm_epz' is not defined", "'norm_eps'?"
    ),
    "undefined in param": Mistake(
        "hidden: 8", "hidden: vocb // 4", "vocb", "'vocb' is not defined", "'vocab'?"
    ),
    "unknown weight": Mistake(
        "linear(h, $up)", "linear(h, $upp)", "$upp", "no weight is named 'upp'", "'up'?"
    ),
    "unknown op": Mistake(
        "rmsnorm(x", "rmsnrm(x", "rmsnrm", "no op is named 'rmsnrm'", "did you mean 'rmsnorm'?"
    ),
    "internal op": Mistake("rmsnorm(x", "kv_write(x", "kv_write", "no op is named 'kv_write'"),
    "cycle": Mistake(
        "hidden: 8", "hidden: a\n  a: hidden", "a\n  a", "params depend on each other: hidden -> a -> hidden"
    ),
    "required": Mistake(
        "  max_len: 64\n", "", "", "the param 'max_len' is required", "add max_len: ... to params"
    ),
    "unused param": Mistake(
        "  norm_eps", "  norm_epz: 1\n  norm_eps", "norm_epz", "nothing uses the param 'norm_epz'"
    ),
    "unused weight": Mistake(
        "  up:",
        "  dn: {name: a, shape: [1]}\n  up:",
        "dn",
        "nothing uses the weight 'dn'",
        "remove it, or use it",
    ),
    "unused value": Mistake("    - x = x +", "    - y = x +", "y =", "nothing uses 'y'"),
    "shadowed param": Mistake("    - h = rms", "    - hidden = rms", "hidden =", "'hidden' is a param"),
    "layer weight outside": Mistake(
        "linear(x, $embed)", "linear(x, $up)", "$up", "$up belongs to the layers"
    ),
    "no logits": Mistake(
        "- logits = linear(x, $e", "- x = linear(x, $e", "x =", "the graph gives no 'logits'"
    ),
    "unknown type": Mistake("weights:\n", "layer_types: [a]\nweights:\n", "a]", "no type is named 'a'"),
    "override of nothing": Mistake(
        "weights:\n",
        "types: {a: {windw: 1}}\nlayer_types: [a]\nweights:\n",
        "windw",
        "there is no param 'windw'",
    ),
    "null deletes nothing": Mistake("  up:", "  dn: null\n  up:", "dn", "nothing named 'dn' is inherited"),
    # building
    "shapes": Mistake(
        "shape: [hidden, hidden]",
        "shape: [hidden, 9]",
        "",
        "linear: x has 8 elements a row, the weight [N=8, K=9]",
    ),
    "too many arguments": Mistake(
        "linear(x, $e", "heads_of(x, 1, $e", "heads", "heads_of takes at most 2 arguments"
    ),
    "missing argument": Mistake(
        "rmsnorm(x, $norm, eps=norm_eps)", "rmsnorm(x, $norm, offset=norm_eps)", "rms", "rmsnorm needs eps"
    ),
    "unknown argument": Mistake(
        "eps=norm_eps)",
        "epz=norm_eps)",
        "norm_eps)",
        "rmsnorm has no parameter 'epz'",
        "rmsnorm(x, w?, eps, offset?)",
    ),
    "argument twice": Mistake("rmsnorm(x, $norm,", "rmsnorm(x, $norm, x=(x),", "x),", "'x' is given twice"),
    "weight as value": Mistake(
        "rmsnorm(x, $norm", "rmsnorm($norm, x", "$norm", "rmsnorm's x is the weight 8 f32"
    ),
    "value as weight": Mistake(
        "linear(h, $up)", "linear(h, h) + linear(h, $up)", "h)", "linear's w is a value of T x 8 f32"
    ),
    "scalar as value": Mistake("linear(h, $up)", "linear(3, $up) + h", "3", "linear's x is 3, not a tensor"),
    "absent weight": Mistake(
        'up.weight",', 'up.weight", when: false,', "", "linear needs its w: $up is absent here", "mend 'when'"
    ),
    "wrong scalar": Mistake(
        "eps=norm_eps", "eps='small', offset=norm_eps", "'small'", "eps is 'small', not a number"
    ),
    "unknown activation": Mistake(
        "linear(h, $up)",
        "activation(h, 'slu') + linear(h, $up)",
        "'slu'",
        "name is 'slu', not an activation (silu,",
    ),
    "two values for one": Mistake(
        "- h = rms", "- h, g = rms", "rms", "rmsnorm gives 1 values, not 2", "bind each of them to a name"
    ),
    "tensor power": Mistake("x + linear", "x ** 2 + linear", "x **", "a value of T x 8 f32 is not a number"),
    "tensor condition": Mistake(
        "x + linear", "(x if x > 0 else x) + linear", "x >", "only scalars can be compared"
    ),
    "weights alone": Mistake(
        "x + linear(h, $up)", "x + linear(h, $up) + $norm * 2", "$norm", "over weights alone"
    ),
    "divided by zero": Mistake("x + linear", "x / 0 + linear", "0 +", "a division by zero"),
    "logits": Mistake(
        "logits = linear(x, $embed)", "logits = x", "logits", "the logits are T x 8 f32, not T x 32"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, tiny: str) -> None:
    check(MISTAKES[name], tiny)


def test_several_mistakes_are_reported_together(tiny: str) -> None:
    text = tiny.replace("eps=norm_eps", "eps=norm_epz").replace("$up)", "$upp)").replace("rmsnorm", "rmsnrm")
    messages = [p.message for p in problems_of(text)]
    assert messages == [
        "no op is named 'rmsnrm'",
        "'norm_epz' is not defined",
        "no weight is named 'upp'",
    ]


def test_a_mistake_is_reported_once_and_not_for_what_follows_from_it(tiny: str) -> None:
    text = tiny.replace("shape: [hidden]", "shape: [hidden + 1]")
    (problem,) = problems_of(text)
    assert problem.message == "rmsnorm: the norm's weight is 9 f32, the last axis of x has 8 elements"
    assert problem.path == "graph.layer[0]"
    assert (problem.line, problem.column) == (16, 11)


def test_the_text_of_an_error_has_place_path_and_remedy(tiny: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(tiny.replace("1.0e-5", "1e-5"), "tiny.yaml")
    assert str(caught.value) == (
        "tiny.yaml:7:13 at params.norm_eps: YAML reads 1e-5 as a string, not as a number\n  fix: write 1.0e-5"
    )


def test_columns_count_characters_and_weights_keep_their_width(tiny: str) -> None:
    text = tiny.replace("linear(h, $up)", "activation(h, 'é') * linear(h, $upp)")
    (problem,) = problems_of(text)
    line = text.splitlines()[problem.line - 1]
    assert line[problem.column - 1 :].startswith("$upp)")


def test_mistakes_in_a_parent_name_the_parents_file(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "base.yaml").write_text(tiny.replace("eps=norm_eps", "eps=epz"))
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nparams: {hidden: 16}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(child)
    # The child is right, the parent is wrong: "norm_eps", which nothing uses now, was not its own word.
    assert [(p.file, p.line) for p in caught.value.problems] == [(str(tmp_path / "base.yaml"), 16)]


@pytest.mark.parametrize("text", ["", "- a\n", "3\n", "{", "\x00", "a: b: c\n", "[" * 5000, "{a: " * 3000])
def test_text_that_is_no_spec(text: str) -> None:
    assert problems_of(text)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'smollm2-135m'"):
        load_spec("smolm2-135m")
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec("nowhere/model.yaml")
