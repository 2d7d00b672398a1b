"""What `pagec verify` compares: each kernel alone, fed with the reference's values, then the whole model.

row       what a comparison has found
inputs    random steps
bounds    how far results may lie apart
step      one step: the reference's values, each kernel run on them, and the verdicts
model     an artifact's steps and its whole model
cpu, gpu  how the kernels of a device are run
"""

from __future__ import annotations

from pagec.runtime.cli.verification.model import MODEL_SLACK, mean_kl

__all__ = ["MODEL_SLACK", "mean_kl"]
