"""Text to token ids and back, and the chat template: all from an artifact's tokenizer directory.

tokenizer/tokenizer.json         for the `tokenizers` library
tokenizer/chat_template.jinja    absent if the model has none
tokenizer/generation.json        which ids begin and end a text
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from pagec.compiler.errors import ArtifactError, RequestError
from pagec.runtime.generation import TOKENIZER_DIRECTORY, GenerationDefaults

Message = Mapping[str, Any]


class Tokenizer:
    """An artifact's tokenizer. `decode` leaves special tokens out."""

    def __init__(self, backend: Backend, defaults: GenerationDefaults, chat_template: str | None) -> None:
        self._backend = backend
        self.defaults = defaults
        self._template = ChatTemplate(chat_template) if chat_template else None

    @staticmethod
    def open(artifact: Path) -> Tokenizer:
        """Reads the tokenizer of an artifact; ArtifactError if it has none."""
        directory = artifact / TOKENIZER_DIRECTORY
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ArtifactError(
                "has no tokenizer",
                place=str(artifact),
                remedy="compile from a checkpoint that has one; the engine itself takes token ids",
            )
        template = directory / "chat_template.jinja"
        return Tokenizer(
            Backend.from_file(str(file)),
            GenerationDefaults.read(artifact),
            template.read_text(encoding="utf-8") if template.is_file() else None,
        )

    def encode(self, text: str) -> list[int]:
        """A plain text's ids, with the tokens that the model wants around a text."""
        ids: list[int] = self._backend.encode(text).ids
        bos = self.defaults.bos_token_id
        if self.defaults.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation's ids, up to where the model's answer begins."""
        ids: list[int] = self._backend.encode(self.render_chat(messages), add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[Message]) -> str:
        """A conversation as the text that the model was trained on."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template", place="chat", remedy="send a plain prompt instead"
            )
        defaults = self.defaults
        return self._template.render(messages, bos_token=defaults.bos_token, eos_token=defaults.eos_token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text


class ChatTemplate:
    """A model's Jinja template, run in the sandbox with the names that Hugging Face gives templates."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ArtifactError(
                f"line {error.lineno}: {error}",
                place="chat_template.jinja",
                remedy="mend the checkpoint's chat template and compile the model again",
            ) from error

    def render(self, messages: Sequence[Message], **names: Any) -> str:
        """The conversation as text; RequestError if the template refuses it."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **names)
        except Exception as error:  # a template is a program of its own: anything may go wrong in it
            raise RequestError(f"the chat template refuses it: {error}", place="messages") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter, this one escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
