"""`pagec serve`: OpenAI's HTTP API, gRPC and a page, from one model."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.console import JsonFlag, print_json, stderr
from pagec.runtime.cli.models import (
    Graphs,
    KvBytes,
    KvDir,
    KvDirBytes,
    KvHostBytes,
    ModelOrArtifact,
    Threads,
    Verbose,
    Weights,
    WeightsMemory,
    WeightsMemoryOption,
    find_artifact,
)

if TYPE_CHECKING:
    from pagec.runtime.server.options import Address

KEY_VARIABLE: Final = "PAGEC_API_KEY"


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Options from a YAML file become defaults: what the command line says wins."""
    if file is not None:
        options = {
            parameter.name: parameter
            for parameter in context.command.params
            if parameter.name and parameter.param_type_name == "option"
        }
        found = read_config(file, set(options) - {"config", "help"})
        for name, value in found.items():
            found[name] = _checked(context, options[name], value, file)
        context.default_map = {**(context.default_map or {}), **found}
    return file


def _checked(context: typer.Context, option: Any, value: Any, file: Path) -> Any:
    """The value of an option in the file; one that may be repeated has a list, or a single value."""
    if value is None:
        return None
    if getattr(option, "multiple", False) and not isinstance(value, list):
        value = [value]
    try:
        option.process_value(context, value)
    except (typer.BadParameter, TypeError, ValueError) as error:
        raise PagecError(str(error), place=f"{file}: {option.name.replace('_', '-')}") from error
    return value


def read_config(file: Path, known: set[str]) -> dict[str, Any]:
    """Options by their names, with - or _; PagecError for a name that is none of `known`."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PagecError(f"cannot be read: {error}", place=str(file)) from error
    if not isinstance(data, Mapping | None):
        raise PagecError("is not a map of options to values", place=str(file))
    found = {}
    for key, value in (data or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            meant = f"did you mean {' or '.join(near)}?" if near else f"options: {', '.join(sorted(known))}"
            raise PagecError(f"{key} is no option of serve", place=str(file), remedy=meant)
        found[name] = value
    return found


Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file of options by their names; the command line wins.",
        callback=_read_config,
        is_eager=True,
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: any that is free.")]
GrpcPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="gRPC port; 0: any that is free.", show_default="no gRPC"),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        help=f"A key that requests must show; may be repeated. Also ${KEY_VARIABLE}.", show_default=False
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(help="A name that requests use; may be repeated.", show_default="the model's own"),
]
Policy = Annotated[str, typer.Option(help="Who comes first: fcfs, priority or deadline.")]
Depth = Annotated[
    int | None, typer.Option(min=1, help="Steps in flight.", show_default="1 on a CPU, 2 on a GPU")
]
MaxSeqs = Annotated[
    int | None, typer.Option(min=1, help="Sequences that run at once.", show_default="the artifact's")
]
MaxQueue = Annotated[
    int, typer.Option(min=0, help="Sequences that may wait beyond those; more are refused (429).")
]
PrefillChunk = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a prompt in a step.", show_default="what fits")
]
PrefixCache = Annotated[bool, typer.Option(help="Prompts share the blocks of equal beginnings.")]
ToolFormat = Annotated[
    str | None,
    typer.Option(help="How tool calls are written: hermes, llama3, mistral.", show_default="by the template"),
]
Record = Annotated[
    Path | None, typer.Option(help="Append every request here, for pagec replay.", show_default=False)
]
MaxBodyBytes = Annotated[int, typer.Option(min=1024, help="Largest body of a request.")]
DrainSeconds = Annotated[float, typer.Option(min=0.0, help="At the end: how long running requests may take.")]


def command(
    model: ModelOrArtifact,
    config: Config = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    api_key: ApiKeys = None,
    served_model_name: Names = None,
    policy: Policy = "fcfs",
    depth: Depth = None,
    max_seqs: MaxSeqs = None,
    max_queue: MaxQueue = 256,
    prefill_chunk: PrefillChunk = None,
    prefix_cache: PrefixCache = True,
    tool_format: ToolFormat = None,
    record: Record = None,
    max_body_bytes: MaxBodyBytes = 16 << 20,
    drain_seconds: DrainSeconds = 30.0,
    threads: Threads = None,
    graphs: Graphs = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    kv_bytes: KvBytes = None,
    kv_dir: KvDir = None,
    kv_dir_bytes: KvDirBytes = None,
    kv_host_bytes: KvHostBytes = 0,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model: OpenAI's API under /v1, a page to chat and to watch at /, metrics, gRPC.

    A model that is no artifact is compiled first (once). SIGTERM ends gracefully, a second one at once.

        [bold]pagec serve SmolLM2.gguf --port 8000[/]
        [bold]pagec serve ARTIFACT --config serve.yaml --api-key secret --grpc-port 8001[/]
    """
    del config
    from pagec.runtime.server.front import run_front
    from pagec.runtime.server.limits import RequestLimits
    from pagec.runtime.server.options import FrontOptions

    path, weights = find_artifact(model, weights)
    options = FrontOptions(
        path.resolve(),
        {
            "threads": threads,
            "graph_rows": graphs,
            "weights": weights,
            "weights_memory": weights_memory.kind,
            "kv_bytes": kv_bytes,
            "kv_dir": None if kv_dir is None else str(kv_dir.absolute()),
            "kv_dir_bytes": kv_dir_bytes,
            "kv_host_bytes": kv_host_bytes,
            "policy": policy,
            "depth": depth,
            "max_seqs": max_seqs,
            "prefill_chunk": prefill_chunk,
            "prefix_cache": prefix_cache,
        },
        host=host,
        port=port,
        grpc_port=grpc_port,
        names=tuple(served_model_name or ()),
        api_keys=_keys(api_key or ()),
        tool_format=tool_format,
        limits=RequestLimits(max_body_bytes=max_body_bytes),
        max_queue=max_queue,
        drain_s=drain_seconds,
        record=record,
    )
    run_front(options, lambda address: _say_ready(address, verbose=verbose, as_json=as_json))


def _keys(given: Sequence[str]) -> tuple[str, ...]:
    """The keys of the command line and of the environment, where commas stand between several."""
    variable = os.environ.get(KEY_VARIABLE)
    named = [] if variable is None else [key for key in variable.split(",") if key.strip()]
    empty = KEY_VARIABLE if variable is not None and not named else "--api-key"
    if empty == KEY_VARIABLE or not all(key.strip() for key in given):
        raise PagecError(
            "a key is empty, with which the server would be open to all",
            place=empty,
            remedy="give a key, or leave it out (unset the variable) for a server without keys",
        )
    keys = tuple(dict.fromkeys(key.strip() for key in (*given, *named)))
    for key in keys:
        if not key.isascii() or not key.isprintable():
            raise PagecError(
                "a key has characters that no header can carry", place="--api-key", remedy="use plain ASCII"
            )
    return keys


def _say_ready(address: Address, *, verbose: bool, as_json: bool) -> None:
    """Nothing is compiled or loaded any more; on stdout, for people or programs."""
    engine = address.engine
    if as_json:
        print_json(
            {
                "ready": address.url,
                "grpc_port": address.grpc_port,
                "model": engine.model,
                "engine_pid": address.engine_pid,
                "digest": engine.digest,
            }
        )
    else:
        grpc = f", gRPC on port {address.grpc_port}" if address.grpc_port is not None else ""
        typer.echo(f"{engine.model} is ready: {address.url} (OpenAI's API under /v1{grpc})")
    if verbose:
        stderr().print("\n".join(f"[dim]{line}[/]" for line in engine.memory))
    sys.stdout.flush()
