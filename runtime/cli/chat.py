"""`pagec chat`: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.console import print_error, stderr
from pagec.runtime.cli.models import (
    KvBytes,
    MinP,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Weights,
    WeightsMemory,
    WeightsMemoryOption,
    find_artifact,
)
from pagec.runtime.cli.remote import ApiKey, Remote

if TYPE_CHECKING:
    from pagec.runtime.engine import Engine
    from pagec.runtime.text.tokenizer import Tokenizer

HELP: Final = """\
/reset          begin a new conversation
/system TEXT    set the system message (without TEXT: remove it) and begin anew
/save FILE      write the conversation into a file, as JSON
/help           show this
/exit           leave (so does Ctrl-D); Ctrl-C stops an answer"""


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_URL",
            help="An artifact, what compile takes, or the URL of a server.",
            show_default=False,
        ),
    ],
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="what fits")
    ] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    api_key: ApiKey = None,
    threads: Threads = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    kv_bytes: KvBytes = None,
) -> None:
    """Talk with a model. Without a terminal each line of stdin is a message, and stdout gets the answers.

    [bold]pagec chat SmolLM2.gguf[/]
    [bold]pagec chat http://127.0.0.1:8000 --system "Answer in one sentence."[/]
    [bold]echo "Name three rivers." | pagec chat ARTIFACT --temperature 0[/]
    """
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    model_side: Model
    if model.startswith(("http://", "https://")):
        model_side = RemoteModel(Remote(model, api_key), sampling)
    else:
        path, weights = find_artifact(model, weights)
        model_side = LocalModel.open(
            path,
            sampling,
            threads=threads,
            weights=weights,
            weights_memory=weights_memory.kind,
            kv_bytes=kv_bytes,
        )
    conversation = Conversation(model_side, system)
    fine = _talk(conversation) if sys.stdin.isatty() else _read(conversation)
    model_side.close()
    if not fine:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------- the two sides


class Model(Protocol):
    """Who answers."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer's text as it comes. KeyboardInterrupt stops it; PagecError if there is none."""

    def close(self) -> None:
        """Nothing more is asked."""


class RemoteModel:
    """A server's model."""

    def __init__(self, server: Remote, sampling: Mapping[str, Any]) -> None:
        self._server = server
        self._sampling = {name: value for name, value in sampling.items() if value is not None}

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        body = {"messages": messages, "stream": True, **self._sampling}
        for event in self._server.events("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""

    def close(self) -> None:
        pass


class LocalModel:
    """A model in this process."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, sampling: Mapping[str, Any]) -> None:
        from pagec.runtime.sampling.params import SamplingParams

        self._engine = engine
        self._tokenizer = tokenizer
        self._params = SamplingParams(**sampling)

    @staticmethod
    def open(path: Path, sampling: Mapping[str, Any], **options: Any) -> LocalModel:
        """Loads an artifact; `options` as of Engine."""
        from pagec.runtime.engine import Engine
        from pagec.runtime.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.open(path)
        return LocalModel(Engine(path, **options), tokenizer, sampling)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        from pagec.runtime.text.choice import ChoiceText

        text = ChoiceText(self._tokenizer, self._params)
        prompt = self._tokenizer.encode_chat(messages)
        with _noted_interrupts() as raise_if_any:
            request = self._engine.add_request(prompt, params=self._params)
            try:
                for output in self._engine.stream():
                    raise_if_any()
                    yield text.add(output.token_ids, (), output.finish_reason is not None).text
            finally:
                self._engine.abort(request)
                for _ in self._engine.stream():
                    pass
        if request.error is not None:
            raise PagecError(str(request.error))

    def close(self) -> None:
        self._engine.close()


@contextmanager
def _noted_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C is only noted, so that it cannot fall into the middle of a step; what this gives raises
    KeyboardInterrupt if there was one."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))

    def raise_if_any() -> None:
        if seen:
            raise KeyboardInterrupt

    try:
        yield raise_if_any
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------- conversation


@dataclass(slots=True)
class Conversation:
    """What has been said. `say` is for everything but commands."""

    model: Model
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the chat template gets them."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    def say(self, words: str) -> Iterator[str]:
        """The answer's pieces. A turn that brought none is forgotten."""
        self.turns.append({"role": "user", "content": words})
        pieces: list[str] = []
        try:
            for piece in self.model.answer(self.messages):
                pieces.append(piece)
                yield piece
        finally:
            if text := "".join(pieces):
                self.turns.append({"role": "assistant", "content": text})
            else:
                self.turns.pop()

    def save(self, file: Path) -> None:
        """Writes all messages; PagecError if that is not possible."""
        try:
            file.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise PagecError(f"cannot be written: {error.strerror}", place=str(file)) from error


def _obey(conversation: Conversation, line: str) -> bool:
    """Carries a command out; False: it was /exit."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/exit":
        return False
    if name == "/help":
        stderr().print(HELP, markup=False)
    elif name == "/reset":
        conversation.turns.clear()
    elif name == "/system":
        conversation.system = rest or None
        conversation.turns.clear()
    elif name == "/save" and rest:
        conversation.save(Path(rest).expanduser())
    else:
        raise PagecError(f"{line} is no command", remedy="/help shows them")
    return True


# -------------------------------------------------------------------------------- in and out


def _talk(conversation: Conversation) -> bool:
    """At a terminal."""
    import readline  # noqa: F401  (input() edits lines with it)

    stderr().print("[dim]/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends[/]")
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            typer.echo()
            return True
        if not _take(conversation, line):
            return True


def _read(conversation: Conversation) -> bool:
    """From a pipe; False if anything went wrong."""
    fine = True
    for line in sys.stdin:
        try:
            if not _carry_out(conversation, line.strip()):
                break
        except PagecError as error:
            print_error(error)
            fine = False
    return fine


def _take(conversation: Conversation, line: str) -> bool:
    """A line from a terminal, where errors and Ctrl-C end no conversation; False: it shall end."""
    try:
        return _carry_out(conversation, line)
    except KeyboardInterrupt:
        typer.echo()
        stderr().print("[dim]stopped[/]")
    except PagecError as error:
        print_error(error)
    return True


def _carry_out(conversation: Conversation, line: str) -> bool:
    if line.startswith("/"):
        return _obey(conversation, line)
    if line:
        for piece in conversation.say(line):
            sys.stdout.write(piece)
            sys.stdout.flush()
        typer.echo()
    return True
