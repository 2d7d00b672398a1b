"""`pagec generate`: greedy text from a model, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pagec.runtime.cli.console import JsonFlag, print_error, print_json, print_ledger, stderr
from pagec.runtime.cli.models import (
    Graphs,
    KvBytes,
    KvDir,
    KvDirBytes,
    KvHostBytes,
    MinP,
    ModelOrArtifact,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    Weights,
    WeightsMemory,
    WeightsMemoryOption,
    find_artifact,
)

if TYPE_CHECKING:
    from pagec.runtime.engine import Engine
    from pagec.runtime.sampling.params import SamplingParams
    from pagec.runtime.sequence import Request
    from pagec.runtime.text.detokenizer import Detokenizer
    from pagec.runtime.text.tokenizer import Tokenizer
    from pagec.runtime.trace import Recorder

DEFAULT_MAX_TOKENS: Final = 256


def command(
    model: ModelOrArtifact,
    prompt: Annotated[list[str], typer.Option(help="Text to go on from; several make one batch.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(help="System message (with --chat).", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of an answer.", show_default=f"{DEFAULT_MAX_TOKENS}, or what fits"
        ),
    ] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    threads: Threads = None,
    graphs: Graphs = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    kv_bytes: KvBytes = None,
    kv_dir: KvDir = None,
    kv_dir_bytes: KvDirBytes = None,
    kv_host_bytes: KvHostBytes = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of all steps here.", show_default=False),
    ] = None,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate text. One prompt is streamed; of several, each answer is printed when complete.

    A model that is no artifact is compiled first (once).

        [bold]pagec generate SmolLM2.gguf --chat --prompt "What is the capital of France?"[/]
        [bold]pagec generate ARTIFACT --prompt "Once upon" --prompt "In 1969" --max-tokens 32 --json[/]
    """
    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="--system")
    from pagec.runtime.sampling.params import SamplingParams

    path, weights = find_artifact(model, weights)
    began = time.perf_counter()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    engine, tokenizer = _load(
        path,
        threads=threads,
        graph_rows=graphs,
        weights=weights,
        weights_memory=weights_memory.kind,
        kv_bytes=kv_bytes,
        kv_dir=kv_dir,
        kv_dir_bytes=kv_dir_bytes,
        kv_host_bytes=kv_host_bytes,
    )
    load_s = time.perf_counter() - began
    if verbose:
        print_ledger(engine.ledger)
    recorder = _record(engine) if trace is not None else None
    answers = [
        _ask(engine, tokenizer, text, _encode(tokenizer, text, chat, system), max_tokens, params)
        for text in prompt
    ]
    _answer(engine, answers, load_s, as_json)
    engine.close()
    if recorder is not None and trace is not None:
        recorder.write(trace)
    if any(answer.request.error for answer in answers):
        raise typer.Exit(1)
    if not as_json:
        _print_figures(answers, load_s)


def _answer(engine: Engine, answers: Sequence[Answer], load_s: float, as_json: bool) -> None:
    """Runs the requests and prints what comes: JSON at the end, one text as it comes, several when whole."""
    if as_json:
        _run(engine, answers, _print_nothing)
        ledger = engine.ledger.to_json()
        print_json([{**answer.to_json(load_s), "memory": ledger} for answer in answers])
    elif len(answers) == 1:
        _run(engine, answers, _print_piece)
        typer.echo()
    else:
        _run(engine, answers, _print_complete)


@dataclass(slots=True)
class Answer:
    """One prompt's text as it grows. Times are seconds since the request was made."""

    prompt: str
    request: Request
    detokenizer: Detokenizer
    began: float = field(default_factory=time.perf_counter)
    text: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0

    def to_json(self, load_s: float) -> dict[str, Any]:
        request = self.request
        return {
            "prompt": self.prompt,
            "text": self.text,
            "prompt_token_ids": list(request.prompt),
            "token_ids": request.output,
            "cached_tokens": request.num_cached_tokens,
            "finish_reason": request.finish_reason,
            "error": str(request.error) if request.error else None,
            "timings": {
                "load_s": round(load_s, 4),
                "first_token_s": round(self.first_token_s, 4),
                "total_s": round(self.total_s, 4),
            },
        }


def _load(path: Path, **options: Any) -> tuple[Engine, Tokenizer]:
    """The tokenizer and its library are read while the weights are."""
    from pagec.compiler.artifact import open_artifact
    from pagec.runtime.engine import Engine

    artifact = open_artifact(path)
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(_open_tokenizer, path)
        engine = Engine(artifact, **options)
        return engine, tokenizer.result()


def _open_tokenizer(path: Path) -> Tokenizer:
    from pagec.runtime.text.tokenizer import Tokenizer

    return Tokenizer.open(path)


def _record(engine: Engine) -> Recorder:
    """A recorder of the engine's steps."""
    from pagec.runtime.trace import Recorder

    engine.trace = recorder = Recorder()
    return recorder


def _encode(tokenizer: Tokenizer, prompt: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}])


def _ask(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    max_tokens: int | None,
    params: SamplingParams,
) -> Answer:
    from pagec.runtime.text.detokenizer import Detokenizer

    if max_tokens is None:
        max_tokens = max(min(DEFAULT_MAX_TOKENS, engine.program.max_len - len(ids)), 1)
    return Answer(prompt, engine.add_request(ids, max_tokens, params=params), Detokenizer(tokenizer.decode))


def _run(engine: Engine, answers: Sequence[Answer], on_piece: Callable[[Answer, str], None]) -> None:
    by_request = {answer.request.id: answer for answer in answers}
    for output in engine.stream():
        answer = by_request[output.request.id]
        answer.total_s = time.perf_counter() - answer.began
        answer.first_token_s = answer.first_token_s or answer.total_s
        piece = answer.detokenizer.add(output.token_ids)
        if output.finish_reason:
            piece += answer.detokenizer.finish()
        answer.text += piece
        on_piece(answer, piece)


def _print_nothing(_answer: Answer, _piece: str) -> None:
    pass


def _print_piece(answer: Answer, piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
    _print_fault(answer)


def _print_complete(answer: Answer, _piece: str) -> None:
    if answer.request.is_finished:
        typer.secho(f"> {answer.prompt}", bold=True)
        typer.echo(f"{answer.text}\n")
        _print_fault(answer)


def _print_fault(answer: Answer) -> None:
    from pagec.compiler.errors import PagecError

    error = answer.request.error
    if error is not None:
        print_error(error if isinstance(error, PagecError) else PagecError(str(error)))


def _print_figures(answers: Sequence[Answer], load_s: float) -> None:
    tokens = sum(len(answer.request.output) for answer in answers)
    total = max(answer.total_s for answer in answers)
    first = min(answer.first_token_s for answer in answers)
    stderr().print(
        f"[dim]{tokens} tokens in {total:.2f} s ({tokens / total:.1f}/s), "
        f"first after {first:.2f} s, loaded in {load_s:.2f} s[/]"
    )
