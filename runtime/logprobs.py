"""Log probabilities on the host, from a step's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_probability(logits: npt.NDArray[np.float32], token: int) -> float:
    """log softmax(logits)[token] of one row [vocab], in float64; the greatest logit is taken out first."""
    row = logits.astype(np.float64)
    row -= row.max()
    return float(row[token] - np.log(np.exp(row).sum()))
