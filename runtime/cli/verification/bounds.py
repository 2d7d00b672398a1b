"""How far results may lie apart: what the arithmetic allows between two orders of summation.

For a float32 sum of n products that is 2 n u sum |a b| (u = 2^-24; Higham, Accuracy and Stability, section
3.1), and one unit in the last place wherever a result is rounded to bf16, since two sums a hair apart may
round apart. Where a value is rounded on the way and read by what follows, that unit is carried on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from pagec.compiler import ops, reference
from pagec.compiler.ir import Graph, Node, Type

U = 2.0**-24
BF16_ULP = 2.0**-7
# How far float32 weights and their sums may shift the pieces of a distribution, and log probabilities.
SAMPLING_SLACK = 1e-4
SIGNS = 4
# Elements of a normed row that lie so near to the middle between two numbers of bf16 that the order of the
# row's sum of squares decides to which they are rounded: one in some thousands.
FLIPS = 4
Values = Mapping[str, torch.Tensor]


class Bounds:
    """For one step: the reference's `values`, its weights, and the number of keys of the longest sequence."""

    def __init__(
        self,
        fused: Graph,
        values: Values,
        weight: Callable[[str], torch.Tensor],
        rng: np.random.Generator,
        *,
        keys: int,
        kv_dtype: str,
    ) -> None:
        self.fused, self.values, self.weight, self.rng = fused, values, weight, rng
        self.keys, self.kv_dtype = keys, kv_dtype
        # Whether the linear at hand norms its rows itself: then a few may round to bf16 the other way.
        self.norms_itself = False

    def of(self, node: Node, t: Type, expected: torch.Tensor) -> torch.Tensor:
        """What float32 arithmetic allows, element by element."""
        if node.op in ("embed", "expert_lists"):
            return torch.zeros_like(expected)
        if node.op == "top_k_of":  # indices exactly; values are divided by a sum at most
            return 2 * t.inner[-1] * U * expected.abs() if t.dtype == "f32" else torch.zeros_like(expected)
        if node.op == "grouped_linear":
            x, chosen = (self.values[node.inputs[i][1:]] for i in (0, 2))
            w = reference.read(node.inputs[1][1:], self.weight).abs()
            (sums,) = ops.run("expert_linear", [x.abs(), w, chosen], {})
            return torch.as_tensor(2 * x.shape[-1] * U * sums + 1e-30)
        if node.op == "linear":
            return self._linear_bound(node).reshape(expected.shape)
        if node.op == "fused.linear" and node.find("kv_write"):
            sums = self.behind_linear(node).reshape(-1, *[1] * (expected.ndim - 1))
            return 16 * U * expected.abs().amax(-1, keepdim=True) + sums
        if node.op == "fused.linear":
            return self._epilogue_bound(node, expected)
        if node.op == "fused.attention":
            values = self.values[node.inputs[1][1:]][1].nan_to_num().abs().max()
            rounding = BF16_ULP if self.kv_dtype == "bf16" else 0.0
            return torch.full_like(expected, float(values) * (rounding + 8 * (self.keys + 64) * U))
        return self._rowwise_bound(node, t, expected)

    def behind_linear(self, node: Node) -> torch.Tensor:
        """[T]: how far a linear's sums may shift what is made of them by rope, which adds two of them."""
        linear = node.find("linear")
        return torch.zeros(()) if linear is None else 2 * self._linear_bound(linear).flatten(1).amax(1)

    def _rowwise_bound(self, node: Node, t: Type, expected: torch.Tensor) -> torch.Tensor:
        # A few roundings per op, and a sum over the row where there is a norm.
        sums = sum(inner.op in ("rmsnorm", "layernorm", "softmax") for inner in node.body)
        roundings = 16 * max(1, len(node.body)) + sums * t.inner[-1]
        relative = 2 * roundings * U + BF16_ULP * len(rounded_inside(node))
        scale = expected.abs().flatten(1).amax(-1)
        for value in node.values():
            source, kind = self.values[value], self.fused.types[value]
            if isinstance(kind, Type) and kind.rows == t.rows and kind.dtype != "i32":
                scale = torch.maximum(scale, source.abs().flatten(1).amax(-1))
        return (relative * scale).reshape(-1, *[1] * (expected.ndim - 1)).expand_as(expected)

    def _linear_bound(self, linear: Node) -> torch.Tensor:
        name = linear.inputs[0][1:]
        x = self.values[name].flatten(1).abs()
        w = reference.read(linear.inputs[1][1:], self.weight).abs()
        bound = 2 * x.shape[1] * U * (x @ w.T) + 1e-30
        if self.norms_itself and self.fused.type(name).dtype == "bf16":
            bound += FLIPS * BF16_ULP * x.amax(1)[:, None] * w.amax(1)
        return bound

    def _epilogue_bound(self, node: Node, expected: torch.Tensor) -> torch.Tensor:
        """How far the epilogue carries the linear's bound: tried with random signs, before any rounding."""
        linear = node.find("linear") or node
        rest = [inner for inner in node.body if inner is not linear]
        inside = rounded_inside(node)
        name = linear.outputs[0]
        exact = reference.run_node(linear, self.values, self.weight)[name]
        slack = self._linear_bound(linear).reshape(exact.shape)

        def result(y: torch.Tensor, jitter: bool = False) -> torch.Tensor:
            values = {**self.values, name: y}
            for inner in rest:
                values.update(self._unrounded(inner, values, jitter and inner in inside))
            return values[rest[-1].outputs[0]] if rest else y

        def magnitude(y: torch.Tensor) -> torch.Tensor:
            """Of what is rounded on the way: an activation near 0 may come from a large sum (GELU's tail)."""
            values = {**self.values, name: y}
            for inner in rest:
                if inner.op == "activation":
                    values[inner.outputs[0]] = values[inner.inputs[0][1:]].abs()
                else:
                    values.update(self._unrounded(inner, values, False))
            return (values[rest[-1].outputs[0]] if rest else y).abs()

        middle = result(exact)
        spread = torch.zeros_like(middle)
        for _ in range(SIGNS):
            spread = torch.maximum(spread, (result(exact + slack * self._signs(exact), True) - middle).abs())
        return 4 * spread + 16 * len(node.body) * U * (expected.abs() + spread + magnitude(exact)) + 1e-30

    def _unrounded(self, node: Node, values: Values, jitter: bool) -> dict[str, torch.Tensor]:
        """A node's results, of a cast the value as it is, or off by a unit in its last place."""
        if node.op != "cast":
            return reference.run_node(node, values, self.weight)
        x = values[node.inputs[0][1:]]
        return {node.outputs[0]: x * (1 + BF16_ULP * self._signs(x)) if jitter else x}

    def _signs(self, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.rng.choice([-1.0, 1.0], like.shape).astype(np.float32))


def rounded_inside(node: Node) -> list[Node]:
    """Casts to bf16 of what a fused node computes that others of its nodes read."""
    made = {name for inner in node.body for name in inner.outputs}
    read = {name for inner in node.body for name in inner.values() if inner.op != "kv_write"}
    casts = [inner for inner in node.body if inner.op == "cast" and inner.attrs["dtype"] == "bf16"]
    return [one for one in casts if one.outputs[0] in read and one.inputs[0][1:] in made]
