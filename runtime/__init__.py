"""The serving runtime: requests in, tokens out, from an artifact and a paged KV cache.

    LLM -> Engine -> Request -> Sequences -> Scheduler -> Batch -> Runner(Artifact) -> StepOutput -> tokens

From the engine down it needs the standard library, numpy and the device's own library; above it there is
text, and with it `tokenizers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagec.runtime.engine import Engine
    from pagec.runtime.llm.llm import LLM
    from pagec.runtime.llm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from pagec.runtime.sampling.beam import BeamSearchParams
    from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line starts fast."""
    if name == "Engine":
        from pagec.runtime.engine import Engine

        return Engine
    if name == "LLM":
        from pagec.runtime.llm.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from pagec.runtime.sampling.beam import BeamSearchParams

        return BeamSearchParams
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from pagec.runtime.sampling import params

        return getattr(params, name)
    if name in __all__:
        from pagec.runtime.llm import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
