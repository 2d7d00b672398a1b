"""Gemma 3 270M with its real weights: local and global layers, prompts across the window, its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from tokenizers import Tokenizer
from transformers import GgufConfig

from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.tokenizer import tokenizer_of_gguf

ROOT = Path(__file__).parent.parent
KEPT = 128  # positions at the end of a prompt whose logits are compared; some 50 lie past the window
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
def test_the_vocabulary_is_as_long_as_the_embedding(model: str, request: pytest.FixtureRequest) -> None:
    file = GgufCheckpoint(request.getfixturevalue(model))
    assert len(file.value("tokenizer.ggml.tokens")) == file.shape("token_embd.weight")[0]


@pytest.mark.slow
def test_the_tokenizer_equals_that_of_transformers(tokenizer: Any, gemma3_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(gemma3_gguf.parent), gguf_file=gemma3_gguf.name)
    for text in [*TEXTS, (ROOT / "runtime" / "scheduler.py").read_text()[:4000]]:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"], text


def last_logits(model: Any, inputs: list[list[int]]) -> torch.Tensor:
    """transformers' logits of each prompt's last positions; those of all, 262,144 wide, take gigabytes."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([t]), logits_to_keep=KEPT).logits[0].float() for t in inputs])


@pytest.mark.slow
def test_prompts_that_cross_the_window(gemma3_gguf: Path, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("tvm")
    texts = [(ROOT / "runtime" / "scheduler.py").read_text(), (ROOT / "LICENSE").read_text()]
    inputs = [tokenizer.encode(text).ids[:n] for text, n in zip(texts, (60, 560), strict=True)]
    # Without the setting transformers may keep the weights in blocks, with kernels of its own for them.
    where = {"gguf_file": gemma3_gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    model = oracle.load(gemma3_gguf.parent, torch.float32, **where)
    assert model.config.rms_norm_eps == pytest.approx(1e-6)
    assert model.config.sliding_window == 512
    expected = last_logits(model, inputs)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")  # a second reading of the file takes a minute
    del model
    rounded = last_logits(oracle.load(tmp_path / "bf16", torch.bfloat16), inputs)
    allowed = oracle.mean_kl(expected, rounded)
    del rounded
    mine = oracle.ours(oracle.compiled(gemma3_gguf, tmp_path / "out", "bf16", max_len=2048), inputs).float()
    rows = [start + i for start, n in ((0, 60), (60, 560)) for i in range(max(0, n - KEPT), n)]
    assert oracle.mean_kl(expected, mine[rows]) <= 1.5 * allowed
