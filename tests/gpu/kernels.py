"""Every kernel of an artifact alone, fed with the reference's values, as `pagec verify` does it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.device import fill_weights, hollow_weights, is_padded
from gpu.models import Finding
from pagec.compiler.artifact import GpuArtifact
from pagec.runtime.cli.verification.gpu import GpuVerification
from pagec.runtime.cli.verification.row import worse


def kernels_beside_reference(artifact: GpuArtifact, seed: int) -> Finding:
    """All kernels, in every span of rows that has them, on fresh inputs and over poisoned outputs; a captured
    step of each bucket beside its launches."""
    rows = _verification(artifact, seed).run(lambda *_: None)
    wrong = [
        f"{row.subject} with {row.num_rows} rows: {row.of_bound:.3g} of the bound, error {row.error:.3g}"
        for row in rows
        if not row.ok
    ]
    left = artifact.kernels.keys() - {row.subject for row in rows}
    wrong += [f"{key} was not compared" for key in sorted(left)]
    worst = worse(*rows)
    detail = (
        f"{len(artifact.kernels)} kernels, {len(rows)} comparisons, the worst {worst.of_bound:.3f} of its"
    )
    return Finding(tuple(wrong), f"{detail} bound: {worst.subject}")


def _verification(artifact: GpuArtifact, seed: int) -> GpuVerification:
    """With random weights: made on the GPU, or on the host where there are few, with padding."""
    weights = artifact.program.weights
    if any(map(is_padded, weights)):
        return GpuVerification(artifact, f"random:{seed}", seed)
    with tempfile.TemporaryDirectory() as directory:
        path = hollow_weights(weights, Path(directory) / "weights.safetensors")
        verification = GpuVerification(artifact, str(path), seed)
    fill_weights(weights, verification.runner.memory.weights, seed)
    return verification
