"""Puts the commands together; turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli import bench, compile, generate, import_model, profile, show, verify
from pagec.runtime.cli.console import print_error

COMPILE_EXTRA: Final = ("torch", "transformers", "tvm", "gguf", "safetensors", "yaml")

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
app.command("verify")(verify.command)
app.add_typer(bench.app, name="bench")
app.command("profile")(profile.command)


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


def run() -> None:
    """Runs the command line; exit code 2 for an error that the user can mend."""
    try:
        app()
    except PagecError as error:
        print_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in COMPILE_EXTRA:
            raise
        remedy = "pip install 'pagec[compile]', or compile elsewhere and give the artifact"
        print_error(PagecError(f"the compiler is not installed here (no {error.name})", remedy=remedy))
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more while closing stdout.
        sys.stderr.close()
        sys.exit(1)
