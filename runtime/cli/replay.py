"""`pagec replay`: a request of a live server again, alone, compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.console import JsonFlag, print_json
from pagec.runtime.cli.models import Threads

if TYPE_CHECKING:
    from pagec.runtime.server.record import Record
    from pagec.runtime.server.replay import Comparison


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What serve --record wrote.")],
    id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The answer's id.", show_default=False)
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print the ids that the file has.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="The artifact.", show_default="the one that was served")
    ] = None,
    threads: Threads = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a recorded request alone and compare its tokens and log probabilities, bit for bit.

    Exits with 1 if they differ.

        [bold]pagec replay requests.jsonl --list[/]
        [bold]pagec replay requests.jsonl chatcmpl-0123456789abcdef[/]
    """
    from pagec.runtime.server.record import find_records, read_records

    if list_all:
        _print_list(list(read_records(file)), as_json)
        return
    if id is None:
        raise typer.BadParameter("give the ID of a request, or --list", param_hint="ID")
    records = find_records(file, id)
    found = replay(records, model or Path(records[0].data["artifact"]), threads)
    if as_json:
        print_json([comparison.to_json() for comparison in found])
    else:
        for comparison in found:
            typer.echo(comparison.describe())
    if not all(comparison.is_equal for comparison in found):
        raise typer.Exit(1)


def replay(records: Sequence[Record], path: Path, threads: int | None) -> list[Comparison]:
    """Runs the requests one by one on an artifact; PagecError if it is not the recorded one, or promises no
    equal bits."""
    from pagec.compiler.artifact import open_artifact
    from pagec.runtime.engine import Engine
    from pagec.runtime.kv.setup import owner_of
    from pagec.runtime.server.replay import check_reproducible, run_again

    check_reproducible(path)
    artifact = open_artifact(path)
    data: Mapping[str, Any] = records[0].data
    if owner_of(artifact, data["weights"]).hex() != data["digest"]:
        raise PagecError(
            "is not the artifact that answered, or has other weights",
            place=str(path),
            remedy="give the one that was served: --model ARTIFACT",
        )
    with Engine(artifact, threads=threads, weights=data["weights"], prefix_cache=False) as engine:
        return [run_again(engine, path, record) for record in records]


def _print_list(records: Sequence[Record], as_json: bool) -> None:
    lines = [
        {
            "id": record.id,
            "prompt_tokens": len(record.data["prompt"]),
            "output_tokens": sum(len(choice["token_ids"]) for choice in record.data["choices"]),
            "outcome": record.data.get("outcome"),
        }
        for record in records
    ]
    if as_json:
        print_json(lines)
    for line in () if as_json else lines:
        typer.echo(
            f"{line['id']}  {line['prompt_tokens']} + {line['output_tokens']} tokens, {line['outcome']}"
        )
