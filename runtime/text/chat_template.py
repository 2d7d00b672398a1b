"""A model's chat template: Jinja, as Hugging Face runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagec.compiler.errors import ArtifactError, RequestError

Message = Mapping[str, Any]


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
            return self._template.render(**{"add_generation_prompt": True, **names, "messages": messages})
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
