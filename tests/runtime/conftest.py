"""A toy model on a fake device: its kernels are numpy, but go through the real pool and block tables.

The toy's next token is a hash of all tokens so far (`next_token`), read back from the KV pool by block
tables: any mistake in a batch's arrays, a block table or a preemption changes what it says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagec.compiler.artifact import LIBRARY, Artifact
from pagec.compiler.backends.cpu.build import link_library
from pagec.compiler.dims import Capacity
from pagec.compiler.program import (
    Buffer,
    Kernel,
    KvGroup,
    KvLayout,
    Launch,
    PackedWeight,
    Program,
    RopeTable,
    Slot,
)
from pagec.runtime.device import KernelCall

VOCAB = 50
BLOCK_SIZE = 16
WORDS_PER_SLOT = 16  # one KV head of 16 dims: K and V are 16 words of bf16 pairs per token


def next_token(tokens: list[int]) -> int:
    """What the toy model says after these tokens."""
    return sum((position + 1) * (token + 3) for position, token in enumerate(tokens)) * 7919 % VOCAB


def toy_generate(prompt: list[int], num_tokens: int) -> list[int]:
    """The toy's greedy continuation."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def toy_program(*, T: int = 32, S: int = 4, R: int = 4, max_len: int = 128, num_groups: int = 1) -> Program:
    groups = tuple(KvGroup((2 * g, 2 * g + 1), None) for g in range(num_groups))
    last = num_groups - 1
    layer = f"kv:{2 * last + 1}"
    step = ("step:tokens", "step:positions", "step:query_start", "step:seq_lens", "step:tiles")
    kernels = [
        ("write", ("step:tokens", f"step:slot_mapping.{last}", layer)),
        ("attend", (*step, f"step:block_tables.{last}", layer, "buffer:hidden")),
        ("head", ("step:logit_rows", "buffer:hidden", "buffer:logits", "buffer:argmax")),
        ("head_one", ("step:logit_rows", "buffer:hidden", "buffer:logits", "buffer:argmax")),
    ]
    float_args = {"buffer:logits"}
    return Program(
        model="toy",
        vocab=VOCAB,
        max_len=max_len,
        capacity=Capacity(T, S, R),
        query_tile=8,
        few_tiles=4,
        key_split=256,
        kv=KvLayout("bf16", BLOCK_SIZE, 1, 16, groups),
        slots=(Slot("T", 4), Slot("R", 4), Slot("R", 64 * 4)),
        buffers=(
            Buffer("hidden", "T", (), "i32", 0),
            Buffer("argmax", "R", (), "i32", 1),
            Buffer("logits", "R", (VOCAB,), "f32", 2),
        ),
        weights=(
            PackedWeight("norm", ("norm",), ((64,),), (), "f32", (64,)),
            PackedWeight("w", ("w",), ((4, 16),), (), "f32", (4, 16)),
        ),
        tables=(RopeTable("rope", (1.0, 0.1), 8),),
        scratch_bytes=0,
        kernels=tuple(
            Kernel(
                name,
                name,
                name,
                {},
                tuple("float32" if a in float_args else "int32" for a in args),
                1,
                1,
                0,
            )
            for name, args in kernels
        ),
        body=(
            Launch("write", "T", ((0, "write"),), kernels[0][1]),
            Launch("attend", "tiles", ((0, "attend"),), kernels[1][1]),
        ),
        head=(Launch("head", "R", ((1, "head_one"), (0, "head")), kernels[2][1]),),
        outputs={"argmax": "argmax", "logits": "logits"},
    )


class FakeCalls:
    """Runs a list of calls one by one."""

    def __init__(self, device: FakeDevice, calls: Sequence[KernelCall]) -> None:
        self.device, self.calls = device, calls

    def run(self, *rows: int) -> None:
        self.device.num_runs += 1
        for call in self.calls:
            count = rows[call.rows]
            if count == 0:
                continue
            symbol = next(symbol for limit, symbol in call.variants if limit == 0 or count <= limit)
            self.device.calls.append((symbol, count, self.device.num_workers))
            getattr(self.device, f"_{symbol}")(*call.tensors, count)

    def time_us(self, *rows: int) -> list[float]:
        self.run(*rows)
        return [0.0] * len(self.calls)


class FakeDevice:
    """Numpy as a device. `calls` records (symbol, num_rows, num_workers), `touched` what is to be ready,
    `num_runs` how often a list of calls was run."""

    num_workers = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.tensors: list[tuple[int, str]] = []
        self.touched: list[int] = []
        self.num_runs = 0
        self.break_token: int | None = None
        self.free = 1 << 30

    def allocate(self, nbytes: int, *, parts: int = 1) -> Any:  # noqa: ARG002
        return np.zeros(nbytes, np.uint8)

    def touch_ahead(self, memory: Any, parts: int, nbytes: int) -> None:
        assert memory.nbytes % parts == 0
        self.touched.append(nbytes)

    def settle(self) -> None:
        pass

    def read_file(self, path: Path, offset: int, nbytes: int) -> Any:
        return np.fromfile(path, np.uint8, nbytes, offset=offset)

    def map_file(self, path: Path, offset: int, nbytes: int) -> Any:
        return np.memmap(path, np.uint8, "c", offset, (nbytes,))

    def upload(self, memory: Any, array: Any) -> None:
        memory[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, memory: Any, dtype: Any) -> Any:
        return memory.view(dtype).copy()

    def fill_nan(self, memory: Any) -> None:
        memory.fill(0xFF)

    def upload_rows(self, memory: Any, array: Any, row_bytes: int) -> None:
        for number, row in enumerate(array):
            self.upload(memory[number * row_bytes :][:row_bytes], row)

    def copy_blocks(self, memory: Any, spans: int, span_bytes: int, copies: Any) -> None:
        pool = memory.reshape(spans, -1, span_bytes)
        for source, target in copies:
            pool[:, target] = pool[:, source]

    def read_blocks(
        self, memory: Any, spans: int, span_bytes: int, blocks: Any, spare: Any = None
    ) -> list[Any]:
        del spare
        return [memory.reshape(spans, -1, span_bytes)[:, block].flatten() for block in blocks]

    def write_blocks(self, memory: Any, spans: int, span_bytes: int, blocks: Any, data: Any) -> None:
        for block, array in zip(blocks, data, strict=True):
            memory.reshape(spans, -1, span_bytes)[:, block] = array.reshape(spans, span_bytes)

    def tensor(self, memory: Any, dtype: str) -> Any:
        self.tensors.append((memory.nbytes, dtype))
        return memory.view(dtype)

    def free_bytes(self) -> int:
        return self.free

    def prepare(self, calls: Sequence[KernelCall]) -> FakeCalls:
        return FakeCalls(self, calls)

    def _write(self, tokens: Any, slots: Any, pool: Any, num_rows: int) -> None:
        pool[slots[:num_rows] * WORDS_PER_SLOT] = tokens[:num_rows]

    def _attend(
        self,
        tokens: Any,
        positions: Any,
        query_start: Any,
        seq_lens: Any,
        tiles: Any,
        block_tables: Any,
        pool: Any,
        hidden: Any,
        num_tiles: int,
    ) -> None:
        tables = block_tables.reshape(-1, block_tables.size // (seq_lens.size or 1))
        for sequence, first in tiles[: 2 * num_tiles].reshape(-1, 2):
            for row in range(query_start[sequence] + first, query_start[sequence + 1])[:8]:
                past = np.arange(positions[row] + 1)
                slots = tables[sequence, past // BLOCK_SIZE] * BLOCK_SIZE + past % BLOCK_SIZE
                read = [int(t) for t in pool[slots * WORDS_PER_SLOT]]
                assert read[-1] == tokens[row]
                assert positions[row] < seq_lens[sequence]
                hidden[row] = next_token(read)

    def _head(self, logit_rows: Any, hidden: Any, logits: Any, argmax: Any, num_rows: int) -> None:
        table = logits.reshape(-1, 64)
        for i in range(num_rows):
            token = int(hidden[logit_rows[i]])
            table[i] = 0.0
            table[i, token] = 1.0
            argmax[i] = -1 if token == self.break_token else token

    _head_one = _head


@pytest.fixture(scope="session")
def build_library() -> Callable[[Path, str], None]:
    """Makes kernels.so in a directory from C source, which includes tvm/ffi/c_api.h and defines
    __tvm_ffi_<symbol> functions."""
    found = importlib.util.find_spec("tvm_ffi")
    assert found is not None
    assert found.origin is not None
    headers = Path(found.origin).parent / "include"

    def build(path: Path, source: str) -> None:
        file = path / "kernels.c"
        file.write_text(source)
        link_library(str(path / LIBRARY), [f"-I{headers}", str(file)])
        file.unlink()

    return build


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Artifact]:
    """Makes an artifact object of the toy program (no files but what a test writes)."""
    return lambda **sizes: Artifact(tmp_path, {"files": {}}, toy_program(**sizes))


@pytest.fixture(scope="session")
def make_toy_program() -> Callable[..., Program]:
    return toy_program


@pytest.fixture(scope="session")
def toy_answer() -> Callable[[list[int], int], list[int]]:
    return toy_generate
