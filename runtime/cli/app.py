"""Puts the commands together; turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli import (
    bench,
    chat,
    compile,
    generate,
    import_model,
    profile,
    replay,
    serve,
    show,
    top,
    tune,
    verify,
)
from pagec.runtime.cli.console import print_error

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

app = typer.Typer(
    name="pagec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("compile")(compile.command)
app.command("import")(import_model.command)
app.command("show")(show.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("serve")(serve.command)
app.command("top")(top.command)
app.command("replay")(replay.command)
app.command("verify")(verify.command)
app.add_typer(bench.app, name="bench")
app.command("profile")(profile.command)
app.add_typer(tune.app, name="tune")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pagec {version('pagec')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compiles YAML model specs into fused kernels and serves them from a paged KV cache.

    A first answer from a checkpoint (compiled on first use):

        [bold]pagec generate SmolLM2.gguf --chat --prompt "Name three rivers."[/]
    """


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
    try:
        app()
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
