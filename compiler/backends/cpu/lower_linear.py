"""Lowers linears: with what is done before and after them, and the choice of the greatest logit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pagec.compiler.backends.cpu.calls import ELEMENT_FLOPS, Call, KernelMaker
from pagec.compiler.backends.cpu.epilogue import Epilogue, line_of, plain_value, store_line
from pagec.compiler.backends.cpu.prologue import Prologue
from pagec.compiler.backends.cpu.tiles import BLOCK_ROWS, LINE, SHARES
from pagec.compiler.dims import ITEM_BYTES, WORD_ELEMENTS, row_stride
from pagec.compiler.ir import Node
from pagec.compiler.packer import Layout
from pagec.compiler.program import Kernel, RowCount


@dataclass(slots=True)
class _Linear:
    """A linear on its way to a kernel: all but where its result goes."""

    params: dict[str, Any]
    arrays: list[tuple[str, str]]
    args: list[str]
    value: str
    suffix: str
    cost: dict[str, int]
    before: Prologue | None


class LinearLowering(KernelMaker):
    """Linears, alone or with epilogue and prologue."""

    def _linear(self, node: Node) -> Call:
        name = node.outputs[0]
        out, parts = self.graph.type(name), self._parts(node)
        unit = WORD_ELEMENTS[out.dtype]
        columns = self.packer.nt // parts.params["parts"]
        parts.params["store"] = store_line(
            parts.value, row_stride(out.inner), unit, columns, self.target.lanes
        )
        parts.params |= {
            "written": line_of("out", row_stride(out.inner), 0, columns, unit),
            "lines": -(-columns // unit // LINE),
        }
        parts.arrays.append(("out", "int32" if unit == 2 else "float32"))
        parts.args.append(f"value:{name}")
        return self._finish(node, parts, "logits" if name == self.logits else self._rows(node))

    def _greedy(self, node: Node) -> tuple[Call, Call]:
        """The argmax of a linear's results without storing them: the greatest of each tile, then of all."""
        linear = next(n for n in self.graph.nodes if self.logits in n.outputs)
        width = self.graph.type(self.logits).inner[0]
        parts = self._parts(linear)
        tiles = parts.params["NP"] // self.packer.nt
        value = parts.value
        if width < parts.params["NP"]:
            kind = f"float32x{self.target.lanes}"
            value = f'T.call_pure_extern("{kind}", "pagec_mask", {value}, {{c}}, 0, {width - 1})'
        parts.params |= {"greatest": value, "tiles": tiles}
        parts.suffix += "_argmax"
        parts.arrays.append(("pairs", "float32"))
        parts.args.append("scratch:")
        self.scratch_bytes = max(self.scratch_bytes, 8 * tiles * self.settings.capacity.R)
        params = {"width": tiles, "stride": 2 * tiles, "pairs": True}
        arrays = [("x", "float32"), ("out", "int32")]
        kernel = self._kernel("argmax", f"{tiles}_pairs", params, arrays, bytes_per_row=8 * tiles)
        args = ("scratch:", f"value:{node.outputs[0]}")
        first = self._finish(linear, parts, "greedy")
        return (
            replace(first, node=node, suffix=".linear", more_values=(*linear.values(), *first.more_values)),
            Call(node, "greedy", ((0, kernel),), args, ".greatest"),
        )

    def _parts(self, node: Node) -> _Linear:
        linear = node.find("linear") or node
        x, y = self.graph.type(linear.inputs[0][1:]), self.graph.type(linear.outputs[0])
        dtype, bias, nt = x.dtype, len(linear.inputs) > 2, self.packer.nt
        unit, kp = WORD_ELEMENTS[dtype], row_stride(x.inner)
        arrays, args = [("x", "int32"), ("w", "int32")], [f"value:{linear.inputs[0][1:]}", ""]
        value, parts, ops, layout = plain_value(self.target.lanes, nt, bias), 1, list[str](), Layout(y.inner)
        extra: tuple[list[tuple[str, str]], tuple[str, ...]] = ([], ())
        read = list[str]()
        if node.body:
            epilogue = Epilogue(node, self.graph, self.target.lanes, nt, bias)
            value, parts, read = epilogue.value(), epilogue.parts, epilogue.read
            extra = epilogue.code.arrays, self._arguments(epilogue.code)
            ops = [n.op for n in node.body if n.op not in ("linear", "slice", "take_rows")]
            if parts > 1:
                layout = Layout(y.inner, side_by_side=epilogue.columns)
        args[1] = f"weight:{self.packer.matrix(linear.inputs[1][1:], layout, x.inner, dtype)}"
        if bias:
            arrays.append(("bias", "float32"))
            args.append(f"weight:{self.packer.vector(linear.inputs[2][1:], layout)}")
        out = self.graph.type(node.outputs[0])
        n, k = prod(y.inner), prod(x.inner)
        params = {
            "dtype": dtype,
            "NP": layout.width,
            "KW": kp // unit,
            "unit": unit,
            "NT": nt,
            "bias": bias,
            "parts": parts,
            "ops": ops,
            "store": "",
            "greatest": "",
            "tiles": 0,
            "read": read,
            "written": "",
            "lines": 0,
        }
        cost = {
            "flops": 2 * n * k + prod(out.inner) * sum(ELEMENT_FLOPS.get(op, 1) for op in ops),
            "bytes_per_row": sum(self.graph.row_bytes(name) for name in (*node.values(), node.outputs[0])),
            "bytes_fixed": n * k * ITEM_BYTES[dtype],
        }
        suffix = "_bias" * bias + "".join(f"_{op}" for op in dict.fromkeys(ops))
        before = self.prologues.get(node.outputs[0])
        return _Linear(params, arrays + extra[0], [*args, *extra[1]], value, suffix, cost, before)

    def _finish(self, node: Node, parts: _Linear, rows: RowCount) -> Call:
        """A kernel for each bucket of rows."""
        code = None
        if parts.before:
            region = parts.before.region(self.graph, self.target.lanes)
            code = region.params()
            # Arrays before the result's.
            parts.arrays[-1:-1] = region.code.arrays
            parts.args[-1:-1] = self._arguments(region.code)
        variants: list[tuple[int, Kernel | None]] = []
        p, normed = parts.params, parts.before.rows if parts.before else 0
        sizes = f"{p['dtype']}_n{p['NP']}_k{p['KW'] * p['unit']}"
        tuned, buckets = self.chooser.linear(sizes + parts.suffix, p["dtype"], normed)
        for limit, num_rows in buckets:
            itself = code if 0 < limit <= normed else None
            words = f"{sizes}{'_norm' if itself else ''}{parts.suffix}_m{num_rows}"
            params = {**p, "MB": num_rows, "before": itself, "block_rows": BLOCK_ROWS}
            kernel = self._kernel("linear", words, params, parts.arrays, shares=SHARES, **parts.cost)
            variants.append((limit, kernel))
        more = tuple(parts.before.node.values()) if parts.before else ()
        return Call(node, rows, tuple(variants), tuple(parts.args), more_values=more, tuned=tuned)
