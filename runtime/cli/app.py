"""Puts the commands together; turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Annotated, Final

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.console import print_error

# In the order of the help. All of them take a tenth of a second to import, so only what is wanted is.
COMMANDS: Final[Mapping[str, Callable[[], ModuleType]]] = {
    "compile": lambda: import_module("pagec.runtime.cli.compile"),
    "import": lambda: import_module("pagec.runtime.cli.import_model"),
    "show": lambda: import_module("pagec.runtime.cli.show"),
    "generate": lambda: import_module("pagec.runtime.cli.generate"),
    "chat": lambda: import_module("pagec.runtime.cli.chat"),
    "serve": lambda: import_module("pagec.runtime.cli.serve"),
    "top": lambda: import_module("pagec.runtime.cli.top"),
    "replay": lambda: import_module("pagec.runtime.cli.replay"),
    "verify": lambda: import_module("pagec.runtime.cli.verify"),
    "bench": lambda: import_module("pagec.runtime.cli.bench"),
    "profile": lambda: import_module("pagec.runtime.cli.profile"),
    "tune": lambda: import_module("pagec.runtime.cli.tune"),
}

COMPILE_EXTRA: Final = ("torch", "transformers", "tvm", "gguf", "safetensors", "yaml")
SERVE_EXTRA: Final = (
    "fastapi",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pagec {version('pagec')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compiles YAML model specs into fused kernels and serves them from a paged KV cache.

    A first answer from a checkpoint (compiled on first use):

        [bold]pagec generate SmolLM2.gguf --chat --prompt "Name three rivers."[/]
    """


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line, with some commands or all."""
    app = typer.Typer(
        name="pagec",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for name in names:
        module = COMMANDS[name]()
        if hasattr(module, "app"):  # several commands under one name
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def _missing(library: str) -> PagecError | None:
    """What to say of a library that an extra brings; None of any other."""
    name = library.partition(".")[0]
    if name in COMPILE_EXTRA:
        remedy = "pip install 'pagec[compile]', or compile elsewhere and give the artifact"
        return PagecError(f"the compiler is not installed here (no {name})", remedy=remedy)
    if name in SERVE_EXTRA:
        return PagecError(
            f"the server is not installed here (no {name})", remedy="pip install 'pagec[serve]'"
        )
    return None


def run() -> None:
    """Runs the command line; exit code 2 for an error that the user can mend."""
    wanted = [name for name in sys.argv[1:2] if name in COMMANDS]
    try:
        make_app(wanted or COMMANDS)()
    except PagecError as error:
        print_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = _missing(error.name or "")
        if missing is None:
            raise
        print_error(missing)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more while closing stdout.
        sys.stderr.close()
        sys.exit(1)
