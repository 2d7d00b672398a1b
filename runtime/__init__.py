"""The serving runtime: requests in, tokens out, from an artifact and a paged KV cache.

    Request -> Sequences -> Scheduler -> Batch -> Runner(Artifact) -> StepOutput -> tokens

From the engine down it needs the standard library, numpy and the device's own library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagec.runtime.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line starts fast."""
    if name == "Engine":
        from pagec.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
