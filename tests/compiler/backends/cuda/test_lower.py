"""A whole small model, lowered and run in Triton's interpreter, against the graph's meaning."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.graphs import llama_graph, llama_text
from support.interpret import KINDS, interpret

from pagec.compiler import reference
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.backends.cuda.knobs import Chooser
from pagec.compiler.backends.cuda.lower import Call, Lowering, Settings
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.dims import Capacity, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.packing import buffer_to_rows, pack
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import kv_layout
from pagec.compiler.rope import cos_sin_of
from pagec.compiler.spec import build_graph, parse_spec

BLOCKS, BLOCK, MAX_LEN, BUCKET = 12, 16, 64, 32
FEW = 8  # rows of a smaller bucket, in which linears norm their rows themselves


class Model:
    """A graph lowered for two buckets, with random weights, and the memory of its launches."""

    def __init__(self, source: Graph) -> None:
        self.source = source
        self.graph = fuse_writes(run_passes(self.source, Numbers("f32", "f32")))
        self.kv = kv_layout(self.graph, "f32", BLOCK, "rows")
        target, capacity = load_cuda_target("h100"), Capacity(BUCKET, 4, BUCKET)
        settings = Settings(capacity, MAX_LEN, self.kv, Chooser(target, {}))
        lowering = Lowering(self.graph, self.source, settings)
        self.calls = {
            rows: [call for node in self.graph.nodes for call in lowering.lower(node, rows)]
            for rows in (FEW, BUCKET)
        }
        rng = np.random.default_rng(0)
        self.weights = {
            name: (rng.standard_normal(t.inner) * (0.2 if len(t.inner) > 1 else 1.0)).astype(np.float32)
            for name, t in self.source.weights.items()
        }
        self.memory: dict[str, Any] = {
            f"weight:{w.name}": pack(w, [self.weights[part] for part in w.parts])
            for w in lowering.packer.weights.values()
        }
        for table in lowering.packer.tables.values():
            turns = np.array(table.frequencies, np.float32)
            self.memory[f"table:{table.name}"] = np.stack(cos_sin_of(turns, table.length, table.scale))
        for name in self.graph.inputs:
            if isinstance(t := self.graph.types[name], CacheType):
                size = BLOCKS * self.kv.span_bytes // 4
                self.memory[f"kv:{t.layer}"] = np.full(size, np.nan, np.float32)
        self.scratch = np.full(lowering.scratch_bytes // 4, np.nan, np.float32)

    def run(self, step: dict[str, Any], counts: dict[str, int]) -> Any:
        """The logits of a step."""
        self.memory |= step
        for call in next(calls for rows, calls in self.calls.items() if counts["T"] <= rows):
            interpret(call.kernel, self._arrays(call, counts), counts)
        raw = self.memory["value:logits"]
        return buffer_to_rows(raw, self.graph.type("logits").inner, "f32")

    def _arrays(self, call: Call, counts: dict[str, int]) -> dict[str, Any]:
        arrays = {}
        for (name, element), arg in zip(call.kernel.arrays, call.args, strict=True):
            if arg.startswith("scratch:"):
                arrays[name] = self.scratch[int(arg[8:]) // 4 :].view(KINDS[element])
            elif arg.startswith("partial:"):
                arrays[name] = self.memory.setdefault(arg, np.full(1 << 14, np.nan, np.float32))
            else:
                if arg not in self.memory:
                    self.memory[arg] = self._buffer(arg[6:], counts)
                arrays[name] = self.memory[arg]
        return arrays

    def _buffer(self, name: str, counts: dict[str, int]) -> Any:
        t = self.graph.type(name)
        assert t.rows is not None
        poison = -1 if t.dtype == "i32" else np.nan
        return np.full((counts[t.rows], row_stride(t.inner)), poison, KINDS[t.dtype])


def step_arrays(model: Model, chunks: list[tuple[int, int]], tables: Any, tokens: Any) -> Any:
    """(arrays, counts) of a step of (tokens before, tokens now) of each sequence; all its rows' logits."""
    starts = np.cumsum([0, *(now for _, now in chunks)]).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in chunks]).astype(np.int32)
    owner = np.repeat(np.arange(len(chunks)), [n for _, n in chunks])
    slots = (tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
    prefill = next(call for call in model.calls[BUCKET] if call.kernel.template == "attention_prefill")
    height = prefill.kernel.params["query_tile"]
    # Single new tokens go to decode attention, chunks to prefill.
    tiles = [(s, row) for s, (_, n) in enumerate(chunks) if n > 1 for row in range(0, n, height)]
    splits = [(s, 0) for s, (_, n) in enumerate(chunks) if n == 1]
    split_start = np.cumsum([0, *(int(n == 1) for _, n in chunks)]).astype(np.int32)
    rows = len(positions)
    greedy = np.zeros((rows, 16), np.int32)
    arrays = {
        "value:tokens": tokens,
        "step:positions": positions,
        "value:positions": positions,
        "value:logit_rows": np.arange(rows, dtype=np.int32),
        "value:sampling.settings": greedy,
        "value:sampling.edits": np.zeros(2, np.int32),
        "value:sampling.masks": np.zeros(1, np.int32),
        "step:query_start": starts,
        "step:seq_lens": np.array([b + n for b, n in chunks], np.int32),
        "step:tiles": np.array([*tiles, (0, 0)], np.int32),
        "step:splits": np.array([*splits, (0, 0)], np.int32),
        "step:split_start": split_start,
    }
    for group in range(len(model.kv.groups)):
        arrays[f"step:block_tables.{group}"] = tables
        arrays[f"step:slot_mapping.{group}"] = slots
    sizes = {"T": rows, "R": rows, "S": len(chunks), "TILES": len(tiles), "SPLITS": len(splits)}
    return arrays, sizes


LAYERS = "layers: 2, vocab: 256, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, max_len: 64"
FAMILIES = {
    "plain": llama_text(max_len=MAX_LEN),
    "odd sizes": llama_text(
        max_len=MAX_LEN, heads=6, kv_heads=2, head_dim=20, hidden=72, inter=100, qkv_bias=True, window=9
    ),
    "norms of heads, experts": f"extends: qwen3-moe\nparams: {{{LAYERS}, inter: 48, experts: 8, top_k: 2}}\n",
    "soft caps, norms around, windows": (
        f"extends: gemma2\nparams: {{{LAYERS}, inter: 128, sliding_window: 9, attn_softcap: 5.0}}\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_gives_the_logits_of_its_meaning(name: str) -> None:
    """Two steps: chunks, then few rows, a chunk beside single new tokens. What was not written is NaN."""
    model = Model(build_graph(parse_spec(FAMILIES[name], "model.yaml")))
    rng = np.random.default_rng(1)
    tables = np.array([[3, 5, 0, 0], [7, 2, 0, 0], [1, 4, 0, 0]], np.int32)
    tokens = rng.integers(0, 256, (3, 30)).astype(np.int32)
    done = [0, 0, 0]
    for taken in ([17, 5, 3], [1, 6, 1]):
        chunks = list(zip(done, taken, strict=True))
        ids = np.concatenate([tokens[s, b : b + n] for s, (b, n) in enumerate(chunks)])
        for name in [n for n in model.memory if n.startswith("value:")]:
            del model.memory[name]
        got = model.run(*step_arrays(model, chunks, tables, ids))
        done = [b + n for b, n in chunks]
        expected = expected_logits(model.source, model.weights, [tokens[s, :n] for s, n in enumerate(done)])
        rows = [expected[s][-n:] for s, n in enumerate(taken)]
        assert np.abs(got - np.concatenate(rows)).max() < 2e-4
        picked = model.memory["value:sampling.token"].ravel()
        assert (picked == got.argmax(-1)).all()


def expected_logits(source: Graph, weights: dict[str, Any], sequences: list[Any]) -> list[Any]:
    """Each sequence's logits, from its beginning, by the ops' meanings."""
    inputs = reference.step_inputs(source, [list(map(int, s)) for s in sequences])
    values = reference.run(source, inputs, lambda name: torch.from_numpy(weights[name]))
    ends = np.cumsum([0, *(len(s) for s in sequences)])
    logits = values["logits"].numpy()
    return [logits[a:b] for a, b in pairwise(ends)]


def test_an_op_without_a_kernel_is_named() -> None:
    graph = llama_graph()
    kv = kv_layout(run_passes(graph, Numbers("bf16", "bf16")), "bf16", 16)
    settings = Settings(Capacity(8, 2, 2), 64, kv, Chooser(load_cuda_target("a100"), {}))
    node = Node("take_rows", ("%x", "%i"), ("y",))
    types = {"x": Type("T", (8,), "f32"), "i": Type("R", (), "i32"), "y": Type("R", (8,), "f32")}
    with pytest.raises(CompileError, match="no kernel for op 'take_rows'"):
        Lowering(Graph(("x", "i"), ("y",), (node,), types, {}), graph, settings).lower(node, 8)
