"""`LLM` beside others: streams in event loops, several threads, interrupts, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.llms import idle, tokens

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime import LLM, RequestOutput, SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [200, 7], [9, 9, 9, 30, 31, 32, 33]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(max_tokens=1500, seed=1)


# ----------------------------------------------------------------------------------- streams


async def collect(llm: LLM, prompt: list[int], params: SamplingParams, *, delta: bool) -> list[RequestOutput]:
    return [output async for output in llm.stream(prompt, params, delta=delta)]


def test_streams_add_up_to_what_generate_gives(llm: LLM) -> None:
    several = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=9, logprobs=1, prompt_logprobs=1)
    params = [GREEDY, several, SamplingParams(seed=1, max_tokens=20)]
    expected = llm.generate(PROMPTS, params)

    async def main() -> list[list[RequestOutput]]:
        both = [(p, q, delta) for delta in (False, True) for p, q in zip(PROMPTS, params, strict=True)]
        return await asyncio.gather(*(collect(llm, p, q, delta=delta) for p, q, delta in both))

    found = asyncio.run(main())
    for outputs, whole in zip(found[:3], expected, strict=True):
        lengths = [sum(len(choice.token_ids) for choice in output.outputs) for output in outputs]
        assert lengths == sorted(lengths)
        assert outputs[-1].outputs == whole.outputs
        assert outputs[-1].prompt_logprobs == whole.prompt_logprobs
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for outputs, whole in zip(found[3:], expected, strict=True):
        for index, choice in enumerate(whole.outputs):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            assert [token for part in parts for token in part.token_ids] == choice.token_ids
            assert [part.finish_reason for part in parts][:-1] == [None] * (len(parts) - 1)
            assert parts[-1].finish_reason == choice.finish_reason
            assert parts[-1].cumulative_logprob == choice.cumulative_logprob
        given = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert given == ([whole.prompt_logprobs] if whole.prompt_logprobs else [])
    assert idle(llm)


def test_several_streams_share_batches(llm: LLM) -> None:
    sizes = []
    step = llm.engine.loop.step

    def counting() -> Any:
        outputs = step()
        sizes.append(len(outputs))
        return outputs

    async def main() -> None:
        holds, may_step = threading.Event(), threading.Event()

        def hold() -> None:  # or the first stream might be through before the last has come
            holds.set()
            may_step.wait()

        llm._thread.call(hold)
        holds.wait()
        streams = [asyncio.create_task(collect(llm, prompt, GREEDY, delta=True)) for prompt in PROMPTS]
        while llm._thread._calls.qsize() < len(streams):
            await asyncio.sleep(0.001)
        may_step.set()
        await asyncio.gather(*streams)

    llm.engine.loop.step = counting  # type: ignore[method-assign]
    try:
        asyncio.run(main())
    finally:
        del llm.engine.loop.step
    assert max(sizes) == 3


def leave_by_break(llm: LLM) -> Any:
    async def main() -> None:
        async for output in llm.stream(PROMPTS[0], LONG):
            if len(output.outputs[0].token_ids) >= 3:
                break
        del output
        assert await asyncio.to_thread(idle, llm)

    return main()


def leave_by_closing(llm: LLM) -> Any:
    async def main() -> None:
        async with llm.stream(PROMPTS[0], LONG) as stream:
            await anext(stream)
        assert await asyncio.to_thread(idle, llm)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    return main()


def leave_by_cancelling(llm: LLM) -> Any:
    async def main() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.stream(PROMPTS[0], LONG):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        assert await asyncio.to_thread(idle, llm)

    return main()


def leave_at_the_start(llm: LLM) -> Any:
    async def main() -> None:
        llm.stream(PROMPTS[0], LONG)  # never begun
        hold, held = threading.Event(), llm._thread
        held.call(hold.wait)  # what is asked of the engine now waits
        task = asyncio.create_task(anext(llm.stream(PROMPTS[0], LONG)))  # type: ignore[arg-type]
        while held._calls.empty():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hold.set()
        assert await asyncio.to_thread(idle, llm)

    return main()


def leave_the_loop(llm: LLM) -> Any:
    async def main() -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        await anext(stream)
        kept.append(stream)

    kept: list[Any] = []
    return main()


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_closing, leave_by_cancelling, leave_at_the_start, leave_the_loop],
)
def test_a_stream_that_is_left_early_is_aborted(llm: LLM, leave: Callable[[LLM], Any]) -> None:
    asyncio.run(leave(llm))
    gc.collect()
    other = llm.generate(PROMPTS[1], GREEDY)[0]
    assert other.outputs[0].finish_reason == "length"
    assert idle(llm)


def test_a_stream_says_what_is_wrong_with_its_request(llm: LLM) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="empty"):
            await anext(llm.stream([], GREEDY))
        with pytest.raises(RequestError, match="token id"):
            await anext(llm.stream([1], SamplingParams(stop_token_ids=[999])))

    asyncio.run(main())


def test_a_fault_in_a_stream_comes_with_its_last_output(llm: LLM) -> None:
    def failing(output: list[int], row: Any) -> Any:
        if len(output) == 2:
            raise ValueError("mine")
        return row

    outputs = asyncio.run(collect(llm, [1, 2], SamplingParams(logits_processors=[failing]), delta=False))
    assert (outputs[-1].outputs[0].finish_reason, len(outputs[-1].outputs[0].token_ids)) == ("error", 2)
    assert isinstance(outputs[-1].error, ValueError)


# ----------------------------------------------------------------------------------- threads


def test_threads_may_generate_together(llm: LLM) -> None:
    expected = [tokens(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda prompt: tokens(llm.generate(prompt, GREEDY)), PROMPTS)) == expected


def test_an_interrupt_ends_what_runs(llm: LLM) -> None:
    def interrupting(output: list[int], row: Any) -> Any:
        if len(output) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return row

    interrupted = SamplingParams(max_tokens=1500, logits_processors=[interrupting])
    # A process that a shell has put into the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS[0], PROMPTS[1]], [LONG, interrupted])
    finally:
        signal.signal(signal.SIGINT, before)
    assert idle(llm)


def test_closing_aborts_what_runs(path: Path) -> None:
    llm = LLM(path, threads=1, num_blocks=200)

    async def main() -> RequestOutput:
        async for output in llm.stream(PROMPTS[0], LONG):
            if not output.finished:
                await asyncio.to_thread(llm.close)
        return output

    last = asyncio.run(main())
    assert last.outputs[0].finish_reason == "abort"
    llm.close()
    with pytest.raises(PagecError, match="closed"):
        llm.generate(PROMPTS[0], GREEDY)


def test_an_engine_that_fails_keeps_nobody_waiting(path: Path) -> None:
    with LLM(path, threads=1, num_blocks=50) as llm:

        def broken() -> Any:
            raise OSError("defect")

        llm.engine.loop.step = broken  # type: ignore[method-assign]
        output = llm.generate(PROMPTS[0], GREEDY)[0]
        assert isinstance(output.error, OSError)
        assert output.outputs[0].finish_reason == "error"
        with pytest.raises(PagecError, match=r"failed.*defect"):
            llm.generate(PROMPTS[0], GREEDY)


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_ends_the_engines_thread_keeps_nobody_waiting(path: Path, end: BaseException) -> None:
    with LLM(path, threads=1, num_blocks=50) as llm:

        def ending(*_: Any) -> Any:
            raise end

        llm.engine.loop.step = ending  # type: ignore[method-assign]
        llm.engine.abort = ending  # type: ignore[method-assign]
        output = llm.generate(PROMPTS[0], GREEDY)[0]
        assert isinstance(output.error, PagecError)
        assert output.error.__cause__ is end
        with pytest.raises(PagecError, match=type(end).__name__):
            llm.generate(PROMPTS[0], GREEDY)
