"""Log probabilities on the host, from a step's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_total(row: npt.NDArray[np.float32]) -> float:
    """log of the sum of exponentials of a row [vocab], in float64; the greatest is taken out first."""
    greatest = float(row.max())
    return greatest + float(np.log(np.exp(row.astype(np.float64) - greatest).sum()))


def log_probability(logits: npt.NDArray[np.float32], token: int) -> float:
    """log softmax(logits)[token] of one row [vocab], in float64."""
    return float(logits[token]) - log_total(logits)
