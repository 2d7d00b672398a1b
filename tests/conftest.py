"""Fixtures that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.goldens import Golden

# Artifacts that several tests share are compiled once, also across runs while the compiler is unchanged.
os.environ["PAGEC_CACHE"] = str(Path(__file__).parent.parent / "build" / "cache")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares texts with the files under tests/goldens."""
    return Golden(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; fetched where it is not there yet."""
    script = Path(__file__).parent / "fetch_models.py"
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """The artifact of SmolLM2-135M-Instruct, bf16, for this machine."""
    from pagec.compiler.driver import CompileOptions, compile_model

    return compile_model(CompileOptions(model=str(smollm2_gguf)), lambda *_: None).path
