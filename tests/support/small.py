"""A small llama with random weights, compiled for this machine once for all tests that want it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from support.graphs import llama_text


def small_artifact() -> Path:
    """Two layers, vocabulary 256, room for every workload; in the cache of the tests."""
    pytest.importorskip("tvm")
    from pagec.compiler.driver import CompileOptions, compile_model

    cache = Path(os.environ["PAGEC_CACHE"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # the other test process may want it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        spec = cache / "small.yaml"
        spec.write_text(llama_text(max_len=2048, tied=False))
        options = CompileOptions(model=str(spec), weights="random:1")
        return compile_model(options, lambda *_: None).path
