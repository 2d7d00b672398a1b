"""Fixtures that all tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.goldens import Golden


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
