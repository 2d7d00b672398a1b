"""`LLM` on a small model without a tokenizer: numbers beside torch's, order, faults, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llms import idle, tokens

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import CapacityError, CompileError, PagecError, RequestError
from pagec.runtime import (
    LLM,
    BeamSearchParams,
    Engine,
    SamplingParams,
    StructuredOutputsParams,
)

PROMPTS = [[1, 2, 3, 4, 5], [200, 7], [9, 9, 9, 30, 31, 32, 33]]
MAX_LEN = 2048
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def logits(path: Path) -> Callable[[list[int], int], torch.Tensor]:
    """Logits of all positions of a prompt and its greedy continuation, from an engine of its own."""
    engine = Engine(path, threads=1, num_blocks=400)

    def find(prompt: list[int], num_tokens: int) -> torch.Tensor:
        request = engine.add_request(prompt, num_tokens, prompt_logits=True)
        list(engine.stream())
        return torch.cat([torch.from_numpy(part) for part in request.logits])

    return find


# -------------------------------------------------------------------------------- generation


def test_outputs_are_the_engines_in_the_order_of_the_prompts(llm: LLM, path: Path) -> None:
    engine = Engine(path, threads=1, num_blocks=400)
    requests = [engine.add_request(prompt, 12) for prompt in PROMPTS]
    list(engine.stream())
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 3, 9)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert tokens(outputs) == [[r.output[: p.max_tokens]] for r, p in zip(requests, params, strict=True)]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert len({o.request_id for o in outputs}) == 3


def test_prompts_in_all_their_forms(llm: LLM) -> None:
    expected = tokens(llm.generate([PROMPTS[0]], GREEDY))
    single: list[Any] = [
        PROMPTS[0],
        tuple(PROMPTS[0]),
        {"prompt_token_ids": PROMPTS[0]},
        [{"prompt_token_ids": PROMPTS[0], "prompt": "?"}],
    ]
    for prompts in single:
        assert tokens(llm.generate(prompts, GREEDY)) == expected
    assert llm.generate([], GREEDY) == []


def test_metrics_tell_what_happened(llm: LLM) -> None:
    prompt = list(range(100, 180))
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert 64 <= second.num_cached_tokens < 80
    metrics = first.metrics
    assert metrics is not None
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert times == sorted(time for time in times if time is not None)
    assert metrics.time_in_queue is not None


def test_log_probabilities_are_those_of_the_logits(llm: LLM, logits: Callable[..., torch.Tensor]) -> None:
    prompt = PROMPTS[2]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate(prompt, params)[0]
    choice = output.outputs[0]
    expected = torch.log_softmax(logits(prompt, 6).double(), -1)
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 6
    for i, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + i]
        assert found is not None
        assert next(iter(found)) == token
        assert set(found) == {token, *row.topk(3).indices.tolist()}
        for other, of in found.items():
            assert of.logprob == pytest.approx(float(row[other]), abs=1e-6)
            assert of.rank == int((row > row[other]).sum()) + 1
    own = [
        found[token].logprob for token, found in zip(choice.token_ids, choice.logprobs, strict=True) if found
    ]
    assert choice.cumulative_logprob == pytest.approx(sum(own))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, found in enumerate(output.prompt_logprobs[1:], 1):
        row = expected[i - 1]
        assert found is not None
        assert set(found) == {prompt[i], *row.topk(2).indices.tolist()}
        assert found[prompt[i]].logprob == pytest.approx(float(row[prompt[i]]), abs=1e-6)


def test_a_tokens_own_log_probability_alone(llm: LLM) -> None:
    several = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5, logprobs=4))[0].outputs[
        0
    ]
    alone = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5, logprobs=0))[0].outputs[0]
    without = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0]
    assert (without.logprobs, without.cumulative_logprob) == (None, None)
    assert alone.logprobs is not None
    assert several.logprobs is not None
    assert [list(found or ()) for found in alone.logprobs] == [[token] for token in alone.token_ids]
    assert alone.cumulative_logprob == pytest.approx(several.cumulative_logprob, abs=1e-4)


def test_echo_puts_the_prompt_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, n=2)
    plain = llm.generate(PROMPTS[0], params)[0]
    echoed = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, n=2, echo=True)
    )[0]
    for without, choice in zip(plain.outputs, echoed.outputs, strict=True):
        assert choice.token_ids == PROMPTS[0] + without.token_ids
        assert choice.logprobs is not None
        assert choice.logprobs[0] is None
        assert [next(iter(found or ())) for found in choice.logprobs[1:]] == choice.token_ids[1:]
        assert choice.logprobs[len(PROMPTS[0]) :] == without.logprobs
        assert choice.cumulative_logprob == without.cumulative_logprob


def test_choices_and_seeds_do_not_depend_on_the_company(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=10, seed=11)
    alone = llm.generate(PROMPTS[0], params)[0]
    company = llm.generate(
        [PROMPTS[1], PROMPTS[0], PROMPTS[2]], [GREEDY, params, SamplingParams(n=2, max_tokens=20)]
    )
    assert [choice.index for choice in alone.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in alone.outputs}) == 3
    assert tokens([company[1]]) == tokens([alone])
    assert [choice.finish_reason for choice in alone.outputs] == ["length"] * 3
    assert alone.seed == 11


def test_a_drawn_seed_gives_the_same_again(llm: LLM) -> None:
    first = llm.generate(PROMPTS[1], SamplingParams(max_tokens=10))[0]
    again = llm.generate(PROMPTS[1], SamplingParams(max_tokens=10, seed=first.seed))[0]
    other = llm.generate(PROMPTS[1], SamplingParams(max_tokens=10))[0]
    assert tokens([again]) == tokens([first]) != tokens([other])


def test_the_engines_seed_repeats_a_whole_script(path: Path) -> None:
    def script() -> list[list[list[int]]]:
        with LLM(path, threads=1, num_blocks=100, seed=3) as llm:
            return tokens(llm.generate(PROMPTS) + llm.generate(PROMPTS[0], SamplingParams(n=2)))

    assert script() == script()


# ----------------------------------------------------------------------------------- the end


def test_tokens_that_end_a_text(path: Path) -> None:
    with LLM(path, threads=1, num_blocks=100, eos_token_ids=[]) as llm:
        free = (
            llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30))[0].outputs[0].token_ids
        )
    stop = next(token for i, token in enumerate(free) if i >= 4 and token not in free[:i])
    end = free.index(stop) + 1
    with LLM(path, threads=1, num_blocks=100, eos_token_ids=[stop, 255]) as llm:

        def run(**more: Any) -> Any:
            return llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, **more))[
                0
            ].outputs[0]

        at_eos = run()
        assert (at_eos.token_ids, at_eos.finish_reason, at_eos.stop_reason) == (free[:end], "stop", None)
        ignoring = run(ignore_eos=True)
        assert (ignoring.token_ids, ignoring.finish_reason) == (free, "length")
        at_token = run(ignore_eos=True, stop_token_ids=[stop])
        assert (at_token.token_ids, at_token.finish_reason, at_token.stop_reason) == (
            free[:end],
            "stop",
            stop,
        )
        later = run(stop_token_ids=[free[0]], min_tokens=end + 2)
        assert len(later.token_ids) >= end + 2
        assert not {stop, free[0], 255} & set(later.token_ids[: end + 2])


@pytest.mark.parametrize("length", [MAX_LEN - 2, MAX_LEN - 1])
def test_a_prompt_up_to_the_limit_gets_what_is_left(llm: LLM, length: int) -> None:
    output = llm.generate([5] * length, GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (MAX_LEN - length, "length")
    everything = llm.generate([5] * length, SamplingParams(max_tokens=None))[0].outputs[0]
    assert len(everything.token_ids) == MAX_LEN - length


def test_a_shorter_limit(path: Path) -> None:
    with LLM(path, threads=1, num_blocks=100, max_model_len=20) as llm:
        assert len(llm.generate([1] * 17, GREEDY)[0].outputs[0].token_ids) == 3
        with pytest.raises(RequestError, match=r"20 tokens leave no room.*holds 20"):
            llm.generate([1] * 20, GREEDY)
    for wrong in (0, MAX_LEN + 1):
        with pytest.raises(CapacityError, match=f"max_model_len: {wrong} .*{MAX_LEN}"):
            LLM(path, max_model_len=wrong)


# -------------------------------------------------------------------------------- processors


def test_a_logits_processor_sees_the_output_and_changes_the_logits(llm: LLM) -> None:
    seen = []

    def only(output: list[int], row: Any) -> Any:
        seen.append(output)
        row[:] = float("-inf")
        row[40 + len(output)] = 0.0
        return row

    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, logits_processors=[only]))[0]
    assert output.outputs[0].token_ids == [40, 41, 42, 43]
    assert seen == [[], [40], [40, 41], [40, 41, 42]]


def test_a_fault_ends_its_own_request_only(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))

    def failing(output: list[int], row: Any) -> Any:
        if len(output) == 3:
            raise ZeroDivisionError("mine")
        return row

    bad = SamplingParams(temperature=0.0, max_tokens=12, n=2, logits_processors=[failing])
    outputs = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], [GREEDY, bad, GREEDY])
    assert tokens([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    assert [choice.finish_reason for choice in outputs[1].outputs] == ["error"] * 2
    assert [choice.token_ids for choice in outputs[1].outputs] == [expected[1][0][:3]] * 2
    assert isinstance(outputs[1].error, ZeroDivisionError)
    assert outputs[1].finished
    assert outputs[0].error is None
    assert idle(llm)


@pytest.mark.parametrize("end", [SystemExit(1), GeneratorExit()])
def test_a_processor_that_would_end_the_process_ends_its_own_request_only(
    llm: LLM, end: BaseException
) -> None:
    expected = tokens(llm.generate(PROMPTS[:1], GREEDY))

    def ending(*_: Any) -> Any:
        raise end

    bad = SamplingParams(max_tokens=4, logits_processors=[ending])
    good, ended = llm.generate(PROMPTS[:2], [GREEDY, bad])
    assert tokens([good]) == expected
    assert ended.outputs[0].finish_reason == "error"
    assert isinstance(ended.error, RequestError)
    assert ended.error.__cause__ is end
    assert idle(llm)


# --------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("prompt", "params", "place", "words"),
    [
        ([], GREEDY, "", "empty"),
        ([256], GREEDY, "", "256"),
        ([1.5], GREEDY, "", "token ids"),
        (None, GREEDY, "", "token ids"),
        ("a text", GREEDY, "", "no tokenizer"),
        ({"prompts": [1]}, GREEDY, "", "token ids"),
        ([5] * MAX_LEN, GREEDY, "", f"{MAX_LEN} tokens"),
        ([5] * (MAX_LEN + 1), GREEDY, "", f"{MAX_LEN + 1} tokens.*{MAX_LEN}"),
        ([1], SamplingParams(logit_bias={256: 1.0}), ".logit_bias", "256"),
        ([1], SamplingParams(n=9), ".n", "9"),
        ([1], SamplingParams(stop="x"), ".stop", "text"),
        ([1], SamplingParams(bad_words=["x"]), "", "no tokenizer"),
        ([1], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "", "no tokenizer"),
        ([1], "hot", ".sampling_params", "SamplingParams"),
    ],
)  # fmt: skip
def test_an_invalid_prompt_is_named_before_anything_runs(
    llm: LLM, prompt: Any, params: Any, place: str, words: str
) -> None:
    ran: list[int] = []

    def note(output: list[int], row: Any) -> Any:
        ran.append(len(output))
        return row

    noting = SamplingParams(logits_processors=[note])
    with pytest.raises(RequestError, match=words) as refused:
        llm.generate([[1, 2], [3, 4], prompt, [5]], [noting, noting, params, noting])
    assert refused.value.place == f"prompts[2]{place}"
    assert not ran
    assert idle(llm)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 of them for 2") as refused:
        llm.generate([[1], [2]], [GREEDY])
    assert refused.value.place == "sampling_params"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("tensor_parallel_size", True),
        ("dtype", "float16"),
        ("block_size", 7),
        ("colour", 1),
        ("revision", "main"),
        ("tokenizer_mode", "slow"),
        ("load_format", "dummy"),
        ("task", "embed"),
        ("enable_chunked_prefill", False),
        ("gpu_memory_utilization", "all"),
        ("swap_space", -1),
        ("enable_lora", True),
        ("max_num_batched_tokens", 0),
    ],
)
def test_options_that_do_not_exist(path: Path, name: str, value: object) -> None:
    with pytest.raises(PagecError) as refused:
        LLM(path, **{name: value})
    assert refused.value.place == name
    assert refused.value.remedy or name == "max_num_batched_tokens"


def test_vllms_options_have_their_meaning(path: Path) -> None:
    with LLM(
        path, threads=1, num_blocks=50, max_num_seqs=3, enable_prefix_caching=False, tensor_parallel_size=1
    ) as llm:
        assert llm.engine.scheduler.limits.max_rows == 3
        llm.generate([5] * 64, GREEDY)
        assert llm.generate([5] * 64, GREEDY)[0].num_cached_tokens == 0


def test_vllms_options_that_change_nothing_are_taken(path: Path) -> None:
    kv = Artifact.open(path).program.kv
    with LLM(
        path,
        threads=1,
        num_blocks=50,
        gpu_memory_utilization=0.9,
        swap_space=4,
        enforce_eager=True,
        revision=None,
        quantization=None,
        tokenizer_mode="auto",
        load_format="auto",
        task="generate",
        runner="auto",
        max_num_batched_tokens=32,
        max_num_seqs=None,
        enable_chunked_prefill=True,
        block_size=kv.block_size,
        dtype={"f32": "float32", "bf16": "bfloat16"}[kv.dtype],
    ) as llm:
        assert llm.engine.scheduler.limits.prefill_chunk == 32
        output = llm.generate(PROMPTS[0], GREEDY, lora_request=None, priority=[0])[0]
        assert len(output.outputs[0].token_ids) == 12


def test_what_a_call_cannot_do_is_named(llm: LLM) -> None:
    calls: list[tuple[str, Callable[..., Any], Any]] = [
        ("lora_request", llm.generate, "adapter"),
        ("priority", llm.generate, [1]),
        ("lora_request", llm.chat, "adapter"),
        ("continue_final_message", llm.chat, True),
    ]
    for name, call, value in calls:
        with pytest.raises(RequestError, match="not supported") as refused:
            call(PROMPTS[:1], GREEDY, **{name: value})
        assert refused.value.place == name
        assert refused.value.remedy


def test_a_model_that_cannot_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"none\.gguf.*does not exist"):
        LLM(tmp_path / "none.gguf")


# ------------------------------------------------------------------------------------- beams


def test_beams_are_the_engines(llm: LLM, path: Path) -> None:
    params = BeamSearchParams(beam_width=4, n=3, max_tokens=6)
    engine = Engine(path, threads=1, num_blocks=100)
    requests = [engine.add_request(prompt, beam=params) for prompt in PROMPTS[:2]]
    list(engine.stream())
    for output, request, prompt in zip(llm.beam_search(PROMPTS[:2], params), requests, PROMPTS, strict=False):
        assert [s.tokens for s in output.sequences] == [[*prompt, *h.tokens] for h in request.hypotheses[:3]]
        assert [s.score for s in output.sequences] == pytest.approx([h.score for h in request.hypotheses[:3]])
        assert output.sequences[0].cum_logprob == pytest.approx(sum(output.sequences[0].logprobs))
    with pytest.raises(RequestError, match="9") as refused:
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=9))
    assert refused.value.place == "prompts[0].beam_width"
    assert idle(llm)
