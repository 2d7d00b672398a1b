"""What mixtures of experts are made of: choices, lists of rows by expert, grouped linears -> kernels."""

from __future__ import annotations

from dataclasses import dataclass

from pagec.compiler.backends.cuda.emit import ELEMENTS, CudaKernel, make_kernel
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import Graph, Node
from pagec.compiler.launch import Counts, GridRule

# Choices that expert_lists looks through at a time.
LIST_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class GroupedKnobs:
    """A tile of BM rows of one expert x BN columns, and BK of K a step."""

    BM: int = 64
    BN: int = 128
    BK: int = 64
    warps: int = 4
    stages: int = 3


def top_k(node: Node, graph: Graph, warps: int = 1) -> CudaKernel:
    """Of a top_k_of node; takes x, values, indices."""
    x, k = graph.type(node.inputs[0][1:]), graph.type(node.outputs[0]).inner[0]
    params = {
        "width": x.inner[0],
        "stride": row_stride(x.inner),
        "block": _power(x.inner[0]),
        "k": k,
        "out_stride": row_stride((k,)),
        "normalize": bool(node.attrs.get("normalize", False)),
    }
    arrays = (("x", "f32"), ("values", "f32"), ("indices", "i32"))
    grid = GridRule(1, 1)
    return make_kernel("top_k", f"{k}_of_{x.inner[0]}", params, arrays, _rows(graph, node), grid, warps)


def expert_lists(node: Node, graph: Graph, warps: int = 4) -> CudaKernel:
    """Of an expert_lists node; takes chosen, out."""
    chosen, experts = graph.type(node.inputs[0][1:]), _experts(node)
    k = chosen.inner[0]
    params = {
        "experts": experts,
        "k": k,
        "stride": row_stride(chosen.inner),
        "block": LIST_BLOCK,
        "bins": _power(experts + 1),
    }
    grid = GridRule(1, 0, extra=experts)
    return make_kernel(
        "expert_lists",
        f"{k}_of_{experts}",
        params,
        (("chosen", "i32"), ("out", "i32")),
        _rows(graph, node),
        grid,
        warps,
    )


def grouped_linear(node: Node, graph: Graph, knobs: GroupedKnobs) -> CudaKernel:
    """Of a grouped_linear node; takes x, w, lists, bias if there is one, out."""
    x, out = graph.type(node.inputs[0][1:]), graph.type(node.outputs[0])
    experts, n, k = graph.weights[node.inputs[1][1:]].inner
    choices, bias = out.inner[0], len(node.inputs) > 4
    per_choice = len(x.inner) == 2
    kp, group = expert_columns(node, graph), padded_last(out.inner)
    tail = row_stride(out.inner) - choices * group
    if kp % knobs.BK:
        raise CompileError(f"K = {kp} is no whole steps of {knobs.BK}", place=f"%{node.outputs[0]}")
    tiles_n = -(-(group + tail) // knobs.BN)
    params = {
        "dtype": ELEMENTS[x.dtype],
        "out_dtype": ELEMENTS[out.dtype],
        "experts": experts,
        "slots": _power(experts),
        "choices": choices,
        "n": n,
        "NP": row_stride((n,)),
        "KP": kp,
        "per_choice": per_choice,
        "x_stride": row_stride(x.inner),
        "x_group": padded_last(x.inner),
        "out_stride": row_stride(out.inner),
        "out_group": group,
        "out_width": tiles_n * knobs.BN,
        "tail": tail,
        "bias": bias,
        "BM": knobs.BM,
        "BN": knobs.BN,
        "BK": knobs.BK,
        "tiles_n": tiles_n,
    }
    vectors = (("bias", "f32"),) if bias else ()
    arrays = (("x", x.dtype), ("w", x.dtype), ("lists", "i32"), *vectors, ("out", out.dtype))
    words = f"{x.dtype}_{choices}_of_{experts}_n{n}_k{k}{'_bias' * bias}_{knobs.BM}x{knobs.BN}x{knobs.BK}"
    # Tiles of rows: of all choices together, and the last of each expert may be a part of one.
    grid = GridRule(knobs.BM, choices * tiles_n, extra=experts * tiles_n)
    return make_kernel(
        "grouped_linear", words, params, arrays, _rows(graph, node), grid, knobs.warps, knobs.stages
    )


def expert_columns(node: Node, graph: Graph) -> int:
    """Elements of a row of an expert's matrix: as x lies, padded to whole steps."""
    x = graph.type(node.inputs[0][1:])
    return row_stride(x.inner) if len(x.inner) == 1 else padded_last(x.inner)


def _experts(node: Node) -> int:
    experts = node.attrs["experts"]
    assert isinstance(experts, int)
    return experts


def _rows(graph: Graph, node: Node) -> Counts:
    rows = graph.type(node.outputs[0]).rows
    assert rows is not None
    return Counts[rows]


def _power(width: int) -> int:
    """The least power of two that is not below width."""
    return 1 << (width - 1).bit_length()
