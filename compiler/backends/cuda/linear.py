"""A linear and what follows it element by element -> its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from pagec.compiler.backends.cuda.emit import ELEMENTS, CudaKernel, make_kernel
from pagec.compiler.backends.cuda.kv_write import CacheUse, place_arrays, place_params
from pagec.compiler.backends.cuda.values import Values
from pagec.compiler.dims import row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import Graph, Node
from pagec.compiler.launch import Counts, GridRule
from pagec.compiler.verifier import VIEWS

# Elements of a row that a norm before a linear takes at a time.
NORM_STEP: Final = 128


@dataclass(frozen=True, slots=True)
class LinearKnobs:
    """A tile of BM x BN and BK of K a step; `group_m` tiles of rows go together; K in `splits` pieces; `tma`:
    weights by the tensor memory accelerator (sm_90)."""

    BM: int = 128
    BN: int = 128
    BK: int = 64
    warps: int = 8
    stages: int = 3
    group_m: int = 8
    splits: int = 1
    tma: bool = False

    @staticmethod
    def of(point: Mapping[str, int]) -> LinearKnobs:
        """A point as tables have it, whose values are numbers all."""
        values: dict[str, Any] = {**point, "tma": bool(point["tma"])}
        return LinearKnobs(**values)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """y[M, n] = x[M, k] w[n, k]^T: n and k as they lie in memory, `dtype` of x and w, `rows` which M is.

    `parts`: 2 if columns of two equal parts take turns.
    """

    n: int
    k: int
    dtype: str
    rows: Counts = Counts.T
    bias: bool = False
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows: lines of Triton on y0 (and y1, the second part), the arrays they use, the arguments
    behind them; `width`: elements of a row, where not all columns are (else 0).

    `write`: instead of lines, parameters of rope_write (see kv_write.place_params)."""

    ops: tuple[str, ...]
    lines: tuple[str, ...]
    arrays: tuple[tuple[str, str], ...]
    args: tuple[str, ...] = ()
    width: int = 0
    write: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prologue:
    """What precedes: x is a row of `source` (of `dtype`, `width` elements), normed with `weight`."""

    source: str
    dtype: str
    weight: str
    width: int
    eps: float
    offset: float


def plain(shape: LinearShape, out: str) -> Epilogue:
    """y as it is, stored as `out`."""
    value = "y0" if out == "f32" else f"y0.to({ELEMENTS[out]})"
    store = f"tl.store(out0 + row * {shape.n} + column, {value}, mask=stored)"
    return Epilogue((), (store,), (("out0", out),))


def shape_of(node: Node, graph: Graph) -> LinearShape:
    """Of a linear or fused.linear node."""
    linear = _linear(node)
    x, y = graph.type(linear.inputs[0][1:]), graph.type(linear.outputs[0])
    assert y.rows is not None
    parts = len(_slices(node)) or 1
    n = parts * row_stride(y.inner[1:]) if parts > 1 else row_stride(y.inner)
    return LinearShape(n, row_stride(x.inner), x.dtype, Counts[y.rows], len(linear.inputs) > 2, parts)


def epilogue_of(node: Node, graph: Graph, shape: LinearShape, bn: int) -> Epilogue:
    """Of a linear or fused.linear node, for tiles of `bn` columns."""
    linear, out = _linear(node), graph.type(node.outputs[0])
    elements, columns = prod(out.inner), row_stride(out.inner)
    # Columns of the last tile that are none are not read either.
    masked = bool(node.body) and (elements != columns or shape.n % bn != 0)
    values = Values(node, graph, masked=masked)
    values.known[linear.outputs[0]] = "y0"
    values.known |= {name: f"y{start}" for name, start in _slices(node).items()}
    rest = tuple(inner for inner in node.body if inner is not linear)
    values.compute(rest)
    values.store(node.outputs[0], "stored")
    ops = tuple(inner.op for inner in rest if inner.op not in VIEWS)
    return Epilogue(
        ops, tuple(values.lines), tuple(values.arrays), tuple(values.args), elements if masked else 0
    )


def write_of(node: Node, graph: Graph, use: CacheUse, table: str) -> Epilogue:
    """Of a fused.linear node that ropes and writes q, k and v: see kv_write."""
    arrays, args = place_arrays(node, graph, use, table)
    ops = ("rope", "kv_write") if node.find("rope") else ("kv_write",)
    return Epilogue(ops, (), arrays, args, write=place_params(node, graph, use))


def linear_of(
    node: Node,
    graph: Graph,
    knobs: LinearKnobs,
    write: Epilogue | None = None,
    norm: Prologue | None = None,
) -> tuple[tuple[CudaKernel, tuple[str, ...]], ...]:
    """The kernels of a linear or fused.linear node and their arguments as program.py has them; `write`: what
    follows, where that is write_of; `norm`: what precedes."""
    shape = shape_of(node, graph)
    columns = knobs.BN if knobs.splits == 1 else _sum_columns(shape)
    epilogue = write or epilogue_of(node, graph, shape, columns)
    inner = _linear(node)
    x = norm.source if norm else inner.inputs[0][1:]
    weights = [inner.inputs[1][1:], *([norm.weight] if norm else [])]
    first = (f"value:{x}", *(f"weight:{name}" for name in weights))
    bias = (f"weight:{inner.inputs[2][1:]}",) if shape.bias else ()
    kernels = linear(shape, epilogue, knobs, norm)
    if len(kernels) == 1:
        return ((kernels[0], (*first, *bias, *epilogue.args)),)
    return (kernels[0], (*first, "scratch:")), (kernels[1], (*bias, "scratch:", *epilogue.args))


def _linear(node: Node) -> Node:
    found = node.find("linear")
    assert found is not None
    return found


def _slices(node: Node) -> dict[str, int]:
    """The parts of the linear's result, by name."""
    result = _linear(node).outputs[0]
    return {
        n.outputs[0]: int(str(n.attrs["start"]))
        for n in node.body
        if n.op == "slice" and n.inputs[0][1:] == result and n.attrs.get("drop_axis")
    }


def linear(
    shape: LinearShape, epilogue: Epilogue, knobs: LinearKnobs, norm: Prologue | None = None
) -> tuple[CudaKernel, ...]:
    """One kernel, or with `splits` two: the second sums up partial[splits, M, n] and does the rest."""
    tile = f"{knobs.BM}x{knobs.BN}x{knobs.BK}{'_tma' * knobs.tma}"
    # Whole bands of group_m tiles of rows.
    columns = knobs.group_m * knobs.splits * -(-shape.n // knobs.BN)
    grid = GridRule(knobs.BM * knobs.group_m, columns)
    scale = (("norm_weight", "f32"),) if norm else ()
    inputs = (("x", norm.dtype if norm else shape.dtype), ("w", shape.dtype), *scale)
    before = {"norm": _norm_params(shape, norm)}
    bias = (("bias", "f32"),) if shape.bias else ()
    if knobs.splits == 1:
        params = _params(shape, epilogue, knobs) | before
        arrays = (*inputs, *bias, *epilogue.arrays)
        words = f"{_words(shape, epilogue)}{'_normed' * bool(norm)}_{tile}"
        return (make_kernel("linear", words, params, arrays, shape.rows, grid, knobs.warps, knobs.stages),)
    sums = replace(shape, bias=False, parts=1)
    nothing = Epilogue((), (), ())
    arrays = (*inputs, ("partial", "f32"))
    words = f"{_words(sums, nothing)}{'_normed' * bool(norm)}_{tile}_s{knobs.splits}"
    params = _params(sums, nothing, knobs) | before
    first = make_kernel("linear", words, params, arrays, shape.rows, grid, knobs.warps, knobs.stages)
    small = replace(knobs, BM=4, BN=_sum_columns(shape), warps=4)
    params = _params(shape, epilogue, small)
    arrays = (*bias, ("partial", "f32"), *epilogue.arrays)
    grid = GridRule(small.BM, params["tiles_n"])
    words = f"{_words(shape, epilogue)}_s{knobs.splits}"
    return first, make_kernel("linear_sum", words, params, arrays, shape.rows, grid, small.warps)


def _words(shape: LinearShape, epilogue: Epilogue) -> str:
    sizes = f"{shape.dtype}_n{shape.n}_k{shape.k}{'_bias' * shape.bias}"
    return sizes + "".join(f"_{op}" for op in dict.fromkeys(epilogue.ops))


def _sum_columns(shape: LinearShape) -> int:
    """Columns of a tile where partial sums are put together."""
    return 256 if shape.n % 256 == 0 else 64


def _norm_params(shape: LinearShape, norm: Prologue | None) -> dict[str, Any] | None:
    if norm is None:
        return None
    step = min(NORM_STEP, 1 << (shape.k - 1).bit_length())
    return {"width": norm.width, "eps": norm.eps, "offset": norm.offset, "step": step}


def _params(shape: LinearShape, epilogue: Epilogue, knobs: LinearKnobs) -> dict[str, Any]:
    if shape.k % (knobs.BK * knobs.splits):
        raise CompileError(
            f"K = {shape.k} is not {knobs.splits} splits of whole steps of {knobs.BK}",
            place=f"linear {shape.n} x {shape.k}",
        )
    return {
        "dtype": ELEMENTS[shape.dtype],
        "NP": shape.n,
        "KP": shape.k,
        "bias": shape.bias,
        "parts": shape.parts,
        "ops": list(dict.fromkeys(epilogue.ops)),
        "lines": list(epilogue.lines),
        "width": epilogue.width,
        "masked": bool(epilogue.width),
        "write": epilogue.write,
        "BM": knobs.BM,
        "BN": knobs.BN,
        "BK": knobs.BK,
        "group_m": knobs.group_m,
        "splits": knobs.splits,
        "tma": knobs.tma,
        "tiles_n": -(-shape.n // knobs.BN),
    }
