"""The command line: help that teaches, clean errors, lean imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagec.runtime.cli.app import COMMANDS


def pagec(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagec.runtime.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_version() -> None:
    assert pagec("--version").stdout.startswith("pagec ")


@pytest.mark.parametrize("command", ["compile", "import", "show", "generate", "verify", "bench", "profile"])
def test_every_command_has_help(command: str) -> None:
    assert command in pagec("--help").stdout
    assert "Usage" in pagec(command, "--help").stdout


def test_help_shows_an_example() -> None:
    assert "--chat --prompt" in pagec("generate", "--help").stdout


def test_an_error_is_a_message_and_code_2(tmp_path: Path) -> None:
    done = pagec("show", "manifest", str(tmp_path), code=2)
    assert done.stdout == ""
    assert "no manifest.json" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_names_itself(tmp_path: Path) -> None:
    done = pagec("generate", str(tmp_path), "--prompt", "x", "--system", "y", code=2)
    assert "--chat" in done.stderr


def test_a_command_alone_is_the_same_as_among_all() -> None:
    """Only what is asked for is imported; the help of all imports all."""
    assert set(COMMANDS) <= set(pagec("--help").stdout.split())
    code = """
import sys
sys.argv = ["pagec", "show", "manifest", "nowhere"]
from pagec.runtime.cli import main
try:
    main()
finally:
    print([name for name in sys.modules if name.startswith("pagec.runtime.cli.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pagec.runtime.cli.show" in done.stdout
    assert "pagec.runtime.cli.serve" not in done.stdout


def test_generating_imports_nothing_heavy() -> None:
    code = """
import sys
from pagec.runtime.cli.app import make_app
make_app()
import pagec.runtime.engine
import pagec.runtime.text.tokenizer, pagec.runtime.text.detokenizer
heavy = {"torch", "tvm", "transformers", "triton", "yaml"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_serving_install_says_what_compiling_needs() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "tvm", "transformers", "gguf", "safetensors", "yaml"]))
sys.argv = ["pagec", "compile", "smollm2-135m"]
from pagec.runtime.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pagec[compile]" in done.stderr
    assert "Traceback" not in done.stderr
