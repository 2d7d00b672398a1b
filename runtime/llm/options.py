"""vLLM's options of an `LLM`: which have a meaning here, which may stand there, and what to do about others.

renamed     the engine has it under another name
neutral     may be given with values that change nothing here; None always is one
claims      say what the artifact is; true, or refused
sizes       of memory that an engine takes for itself elsewhere: any, without effect
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any, Final

from pagec.compiler.errors import PagecError, RequestError
from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.program import Program
from pagec.runtime.engine import Engine

_RENAMED: Final = {
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "prefill_chunk",
    "enable_prefix_caching": "prefix_cache",
    "scheduling_policy": "policy",
    "kv_cache_memory_bytes": "kv_bytes",
}
_ALONE: Final = "leave it out: the engine runs in one process, on one device"
_COMPILED: Final = "leave it out: that is decided when the model is compiled"
_LOCAL: Final = "leave it out, and give the model's files"
_EITHER: Final = (False, True)
# The values that change nothing, and what to do who wants another.
_NEUTRAL: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "tensor_parallel_size": ((1,), _ALONE),
    "pipeline_parallel_size": ((1,), _ALONE),
    "data_parallel_size": ((1,), _ALONE),
    "distributed_executor_backend": ((), _ALONE),
    "quantization": ((), _COMPILED),
    "kv_cache_dtype": (("auto",), _COMPILED),
    "enforce_eager": (_EITHER, _COMPILED),
    "max_seq_len_to_capture": ((), _COMPILED),
    "compilation_config": ((), _COMPILED),
    "tokenizer": ((), "leave it out: the artifact has the model's own"),
    "tokenizer_mode": (("auto",), "leave it out: the artifact has the model's own tokenizer"),
    "tokenizer_revision": ((), _LOCAL),
    "skip_tokenizer_init": ((False,), "set detokenize to false in SamplingParams"),
    "revision": ((), _LOCAL),
    "code_revision": ((), _LOCAL),
    "download_dir": ((), _LOCAL),
    "load_format": (("auto",), _LOCAL),
    "trust_remote_code": (_EITHER, _LOCAL),
    "hf_overrides": ((), _COMPILED),
    "task": (("auto", "generate"), "leave it out: models write text"),
    "runner": (("auto", "generate"), "leave it out: models write text"),
    "enable_chunked_prefill": ((True,), "leave it out: prompts are always cut to what a step holds"),
    "enable_lora": ((False,), "merge the adapter into the checkpoint, and compile that"),
    "speculative_config": ((), "leave it out"),
    "disable_custom_all_reduce": (_EITHER, _ALONE),
    "disable_log_stats": (_EITHER, "leave it out"),
    "cpu_offload_gb": ((0,), "leave it out"),
}
_SIZES: Final = ("gpu_memory_utilization", "swap_space")
_CLAIMS: Final = ("dtype", "block_size")
_DTYPES: Final = {"float32": "f32", "float": "f32", "bfloat16": "bf16"}


def engine_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by the engine's names, and what the artifact must be (`check_claims`); PagecError for one that
    does not exist, or not with this value."""
    known = inspect.signature(Engine.__init__).parameters
    options: dict[str, Any] = {}
    claims: dict[str, Any] = {}
    for name, value in given.items():
        own = _RENAMED.get(name, name)
        if name in _NEUTRAL:
            _check_neutral_option(name, value)
        elif name in _SIZES:
            _check_size(name, value)
        elif name in _CLAIMS:
            claims[name] = value
        elif own not in known or own == "self":
            raise PagecError("there is no such option", place=name, remedy="leave it out")
        elif own != name and own in given:
            raise PagecError(f"is {own} by another name", place=name, remedy="give one of the two")
        elif own == name or value is not None:  # None of vLLM's is its own choice
            options[own] = value
    _check_chunk(given)
    return options, claims


def check_claims(claims: Mapping[str, Any], program: Program | GpuProgram) -> None:
    """PagecError for what the artifact is said to be, and is not."""
    remedy = "leave it out, or compile the model for it"
    dtype = claims.get("dtype")
    if dtype not in (None, "auto"):
        name = str(dtype).removeprefix("torch.")
        if _DTYPES.get(name) != program.kv.dtype:
            raise PagecError(
                f"{name} is not the artifact's, {program.kv.dtype}", place="dtype", remedy=remedy
            )
    size = claims.get("block_size")
    if size not in (None, program.kv.block_size):
        raise PagecError(
            f"{size!r} is not the artifact's, {program.kv.block_size}", place="block_size", remedy=remedy
        )


def check_neutral(**given: object) -> None:
    """RequestError for what a call of vLLM's may ask and one here may not; None, False, zeros ask nothing."""
    remedies = {
        "lora_request": "merge the adapter into the checkpoint, and compile that",
        "priority": "leave it out: all prompts of a call run together",
        "continue_final_message": "render the chat to a text, and let `generate` go on from it",
    }
    for name, value in given.items():
        if any(value) if isinstance(value, list | tuple) else value:
            raise RequestError(f"{value!r} is not supported", place=name, remedy=remedies[name])


def _check_neutral_option(name: str, value: object) -> None:
    values, remedy = _NEUTRAL[name]
    # True is no 1, and False no 0
    if value is None or any(type(value) is type(one) and value == one for one in values):
        return
    allowed = " or ".join(map(repr, values or (None,)))
    raise PagecError(f"{value!r} is not supported, only {allowed}", place=name, remedy=remedy)


def _check_size(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real) or value < 0):
        raise PagecError(f"{value!r} is no size", place=name, remedy="leave it out, and give `kv_bytes`")


def _check_chunk(given: Mapping[str, Any]) -> None:
    value = given.get("max_num_batched_tokens")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise PagecError(f"{value!r} is no number of tokens", place="max_num_batched_tokens")
