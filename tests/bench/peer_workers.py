"""The other end of peers.py: one engine in a process of its own, spoken to in lines of JSON.

    python peer_workers.py NAME MODEL THREADS

    stdin    {"asks": [[prompt token ids, tokens to generate], ...]}
    stdout   {"first_s": ..., "end_s": ..., "num_tokens": ...}   seconds since the requests were made

Runs in the environment of the peer: at module level nothing but the standard library is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Ask = tuple[list[int], int]
BATCH_TOKENS = 2048
Run = Callable[[Sequence[Ask]], dict[str, float]]


class Clock:
    """Notes the first token and the last."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = 0.0

    def token(self) -> None:
        self._first = self._first or time.perf_counter() - self._began

    def done(self, num_tokens: int) -> dict[str, float]:
        end = time.perf_counter() - self._began
        return {"first_s": self._first, "end_s": end, "num_tokens": num_tokens}


def pagec(model: str, threads: int) -> Run:
    """An artifact."""
    from pagec.compiler.artifact import Artifact
    from pagec.runtime.bench import workloads
    from pagec.runtime.engine import Engine

    artifact = Artifact.open(Path(model))
    blocks = workloads.pool_blocks(workloads.WORKLOADS, artifact.program)
    engine = Engine(artifact, threads=threads, num_blocks=blocks)

    def run(asks: Sequence[Ask]) -> dict[str, float]:
        line = workloads.run_asks(engine, [workloads.Ask(*ask) for ask in asks])
        return {"first_s": line.first_s, "end_s": line.end_s, "num_tokens": line.num_tokens}

    return run


# ------------------------------------------------------------------------------------- llama.cpp


def llama(model: str, threads: int) -> Run:
    """A GGUF file in llama.cpp, by its C interface: prompts in batches, then all sequences in one batch."""
    import llama_cpp as api  # type: ignore[import-not-found,unused-ignore]

    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())

    def run(asks: Sequence[Ask]) -> dict[str, float]:
        parameters = api.llama_context_default_params()
        parameters.n_seq_max = len(asks)
        length = max(len(prompt) + output for prompt, output in asks)
        parameters.n_ctx = len(asks) * -(-length // 256) * 256
        parameters.n_batch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        context = api.llama_init_from_model(loaded, parameters)
        try:
            return _Llama(api, loaded, context).run(asks)
        finally:
            api.llama_free(context)

    return run


class _Llama:
    """Greedy decoding of several sequences in one context."""

    def __init__(self, api: Any, model: Any, context: Any) -> None:
        self._api, self._context = api, context
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def run(self, asks: Sequence[Ask]) -> dict[str, float]:
        clock = Clock()
        outputs: list[list[int]] = [[] for _ in asks]
        waiting = list(range(len(asks)))
        while waiting:
            now: list[int] = []
            room = BATCH_TOKENS
            while waiting and (not now or len(asks[waiting[0]][0]) <= room):
                room -= len(asks[waiting[0]][0])
                now.append(waiting.pop(0))
            rows = [
                (token, at, s, at == len(asks[s][0]) - 1) for s in now for at, token in enumerate(asks[s][0])
            ]
            self._step(rows, outputs)
            clock.token()
        while running := [s for s, out in enumerate(outputs) if len(out) < asks[s][1]]:
            self._step(
                [(outputs[s][-1], len(asks[s][0]) + len(outputs[s]) - 1, s, True) for s in running], outputs
            )
        return clock.done(sum(map(len, outputs)))

    def _step(self, rows: Sequence[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Rows are (token, position, sequence, whether its logits are wanted)."""
        import numpy as np

        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        failed = self._api.llama_decode(self._context, batch)
        assert failed == 0, f"llama_decode: {failed}"
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self._api.llama_get_logits_ith(self._context, i)
                outputs[sequence].append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        self._api.llama_batch_free(batch)


# ------------------------------------------------------------------------------------------ vLLM


def vllm(model: str, threads: int) -> Run:
    """A Hugging Face directory in vLLM, in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        model=model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64
    ).llm_engine
    names = iter(range(1 << 60))

    def run(asks: Sequence[Ask]) -> dict[str, float]:
        clock, done = Clock(), 0
        for prompt, output in asks:
            parameters = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            for result in engine.step():
                clock.token()
                done += len(result.outputs[0].token_ids) if result.finished else 0
        return clock.done(done)

    return run


# ---------------------------------------------------------------------------------- transformers


def transformers(model: str, threads: int) -> Run:
    """A Hugging Face directory in transformers: one static batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def run(asks: Sequence[Ask]) -> dict[str, float]:
        clock = Clock()
        width = max(len(prompt) for prompt, _ in asks)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in asks])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in asks])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = None
        for step in range(max(output for _, output in asks)):
            out = loaded(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(len(asks), 1)], 1)
            positions = positions[:, -1:] + 1
            if step == 0:
                clock.token()
        return clock.done(sum(output for _, output in asks))

    return run  # type: ignore[no-any-return,unused-ignore]


WORKERS = {"pagec": pagec, "llama.cpp": llama, "vllm": vllm, "transformers": transformers}


def main() -> None:
    name, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = WORKERS[name](model, threads)
    for line in sys.stdin:
        asks = [(prompt, output) for prompt, output in json.loads(line)["asks"]]
        print(json.dumps(run(asks)), file=answers, flush=True)


if __name__ == "__main__":
    main()
