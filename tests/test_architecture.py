"""Who may import whom, who may use which library, and how large a file may grow.

Read from the sources by `ast`: nothing is imported. An import counts as

    top       at module level: it runs when the module is imported
    inside    in a function: it runs when the function does
    typing    under `if TYPE_CHECKING:` it never runs
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("configs", "templates", "compiler", "runtime", "autotune")

# The half of the compiler that describes an artifact. A serving process holds no other.
LIGHT: Final = frozenset(
    f"pagec.compiler.{name}"
    for name in (
        "errors",
        "dims",
        "target",
        "launch",
        "program",
        "gpu_program",
        "probes",
        "artifact",
        "packing",
        "rope",
        "random_weights",
        "ir",
        "sampling",
    )
)

# A part's modules may import those of these parts, and of their own.
MAY_IMPORT: Final[Mapping[str, frozenset[str]]] = {
    "configs": frozenset(),
    "templates": frozenset({"configs"}),
    "compiler light": frozenset(),
    "compiler": frozenset({"configs", "templates", "compiler light"}),
    "runtime.device": frozenset({"compiler light"}),
    "runtime": frozenset({"compiler light", "runtime.device"}),
    "autotune": frozenset({"configs", "templates", "compiler light", "compiler", "runtime.device"}),
    "runtime.server": frozenset({"compiler light", "runtime"}),
    "runtime.cli": frozenset(
        {"configs", "compiler light", "compiler", "runtime", "runtime.device", "runtime.server", "autotune"}
    ),
}

# Libraries by the longest matching prefix: those imported at module level, those inside functions.
LIBRARIES: Final[Mapping[str, tuple[str, str]]] = {
    "pagec.configs": ("", ""),
    "pagec.templates": ("jinja2", ""),
    "pagec.compiler": ("numpy", ""),
    "pagec.compiler.spec": ("yaml", ""),
    "pagec.compiler.importers": ("numpy yaml", "gguf safetensors tokenizers"),
    "pagec.compiler.ops": ("numpy", "torch"),
    "pagec.compiler.reference": ("numpy", "torch"),
    "pagec.compiler.backends.targets": ("yaml", ""),
    "pagec.compiler.backends.cpu.build": ("", "tvm tvm_ffi"),
    "pagec.compiler.backends.cuda.build": ("", "triton"),
    "pagec.compiler.backends.cuda.space": ("yaml", ""),
    "pagec.autotune": ("numpy", ""),
    "pagec.autotune.bundle_arrays": ("numpy", "torch"),
    "pagec.autotune.bundle_run": ("numpy", "torch"),
    "pagec.runtime": ("numpy", ""),
    "pagec.runtime.device.cuda": ("numpy", "torch"),
    "pagec.runtime.sequence": ("", ""),
    "pagec.runtime.kv": ("", ""),
    "pagec.runtime.kv.setup": ("numpy", ""),
    "pagec.runtime.sampling.grammar": ("numpy", "llguidance"),
    "pagec.runtime.llm.llm": ("", "rich"),
    "pagec.runtime.policies": ("", ""),
    "pagec.runtime.preemption": ("", ""),
    "pagec.runtime.room": ("", ""),
    "pagec.runtime.scheduler": ("", ""),
    "pagec.runtime.text.chat_template": ("jinja2", ""),
    "pagec.runtime.text.tokenizer": ("tokenizers", ""),
    "pagec.runtime.server": ("msgspec", ""),
    "pagec.runtime.server.app": ("fastapi msgspec starlette", ""),
    "pagec.runtime.server.front": ("uvloop", ""),
    "pagec.runtime.server.grpc": ("google grpc grpc_health grpc_reflection", ""),
    "pagec.runtime.server.guard": ("starlette", ""),
    "pagec.runtime.server.meter": ("numpy", ""),
    "pagec.runtime.server.metrics": ("prometheus_client", ""),
    "pagec.runtime.server.openai": ("fastapi msgspec pydantic starlette", ""),
    "pagec.runtime.server.site": ("uvicorn", ""),
    "pagec.runtime.cli": ("typer", "rich"),
    "pagec.runtime.cli.serve": ("typer", "rich yaml"),
    "pagec.runtime.cli.verification": ("numpy torch", ""),  # imported inside the command verify
}

MAX_FILE_LINES: Final = 500
MAX_FUNCTION_LINES: Final = 80


@dataclass(frozen=True, slots=True)
class Import:
    """`module` imports `target` (a module of pagec, or a library) on this line."""

    module: str
    target: str
    where: Literal["top", "inside", "typing"]
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target} ({self.where})"


# ------------------------------------------------------------------------------------- reading


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    """The syntax tree of every module of pagec."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(("pagec", *file.relative_to(ROOT).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = ast.parse(file.read_text(), str(file))
    return found


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import of every module, the standard library left out."""
    return tuple(
        Import(module, target, where, line)
        for module, tree in sources().items()
        for target, where, line in _imports(tree, "top")
        if target.partition(".")[0] not in sys.stdlib_module_names
    )


Where = Literal["top", "inside", "typing"]


def _imports(tree: ast.AST, where: Where) -> Iterator[tuple[str, Where, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((_module(alias.name), where, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((_module(f"{node.module}.{a.name}"), where, node.lineno) for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, "inside")
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(node, "typing")
        else:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                name = ast.literal_eval(node.args[0])
                assert isinstance(name, str)
                yield _module(name), where, node.lineno
            yield from _imports(node, where)


def _module(name: str) -> str:
    """The module in "module.attribute"; of a library its first name."""
    if not name.startswith("pagec"):
        return name.partition(".")[0]
    return name if name in sources() else name.rpartition(".")[0]


def part(module: str) -> str:
    """The key of MAY_IMPORT that a module of pagec belongs to."""
    if module in LIGHT or module == "pagec.compiler":
        return "compiler light"
    for name in ("runtime.device", "runtime.server", "runtime.cli"):
        if f"{module}.".startswith(f"pagec.{name}."):
            return name
    return module.split(".")[1]


def of_pagec(target: str) -> bool:
    return target.startswith("pagec.")


def by_prefix(module: str) -> tuple[set[str], set[str]]:
    prefixes = [p for p in LIBRARIES if f"{module}.".startswith(f"{p}.")]
    top, inside = LIBRARIES[max(prefixes, key=len)]
    return set(top.split()), set(inside.split())


def reached(start: str) -> set[str]:
    """Modules and libraries that importing `start` brings in."""
    found: set[str] = set()
    todo = [start]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [module.rpartition(".")[0]] if module.count(".") > 1 else []
            todo += [i.target for i in imports() if i.module == module and i.where == "top"]
    return found


def check(wrong: list[str]) -> None:
    assert not wrong, "\n".join(["", *wrong])


# --------------------------------------------------------------------------------------- rules


def test_packages_import_in_one_direction() -> None:
    wrong = []
    for i in imports():
        mine = part(i.module)
        if of_pagec(i.target) and part(i.target) not in MAY_IMPORT[mine] | {mine}:
            wrong.append(f"{i}: {mine} may not know {part(i.target)}")
    check(wrong)


def test_libraries_stay_where_they_belong() -> None:
    wrong = []
    for i in imports():
        top, inside = by_prefix(i.module)
        if not of_pagec(i.target) and i.target not in (top if i.where == "top" else top | inside):
            wrong.append(str(i))
    check(wrong)


def test_bare_package_names_are_not_imported() -> None:
    check([str(i) for i in imports() if i.target in PACKAGES])


def test_commands_import_the_compiler_only_when_they_run() -> None:
    app = "pagec.runtime.cli.app"
    commands = {i.target for i in imports() if i.module == app and i.target.startswith("pagec.runtime.cli.")}
    assert "pagec.runtime.cli.generate" in commands
    found = {m for name in commands for m in reached(name)}
    heavy = {m for m in found if of_pagec(m) and part(m) in ("compiler", "autotune", "templates")}
    libraries = {m for m in found if not of_pagec(m)}
    check(sorted(heavy | libraries - {"typer"}))


@pytest.mark.parametrize("name", ["engine", "tokenizer", "detokenizer", "text", "llm"])
def test_serving_reaches_nothing_heavy(name: str) -> None:
    libraries = {m for m in reached(f"pagec.runtime.{name}") if not of_pagec(m)}
    assert libraries <= {"numpy", "jinja2", "tokenizers"}


def test_the_engine_process_reaches_nothing_of_the_fronts() -> None:
    libraries = {m for m in reached("pagec.runtime.server.worker") if not of_pagec(m)}
    assert libraries == {"numpy", "msgspec"}


def test_the_light_half_needs_numpy_at_most() -> None:
    for module in LIGHT:
        assert module in sources()
        assert {m for m in reached(module) if not of_pagec(m)} <= {"numpy"}, module


def test_modules_do_not_import_each_other_in_circles() -> None:
    edges = {(i.module, i.target) for i in imports() if of_pagec(i.target) and i.where != "typing"}
    left = set(sources())
    while free := {m for m in left if not any(a == m and b in left for a, b in edges)}:
        left -= free
    check(sorted(left))


# --------------------------------------------------------------------------------------- sizes


def python_files() -> list[Path]:
    return [file for package in (*PACKAGES, "tests") for file in sorted((ROOT / package).rglob("*.py"))]


def test_no_file_is_too_long() -> None:
    sizes = [(len(file.read_text().splitlines()), file) for file in python_files()]
    check([f"{file.relative_to(ROOT)}: {n} lines" for n, file in sizes if n > MAX_FILE_LINES])


def test_no_function_is_too_long() -> None:
    wrong = []
    for file in python_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    check(wrong)


# --------------------------------------------------------------------------------- the project


def test_every_package_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == {module for module in sources() if _is_package(module)}
    assert setuptools["package-dir"] == {f"pagec.{name}": name for name in PACKAGES}
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").is_file()


def _is_package(module: str) -> bool:
    return ROOT.joinpath(*module.split(".")[1:], "__init__.py").is_file()


def test_every_data_file_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns: dict[str, list[str]] = setuptools["package-data"]
    wrong = []
    for name in PACKAGES:
        mine = [*patterns["*"], *patterns.get(f"pagec.{name}", [])]
        installed = {file for pattern in mine for file in (ROOT / name).glob(pattern)}
        files = {f for f in (ROOT / name).rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
        wrong += [str(file.relative_to(ROOT)) for file in files - installed]
    check(sorted(wrong))


def test_every_directory_with_python_is_a_package() -> None:
    directories = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    check([str(d.relative_to(ROOT)) for d in sorted(directories) if not (d / "__init__.py").is_file()])


MACHINE_PATH: Final = re.compile(r"(?<![\w.])/(?:home|root|work|Users|opt|mnt)/\w")
URL: Final = re.compile(r"https?://([\w.-]+)")
HOSTS: Final = frozenset({"www.apache.org", "www.w3.org", "localhost", "127.0.0.1", "arxiv.org"})


def repository_files() -> Iterator[Path]:
    """Text that is part of the repository: not what tools leave beside it."""
    tops = [*PACKAGES, "tests", ".ci"]
    files = [f for top in tops for f in (ROOT / top).rglob("*") if f.is_file()]
    files += [f for f in ROOT.iterdir() if f.is_file() and f.suffix in ("", ".md", ".toml", ".txt")]
    return (f for f in files if "__pycache__" not in f.parts and not f.name.startswith(".coverage"))


def test_no_machine_and_no_foreign_host_is_named() -> None:
    wrong = []
    for file in repository_files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            hosts = set(URL.findall(line)) - HOSTS
            if MACHINE_PATH.search(line) or hosts:
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    check(wrong)
