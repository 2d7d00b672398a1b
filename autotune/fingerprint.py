"""What a tuned choice depends on beside its problem: the template's text, and the versions of tools."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from pagec import templates

Backend = Literal["cuda", "cpu"]
# Raised when the cost model changes what it says.
MODEL_VERSION: Final = 1
_NEEDS: Final = re.compile(r"{%-?\s*(?:extends|import|include|from)\s+\"([\w/.]+)\"")


def template_hash(backend: Backend, kind: str) -> str:
    """Of a kernel's template and all that it extends or imports; of a CPU's also the vector library."""
    root = Path(templates.__file__).parent
    todo, texts = [f"{backend}/{kind}.py.jinja"], dict[str, str]()
    if backend == "cpu":
        todo.append("cpu/vector.ll.jinja")
    while todo:
        name = todo.pop()
        if name not in texts:
            texts[name] = (root / name).read_text()
            todo += _NEEDS.findall(texts[name])
    whole = "".join(f"{name}\n{texts[name]}" for name in sorted(texts))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def cpu_versions(threads: int) -> dict[str, str]:
    """Of what times on a CPU depend on beside it: the compiler, if it is here, and the number of threads."""
    versions = {"threads": str(threads)}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["apache-tvm"] = importlib.metadata.version("apache-tvm")
    return versions


def machine_name() -> str:
    """The CPU of this machine as it names itself; empty if it does not."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""
