"""`pagec generate` from an artifact holds no compiler: the real model, in a fresh process.

How soon the first token comes is measured by `pagec bench startup`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Prints what is loaded when the process ends.
LAUNCHER = """
import atexit, json, sys

@atexit.register
def report():
    first_names = {name.partition(".")[0] for name in sys.modules}
    print("modules:", json.dumps(sorted(first_names)), file=sys.stderr)

sys.argv[0] = "pagec"
from pagec.runtime.cli import main
main()
"""
HEAVY = {"torch", "transformers", "tvm", "tvm_ffi", "triton", "yaml", "gguf", "safetensors"}


def test_generating_from_an_artifact_loads_no_compiler(smollm2: Path) -> None:
    words = ["generate", str(smollm2), "--chat", "--prompt", "Name three rivers.", "--max-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words], capture_output=True, text=True, check=True
    )
    modules = next(line for line in done.stderr.splitlines() if line.startswith("modules: "))
    loaded = set(json.loads(modules.removeprefix("modules: ")))
    assert {"pagec", "numpy", "tokenizers"} <= loaded
    assert not loaded & HEAVY


def test_the_model_answers(smollm2: Path) -> None:
    """Sense is the evidence here: weights, tokenizer, template and kernels all fit together."""
    command = [sys.executable, "-m", "pagec.runtime.cli", "generate", str(smollm2), "--chat"]
    prompt = "What is the capital of France? Answer in one sentence."
    done = subprocess.run(
        [*command, "--prompt", prompt, "--max-tokens", "24"], capture_output=True, text=True, check=True
    )
    assert "Paris" in done.stdout
