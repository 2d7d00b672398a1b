"""Ops of a user's own, given by files: without touching pagec, from the spec to `pagec verify`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.compiler.errors import ArtifactError, CompileError, SpecError
from pagec.compiler.ops import OPS
from pagec.compiler.show import show
from pagec.compiler.user_ops import load_ops
from pagec.runtime.cli.verify import verify_artifact

SCALAR = """
from pagec.compiler.ops import Param, elementwise, register

register(
    elementwise(
        "swish_gate",
        [
            Param("x", "value"),
            Param("y", "value"),
            Param("w", "weight"),
            Param("beta", "scalar", 1.0, "number"),
        ],
        meaning=lambda x, y, w, *, beta=1.0: x * (beta * x).sigmoid() * y + w * abs(y),
        scalar="x * sigmoid(beta * x) * y + w * max(y, -y)",
    )
)
"""
TEMPLATE = """
from pathlib import Path

import torch

from pagec.compiler.ops import Op, Param, register, same

register(
    Op(
        "running_max",
        (Param("x", "value"),),
        same,
        lambda x: x.cummax(-1).values,
        templates={"cpu": Path(__file__).parent / "running_max.py.jinja"},
    )
)
register(Op("no_kernel", (Param("x", "value"),), same, lambda x: x, rowwise=True))
"""
JINJA = """
{% extends "cpu/kernel.py.jinja" %}
{% block title %}out[M, {{ layouts.x.inner[0] }}] = the greatest of x so far.{% endblock %}
{% block body %}
best = T.alloc_buffer((1,), "float32", scope="local")
first: T.int32 = num_rows * share // num_shares
last: T.int32 = num_rows * (share + 1) // num_shares
for i in range(last - first):
    row: T.int32 = first + i
    best[0] = T.float32("-inf")
    for c in range({{ layouts.x.inner[0] }}):
        best[0] = T.max(best[0], x[row * {{ layouts.x.stride }} + c])
        out[row * {{ layouts.out.stride }} + c] = best[0]
    for c in range({{ layouts.out.stride - layouts.out.inner[0] }}):
        out[row * {{ layouts.out.stride }} + {{ layouts.out.inner[0] }} + c] = T.float32(0)
{% endblock %}
"""
SPEC = """
extends: llama
params: {{vocab: 96, hidden: 48, layers: 1, heads: 3, inter: 80, max_len: 64}}
weights:
  slope: {{name: "model.layers.{{i}}.slope", shape: [inter]}}
graph:
  last:
    - h = rmsnorm({0}, $final_norm, eps=norm_eps)
    - logits = linear(h, $lm_head)
  layer:
    - h = rmsnorm(x, $attn_norm, eps=norm_eps)
    - q, k = heads_of(linear(h, $q), head_dim), heads_of(linear(h, $k), head_dim)
    - q, k = rope(q, k, positions, rope)
    - x = x + linear(attention(q, k, heads_of(linear(h, $v), head_dim), scale=attn_scale), $o)
    - h = rmsnorm(x, $mlp_norm, eps=norm_eps)
    - x = x + linear({1}, $down)
"""
GATE = "swish_gate(linear(h, $gate), linear(h, $up), $slope, beta=1.5)"
PLAIN = "linear(h, $gate) * linear(h, $up) * $slope"


@pytest.fixture(autouse=True)
def _same_table() -> Iterator[None]:
    """The table of ops as it was."""
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def options(path: Path, statement: tuple[str, str], ops: str, dtype: str = "bf16") -> CompileOptions:
    (path / "m.yaml").write_text(SPEC.format(*statement))
    (path / "ops.py").write_text(ops)
    (path / "running_max.py.jinja").write_text(JINJA)
    return CompileOptions(
        str(path / "m.yaml"),
        weights="random:1",
        dtype=dtype,
        output=path / "out",
        ops=(path / "ops.py",),
        max_step_tokens=64,
        max_seqs=4,
    )


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("statement", "ops"), [(("x", GATE), SCALAR), (("running_max(x)", PLAIN), TEMPLATE)])
def test_an_op_of_a_users(statement: tuple[str, str], ops: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("tvm")
    chosen = options(tmp_path, statement, ops, dtype)
    artifact = compile_model(chosen, lambda *_: None).path
    rows = verify_artifact(artifact, ops=chosen.ops, progress=lambda *_: None)
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    name = "swish_gate" if ops is SCALAR else "running_max"
    assert any(name in row.subject for row in rows)
    assert name in show("fused", CompileOptions(str(artifact), ops=chosen.ops), False)


def test_an_artifact_of_unknown_ops_says_what_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("tvm")
    artifact = compile_model(options(tmp_path, ("x", GATE), SCALAR), lambda *_: None).path
    del OPS["swish_gate"]
    for use in (
        lambda: verify_artifact(artifact, progress=lambda *_: None),
        lambda: show("plan", CompileOptions(str(artifact)), False),
    ):
        with pytest.raises(ArtifactError, match=r"does not know: swish_gate[\s\S]*--ops FILE\.py"):
            use()


def test_an_op_without_a_kernel_is_refused_by_the_backends_name(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="the CPU backend has no"):
        compile_model(options(tmp_path, ("no_kernel(x)", PLAIN), TEMPLATE), lambda *_: None)


@pytest.mark.parametrize(
    ("scalar", "message"),
    [
        ("x * z", "no parameter is named 'z'"),
        ("sin(x)", "no function 'sin' of 1 arguments"),
        ("x if x > 0 else y", "is not part of the language"),
        ("x *", "invalid syntax"),
    ],
)
def test_scalar_expressions_that_are_refused(scalar: str, message: str, tmp_path: Path) -> None:
    ops = SCALAR.replace("x * sigmoid(beta * x) * y + w * max(y, -y)", scalar)
    with pytest.raises(CompileError, match=message):
        compile_model(options(tmp_path, ("x", GATE), ops), lambda *_: None)


RULE = """
from pagec.compiler.ops import Op, Param, register
register(Op("own", (Param("x", "value"),), {}, lambda x: x))
"""
TWICE = "from pagec.compiler.ops import Param, elementwise, register\n" + 2 * (
    'register(elementwise("own", [Param("x", "value")], meaning=lambda x: x, scalar="x"))\n'
)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\n1 / 0", 2, "ZeroDivisionError: division by zero"),
        ("x = 1\nx = (", 2, "SyntaxError: '(' was never closed"),
        ("import nothing_of_that_name", 1, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise SystemExit(3)", 1, "SystemExit: 3"),
        (
            "from pagec.compiler.ops import OPS, register\nregister(OPS['linear'])",
            2,
            "ValueError: there is already an op named 'linear'",
        ),
        (TWICE, 3, "there is already an op named 'own'"),
        (RULE.format("None"), 3, "op 'own' has no shape rule: None is no function"),
        (
            RULE.format("None").replace(", None, lambda x: x", ""),
            3,
            "missing 2 required positional arguments",
        ),
        (RULE.format("max").replace('"own"', '"an op"'), 3, "an op cannot be named 'an op'"),
        (
            RULE.format("max").replace('Param("x", "value"),', 'Param("x", "value"), Param("x", "value"),'),
            3,
            "op 'own' has two parameters of one name",
        ),
        (
            "from pathlib import Path\n"
            + RULE.format("max").replace("x: x", 'x: x, templates={"cpu": Path("no.jinja")}'),
            4,
            "there is no file 'no.jinja'",
        ),
    ],
)
def test_files_that_cannot_be_run(text: str, line: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_model(options(tmp_path, ("x", PLAIN), text), lambda *_: None)
    assert message in caught.value.message
    assert caught.value.place == f"{tmp_path / 'ops.py'}:{line}"
    assert "own" not in OPS


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ops.txt").write_text("")
    for file, message in (
        ("none.py", "No such file"),
        (".", "Is a directory"),
        ("ops.txt", "no Python file"),
    ):
        with pytest.raises(CompileError, match=message):
            load_ops([tmp_path / file])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("lambda types, attrs: types[7]", "own: its shape rule fails: IndexError: list index out of range"),
        ("lambda types, attrs: None", "own: its shape rule fails: TypeError"),
        ("lambda types, attrs: ['T']", r"own: its shape rule gives \('T',\)"),
        ("lambda types, attrs: [*types, *types]", "own gives 2 values, not 1"),
    ],
)
def test_shape_rules_that_fail(rule: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        compile_model(options(tmp_path, ("own(x)", PLAIN), RULE.format(rule)), lambda *_: None)
    assert caught.value.problems[0].path == "graph.last[0]"


def test_an_unknown_op_in_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="swish_gate"):
        compile_model(options(tmp_path, ("x", GATE), ""), lambda *_: None)
