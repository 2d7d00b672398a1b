"""An artifact's tokenizer directory: text, special tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from pagec.compiler.errors import ArtifactError, RequestError
from pagec.runtime.text.defaults import GenerationDefaults
from pagec.runtime.text.tokenizer import Tokenizer

WORDS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "hello", "world", "1"]
CHATML = """{% for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('who?') }}{% endif %}
<|{{ message.role }}|> {{ message.content }} {{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""
USER = [{"role": "user", "content": "hello world"}]


def write(
    path: Path, *, template: str | None = None, bos_in_processor: bool = False, **generation: Any
) -> Path:
    directory = path / "tokenizer"
    directory.mkdir()
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:5])
    if bos_in_processor:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    data = {
        "eos_token_ids": [2],
        "bos_token_id": 1,
        "add_bos": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "generation.json").write_text(json.dumps({**data, **generation}))
    return path


@pytest.mark.parametrize("in_processor", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_stands_once_if_asked(tmp_path: Path, in_processor: bool, add_bos: bool) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, bos_in_processor=in_processor, add_bos=add_bos))
    assert tokenizer.encode("hello world") == ([1, 5, 6] if in_processor or add_bos else [5, 6])


def test_decode_leaves_special_tokens_out(tmp_path: Path) -> None:
    assert Tokenizer.open(write(tmp_path)).decode([1, 5, 6, 2]) == "hello world"


def test_a_chat_has_no_second_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, template=CHATML, bos_in_processor=True))
    assert tokenizer.render_chat(USER) == "<|user|> hello world </s>\n<|assistant|>"
    assert tokenizer.encode_chat(USER) == [3, 5, 6, 2, 4]


def test_a_template_may_refuse(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, template=CHATML))
    with pytest.raises(RequestError, match="who"):
        tokenizer.encode_chat([{"role": "robot", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_must_not_do_is_a_request_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, template=template))
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.render_chat(USER)


def test_names_that_templates_use(tmp_path: Path) -> None:
    template = (
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %} {{ bos_token }}"
        "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        " {{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer.open(write(tmp_path, template=template))
    assert tokenizer.render_chat(USER) == '{"a": "<é>"} <s>1 4'


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.open(write(tmp_path)).encode_chat(USER)


def test_a_broken_template_harms_conversations_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, template="{% if %}"))
    assert tokenizer.encode("hello")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="line 1"):
            tokenizer.encode_chat(USER)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no tokenizer"):
        Tokenizer.open(tmp_path)
    assert GenerationDefaults.read(tmp_path) == GenerationDefaults()


def test_generation_defaults(tmp_path: Path) -> None:
    write(tmp_path, eos_token_ids=[2, 4], add_bos=True)
    assert GenerationDefaults.read(tmp_path) == GenerationDefaults(frozenset({2, 4}), 1, True, "<s>", "</s>")
