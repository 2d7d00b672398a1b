"""Triton sources -> cubins: what is promised of them, what is refused, what the cache keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda import cuda_kernels
from support.goldens import Golden

from pagec.compiler.backends.cuda.build import CompileRequest, Cubin, compile_all, compile_kernel
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape, linear, plain
from pagec.compiler.backends.cuda.resources import Resources, check, occupancy
from pagec.compiler.backends.targets import load_cpu_target, load_cuda_target, load_target
from pagec.compiler.errors import ArtifactError, CompileError, TargetError
from pagec.compiler.launch import GridRule, LaunchMetadata

A100, H100 = load_cuda_target("a100"), load_cuda_target("h100")

DOT = """\
import triton
import triton.language as tl


@triton.jit
def dot(x, y, out, counts):
    row = tl.arange(0, {size})
    column = tl.arange(0, 64)
    acc = tl.zeros(({size}, {size}), tl.float32)
    for k in range(0, tl.load(counts), 64):
        left = tl.load(x + row[:, None] * 4096 + (k + column)[None, :])
        right = tl.load(y + row[None, :] * 4096 + (k + column)[:, None])
        acc = tl.dot(left, right, acc)
    tl.store(out + row[:, None] * {size} + row[None, :], acc)
"""


def request(directory: Path, size: int = 64, stages: int = 2, **more: object) -> CompileRequest:
    directory.mkdir(exist_ok=True)
    file = directory / "dot.py"
    file.write_text(DOT.format(size=size))
    names = ("x", "y", "out", "counts")
    kinds = ("*bf16", "*bf16", "*fp32", "*i32")
    made = CompileRequest(
        f"dot{size}",
        file,
        "dot",
        tuple(zip(names, kinds, strict=True)),
        names,
        GridRule(1, 1),
        4,
        stages,
    )
    return replace(made, **more)


@pytest.mark.parametrize(("target", "mma"), [(A100, "HMMA"), (H100, "HGMMA")])
def test_a_kernel_compiles_to_the_same_bytes_wherever_its_source_lies(
    tmp_path: Path, target: object, mma: str
) -> None:
    one = compile_kernel(request(tmp_path / "a"), target)
    two = compile_kernel(request(tmp_path / "b"), target)
    assert one == two
    assert one.binary[:4] == b"\x7fELF"
    assert one.resources.mma == mma
    assert one.resources.stack_bytes == 0
    assert one.launch.symbol == "dot"
    assert one.launch.shared_bytes >= 2 * 2 * 64 * 64
    assert str(tmp_path).encode() not in one.binary


def test_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    requests = [request(tmp_path / str(size), size) for size in (16, 32, 64)]
    seen: list[tuple[str, int, int]] = []
    pooled = compile_all(requests, A100, workers=2, progress=lambda *step: seen.append(step))
    assert pooled == compile_all(requests, A100, workers=1)
    assert seen == [("compile kernels", done, 3) for done in range(4)]


def test_the_cache_keeps_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = compile_kernel(request(tmp_path / "a"), A100, cache)
    compiled: list[Cubin] = []

    def compile_again(*_: object) -> Cubin:
        compiled.append(first)
        return first

    monkeypatch.setattr("pagec.compiler.backends.cuda.build._compile", compile_again)
    assert compile_kernel(request(tmp_path / "b"), A100, cache) == first
    assert not compiled
    # Another number of stages, another chip, or a damaged entry: compiled.
    compile_kernel(request(tmp_path / "a", stages=3), A100, cache)
    compile_kernel(request(tmp_path / "a"), H100, cache)
    for binary in cache.glob("*.cubin"):
        binary.write_bytes(binary.read_bytes()[:-1])
    compile_kernel(request(tmp_path / "a"), A100, cache)
    assert len(compiled) == 3


def test_weights_by_tensor_memory_accelerator(tmp_path: Path) -> None:
    """sm_90 alone has it; each program keeps its descriptor in scratch memory."""
    shape = LinearShape(4096, 4096, "bf16")
    (kernel,) = linear(shape, plain(shape, "bf16"), LinearKnobs(tma=True))
    cubin = compile_kernel(kernel.write(tmp_path), H100)
    assert "cp.async.bulk.tensor" in cubin.ptx
    assert cubin.resources.mma == "HGMMA"
    assert cubin.launch.scratch_bytes >= 128
    assert cubin.launch.scratch_align >= 64


def test_compiling_needs_neither_torch_nor_tvm(tmp_path: Path) -> None:
    made = request(tmp_path / "a")
    program = (
        "import sys; from pathlib import Path\n"
        "from pagec.compiler.backends.cuda import build, lower, space\n"
        "from pagec.compiler.backends.targets import load_cuda_target\n"
        "from pagec.compiler.launch import GridRule\n"
        f"names = {made.divisible!r}\n"
        f"made = build.CompileRequest('key', Path({str(made.file)!r}), 'dot', {made.signature!r}, names,"
        " GridRule(1, 1), 4, 2)\n"
        "build.compile_kernel(made, load_cuda_target('a100'))\n"
        "print([name for name in ('torch', 'tvm', 'tvm_ffi') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    large = request(tmp_path / "a", 128, stages=7)
    with pytest.raises(CompileError, match=r"dot128: takes 196,608 bytes of shared memory, a100 has 166,912"):
        compile_kernel(large, A100)
    assert compile_kernel(replace(large, checked=False), A100).resources.shared_bytes == 196608
    with pytest.raises(CompileError, match="dot128: spills"):
        compile_kernel(request(tmp_path / "b", 128, warps=1), A100)


def test_an_error_of_triton_names_the_kernel(tmp_path: Path) -> None:
    broken = request(tmp_path / "a")
    broken.file.write_text(broken.file.read_text().replace("tl.zeros", "tl.no_such_function"))
    with pytest.raises(CompileError, match="dot64: Triton cannot compile it for a100"):
        compile_all([broken, request(tmp_path / "b", 32)], A100, workers=2)


def test_launch_metadata_survive_json_and_check_pointers(tmp_path: Path) -> None:
    launch = compile_kernel(request(tmp_path / "a"), A100).launch
    assert LaunchMetadata.from_json(json.loads(json.dumps(launch.to_json()))) == launch
    launch.check_pointers((0, 16, 1 << 40, 32))
    with pytest.raises(ArtifactError, match="argument out lies at 0x8, which is no multiple of 16"):
        launch.check_pointers((0, 16, 8, 32))
    with pytest.raises(ArtifactError, match="takes 4 pointers, not 3"):
        launch.check_pointers((0, 16, 16))


def test_grids() -> None:
    assert GridRule(128, 24).programs(129, 108) == 48
    assert GridRule(1, 8, per_sm=2).programs(1, 108) == 8
    assert GridRule(1, 8, per_sm=2).programs(1000, 108) == 216


@pytest.mark.parametrize(
    ("resources", "warps", "expected"),
    [
        (Resources(128, 0, 0, ""), 4, 4),  # 4 x 4 warps x 4,096 registers
        (Resources(96, 0, 38 << 10, ""), 4, 4),  # 164 KB / 39 KB
        (Resources(32, 0, 0, ""), 1, 32),  # blocks
        (Resources(32, 0, 0, ""), 8, 8),  # warps
        (Resources(255, 0, 0, ""), 16, 0),
    ],
)
def test_occupancy(resources: Resources, warps: int, expected: int) -> None:
    """By registers, shared memory, blocks and warps; figures of the CUDA occupancy calculator."""
    assert occupancy(resources, warps, A100) == expected
    if not expected:
        with pytest.raises(CompileError, match="more than a100 has"):
            check(resources, warps, A100, "key")


def test_targets_know_their_kind() -> None:
    assert load_target("a100") == A100
    with pytest.raises(TargetError, match="a100 is a GPU"):
        load_cpu_target("a100")
    with pytest.raises(TargetError, match="cpu-avx2 is no GPU"):
        load_cuda_target("cpu-avx2")
    assert load_cuda_target("h200").memory_bytes > H100.memory_bytes


KERNELS = tuple(cuda_kernels())
TEMPLATES = frozenset(kernel.template for kernel in KERNELS)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_each_template_is_golden(golden: Golden, template: str) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.template == template)
    golden.check(f"kernels/cuda/{template}.py.txt", kernel.source())


def test_rope_and_write_of_a_linear_are_golden(golden: Golden) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.template == "linear" and kernel.params["write"])
    golden.check("kernels/cuda/linear_write.py.txt", kernel.source())


def test_a_norm_before_a_linear_is_golden(golden: Golden) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.template == "linear" and kernel.params["norm"])
    golden.check("kernels/cuda/linear_normed.py.txt", kernel.source())


def test_each_template_has_two_configurations() -> None:
    counted = {template: sum(k.template == template for k in KERNELS) for template in TEMPLATES}
    assert min(counted.values()) >= 2 or counted == {**counted, "linear_sum": 1}
