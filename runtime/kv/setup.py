"""The tiers below an engine's KV pool, as its options ask for them."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagec.compiler.artifact import Artifact, GpuArtifact, digest
from pagec.runtime.batch import build_batch
from pagec.runtime.kv.store import BlockStore
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request
from pagec.runtime.weights import RANDOM

if TYPE_CHECKING:
    from pagec.runtime.gpu.runner import GpuRunner
    from pagec.runtime.runner import Runner

    AnyRunner = Runner | GpuRunner

DEFAULT_DIR_BYTES: Final = 8 << 30


def open_tiers(
    artifact: Artifact | GpuArtifact,
    runner: AnyRunner,
    weights: str | None,
    *,
    kv_dir: Path | None,
    kv_dir_bytes: int | None,
    kv_host_bytes: int,
) -> Tiers | None:
    """Host memory of so many bytes and a directory below the pool; None if neither is wanted."""
    kv = artifact.program.kv
    if not kv.groups or (kv_dir is None and not kv_host_bytes):
        return None
    store = None
    if kv_dir is not None:
        store = BlockStore(
            kv_dir, owner_of(artifact, weights), kv.block_bytes, kv_dir_bytes or DEFAULT_DIR_BYTES
        )
    return Tiers(runner, kv.block_bytes, host_bytes=kv_host_bytes, store=store)


def owner_of(artifact: Artifact | GpuArtifact, weights: str | None) -> bytes:
    """sha256 of all that decides what a block's bytes mean: the artifact, whose manifest holds the digests
    of its files, the KV layout, and weights that are not the artifact's own."""
    if weights is not None and not weights.startswith(RANDOM):
        weights = digest(Path(weights))
    parts = [dict(artifact.manifest), artifact.program.kv.layout_id, weights]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def measure_cost(runner: AnyRunner) -> PreemptionCost:
    """The rates of a machine, from a prefill and the copies of some blocks. To be called before any step:
    what it computes goes to the scratch block."""
    program = runner.program
    kv = program.kv
    num_tokens = min(program.capacity.T, program.max_len - 1)
    request = Request(0, [0] * num_tokens, 1, len(kv.groups))
    sequence = request.sequences[0]
    sequence.block_tables = [array("i", [0] * program.max_blocks) for _ in kv.groups]
    batch = build_batch([Entry(request, sequence, 0, num_tokens, 1)], program)
    runner.run(batch)  # the first one touches memory
    began = time.perf_counter()
    runner.run(batch)
    prefill_s = time.perf_counter() - began
    blocks = list(range(min(runner.num_blocks, 33)))
    runner.write_blocks(blocks, runner.read_blocks(blocks))  # likewise
    began = time.perf_counter()
    runner.write_blocks(blocks, runner.read_blocks(blocks))
    copy_s = (time.perf_counter() - began) / 2
    return PreemptionCost(
        prefill_tokens_per_s=num_tokens / max(prefill_s, 1e-9),
        token_bytes=len(kv.groups) * kv.block_bytes / kv.block_size,
        swap_bytes_per_s=len(blocks) * kv.block_bytes / max(copy_s, 1e-9),
    )
