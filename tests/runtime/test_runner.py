"""What the runner launches, with which memory, on a device that only records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagec.compiler.artifact import Artifact, write_weights
from pagec.compiler.errors import ArtifactError, CapacityError, CheckpointError
from pagec.compiler.program import Launch
from pagec.compiler.random_weights import random_packed
from pagec.runtime.batch import Batch
from pagec.runtime.runner import Runner

Toy = Callable[..., Artifact]


def batch(num_tokens: int, logit_rows: list[int], *, want_logits: bool = False) -> Batch:
    """One sequence of blocks 1, 2, ..., computed at once."""
    positions = np.arange(num_tokens, dtype=np.int32)
    table = np.zeros((1, 8), np.int32)
    table[0, : -(-num_tokens // 16)] = 1 + np.arange(-(-num_tokens // 16))
    return Batch(
        tokens=positions % 50,
        positions=positions,
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        slot_mapping=(positions + 16,),
        block_tables=(table,),
        tiles=np.array([(0, first) for first in range(0, num_tokens, 8)], np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        want_logits=want_logits,
    )


@pytest.fixture
def runner(toy: Toy, device: Any) -> Runner:
    return Runner(toy(), device, weights="random:0", num_blocks=9)


def test_rows_tiles_and_head_chunks(runner: Runner, device: Any) -> None:
    runner.run(batch(17, list(range(8, 17))))
    assert device.calls == [
        ("write", 17, 2),
        ("attend", 3, 2),
        ("head", 4, 2),
        ("head", 4, 2),
        ("head_one", 1, 2),
    ]


def test_body_and_head_are_one_call(runner: Runner, device: Any) -> None:
    for num_rows, calls in ((0, 1), (1, 1), (4, 1), (5, 2), (9, 3)):
        device.num_runs = 0
        runner.run(batch(17, list(range(num_rows))))
        assert device.num_runs == calls


def test_logits_are_stored_only_where_they_are_wanted(runner: Runner) -> None:
    """One of the two ways to the argmax gets the rows, the other none, and so does not run."""
    counts = {name: at for at, name in enumerate(("T", "tiles", "R", "merges", "logits", "greedy"))}
    for want_logits in (False, True):
        rows = runner.head_counts(5, want_logits)
        assert (rows[counts["logits"]], rows[counts["greedy"]]) == ((5, 0) if want_logits else (0, 5))
        assert (rows[counts["T"]], rows[counts["R"]]) == (0, 5)


def test_splits_are_merged_in_small_steps_with_long_sequences_only(runner: Runner) -> None:
    program = runner.program  # few_tiles=4, key_split=256
    assert program.merges(4, 257) == 4
    assert program.merges(4, 256) == program.merges(5, 1000) == 0


def test_no_logit_rows_no_head(runner: Runner, device: Any) -> None:
    output = runner.run(batch(3, []))
    assert [name for name, _, _ in device.calls] == ["write", "attend"]
    assert output.tokens.tolist() == []
    assert output.logits is None


def test_tokens_of_all_chunks_and_logits_on_request(
    runner: Runner, toy_answer: Callable[[list[int], int], list[int]]
) -> None:
    says = [toy_answer(list(range(n + 1)), 1)[0] for n in range(17)]
    assert runner.run(batch(17, list(range(17)))).logits is None
    output = runner.run(batch(17, list(range(17)), want_logits=True))
    assert output.tokens.tolist() == says
    assert output.logits is not None
    assert output.logits.shape == (17, 50)
    assert output.logits.argmax(axis=1).tolist() == says


def test_outputs_are_copies(runner: Runner) -> None:
    first = runner.run(batch(3, [2], want_logits=True))
    kept = first.tokens.copy(), first.logits.copy()  # type: ignore[union-attr]
    runner.run(batch(9, [1], want_logits=True))
    assert np.array_equal(first.tokens, kept[0])
    assert np.array_equal(first.logits, kept[1])  # type: ignore[arg-type]


def test_outputs_of_steps_in_flight_come_in_order(
    runner: Runner, toy_answer: Callable[[list[int], int], list[int]]
) -> None:
    for count in (3, 5):
        runner.submit(batch(count, [count - 1]))
    for count in (3, 5):
        assert runner.collect().tokens.tolist() == toy_answer(list(range(count)), 1)
    with pytest.raises(AssertionError, match="no step is in flight"):
        runner.collect()


def test_a_token_may_be_what_the_step_before_chose(
    runner: Runner, device: Any, toy_answer: Callable[[list[int], int], list[int]]
) -> None:
    says = [toy_answer(list(range(count)), 1)[0] for count in (1, 2, 3)]
    runner.submit(batch(3, [0, 1, 2]))
    waiting = batch(4, [])
    waiting.tokens[:] = [7, -1 - 2, -1, -2]
    runner.submit(waiting)
    tokens = runner.memory.steps["tokens"].view(np.int32)[:4].tolist()
    assert tokens == [7, says[2], says[0], says[1]]
    assert waiting.tokens.tolist() == [7, -3, -1, -2]
    device.break_token = says[0]
    runner.submit(batch(1, [0]))
    waiting.tokens[:] = [7, 7, 7, -1]
    runner.submit(waiting)
    assert runner.memory.steps["tokens"].view(np.int32)[3] == 0  # that row chose -1


def test_copies_come_before_the_launches(runner: Runner) -> None:
    kv = runner.program.kv
    pool = runner.memory.kv.reshape(kv.spans, 9, kv.span_bytes)
    pool[:] = np.arange(9, dtype=np.uint8)[None, :, None]
    step = batch(1, [])  # writes the first slot of block 1
    runner.run(replace(step, copies=np.array([[1, 5], [5, 6], [2, 1]], np.int32)))
    assert pool[0, :, -1].tolist() == [0, 2, 2, 3, 4, 1, 1, 7, 8]
    assert pool[1, :, -1].tolist() == [0, 2, 2, 3, 4, 1, 1, 7, 8]
    assert pool[1, 1, :4].tolist() == [0, 0, 0, 0]  # the token's number, 0, not the copied 2
    assert pool[0, 1, :4].tolist() == [2, 2, 2, 2]


def test_rows_of_block_tables_lie_apart_on_the_device(runner: Runner) -> None:
    step = batch(3, [])
    runner.run(replace(step, block_tables=(np.array([[1, 2]], np.int32),)))
    assert runner.memory.steps["block_tables.0"].view(np.int32)[:3].tolist() == [1, 2, 0]


@pytest.mark.parametrize("num_tokens", [0, 33])
def test_a_batch_beyond_the_capacity_is_refused(runner: Runner, num_tokens: int) -> None:
    with pytest.raises(CapacityError, match=f"{num_tokens} tokens"):
        runner.run(batch(num_tokens, []))


def test_layers_see_their_slice_of_the_pool(runner: Runner, device: Any) -> None:
    runner.run(batch(3, []))
    program = runner.program
    pool = runner.memory.kv.view(np.int32).reshape(program.kv.spans, 9, -1)
    written = pool[1, 1, :48:16]  # layer 1, block 1, its first three slots
    assert written.tolist() == [0, 1, 2]
    assert not pool[0].any()
    assert (9 * program.kv.span_bytes, "int32") in device.tensors


def test_rope_tables_are_cosines_then_sines(runner: Runner) -> None:
    table = runner.memory.tables["rope"].view(np.float32).reshape(2, 8, 2)
    angles = np.arange(8)[:, None] * np.array([1.0, 0.1], np.float32)
    assert np.allclose(table[0], np.cos(angles), atol=1e-6)
    assert np.allclose(table[1], np.sin(angles), atol=1e-6)


def test_the_whole_pool_is_poisoned(runner: Runner) -> None:
    runner.fill_kv_with_nan()
    assert np.isnan(runner.memory.kv.view(np.float32)).all()


@pytest.mark.parametrize(
    "launch",
    [
        Launch("bad", "T", ((0, "no_such_kernel"),), ()),
        Launch("bad", "T", ((0, "write"),), ("step:tokens",)),
        Launch("bad", "T", ((0, "write"),), ("step:tokens", "buffer:nothing", "kv:1")),
        Launch("bad", "T", ((0, "write"),), ("step:tokens", "step:slot_mapping.0", "kv:9")),
    ],
)
def test_a_program_that_does_not_hold_together_is_refused(toy: Toy, device: Any, launch: Launch) -> None:
    artifact = toy()
    broken = replace(artifact, program=replace(artifact.program, body=(launch,)))
    with pytest.raises(ArtifactError, match="launch bad"):
        Runner(broken, device, weights="random:0", num_blocks=9)


def test_weights_from_a_file_equal_those_made_from_the_same_seed(
    toy: Toy, device: Any, tmp_path: Path
) -> None:
    artifact = toy()
    weights = artifact.program.weights
    file = tmp_path / "other.safetensors"
    write_weights(file, weights, (random_packed(7, w) for w in weights))
    from_file = Runner(artifact, device, weights=str(file), num_blocks=9).memory.weights
    made = Runner(artifact, device, weights="random:7", num_blocks=9).memory.weights
    other = Runner(artifact, device, weights="random:8", num_blocks=9).memory.weights
    assert from_file.keys() == made.keys() == {"norm", "w"}
    assert all(np.array_equal(from_file[name], made[name]) for name in made)
    assert not np.array_equal(made["w"], other["w"])
    assert (made["norm"].view(np.float32) == 1).all()


def test_mapped_weights_are_the_same_bytes(toy: Toy, device: Any, tmp_path: Path) -> None:
    artifact = toy()
    weights = artifact.program.weights
    file = tmp_path / "other.safetensors"
    write_weights(file, weights, (random_packed(7, w) for w in weights))
    runners = [
        Runner(artifact, device, weights=str(file), weights_memory=kind, num_blocks=9)
        for kind in ("copy", "mmap")
    ]
    copied, mapped = (runner.memory.weights for runner in runners)
    assert all(np.array_equal(copied[name], mapped[name]) for name in copied)
    assert all(memory.ctypes.data % 64 == 0 for memory in mapped.values())
    assert [runner.ledger.weights_memory for runner in runners] == ["copy", "mmap"]
    with pytest.raises(CheckpointError, match="no file to map"):
        Runner(artifact, device, weights="random:7", weights_memory="mmap", num_blocks=9)


def test_what_cannot_fit_is_refused_before_it_is_allocated(toy: Toy, device: Any) -> None:
    device.free = 1000
    with pytest.raises(CapacityError, match=r"512 bytes of weights .* 1000 are free") as refused:
        Runner(toy(), device, weights="random:0", num_blocks=9)
    assert "--weights-memory mmap" in str(refused.value)


def test_wrong_weights_are_refused(toy: Toy, device: Any, tmp_path: Path) -> None:
    artifact = toy()
    with pytest.raises(ArtifactError, match="no weights"):
        Runner(artifact, device)
    with pytest.raises(CheckpointError, match="no such file"):
        Runner(artifact, device, weights=str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="not a seed"):
        Runner(artifact, device, weights="random:x")
    file = tmp_path / "cut.safetensors"
    write_weights(file, artifact.program.weights, (random_packed(7, w) for w in artifact.program.weights))
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ArtifactError, match="packed tensors"):
        Runner(artifact, device, weights=str(file))
