"""Mistakes in experts, rope, fused tensors, types of values and import sections."""

from __future__ import annotations

import pytest
from support.mistakes import Mistake, check, problems_of

from pagec.compiler.spec import build_graph, parse_spec

# A mixture of experts with rope, its import section, and its mistakes.
MIXTURE = """\
required: [vocab, hidden, layers, max_len, experts]
params:
  vocab: 32
  hidden: 8
  layers: 2
  max_len: 64
  experts: 4
  top_k: 2
  normalize: true
  heads: 2
  rope: {base: 100.0, dims: 4}
layer_types: [all]
types: {all: {}}
weights:
  embed: {name: embed.weight, shape: [vocab, hidden]}
  router: {name: "{i}.router.weight", shape: [experts, hidden]}
  up: {name: "{i}.{e}.up.weight", stack: experts, shape: [hidden, hidden]}
  mix: {name: "{i}.mix.weight", rows: [0, 4], every: 8, shape: [hidden, hidden]}
graph:
  first:
    - x = embed(tokens, $embed)
  layer:
    - q = heads_of(linear(x, $mix), hidden // heads)
    - q, k = rope(q, q, positions, rope)
    - x = x + linear(attention(q, k, k, scale=0.5), $mix)
    - w, e = top_k_of(softmax(linear(x, $router)), top_k, normalize=normalize)
    - x = x + weighted_sum(expert_linear(x, $up, e), w)
  last:
    - logits = linear(x, $embed)
import:
  hf:
    model_type: [mixture]
    params: {vocab: vocab_size, rope.base: [rope_theta, {present: x}]}
    words: {rope.kind: {su: longrope}}
    expects: {bias: [false]}
    layer_types: {key: layer_types, names: {full: all}}
    ignore: ["*.inv"]
  gguf:
    arch: [mixture]
    params: {vocab: {tensor: embed, axis: 0}}
    names: {embed: token_embd.weight}
    stored: {embed: []}
"""
ROPE = "rope: {base: 100.0, dims: 4}"


def rope(new: str, marked: str, message: str, remedy: str = "") -> Mistake:
    """A mistake in the settings of rope."""
    return Mistake(ROPE, f"rope: {{{new}}}", marked, message, remedy)


ORIGINAL = "original_max_position_embeddings"
MISTAKES = {
    # experts
    "more than there are": Mistake("top_k: 2", "top_k: 9", "top_k_of", "the 9 greatest of 4 elements"),
    "none chosen": Mistake(
        "top_k: 2",
        "top_k: 0",
        "top_k, n",
        "k is 0, not a positive whole number",
        "check top_k (tiny.yaml:8:10)",
    ),
    "half an expert": Mistake("top_k: 2", "top_k: 1.5", "top_k, n", "k is 1.5, not a positive whole number"),
    "no experts": Mistake(
        "experts: 4", "experts: 0", "experts, s", "the number of experts must be a whole number of at least 1"
    ),
    "a word of experts": Mistake(
        "experts: 4", "experts: \"'four'\"", "experts, h", "not 'four'", "check experts (tiny.yaml:7:12)"
    ),
    "experts in a list": Mistake("experts: 4", "experts: [4]", "experts, h", "at least 1, not [4]"),
    "too many experts": Mistake("experts: 4", "experts: 5000", "experts, s", "5000 experts; at most 4096"),
    "experts missing": Mistake("  experts: 4\n", "", "", "the param 'experts' is required", "add experts"),
    "wrong stack": Mistake(
        "stack: experts", "stack: heads", "expert_linear", "has 2 experts, the choice is among 4", "agree"
    ),
    "wrong router": Mistake(
        "shape: [experts, hidden]",
        "shape: [3, hidden]",
        "expert_linear",
        "has 4 experts, the choice is among 3",
    ),
    "no stack": Mistake(" stack: experts,", "", '"{i}.{e}.up', "has unknown 'e' in braces", "with 'stack'"),
    "stack of a matrix": Mistake(
        'router.weight",', 'router.weight", stack: experts,', "linear(x, $router", "a linear weight is [N, K]"
    ),
    "plain weight for experts": Mistake(
        '"{i}.{e}.up.weight", stack: experts,', '"{i}.up.weight",', "expert_linear", "of experts is [E, N, K]"
    ),
    "no flag": Mistake(
        "normalize: true",
        "normalize: 1",
        "normalize)",
        "normalize is 1, not true or false",
        "check normalize",
    ),
    "sum of what is no choice": Mistake(
        "$up, e), w)",
        "$up, e), x)",
        "weighted_sum(e",
        "its weights are T x 8",
    ),
    "choice that is none": Mistake(
        "$up, e)", "$up, x)", "expert_linear", "experts are chosen by top_k_of, not"
    ),
    "one name for two": Mistake(
        "softmax(linear(x, $router))",
        "top_k_of(linear(x, $router), 2)",
        "top_k_of(linear",
        "gives 2 values, not 1",
    ),
    # parts of fused tensors
    "every without rows": Mistake("rows: [0, 4], ", "", "8, s", "'every' stands without 'rows'", "add rows"),
    "rows beyond": Mistake("every: 8", "every: 3", "3, s", "the rows end beyond each 3 rows", "let 'every'"),
    "rows that do not divide": Mistake(
        "rows: [0, 4]", "rows: [0, 3]", "[0, 3]", "rows 0 to 3 are 3, the shape has 8", "agree"
    ),
    "empty rows": Mistake("rows: [0, 4]", "rows: [4, 4]", "[4, 4]", "rows 4 to 4 are 0, the shape has 8"),
    # rope
    "unknown kind": rope(
        "base: 1.0, dims: 4, kind: lnear", "kind: l", "no rope kind 'lnear'; known: default"
    ),
    "kind no word": rope("base: 1.0, dims: 4, kind: 3", "kind: 3", "there is no rope kind 3"),
    "factor missing": rope("base: 1.0, dims: 4, kind: linear", "kind: l", "rope's factor is missing"),
    "llama3 incomplete": rope(
        "base: 1.0, dims: 4, kind: llama3, factor: 2", "kind: l", "rope's low_freq_factor is missing"
    ),
    "llama3 turned round": rope(
        f"base: 1.0, dims: 4, kind: llama3, factor: 2, {ORIGINAL}: 8, low_freq_factor: 4, "
        "high_freq_factor: 1",
        "high_freq",
        "rope's high_freq_factor must be above its low_freq_factor",
    ),
    "yarn incomplete": rope(
        "base: 1.0, dims: 4, kind: yarn, factor: 2", "kind: y", f"rope's {ORIGINAL} is missing"
    ),
    "yarn's flag": rope(
        f"base: 1.0, dims: 4, kind: yarn, factor: 2, {ORIGINAL}: 8, truncate: 1",
        "truncate",
        "rope's truncate must be true or false, not 1",
    ),
    "longrope's list": rope(
        f"base: 1.0, dims: 4, kind: longrope, short_factor: [1], long_factor: [1, 2], {ORIGINAL}: 8",
        "short_factor",
        "rope's short_factor must be a list of 2 numbers",
    ),
    "longrope's length": rope(
        f"base: 1.0, dims: 4, kind: longrope, short_factor: [1, 1], long_factor: [1, 2], {ORIGINAL}: 1",
        ORIGINAL,
        f"rope's {ORIGINAL} must be above 1, not 1.0",
    ),
    "dynamic too far": rope(
        f"base: 1.0e+308, dims: 4, kind: dynamic, factor: 1.0e+300, {ORIGINAL}: 1",
        "kind",
        "its numbers are too large",
    ),
    "setting of another kind": rope(
        "base: 1.0, dims: 4, factor: 2", "factor", "rope of kind default takes no factor", "base, dims, kind"
    ),
    "flag as word": rope(
        "base: 1.0, dims: 4, interleaved: \"'yes'\"",
        "interleaved",
        "interleaved must be true or false, not 'yes'",
    ),
    "base as word": rope(
        "base: \"'x'\", dims: 4", "base", "rope's base must be a number above zero, not 'x'"
    ),
    "base as string": rope("base: 1e4, dims: 4", "1e4", "YAML reads 1e4 as a string", "write 1.0e+4"),
    "odd dims": rope("base: 1.0, dims: 0", "dims: 0", "rope's dims must be a positive even number, not 0"),
    "rope no map": Mistake(ROPE, "rope: 3", "rope)", "rope's settings must be a map", "give a param like"),
    # wrong types
    "text as size": Mistake(
        "hidden: 8", "hidden: \"'8'\"", "hidden]", "must be a whole number", "check hidden"
    ),
    "flag as size": Mistake("hidden: 8", "hidden: true", "hidden]", "of at least 1, not true"),
    "map as size": Mistake("hidden: 8", "hidden: {a: 1}", "hidden]", "of at least 1, not {a: 1}"),
    "weights no map": Mistake("weights:\n", "weights: [3]\nignore:\n", "[3]", "'weights' must be a map"),
    "weight no map": Mistake("weights:\n", "weights:\n  a: 3\n", "3", "the weight 'a' must be a map"),
    "shape no list": Mistake("[vocab, hidden]}\n  router", "vocab}\n  router", "vocab}", "a shape is a list"),
    "name no text": Mistake("name: embed.weight", "name: 3", "3,", "a tensor's name must be a name"),
    "layer no list": Mistake(
        "  layer:\n", "  layer: {a: 1}\n  frist:\n", "{a", "'layer' is a list of statements"
    ),
    "types no map": Mistake("types: {all: {}}", "types: {all: 3}", "3}", "the type 'all' must be a map"),
    "value as condition": Mistake(
        "x + linear", "(not x) + linear", "x)", "a value of T x 8 f32 is not true or"
    ),
    # import
    "kind of checkpoint": Mistake(
        "  gguf:", "  ggml:", "ggml", "no kind of checkpoint is named 'ggml'", "known: gguf"
    ),
    "import no map": Mistake("import:\n", "import: 3\nname:\n", "3", "'import' must be a map"),
    "import key": Mistake(
        "    words:", "    wrods:", "wrods", "unknown key 'wrods'", "did you mean 'words'?"
    ),
    "import no map inside": Mistake("{su: longrope}}", "3}", "3}", "the words of a param must be a map"),
    "word no text": Mistake("{su: longrope}", "{su: 3}", "3}", "a word must be a name"),
    "import of no param": Mistake(
        "{vocab: vocab_size", "{vocb: vocab_size", "vocb", "no param is named 'vocb'"
    ),
    "key no text": Mistake("vocab: vocab_size", "vocab: 3", "3,", "a key must be a name"),
    "unknown fact": Mistake("{present: x}", "{presnt: x}", "presnt", "unknown key 'presnt'", "'present'?"),
    "two facts": Mistake(
        "{present: x}", "{present: x, absent: y}", "{present", "not one fact about a tensor"
    ),
    "axis": Mistake("axis: 0", "axis: rows", "rows", "an axis is 0, 1 or 2"),
    "type of layers": Mistake("{full: all}", "{full: al}", "al}", "no type is named 'al'", "'all'?"),
    "layer types' key": Mistake("{key: layer_types,", "{ky: layer_types,", "ky", "unknown key 'ky'"),
    "name of no weight": Mistake(
        "{embed: token_embd", "{embd: token_embd", "embd", "no weight is named 'embd'", "'embed'?"
    ),
    "ignored no text": Mistake('["*.inv"]', "[3]", "3]", "a tensor's name must be a name"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    check(MISTAKES[name], MIXTURE)


def test_the_text_without_mistakes_is_a_model() -> None:
    assert build_graph(parse_spec(MIXTURE, "tiny.yaml")).nodes


def test_mistakes_of_several_sections_are_reported_together() -> None:
    text = MIXTURE.replace("top_k: 2", "top_k: {1: 2, 1: 3}").replace("wrods", "words")
    assert [p.message for p in problems_of(text)] == ["the key '1' stands twice (first in line 8)"]
    text = (
        MIXTURE.replace("every: 8", "evry: 8").replace("words:", "wrods:").replace("- q, k = ", "- q, q = ")
    )
    assert [(p.line, p.path, p.message) for p in problems_of(text)] == [
        (18, "weights.mix.evry", "a weight has no 'evry'"),
        (24, "graph.layer[1]", "a name is assigned twice in one statement"),
        (34, "import.hf.wrods", "unknown key 'wrods'"),
    ]


def test_a_mistake_in_rope_stands_where_the_setting_stands() -> None:
    """Through names and conditions of other params, and the overrides of a layer's type."""
    text = MIXTURE.replace(
        "  rope: {base: 100.0, dims: 4}", "  rope: other if i > 0 else none\n  other: {base: 1.0, dims: 1}"
    )
    (problem,) = problems_of(text)
    assert (problem.path, problem.line, problem.column) == ("params.other.dims", 12, 22)
    (problem,) = problems_of(MIXTURE.replace("{all: {}}", "{all: {rope: {kind: yarn}}}"))
    assert (problem.path, problem.line) == ("types.all.rope.kind", 13)
    assert problem.message == "rope's factor is missing"
