"""Kernels without a choice worth a file of its own: tokens, embedding, argmax, copies of cache blocks."""

from __future__ import annotations

from pagec.compiler.backends.cuda.emit import ELEMENTS, CudaKernel, make_kernel
from pagec.compiler.dims import row_stride
from pagec.compiler.launch import Counts, GridRule

# Columns that one program of argmax looks through, where there are more.
ARGMAX_PIECE = 8192


def take_tokens(vocab: int, block: int = 256) -> CudaKernel:
    """Puts what the step before has chosen in the place of tokens below 0."""
    arrays = (("tokens", "i32"), ("chosen", "i32"))
    params = {"vocab": vocab, "block": block}
    return make_kernel("take_tokens", str(vocab), params, arrays, Counts.T, GridRule(block, 1), block // 64)


def embed(width: int, dtype: str, out_dtype: str, warps: int = 4) -> CudaKernel:
    """Rows of a table [V, row_stride(width)] of `dtype`."""
    stride = row_stride((width,))
    params = {"stride": stride, "block": 1 << (stride - 1).bit_length(), "out_dtype": ELEMENTS[out_dtype]}
    arrays = (("ids", "i32"), ("table", dtype), ("out", out_dtype))
    grid = GridRule(1, 1)
    return make_kernel("embed", f"{dtype}_{stride}", params, arrays, Counts.T, grid, warps)


def argmax(width: int, warps: int = 4) -> tuple[CudaKernel, ...]:
    """Of float32 rows: one kernel, or two with (value, index) of pieces of a row in between."""
    block = min(2048, 1 << (width - 1).bit_length())
    pieces = -(-width // ARGMAX_PIECE)
    params = {"width": width, "stride": row_stride((width,)), "block": block}
    params |= {"pieces": pieces, "piece": ARGMAX_PIECE, "pairs": False}
    out, found = ("out", "i32"), (("value", "f32"), ("index", "i32"))
    grid = GridRule(1, pieces)
    if pieces == 1:
        return (make_kernel("argmax", str(width), params, (("x", "f32"), out), Counts.R, grid, warps),)
    first = make_kernel("argmax", f"{width}_pieces", params, (("x", "f32"), *found), Counts.R, grid, warps)
    params = {"width": pieces, "stride": pieces, "block": 1 << (pieces - 1).bit_length()}
    params |= {"pieces": 1, "piece": pieces, "pairs": True}
    grid = GridRule(1, 1)
    return first, make_kernel("argmax", f"{pieces}_pairs", params, (*found, out), Counts.R, grid, 1)


def copy_blocks(spans: int, span_bytes: int, chunk: int = 1024, warps: int = 4) -> CudaKernel:
    """Copies of whole blocks in every span of the pool."""
    words = span_bytes // 4
    params = {"spans": spans, "words": words, "chunk": chunk, "chunks": -(-words // chunk)}
    grid = GridRule(1, spans * params["chunks"])
    arrays = (("copies", "i32"), ("blocks", "i32"), ("pool", "i32"))
    return make_kernel("copy_blocks", f"{spans}x{words}", params, arrays, Counts.COPIES, grid, warps)
