"""What tests of `LLM` ask of it."""

from __future__ import annotations

from pagec.runtime import LLM, RequestOutput


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def idle(llm: LLM) -> bool:
    """Whether nothing runs or waits, and no block is in use; after all that was asked for before."""
    scheduler = llm.engine.scheduler
    state = llm._thread.call(
        lambda: (
            scheduler.blocks.num_used,
            len(scheduler.running),
            len(scheduler.waiting),
            llm.engine.has_work,
        )
    )
    return state.result() == (0, 0, 0, False)
