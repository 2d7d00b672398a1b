"""`pagec generate` from process start to text, on the toy model as a real artifact with kernels in C."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pagec.compiler.artifact import FORMAT, MANIFEST, dump_json, file_entry, write_weights
from pagec.compiler.program import Program
from pagec.compiler.random_weights import random_packed
from pagec.compiler.target import CpuTarget

KERNELS = r"""
#include <tvm/ffi/c_api.h>
#define KERNEL(name) int __tvm_ffi_##name(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result)
#define INTS(i) ((int32_t*)tensor(a[i])->data)
static DLTensor* tensor(TVMFFIAny a) { return (DLTensor*)a.v_ptr; }
// One worker does all of it.
#define ONE_WORKER if (a[n - 2].v_int64) return 0

KERNEL(write) {
  ONE_WORKER;
  for (int64_t i = 0; i < a[3].v_int64; ++i) INTS(2)[INTS(1)[i] * 16] = INTS(0)[i];
  return 0;
}
KERNEL(attend) {
  ONE_WORKER;
  int32_t *positions = INTS(1), *start = INTS(2), *tiles = INTS(4), *pool = INTS(6);
  int64_t max_blocks = tensor(a[5])->shape[0] / tensor(a[3])->shape[0];
  for (int64_t t = 0; t < a[8].v_int64; ++t) {
    int32_t seq = tiles[2 * t], row = start[seq] + tiles[2 * t + 1];
    for (int32_t end = row + 8; row < end && row < start[seq + 1]; ++row) {
      int64_t sum = 0;
      for (int32_t p = 0; p <= positions[row]; ++p) {
        int32_t slot = INTS(5)[seq * max_blocks + p / 16] * 16 + p % 16;
        sum += (int64_t)(p + 1) * (pool[slot * 16] + 3);
      }
      INTS(7)[row] = sum * 7919 % 50;
    }
  }
  return 0;
}
KERNEL(head) {
  ONE_WORKER;
  for (int64_t i = 0; i < a[4].v_int64; ++i) INTS(3)[i] = INTS(1)[INTS(0)[i]];
  return 0;
}
KERNEL(head_one) { return __tvm_ffi_head(self, a, n, result); }
"""
WORDS = [f"w{i}" for i in range(49)] + ["</s>"]


@pytest.fixture(scope="module")
def artifact(
    build_library: Callable[[Path, str], None],
    make_toy_program: Callable[..., Program],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("artifact")
    program = make_toy_program()
    build_library(path, KERNELS)
    (path / "program.json").write_text(dump_json(program.to_json()))
    write_weights(
        path / "weights.safetensors", program.weights, (random_packed(0, w) for w in program.weights)
    )
    directory = path / "tokenizer"
    directory.mkdir()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages | map(attribute='content') | join(' ') }}")
    (directory / "generation.json").write_text(json.dumps({"eos_token_ids": []}))
    target = CpuTarget("any", platform.machine(), (), {}, 16, 32, False, 1, 1, 1, 1.0)
    files = {str(f.relative_to(path)): file_entry(f) for f in sorted(path.rglob("*")) if f.is_file()}
    head = {"format": FORMAT, "pagec": "0", "model": "toy", "tools": {}, "numerics": {}}
    (path / MANIFEST).write_text(dump_json({**head, "target": target.to_json(), "files": files}))
    return path


def pagec(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagec.runtime.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def text(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


Answer = Callable[[list[int], int], list[int]]


def test_one_prompt_streams_to_stdout(artifact: Path, toy_answer: Answer) -> None:
    done = pagec("generate", artifact, "--prompt", "w1 w2", "--max-tokens", "5")
    assert done.stdout == text(toy_answer([1, 2], 5)) + "\n"
    assert "5 tokens" in done.stderr


def test_several_prompts_are_told_apart(artifact: Path, toy_answer: Answer) -> None:
    done = pagec("generate", artifact, "--prompt", "w1", "--prompt", "w2 w3", "--max-tokens", "4")
    for prompt, ids in (("w1", [1]), ("w2 w3", [2, 3])):
        assert f"> {prompt}\n{text(toy_answer(ids, 4))}\n" in done.stdout


def test_json(artifact: Path, toy_answer: Answer) -> None:
    words = ("--chat", "--system", "w9", "--prompt", "w1", "--prompt", "w2", "--max-tokens", "3")
    found: list[dict[str, Any]] = json.loads(pagec("generate", artifact, *words, "--json").stdout)
    assert [item["prompt"] for item in found] == ["w1", "w2"]
    assert found[0]["prompt_token_ids"] == [9, 1]
    assert found[0]["token_ids"] == toy_answer([9, 1], 3)
    assert found[0]["text"] == text(toy_answer([9, 1], 3))
    assert found[0]["finish_reason"] == "length"
    assert found[0]["memory"]["weights_memory"] == "copy"
    assert 0 < found[0]["timings"]["first_token_s"] <= found[0]["timings"]["total_s"]


def test_mapped_weights_and_where_the_memory_goes(artifact: Path, toy_answer: Answer) -> None:
    words = ("--prompt", "w1 w2", "--max-tokens", "5", "--weights-memory", "mmap", "--verbose")
    done = pagec("generate", artifact, *words)
    assert done.stdout == text(toy_answer([1, 2], 5)) + "\n"
    for part in ("mapped from the file", "workspace", "KV pool"):
        assert part in done.stderr


def test_a_trace_and_a_pool_of_a_given_size(
    artifact: Path, make_toy_program: Callable[..., Program], tmp_path: Path
) -> None:
    size, trace = str(7 * make_toy_program().kv.block_bytes), tmp_path / "trace.json"
    words = ("--prompt", "w1 w2", "--max-tokens", "5", "--kv-bytes", size, "--trace", trace, "--json")
    (found,) = json.loads(pagec("generate", artifact, *words).stdout)
    assert found["memory"]["kv_blocks"] == 7
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "execute" for event in events) == 5


def test_the_answer_ends_at_the_models_length(artifact: Path) -> None:
    (found,) = json.loads(pagec("generate", artifact, "--prompt", "w1 w2", "--json").stdout)
    assert len(found["token_ids"]) == 126


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", ""), "prompt: is empty"),
        (("--prompt", "w1", "--max-tokens", "128"), "129; a sequence holds 128"),
        (("--prompt", "w1", "--weights", "random:x"), "not a seed"),
        (("--prompt", "w1", "--weights", "nowhere"), "no such file"),
    ],
)
def test_errors_are_messages(artifact: Path, words: tuple[str, ...], message: str) -> None:
    done = pagec("generate", artifact, *words, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_compiler_is_imported(artifact: Path) -> None:
    code = f"""
import sys
sys.argv = ["pagec", "generate", {str(artifact)!r}, "--prompt", "w1", "--max-tokens", "2"]
from pagec.runtime.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
heavy = {{"torch", "tvm", "transformers", "triton", "yaml"}} & {{name.split(".")[0] for name in sys.modules}}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cached_blocks_outlive_the_process(artifact: Path, toy_answer: Answer, tmp_path: Path) -> None:
    ids = [i % 40 for i in range(40)]
    words = ("generate", artifact, "--prompt", text(ids), "--max-tokens", "5", "--json", "--kv-dir", tmp_path)
    cold, hit = (json.loads(pagec(*words).stdout)[0] for _ in range(2))
    assert (cold["cached_tokens"], hit["cached_tokens"]) == (0, 32)
    assert cold["token_ids"] == hit["token_ids"] == toy_answer(ids, 5)
    assert hit["memory"]["kv_tiers"] == {"disk": 8 << 30}


def test_a_directory_for_blocks_that_cannot_be_used_is_refused(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = pagec("generate", artifact, "--prompt", "w1", "--kv-dir", tmp_path / "file" / "kv", code=2)
    assert "kv_dir" in done.stderr
