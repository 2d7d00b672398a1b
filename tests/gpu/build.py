"""Makes what check.sh needs: `make gpu-artifacts`, or `python -m gpu.build --target h200 -o build/gpu`.

Needs pagec with its compiler and Triton, and no GPU. What is unchanged comes from the compiler's caches.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from gpu.artifacts import BUILD, KERNELS, LIMIT_BYTES, MODELS, ROOT, TUNE, Made
from pagec.compiler.driver import CompileOptions, compile_model
from pagec.compiler.errors import PagecError
from pagec.runtime.cli import tune_gpu
from pagec.runtime.cli.tuned import tuned_choices

MIB: Final = 1 << 20


def build(target: str, output: Path, made: Mapping[str, Made]) -> None:
    """Compiles the artifacts that are wanted into a directory, in place of what is there."""
    for name, one in made.items():
        with tempfile.TemporaryDirectory() as directory:
            spec = Path(directory) / f"{name}.yaml"
            spec.write_text(yaml.safe_dump(dict(one.spec)))
            options = CompileOptions(
                model=str(spec),
                weights="none",
                target=target,
                strict=one.strict,
                max_len=one.max_len,
                tuned=tuned_choices(target, one.strict),
            )
            result = compile_model(options, lambda *_: None)
        shutil.rmtree(output / name, ignore_errors=True)
        shutil.copytree(result.path, output / name)
        print(f"{name:18} {size_of(output / name) / MIB:6.2f} MiB, {result.seconds:.0f} s", flush=True)


def build_bundle(target: str, output: Path) -> None:
    """The tuner's bundle."""
    tune_gpu.prepare([], target, output / TUNE, tune_gpu.BEST["normal"])
    print(f"{TUNE:18} {size_of(output / TUNE) / MIB:6.2f} MiB", flush=True)


def size_of(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def repository_bytes(root: Path) -> int:
    """Bytes of the files that git holds or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((root / name).stat().st_size for name in names if name and (root / name).is_file())


def main(arguments: Sequence[str]) -> int:
    """1 if what was made is larger than it may be."""
    parser = argparse.ArgumentParser("python -m gpu.build", description="Compiles what check.sh needs.")
    parser.add_argument("--target", default="h200", help="a100, h100 or h200")
    parser.add_argument("-o", "--output", type=Path, default=BUILD)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="artifacts, or `tune`")
    options = parser.parse_args(arguments)
    wanted = options.only or [*MODELS, *KERNELS, TUNE]
    try:
        build(options.target, options.output, {k: v for k, v in {**MODELS, **KERNELS}.items() if k in wanted})
        if TUNE in wanted:
            build_bundle(options.target, options.output)
    except PagecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    made, repository = size_of(options.output), repository_bytes(ROOT)
    print(
        f"{made / MIB:.1f} MiB made, {repository / MIB:.1f} of the repository, {LIMIT_BYTES / MIB:g} at most"
    )
    return int(made + repository > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
