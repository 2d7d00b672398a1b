"""Beam search by the engine: the same in any company, by definition, and on SmolLM2 as in transformers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from support.beams import Model, score, search_until_all_have_ended, transformers_search
from support.small import small_artifact
from test_smollm2 import their_model
from transformers.modeling_outputs import CausalLMOutput

from pagec.compiler.errors import RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.sampling.beam import BeamSearchParams, Hypothesis
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.text.tokenizer import Tokenizer

# By which everything is swapped.
SWAP = PreemptionCost(prefill_tokens_per_s=1, token_bytes=1, swap_bytes_per_s=1e9)
ENDS = (11, 200)


@pytest.fixture(scope="module")
def artifact() -> Path:
    return small_artifact()


def start(artifact: Path, **options: Any) -> Engine:
    return Engine(artifact, **({"num_blocks": 300, "eos_token_ids": ENDS} | options))


def search(engine: Engine, prompt: Sequence[int], max_tokens: int, **params: Any) -> list[Hypothesis]:
    """What a search finds that is alone."""
    request = engine.add_request(prompt, max_tokens, beam=BeamSearchParams(**params))
    run(engine)
    if request.error is not None:
        raise request.error
    return list(request.hypotheses)


def run(engine: Engine) -> None:
    for _ in engine.stream():
        pass
    assert engine.scheduler.blocks.num_used == 0


def jobs() -> list[tuple[list[int], dict[str, Any]]]:
    rules = (True, False, "never", "all")
    return [
        (
            [(7 * i * i + n) % 256 for i in range(5 + 13 * n)],
            {"beam_width": 1 + n % 4, "early_stopping": rule},
        )
        for n, rule in enumerate(rules * 2)
    ]


@pytest.fixture(scope="module")
def alone(artifact: Path) -> list[list[Hypothesis]]:
    return [search(start(artifact), prompt, 20, **params) for prompt, params in jobs()]


@pytest.mark.parametrize(
    ("options", "is_tight"),
    [
        ({}, False),
        ({"depth": 2, "prefill_chunk": 16, "prefix_cache": False}, False),
        ({"num_blocks": 36, "depth": 2}, True),
        ({"num_blocks": 36, "kv_host_bytes": 8 << 20, "cost": SWAP}, True),
    ],
)
def test_beams_find_the_same_in_any_company(
    artifact: Path, alone: list[list[Hypothesis]], options: dict[str, Any], is_tight: bool
) -> None:
    assert {len(hypotheses) for hypotheses in alone} == {1, 2, 3, 4}
    engine = start(artifact, **options)
    requests = []
    for seed, (prompt, params) in enumerate(jobs()):
        requests.append(engine.add_request(prompt, 20, beam=BeamSearchParams(**params)))
        engine.add_request(prompt[:-1], 60, params=SamplingParams(seed=seed), ignore_eos=True)
    run(engine)
    assert [request.hypotheses for request in requests] == alone
    assert (engine.scheduler.num_preemptions > 0) == is_tight
    if "kv_host_bytes" in options:
        assert engine.scheduler.blocks.stats().tiers["host"].bytes_in > 0


def logits_after(engine: Engine, prompt: list[int]) -> Model:
    """The engine's own logits, of requests that are greedy and one token long."""

    @functools.cache
    def logits(tokens: tuple[int, ...]) -> Any:
        request = engine.add_request([*prompt, *tokens], 1, want_logits=True)
        run(engine)
        return request.logits[0][0]

    return lambda tokens: logits(tuple(tokens))


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_texts_are_those_of_the_definition(artifact: Path, penalty: float) -> None:
    """Of a model whose texts end early: the tokens that end them are those that it likes."""
    prompt = list(range(40))
    engine = start(artifact)
    model = logits_after(engine, prompt)
    likely = model([]).argsort()[::-1].tolist()
    ends = (likely[1], likely[4])
    searching = start(artifact, eos_token_ids=ends)
    reasons = set()
    for rule in (True, False, "never", "all"):
        params = BeamSearchParams(beam_width=3, length_penalty=penalty, early_stopping=rule)
        if rule == "all":
            expected = search_until_all_have_ended(model, 3, penalty, 4, ends)
        else:
            expected = transformers_search(model, params, 4, ends)
        request = searching.add_request(prompt, 4, beam=params)
        run(searching)
        assert [list(found.tokens) for found in request.hypotheses] == expected
        assert [found.score for found in request.hypotheses] == [score(model, t, penalty) for t in expected]
        reasons |= {found.finish_reason for found in request.hypotheses}
    assert "stop" in reasons


def test_limits_come_from_the_search_unless_others_are_given(artifact: Path) -> None:
    engine = start(artifact, eos_token_ids=range(256))
    (found,) = search(engine, [1, 2], 5, beam_width=1)
    assert (len(found.tokens), found.finish_reason) == (1, "stop")
    (found,) = search(engine, [1, 2], 5, beam_width=1, ignore_eos=True)
    assert (len(found.tokens), found.finish_reason) == (5, "length")
    request = engine.add_request(
        [1, 2], beam=BeamSearchParams(beam_width=2, max_tokens=3, n=1, ignore_eos=True)
    )
    run(engine)
    assert [len(found.tokens) for found in request.hypotheses] == [3]
    assert request.finish_reason == "stop"


def test_what_cannot_be_done_is_refused_at_once(artifact: Path) -> None:
    engine = start(artifact, num_blocks=20, max_seqs=4)
    with pytest.raises(RequestError, match="beam_width: 5 is not at most 4, the sequences that run at once"):
        engine.add_request([1], 5, beam=BeamSearchParams(beam_width=5))
    with pytest.raises(RequestError, match="needs 20 KV blocks at its full length; the pool has 19"):
        engine.add_request([1] * 70, 11, beam=BeamSearchParams(beam_width=4))
    with pytest.raises(RequestError, match="params: means nothing to a beam search"):
        engine.add_request([1], 5, beam=BeamSearchParams(beam_width=2), params=SamplingParams())
    assert not engine.has_work


def test_beams_of_a_long_prompt_start_with_little_more_than_one_sequence(artifact: Path) -> None:
    engine = start(artifact, eos_token_ids=())
    blocks = engine.scheduler.blocks
    request = engine.add_request([i % 256 for i in range(1000)], 20, beam=BeamSearchParams(beam_width=4))
    while len(request.sequences) < 4:
        engine.step()
    engine.step()
    assert blocks.num_used <= 1.1 * blocks.blocks_for(1000)
    engine.abort(request)
    run(engine)


# ---------------------------------------------------------------------------- beside transformers


def remember(monkeypatch: pytest.MonkeyPatch, model: Any, prompt: list[int]) -> None:
    """Has a model keep the logits of every row of tokens that follows the prompt: searches that differ only
    in their scores and ends ask for the same ones."""
    forward = model.forward
    with torch.no_grad():
        start = forward(input_ids=torch.tensor([prompt]), use_cache=True)
    known = {tuple(prompt): start.logits[0, -1:]}

    @functools.wraps(forward)
    def look_up(input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        rows = [tuple(row) for row in input_ids.tolist()]
        new = [row for row in dict.fromkeys(rows) if row not in known]
        if new:
            cache = copy.deepcopy(start.cache)
            cache.batch_repeat_interleave(len(new))
            output = torch.tensor(new)[:, len(prompt) :]
            logits = forward(input_ids=output, cache=cache, logits_to_keep=1).logits
            known.update(zip(new, logits, strict=True))
        return CausalLMOutput(logits=torch.stack([known[row] for row in rows]))

    monkeypatch.setattr(model, "forward", look_up)


def continuation(sequence: list[int], prompt: list[int], ends: Sequence[int]) -> list[int]:
    """What follows the prompt, up to and with an end of text; then comes padding."""
    found = sequence[len(prompt) :]
    length = next((n for n, token in enumerate(found, 1) if token in ends), len(found))
    return found[:length]


def theirs(
    model: Any, prompt: list[int], ends: Sequence[int], width: int, penalty: float, rule: Any, use_cache: bool
) -> tuple[list[list[int]], list[float]]:
    """transformers' texts, and their scores. With one beam it searches greedily and gives none."""
    more = {"early_stopping": rule, "length_penalty": penalty} if width > 1 else {}
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            use_cache=use_cache,
            eos_token_id=list(ends),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
    texts = [continuation(sequence, prompt, ends) for sequence in output.sequences.tolist()]
    if width > 1:
        return texts, output.sequences_scores.tolist()
    each = torch.cat(output.scores).double().log_softmax(-1)[range(len(texts[0])), texts[0]]
    return texts, [float(each.sum()) / len(texts[0]) ** penalty]


@pytest.fixture(scope="module")
def float32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.compiled(smollm2_gguf, tmp_path_factory.mktemp("beams") / "f32", "f32")


@pytest.fixture(scope="module")
def transformers_model(smollm2_gguf: Path) -> Iterator[Any]:
    """On one thread: what a search does between its steps is too little for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield their_model(smollm2_gguf, torch.float32)
    torch.set_num_threads(before)


CHAT = "<|im_start|>user\nSay yes or no: is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 12
TEXT = "Beam search keeps several texts, extends all of them, and"


def check(
    engine: Engine, model: Any, prompt: list[int], width: int, penalty: float, rule: Any, use_cache: bool
) -> list[Hypothesis]:
    ends = sorted(engine.eos_token_ids)
    texts, scores = theirs(model, prompt, ends, width, penalty, rule, use_cache)
    found = search(engine, prompt, MAX_TOKENS, beam_width=width, length_penalty=penalty, early_stopping=rule)
    assert [list(hypothesis.tokens) for hypothesis in found] == texts, (width, penalty, rule)
    assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, abs=1e-4)
    return found


PENALTIES = (0.5, 1.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ends", "widths", "penalties"),
    [(CHAT, ("<|im_end|>",), (8, 4, 2, 1), PENALTIES), (TEXT, (",", " the", "."), (4,), (1.0,))],
    ids=["one end of text", "three"],
)
def test_smollm2(
    float32: Path,
    transformers_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    ends: Sequence[str],
    widths: Sequence[int],
    penalties: Sequence[float],
) -> None:
    tokenizer = Tokenizer.open(float32)
    engine = Engine(float32, num_blocks=200, eos_token_ids=[tokenizer.encode(end)[-1] for end in ends])
    prompt = tokenizer.encode(text)
    remember(monkeypatch, transformers_model, prompt)
    found = [
        hypothesis
        for width, penalty, rule in itertools.product(widths, penalties, (True, False, "never"))
        for hypothesis in check(engine, transformers_model, prompt, width, penalty, rule, use_cache=False)
    ]
    assert {hypothesis.finish_reason for hypothesis in found} == {"stop", "length"}


@pytest.mark.slow
def test_smollm2_with_a_long_prompt(float32: Path, transformers_model: Any) -> None:
    """Where transformers computes each step from its own cache of keys and values."""
    prompt = Tokenizer.open(float32).encode((Path(__file__).parent.parent / "LICENSE").read_text())[:100]
    engine = Engine(float32, num_blocks=200)
    check(engine, transformers_model, prompt, 4, 1.0, False, use_cache=True)
