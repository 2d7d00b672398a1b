"""`pagec compile`: a model to an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagec.runtime.cli.console import JsonFlag, print_json, progress_display, stderr

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A YAML spec, a name in configs/models, a Hugging Face directory or a GGUF file.",
        show_default=False,
    ),
]

TARGET_HELP = "cpu (this machine), a100, h100, h200 or another name in configs/targets."
OpsOption = Annotated[
    list[Path] | None,
    typer.Option("--ops", metavar="FILE.py", help="Registers ops of your own; it is run as code."),
]


def command(
    model: ModelArgument,
    weights: Annotated[
        str | None,
        typer.Option(help="PATH of a checkpoint, none, or random:SEED.", show_default="the model's own"),
    ] = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "cpu",
    dtype: Annotated[str, typer.Option(help="bf16 or f32: weights and matrix inputs.")] = "bf16",
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16 or f32: keys and values.", show_default="as --dtype")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a sequence.", show_default="the model's own")
    ] = None,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a step.", show_default="a default")
    ] = None,
    max_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most sequences in a step.", show_default="a default")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a block of the KV pool, a multiple of 16.", show_default="16"),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="On a GPU: the same bits alone or in a crowd, at some speed. CPUs always do."
        ),
    ] = False,
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="With the choices of `pagec tune`'s tables.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Artifact directory.", show_default="a cache")
    ] = None,
    ops: OpsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compile a model into an artifact.

    The same inputs are compiled once: without -o, the artifact is found in the cache again.

        [bold]pagec compile SmolLM2.gguf[/]
        [bold]pagec compile configs/models/smollm2-135m.yaml --weights none -o smollm2[/]
        [bold]pagec compile llama-3.2-1b --weights none --target h100 -o llama[/]
    """
    from pagec.compiler.driver import CompileOptions, compile_model
    from pagec.runtime.cli.tuned import tuned_choices

    options = CompileOptions(
        model=model,
        weights=weights,
        target=target,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_len=max_len,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        block_size=block_size,
        output=output,
        ops=tuple(ops or ()),
        strict=strict,
        tuned=tuned_choices(target, strict) if tuned else {},
    )
    with progress_display() as progress:
        result = compile_model(options, progress)
    if as_json:
        print_json({"path": str(result.path), "compiled": result.compiled, "seconds": result.seconds})
    else:
        what = f"compiled in {result.seconds:.1f} s" if result.compiled else "already compiled"
        stderr().print(f"[green]{what}[/]")
        typer.echo(result.path)
