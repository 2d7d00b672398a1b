"""The oracle: small random models made by transformers, saved, and run by it and by pagec side by side.

transformers reads the checkpoint by itself; nothing of pagec's importer has a part in what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.runtime.engine import Engine
from pagec.runtime.runner import Runner

LENGTHS = (1, 15, 16, 17, 600, 600)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
}


def save_random(path: Path, kind: str, seed: int = 7, **changes: Any) -> Path:
    """A random model in bf16; norms and biases are random too, since ones and zeros would hide a mistake."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype, **more: Any) -> Any:
    """transformers' model; read again from the file, since casting a live one also rounds its rope."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", **more
    )
    return model.eval()


def prompts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random tokens, the same in every run."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def theirs(model: Any, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """transformers' logits of all positions, float64."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits[0].double() for tokens in inputs])


def compiled(model: Path | str, output: Path, dtype: str, **options: Any) -> Path:
    """An artifact of the model."""
    options = {"max_step_tokens": 256, "max_seqs": 8} | options
    chosen = CompileOptions(model=str(model), dtype=dtype, output=output, **options)
    return compile_model(chosen, lambda *_: None).path


def ours(artifact: Path, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """pagec's logits of all positions, float64; the pool holds NaN before each request."""
    engine = Engine(artifact, num_blocks=2000)
    found = []
    for tokens in inputs:
        engine.runner.fill_kv_with_nan()
        request = engine.add_request(list(tokens), 1, prompt_logits=True, ignore_eos=True)
        for _ in engine.stream():
            pass
        if request.error is not None:
            raise request.error
        found.append(np.concatenate(request.logits))
    return torch.from_numpy(np.concatenate(found)).double()


def mean_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Mean over positions of KL(p || q), float64."""
    total = 0.0
    for start in range(0, len(p_logits), 64):  # a large vocabulary takes room
        p, q = (x[start : start + 64].double().log_softmax(-1) for x in (p_logits, q_logits))
        total += float((p.exp() * (p - q)).sum())
    return total / len(p_logits)


# ----------------------------------------------------------------------------------- experts

Choices = torch.Tensor  # [layers, positions, k], each sorted


def theirs_with_choices(model: Any, inputs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Choices]:
    """transformers' logits, and the experts that its routers choose."""
    routers = [m for name, m in model.named_modules() if type(m).__name__.endswith("TopKRouter")]
    seen: list[list[torch.Tensor]] = [[] for _ in routers]
    for router, found in zip(routers, seen, strict=True):
        router.register_forward_hook(lambda _m, _i, output, found=found: found.append(output[2]))
    logits = theirs(model, inputs)
    return logits, torch.stack([torch.cat(found).sort(-1).values for found in seen])


def ours_with_choices(artifact: Path, inputs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Choices]:
    """pagec's logits, and the experts that it chooses, read after the launch that chooses them."""
    engine = Engine(artifact, num_blocks=2000)
    runner = engine.runner
    assert isinstance(runner, Runner)
    program = runner.program
    layers = [b for b in program.buffers if b.dtype == "i32" and b.name.endswith(".e")]
    seen: dict[str, list[Any]] = {b.name: [] for b in layers}
    by_launch = {b.name: b for b in layers}
    assert layers
    logits = []

    def run(name: str, count: int, num_rows: int) -> None:
        runner.launch(name, count)
        choice = by_launch.get(name.removesuffix(".w") + ".e")
        if name.endswith(".w") and choice is not None:
            raw = runner._device.download(runner.memory.buffers[choice.name], np.int32)
            seen[choice.name].append(raw.reshape(-1, choice.stride)[:num_rows, : choice.inner[0]].copy())

    submit = runner.submit

    def step(batch: Any) -> Any:
        submit(batch)
        for launch in program.body:
            run(
                launch.name,
                len(batch.tiles) if launch.rows in ("tiles", "merges") else batch.num_tokens,
                batch.num_tokens,
            )
        for start in range(0, len(batch.logit_rows), program.capacity.R):
            rows = batch.logit_rows[start : start + program.capacity.R]
            runner.upload_logit_rows(rows)
            for launch in program.head:
                run(launch.name, len(rows), len(rows))

    runner.submit = step  # type: ignore[method-assign]
    for tokens in inputs:
        runner.fill_kv_with_nan()
        request = engine.add_request(list(tokens), 1, prompt_logits=True, ignore_eos=True)
        for _ in engine.stream():
            pass
        if request.error is not None:
            raise request.error
        logits.append(np.concatenate(request.logits))
    choices = [torch.from_numpy(np.concatenate(seen[b.name])).sort(-1).values for b in layers]
    return torch.from_numpy(np.concatenate(logits)).double(), torch.stack(choices)


def same_choices(a: Choices, b: Choices) -> torch.Tensor:
    """Positions at which all layers choose the same experts."""
    return (a == b).all(-1).all(0)
