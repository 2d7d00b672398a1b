"""The emitted sources: golden for each template, and compiled for targets that this machine cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.goldens import Golden
from support.graphs import llama_graph

from pagec.compiler.backends.cpu.build import compile_module
from pagec.compiler.backends.cpu.emit import emit_all, emit_kernel, emit_vector_library
from pagec.compiler.backends.targets import PREFERENCE, load_target
from pagec.compiler.dims import Capacity, DType
from pagec.compiler.errors import TargetError
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import make_plan
from pagec.compiler.program import Program


def small_program(target: str, dtype: DType = "bf16", **sizes: object) -> Program:
    graph = llama_graph(**sizes)
    return make_plan(
        graph,
        run_passes(graph, Numbers(dtype, dtype)),
        model="small",
        max_len=128,
        capacity=Capacity(32, 4, 4),
        kv_dtype=dtype,
        block_size=16,
        target=load_target(target),
        tuned={},
    ).program


@pytest.mark.parametrize(("target", "dtype"), [("cpu-avx512-bf16", "bf16"), ("cpu-avx2", "f32")])
def test_each_template_is_golden(golden: Golden, target: str, dtype: DType) -> None:
    """One kernel of each template; a changed template or tile shows as a diff."""
    program = small_program(target, dtype)
    first = {kernel.template: kernel for kernel in reversed(program.kernels)}
    assert first.keys() == {"embed", "linear", "rowwise", "kv_write", "attention", "argmax", "sample"}
    for template, kernel in first.items():
        golden.check(f"kernels/{target}/{template}.py.txt", emit_kernel(kernel, load_target(target)))


@pytest.mark.parametrize("target", ["cpu-avx512-bf16", "cpu-avx2"])
def test_the_vector_library_is_golden(golden: Golden, target: str) -> None:
    golden.check(f"kernels/{target}/vector.ll.txt", emit_vector_library(load_target(target)))


def test_the_plan_is_golden(golden: Golden) -> None:
    import json

    program = small_program("cpu-avx512-bf16")
    golden.check("plan/program.json", json.dumps(program.to_json(), indent=1) + "\n")


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_neon_code_compiles(tmp_path: Path, dtype: DType) -> None:
    """Arm code is compiled to an object file here, never run."""
    target = load_target("cpu-neon")
    assert not target.run
    program = small_program("cpu-neon", dtype, head_dim=20, window=8, qkv_bias=True)
    for name, text in emit_all(program.kernels, target).items():
        (tmp_path / name).write_text(text)
    module = compile_module(program.kernels, tmp_path, target, lambda *_: None)
    file = tmp_path / "kernels.o"
    module.write_to_file(str(file))
    head = file.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    assert int.from_bytes(head[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("target", PREFERENCE)
def test_keys_differ_where_kernels_do(target: str) -> None:
    program = small_program(target)
    assert len({kernel.key for kernel in program.kernels}) == len(program.kernels)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(TargetError, match="cpu-avx512-bf16"):
        load_target("cpu-486")
