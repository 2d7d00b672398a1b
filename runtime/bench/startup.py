"""From process start to the first token: what a user of `pagec generate` waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pagec.compiler.errors import ArtifactError, PagecError
from pagec.runtime.bench.summary import Summary, summarise_all
from pagec.runtime.text.defaults import TOKENIZER_DIRECTORY

PROMPT: Final = "The three longest rivers are"
NUM_TOKENS: Final = 2


def measure_startup(path: Path, options: Sequence[str], repeat: int) -> dict[str, Summary]:
    """`ttft_s` of fresh processes, after one that brings the files into memory. `options` of generate."""
    if not (path / TOKENIZER_DIRECTORY).is_dir():
        raise ArtifactError(
            "has no tokenizer, which generating text needs",
            place=str(path),
            remedy="compile from a checkpoint that has one",
        )
    words = [str(path), "--prompt", PROMPT, "--max-tokens", str(NUM_TOKENS), *options]
    command = [sys.executable, "-m", "pagec.runtime.cli", "generate", *words]
    times = [first_output_s(command) for _ in range(repeat + 1)]
    return summarise_all([{"ttft_s": seconds} for seconds in times[1:]])


def first_output_s(command: Sequence[str]) -> float:
    """Seconds from starting a process to its first byte of output, Python's bytecode being there as it is
    where a program was installed."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - began
        _, errors = process.communicate()
    if process.returncode or not first:
        raise PagecError(f"the child process failed: {errors.decode().strip()}", place=" ".join(command))
    return elapsed
