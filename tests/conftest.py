"""Fixtures that all tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; fetched where it is not there yet, skipped where it cannot be."""
    script = Path(__file__).parent / "fetch_models.py"
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {found.stderr.strip()[-200:]}")
    return Path(found.stdout.strip())
