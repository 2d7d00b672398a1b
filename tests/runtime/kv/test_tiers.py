"""Engines over host memory and a directory: whoever hits there answers, bit for bit, as if it had not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.graphs import llama_text
from support.small import small_artifact
from support.tiers import LateExecutor

from pagec.compiler.artifact import Artifact
from pagec.runtime.engine import Engine
from pagec.runtime.kv.setup import measure_cost, owner_of
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sequence import Request
from pagec.runtime.trace import Recorder

# Greedy, with the log probabilities of the tokens.
TOP_1 = SamplingParams(temperature=0.0, logprobs=1, max_tokens=None)

Toy = Callable[..., Artifact]
Answer = Callable[[list[int], int], list[int]]
SYSTEM = [(7 * i * i + 3 * i) % 256 for i in range(512)]
# By which everything is swapped.
SWAP = PreemptionCost(prefill_tokens_per_s=1, token_bytes=1, swap_bytes_per_s=1e9)


@pytest.fixture(scope="module", params=["global", "window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tvm")
    if request.param == "global":
        return small_artifact()
    from pagec.compiler.driver import CompileOptions, compile_model

    path = tmp_path_factory.mktemp("window")
    (path / "spec.yaml").write_text(llama_text(max_len=1024, window=40))
    options = CompileOptions(model=str(path / "spec.yaml"), weights="random:1", output=path / "out")
    return compile_model(options, lambda *_: None).path


def start(model: Path, **options: Any) -> Engine:
    engine = Engine(model, threads=1, eos_token_ids=(), **{"num_blocks": 120, **options})
    engine.runner.fill_kv_with_nan()
    return engine


def num_groups(model: Path) -> int:
    return len(Artifact.open(model).program.kv.groups)


def tight(model: Path) -> int:
    """Room for one long prompt, not for two."""
    return 45 * num_groups(model)


def ask(engine: Engine, prompt: list[int], salt: str = "") -> tuple[Request, bytes]:
    """A request of its own, and the bits of its logits."""
    request = engine.add_request(prompt, 6, want_logits=True, salt=salt)
    for _ in engine.stream():
        engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.num_used == 0
    return request, b"".join(logits.tobytes() for logits in request.logits)


def test_a_system_prompt_outlives_the_engine(model: Path, tmp_path: Path) -> None:
    prompt = [*SYSTEM, 1, 2, 3]
    with start(model, kv_dir=tmp_path) as engine:
        cold, bits = ask(engine, prompt)
        assert cold.num_cached_tokens == 0
    with start(model, kv_dir=tmp_path) as engine:
        hit, again = ask(engine, prompt)
        assert hit.num_cached_tokens == 512
        assert (hit.output, again) == (cold.output, bits)
        disk = engine.scheduler.blocks.stats().tiers["disk"]
        # Of a model that sees 40 tokens, only the last blocks have to come.
        is_windowed = engine.scheduler.blocks.windows[0] is not None
        assert (disk.hit_tokens, disk.failures) == (48 if is_windowed else 512, 0)
        assert disk.bytes_out > 0
        assert disk.bytes_in == 0
        # Now they are in the pool, and nothing is read twice.
        assert ask(engine, prompt)[1] == bits
        assert engine.scheduler.blocks.stats().tiers["disk"].bytes_out == disk.bytes_out
        # Another salt shares nothing.
        assert ask(engine, prompt, salt="b")[0].num_cached_tokens == 0


def test_a_killed_engine_leaves_what_was_evicted(model: Path, tmp_path: Path) -> None:
    engine = start(model, kv_dir=tmp_path, num_blocks=tight(model))
    _, bits = ask(engine, [*SYSTEM, 1])
    ask(engine, [9, *SYSTEM, 1])  # takes the room
    assert engine.scheduler.blocks.stats().evictions > 0
    engine.scheduler.blocks._tiers._writer.shutdown()  # type: ignore[union-attr]
    with start(model, kv_dir=tmp_path) as other:
        request, again = ask(other, [*SYSTEM, 1])
        assert request.num_cached_tokens > 0
        assert again == bits


def test_damaged_files_are_computed_anew(model: Path, tmp_path: Path) -> None:
    with start(model, kv_dir=tmp_path) as engine:
        _, bits = ask(engine, [*SYSTEM, 1])
    files = sorted(tmp_path.rglob("*.kv"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-1 - number % 50] ^= 4
        file.write_bytes(content)
    with start(model, kv_dir=tmp_path) as engine:
        request, again = ask(engine, [*SYSTEM, 1])
        assert request.num_cached_tokens == 0
        assert again == bits
        assert engine.scheduler.blocks.stats().tiers["disk"].failures > 0
    with start(model, kv_dir=tmp_path) as engine:  # what was damaged has been written anew
        assert ask(engine, [*SYSTEM, 1])[1] == bits
        assert engine.scheduler.blocks.stats().tiers["disk"].failures == 0


def test_one_lost_file_costs_what_follows_it_only(tmp_path: Path) -> None:
    model = small_artifact()
    with start(model, kv_dir=tmp_path) as engine:
        first, bits = ask(engine, [*SYSTEM, 1])
        lost = first.sequences[0].kv.keys[10].hash.hex()
    (tmp_path / owner_of(Artifact.open(model), None).hex() / f"{lost}-0.kv").unlink()
    with start(model, kv_dir=tmp_path) as engine:
        request, again = ask(engine, [*SYSTEM, 1])
        assert request.num_cached_tokens == 160
        assert again == bits


def test_cold_blocks_return_from_host_memory(model: Path) -> None:
    engine = start(model, num_blocks=tight(model), kv_host_bytes=8 << 20, cost=SWAP)
    prompts = [[n, *SYSTEM[n : n + 500]] for n in range(3)]
    cold = [ask(engine, prompt)[1] for prompt in prompts]
    hits = [ask(engine, prompt) for prompt in prompts]
    assert [bits for _, bits in hits] == cold
    host = engine.scheduler.blocks.stats().tiers["host"]
    assert host.hit_tokens > 0
    assert 0 < host.cached_bytes <= host.limit_bytes
    assert host.bytes_in > 0
    assert host.bytes_out > 0
    assert host.used_bytes == 0


@pytest.mark.parametrize("host_bytes", [8 << 20, 100_000])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_swapped_out_go_on_where_they_were(model: Path, host_bytes: int, depth: int) -> None:
    engine = start(model, num_blocks=14 * num_groups(model), kv_host_bytes=host_bytes, cost=SWAP, depth=depth)
    prompts = [[n, *SYSTEM[n : n + 60]] for n in range(6)]
    requests = [engine.add_request(prompt, 70, params=TOP_1) for prompt in prompts]
    steps = 0
    while engine.has_work:
        engine.step()
        engine.scheduler.blocks.check()
        steps += 1
        if steps == 40:
            engine.abort(requests.pop())
    blocks = engine.scheduler.blocks
    assert blocks.num_used == 0
    assert engine.scheduler.num_preemptions > 0
    host = blocks.stats().tiers["host"]
    assert host.bytes_in > 0
    assert host.used_bytes == 0
    alone = start(model)
    for prompt, request in zip(prompts, requests, strict=False):
        expected = alone.add_request(prompt, 70, params=TOP_1)
        for _ in alone.stream():
            pass
        assert (request.output, request.logprobs) == (expected.output, expected.logprobs)


def late(toy: Toy, device: object, path: Path) -> tuple[Engine, LateExecutor, list[int]]:
    """An engine of the toy model whose reads come when the test says so, and a prompt that is on disk."""
    prompt = [n % 50 for n in range(70)]
    options: Any = {"weights": "random:0", "device": device, "eos_token_ids": (), "kv_dir": path}
    with Engine(toy(), num_blocks=40, **options) as first:
        first.add_request(prompt, 2)
        for _ in first.stream():
            pass
    engine = Engine(toy(), num_blocks=40, **options)
    engine.runner.fill_kv_with_nan()
    assert engine.tiers is not None
    engine.tiers._copier = copier = LateExecutor()
    return engine, copier, prompt


def test_others_run_while_a_prefix_is_read(
    toy: Toy, device: object, toy_answer: Answer, tmp_path: Path
) -> None:
    engine, copier, prompt = late(toy, device, tmp_path)
    waiting, other = engine.add_request(prompt, 3), engine.add_request([1, 2], 8)
    for _ in range(3):
        engine.step()
    assert waiting.status.value == "waiting"
    assert len(other.output) == 3
    assert waiting.sequences[0].block_tables[0] == other.sequences[0].block_tables[0][:0]
    copier.run_all()
    for _ in engine.stream():
        engine.scheduler.blocks.check()
    assert waiting.num_cached_tokens == 64
    assert waiting.output == toy_answer(prompt, 3)
    assert other.output == toy_answer([1, 2], 8)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_while_blocks_are_read(
    toy: Toy, device: object, toy_answer: Answer, tmp_path: Path, fails: bool
) -> None:
    engine, copier, prompt = late(toy, device, tmp_path)
    request = engine.add_request(prompt, 3)
    other = engine.add_request([1, 2], 8)
    engine.step()
    assert copier.jobs
    engine.abort(request)
    engine.abort(request)
    assert engine.scheduler.blocks.num_used == 1  # the other's
    copier.run_next(OSError("failed") if fails else None)
    again = engine.add_request(prompt, 3)
    for _ in engine.stream():
        copier.run_all()
    assert again.output == toy_answer(prompt, 3)
    assert other.output == toy_answer([1, 2], 8)
    assert engine.scheduler.blocks.num_used == 0


def test_a_read_that_fails_is_computed(toy: Toy, device: object, toy_answer: Answer, tmp_path: Path) -> None:
    engine, copier, prompt = late(toy, device, tmp_path)
    request = engine.add_request(prompt, 3)
    engine.step()
    copier.run_next(OSError("failed"))
    for _ in engine.stream():
        pass
    assert request.num_cached_tokens == 0
    assert request.output == toy_answer(prompt, 3)


def test_a_prefix_is_read_ahead_while_all_rows_are_taken(toy: Toy, device: object, tmp_path: Path) -> None:
    engine, copier, prompt = late(toy, device, tmp_path)
    for n in range(engine.scheduler.limits.max_rows):
        engine.add_request([n], 5)
    engine.step()
    engine.add_request(prompt, 3)
    engine.step()
    assert copier.jobs


def test_the_owner_is_artifact_and_weights(model: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(model)
    weights = tmp_path / "weights.safetensors"
    shutil.copy(model / "weights.safetensors", weights)
    other = tmp_path / "other.safetensors"
    other.write_bytes(weights.read_bytes()[:-1] + b"x")
    owners = [owner_of(artifact, w) for w in (None, "random:1", "random:2", str(weights), str(other))]
    assert len(set(owners)) == 5
    assert owner_of(Artifact.open(model), None) == owners[0]


def test_tiers_stand_in_ledger_and_trace(toy: Toy, device: object, tmp_path: Path) -> None:
    engine = Engine(
        toy(),
        weights="random:0",
        device=device,  # type: ignore[arg-type]
        num_blocks=20,
        kv_dir=tmp_path,
        kv_dir_bytes=1 << 20,
        kv_host_bytes=1 << 16,
        eos_token_ids=(),
    )
    assert engine.ledger.to_json()["kv_tiers"] == {"host": 1 << 16, "disk": 1 << 20}
    assert [line.split()[:3] for line in engine.ledger.lines()][-2:] == [
        ["KV", "on", "host"],
        ["KV", "on", "disk"],
    ]
    engine.trace = recorder = Recorder()
    engine.add_request([1] * 40, 3)
    for _ in engine.stream():
        pass
    assert {"KV on host", "KV on disk"} <= {count.name for count in recorder.counts}


def test_rates_are_measured(toy: Toy, device: object) -> None:
    engine = Engine(toy(), weights="random:0", device=device, num_blocks=20)  # type: ignore[arg-type]
    cost = measure_cost(engine.runner)
    assert cost.prefill_tokens_per_s > 0
    assert cost.swap_bytes_per_s > 0
    assert cost.token_bytes == engine.program.kv.block_bytes / 16
