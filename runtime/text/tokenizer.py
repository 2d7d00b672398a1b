"""Text to token ids and back, and the chat template: all from an artifact's tokenizer directory.

tokenizer/tokenizer.json         for the `tokenizers` library
tokenizer/chat_template.jinja    absent if the model has none
tokenizer/generation.json        which ids begin and end a text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from pagec.compiler.errors import ArtifactError, RequestError
from pagec.runtime.text.defaults import TOKENIZER_DIRECTORY, GenerationDefaults

if TYPE_CHECKING:
    from pagec.runtime.text.chat_template import ChatTemplate, Message


class Tokenizer:
    """An artifact's tokenizer."""

    def __init__(self, backend: Backend, defaults: GenerationDefaults, chat_template: str | None) -> None:
        self._backend = backend
        self.defaults = defaults
        self.chat_template = chat_template

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

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; ArtifactError if it is none. Jinja is imported when it is asked for: a
        process that completes a plain prompt starts without."""
        from pagec.runtime.text.chat_template import ChatTemplate

        return ChatTemplate(self.chat_template) if self.chat_template else None

    def encode(self, text: str, *, add_special_tokens: bool = True, place: str = "prompt") -> list[int]:
        """A plain text's ids, with the tokens that the model wants around a text (or without); RequestError,
        which names `place`, for a text that is no Unicode."""
        ids = self._encode(text, place=place, add_special_tokens=add_special_tokens)
        bos = self.defaults.bos_token_id
        if add_special_tokens and self.defaults.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **names: Any
    ) -> list[int]:
        """A conversation's ids, up to where the model's answer begins. `tools`: descriptions of functions
        that the model may call; `names`: what else the template knows."""
        text = self.render_chat(messages, tools=tools, **names)
        return self._encode(text, place="messages", add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: ChatTemplate | None = None,
        **names: Any,
    ) -> str:
        """A conversation as the text that the model was trained on, or as another template says."""
        template = template or self.template
        if template is None:
            raise RequestError(
                "this model has no chat template", place="messages", remedy="send a plain prompt instead"
            )
        own = {"bos_token": self.defaults.bos_token, "eos_token": self.defaults.eos_token, "tools": tools}
        return template.render(messages, **{**names, **own})

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **names: Any,
    ) -> str | list[int]:
        """A conversation's ids or its text, with the name and the defaults that Hugging Face gives this."""
        from pagec.runtime.text.chat_template import ChatTemplate

        template = ChatTemplate(chat_template) if chat_template is not None else None
        names["add_generation_prompt"] = add_generation_prompt
        text = self.render_chat(messages, tools=tools, template=template, **names)
        return self._encode(text, place="messages", add_special_tokens=False) if tokenize else text

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.defaults.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text: of several the one that the checkpoint calls so."""
        ids = self.defaults.eos_token_ids
        named = self._backend.token_to_id(self.defaults.eos_token)
        return named if named in ids else min(ids, default=None)

    def _encode(self, text: str, *, place: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can carry
            raise RequestError(f"character {error.start} is no Unicode character", place=place) from error
        # encode_batch lets other threads run meanwhile.
        (found,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token: int) -> str:
        """A token as the vocabulary writes it, "" for one that it does not have; see `token_bytes`."""
        return self._backend.id_to_token(token) or ""

    @cached_property
    def decoders(self) -> dict[str, dict[str, Any]]:
        """What makes text of pieces: the settings of each step, by its type."""
        decoder = self._backend.decoder
        return {} if decoder is None else dict(_steps(json.loads(decoder.__getstate__())))


def _steps(decoder: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder["type"], decoder
