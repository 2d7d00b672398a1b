"""Lowers the op `sample`: a token of each row of logits."""

from __future__ import annotations

from typing import Final

from pagec.compiler.backends.cpu.calls import Call
from pagec.compiler.backends.cpu.lower_experts import ExpertLowering
from pagec.compiler.dims import round_up, row_stride
from pagec.compiler.ir import Node
from pagec.compiler.sampling import NUM_WORDS, Words, mask_words

# Logits are summed up and looked through by groups. Numeric: the order of sums depends on it.
GROUP: Final = 128
# As many workers sample at once; each has a copy of one row.
MAX_SAMPLERS: Final = 16


class SampleLowering(ExpertLowering):
    """The sampling kernel."""

    def _sample(self, node: Node) -> Call:
        x = self.graph.type(node.inputs[0][1:])
        width = x.inner[0]
        groups = -(-width // GROUP)
        slots = min(MAX_SAMPLERS, self.settings.capacity.R)
        params = {
            "width": width,
            "stride": row_stride(x.inner),
            "group": GROUP,
            "slots": slots,
            "num_words": NUM_WORDS,
            "mask_words": mask_words(width),
            "words": {word.name.lower(): word.value for word in Words},
        }
        names = (*node.inputs, "", *node.outputs)
        arrays = [(name, "int32") for name in ("settings", "edits", "masks")]
        arrays = [("x", "float32"), *arrays, ("work", "float32"), ("token", "int32"), ("logprob", "float32")]
        per_worker = groups * GROUP + 2 * round_up(groups, 16)
        # The scan for the chosen group may look at one more.
        self.scratch_bytes = max(self.scratch_bytes, 4 * (slots * per_worker + 16))
        kernel = self._kernel("sample", str(width), params, arrays, flops=24 * width, bytes_per_row=4 * width)
        args = tuple(f"value:{name.removeprefix('%')}" if name else "scratch:" for name in names)
        return Call(node, "sampled", ((0, kernel),), args)
