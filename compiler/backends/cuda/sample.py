"""Sampling: a token of each row of logits -> its kernel."""

from __future__ import annotations

from pagec.compiler.backends.cuda.emit import CudaKernel, make_kernel
from pagec.compiler.dims import round_up, row_stride
from pagec.compiler.launch import Counts, GridRule
from pagec.compiler.sampling import NUM_WORDS, Words, mask_words


def sample(vocab: int, block: int = 1024, warps: int = 8) -> CudaKernel:
    """For rows of `vocab` logits; `work` holds round_up(vocab, block) float32 for each."""
    params = {
        "width": vocab,
        "stride": row_stride((vocab,)),
        "block": block,
        "padded": round_up(vocab, block),
        "num_words": NUM_WORDS,
        "mask_words": mask_words(vocab),
        "words": {word.name.lower(): word.value for word in Words},
    }
    arrays = (
        ("x", "f32"),
        ("settings", "i32"),
        ("edits", "i32"),
        ("masks", "i32"),
        ("work", "f32"),
        ("token", "i32"),
        ("logprob", "f32"),
    )
    return make_kernel("sample", str(vocab), params, arrays, Counts.R, GridRule(1, 1), warps)
