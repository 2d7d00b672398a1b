"""Gemma 3 270M with its real weights: local and global layers, prompts across the window, its tokenizer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from tokenizers import Tokenizer

from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.tokenizer import tokenizer_of_gguf

ROOT = Path(__file__).parent.parent
TEXTS = [
    "Hello, world!",
    "  leading and   several  spaces ",
    "日本語のテキストと中文",
    "emoji 🙂👩‍👩‍👧 and é à ñ",
    "def f(x):\n\treturn x  # comment\n\n\n",
    "12345 in 1999, 3.14 and 1,000,000",
    "x1y22z333 a  1 ٣٤٥ ²³",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(gemma3_gguf: Path) -> Any:
    files = tokenizer_of_gguf(GgufCheckpoint(gemma3_gguf))
    assert files is not None
    return Tokenizer.from_str(files.tokenizer_json)


@pytest.mark.parametrize("model", ["gemma3_gguf", "smollm2_gguf"])
def test_metadata_are_read_in_a_moment(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    began = time.process_time()
    file = GgufCheckpoint(path)
    assert len(file.value("tokenizer.ggml.tokens")) == file.shape("token_embd.weight")[0]
    assert time.process_time() - began < 1.5


@pytest.mark.slow
def test_the_tokenizer_equals_that_of_transformers(tokenizer: Any, gemma3_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(gemma3_gguf.parent), gguf_file=gemma3_gguf.name)
    for text in [*TEXTS, (ROOT / "runtime" / "scheduler.py").read_text()[:4000]]:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.slow
def test_prompts_that_cross_the_window(gemma3_gguf: Path, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("tvm")
    texts = [(ROOT / "runtime" / "scheduler.py").read_text(), (ROOT / "LICENSE").read_text()]
    inputs = [tokenizer.encode(text).ids[:n] for text, n in zip(texts, (60, 560), strict=True)]
    where = {"gguf_file": gemma3_gguf.name}
    expected = oracle.theirs(oracle.load(gemma3_gguf.parent, torch.float32, **where), inputs).float()
    rounded = oracle.theirs(oracle.load(gemma3_gguf.parent, torch.bfloat16, **where), inputs).float()
    allowed = oracle.mean_kl(expected, rounded)
    del rounded
    mine = oracle.ours(oracle.compiled(gemma3_gguf, tmp_path / "out", "bf16", max_len=2048), inputs).float()
    assert oracle.mean_kl(expected, mine) <= 1.5 * allowed
