"""Lowers what mixtures of experts are made of, and a user's own ops that bring a template."""

from __future__ import annotations

from typing import Any, Final

from pagec.compiler.backends.cpu.calls import Call
from pagec.compiler.backends.cpu.lower_linear import LinearLowering
from pagec.compiler.backends.cpu.tiles import SHARES, linear_buckets, linear_columns
from pagec.compiler.dims import ITEM_BYTES, WORD_ELEMENTS, padded_last, row_stride
from pagec.compiler.ir import Node, Type
from pagec.compiler.ops import OPS

BACKEND: Final = "cpu"


class ExpertLowering(LinearLowering):
    """Choices, lists of rows by expert, and grouped linears."""

    def _top_k(self, node: Node) -> Call:
        x, k = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0]).inner[0]
        params = {
            "width": x.inner[0],
            "stride": row_stride(x.inner),
            "k": k,
            "out_stride": row_stride((k,)),
            "normalize": bool(node.attrs.get("normalize", False)),
        }
        arrays = [("x", "float32"), ("values", "float32"), ("indices", "int32")]
        kernel = self._kernel(
            "top_k", f"{k}_of_{x.inner[0]}", params, arrays, bytes_per_row=4 * x.inner[0] + 8 * k
        )
        return Call(node, self._rows(node), ((0, kernel),), self._values(*node.inputs, *node.outputs))

    def _expert_lists(self, node: Node) -> Call:
        chosen, out = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0])
        params = {
            "experts": node.attrs["experts"],
            "k": chosen.inner[0],
            "stride": row_stride(chosen.inner),
            "width": row_stride(out.inner),
        }
        arrays = [("chosen", "int32"), ("out", "int32")]
        words = f"{chosen.inner[0]}_of_{node.attrs['experts']}"
        kernel = self._kernel("expert_lists", words, params, arrays, bytes_per_row=4 * chosen.inner[0])
        return Call(node, self._rows(node), ((0, kernel),), self._values(*node.inputs, *node.outputs))

    def _grouped_linear(self, node: Node) -> Call:
        x, out = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0])
        experts, n, k = self.graph.weights[node.inputs[1][1:]].inner
        choices, dtype = out.inner[0], x.dtype
        unit = WORD_ELEMENTS[dtype]
        per_choice = len(x.inner) == 2
        params: dict[str, Any] = {
            "dtype": dtype,
            "unit": unit,
            "experts": experts,
            "k": choices,
            "N": n,
            "NP": row_stride((n,)),
            "KW": row_stride((k,)) // unit if not per_choice else padded_last((k,)) // unit,
            "NT": linear_columns(self.target),
            "per_choice": per_choice,
            "x_stride": row_stride(x.inner),
            "x_group": padded_last(x.inner),
            "out_stride": row_stride(out.inner),
            "out_group": padded_last(out.inner),
            "bias": len(node.inputs) > 4,
        }
        weight = self.packer.experts(node.inputs[1][1:], params["KW"] * unit, dtype)
        args = [f"value:{node.inputs[0][1:]}", f"weight:{weight}", f"value:{node.inputs[3][1:]}"]
        arrays = [("x", "int32"), ("w", "int32"), ("lists", "int32")]
        if params["bias"]:
            args.append(f"weight:{self.packer.expert_vectors(node.inputs[4][1:])}")
            arrays.append(("bias", "float32"))
        args.append(f"value:{node.outputs[0]}")
        arrays.append(("out", "float32"))
        variants = []
        # The choices of one row are different experts: each then has one row at most.
        for limit, rows in ((1, 1), linear_buckets(self.target, dtype)[-1]):
            kernel = self._kernel(
                "grouped_linear",
                f"{dtype}_{choices}_of_{experts}_n{n}_k{k}{'_bias' if params['bias'] else ''}_m{rows}",
                {**params, "MB": rows},
                arrays,
                flops=2 * n * k * choices,
                bytes_per_row=self.graph.row_bytes(node.inputs[0][1:])
                + self.graph.row_bytes(node.outputs[0]),
                bytes_fixed=experts * n * k * ITEM_BYTES[dtype],
                shares=SHARES,
            )
            variants.append((limit, kernel))
        return Call(node, self._rows(node), tuple(variants), tuple(args))

    def _templated(self, node: Node) -> Call:
        """An op of a user's with a template of its own: an array for each operand, then out, out1, ..."""
        op = OPS[node.op]
        layouts: dict[str, dict[str, Any]] = {}
        args = []
        outs = ["out", *(f"out{i}" for i in range(1, len(node.outputs)))]
        names = [*(p.name for p, _ in zip(op.tensor_params(), node.inputs, strict=False)), *outs]
        for name, reference in zip(names, [*node.inputs, *(f"%{o}" for o in node.outputs)], strict=True):
            t = self.graph.input_type(reference)
            assert isinstance(t, Type)
            is_weight = reference[0] == "$"
            args.append(self._row_weight(reference[1:]) if is_weight else f"value:{reference[1:]}")
            layouts[name] = {
                "inner": list(t.inner),
                "padded": padded_last(t.inner) if t.inner else 1,
                "stride": row_stride(t.inner),
                "dtype": "f32" if is_weight else t.dtype,
            }
        kinds = {"f32": "float32", "bf16": "int32", "i32": "int32"}
        arrays = [(name, kinds[layout["dtype"]]) for name, layout in layouts.items()]
        params = {"attrs": dict(node.attrs), "layouts": layouts, "text": op.templates[BACKEND].read_text()}
        row_bytes = sum(self.graph.row_bytes(name) for name in (*node.values(), *node.outputs))
        kernel = self._kernel(f"op:{node.op}", node.op, params, arrays, bytes_per_row=row_bytes)
        return Call(node, self._rows(node), ((0, kernel),), tuple(args))
