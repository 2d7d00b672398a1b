"""Fixtures that all tests share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.goldens import Golden

# Artifacts that several tests share are compiled once, also across runs while the compiler is unchanged.
CACHE = Path(__file__).parent.parent / "build" / "cache"
os.environ["PAGEC_CACHE"] = str(CACHE)
# torch's threads wait by spinning, in each of the test processes: with one the whole suite is faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --update-golden only the tests that have golden files run."""
    if config.getoption("--update-golden"):
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares texts with the files under tests/goldens."""
    return Golden(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; fetched where it is not there yet."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M as a GGUF file; fetched where it is not there yet."""
    return fetched("gemma3")


def fetched(model: str) -> Path:
    command = [sys.executable, str(Path(__file__).parent / "fetch_models.py"), model]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """The artifact of SmolLM2-135M-Instruct, bf16, for this machine."""
    from pagec.compiler.driver import CompileOptions, compile_model

    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # the other test process may want it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_model(CompileOptions(model=str(smollm2_gguf)), lambda *_: None).path
