"""Between gRPC's messages and the server's own types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams
from pagec.runtime.sampling.sampler import Logprob, TokenLogprobs
from pagec.runtime.server.generation import Call, Generation, Update
from pagec.runtime.server.grpc import pagec_v1_pb2 as pb
from pagec.runtime.server.openai.calls import encode, encode_chat
from pagec.runtime.server.service import Service
from pagec.runtime.server.tool_choice import check_tools
from pagec.runtime.text.pieces import TokenTexts
from pagec.runtime.text.tokenizer import Tokenizer

FINISH_REASONS: Final = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


async def call_of(request: pb.GenerateRequest, service: Service) -> Call:
    """What is to be generated; RequestError names the field."""
    params = sampling_params(request.params)
    return Call(
        await prompt_ids(request, service),
        params,
        beam_params(request.beam, params) if request.HasField("beam") else None,
        request.salt,
        request.priority,
        request.ttft_s if request.HasField("ttft_s") else None,
        request.token_s if request.HasField("token_s") else None,
        request.text if request.HasField("text") else None,
    )


async def prompt_ids(request: pb.GenerateRequest | pb.TokenizeRequest, service: Service) -> list[int]:
    """The prompt as token ids; RequestError if there is none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return await encode(service, request.text)
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "chat":
        messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
        return await encode_chat(service, messages, check_tools(None), {})
    raise RequestError("is missing", place="prompt", remedy="give one of its kinds")


def sampling_params(given: pb.SamplingParams) -> SamplingParams:
    """The fields that are there; of the others the defaults."""
    values = {field.name: _plain(field.name, value) for field, value in given.ListFields()}
    return SamplingParams(**{"max_tokens": None, **values})


def _plain(name: str, value: Any) -> Any:
    if name == "structured_outputs":
        return _structured_outputs(value)
    if name == "allowed_token_ids":
        return list(value.ids)
    if name == "logit_bias":
        return dict(value)
    return list(value) if name in ("bad_words", "stop", "stop_token_ids") else value


def _structured_outputs(given: pb.StructuredOutputs) -> StructuredOutputsParams:
    kinds: dict[str, Any] = {}
    if kind := given.WhichOneof("kind"):
        value = getattr(given, kind)
        kinds[kind] = list(value.texts) if kind == "choice" else value
    return StructuredOutputsParams(**kinds)


def beam_params(given: pb.BeamSearch, params: SamplingParams) -> BeamSearchParams:
    """A beam search that ends as `params` say."""
    values: dict[str, Any] = {}
    if given.HasField("length_penalty"):
        values["length_penalty"] = given.length_penalty
    if given.HasField("early_stopping"):
        word = given.early_stopping
        values["early_stopping"] = {"true": True, "false": False}.get(word, word)
    return BeamSearchParams(
        beam_width=given.beam_width,
        n=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        **values,
    )


# ------------------------------------------------------------------------------------- answers


def opening(generation: Generation, tokenizer: Tokenizer) -> pb.GenerateResponse:
    """What is known before the first token."""
    response = pb.GenerateResponse(id=generation.id)
    if generation.seed is not None:
        response.seed = (generation.seed + 2**63) % 2**64 - 2**63  # the same 64 bits
    response.prompt_logprobs.extend(places(generation.prompt_logprobs or (), tokenizer))
    return response


def closing(generation: Generation) -> pb.GenerateResponse:
    """What is known at the end."""
    usage, timings = generation.usage, generation.timings
    response = pb.GenerateResponse(
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
    )
    if timings is not None:
        response.timings.CopyFrom(
            pb.Timings(
                queue_s=timings.queue_s,
                prefill_s=timings.prefill_s,
                decode_s=timings.decode_s,
                preemptions=timings.preemptions,
            )
        )
    return response


def echo_of(call: Call, tokenizer: Tokenizer) -> str:
    """What stands before the text of each choice: the prompt, if that is wanted."""
    if not call.params.echo:
        return ""
    if call.prompt_text is not None:
        return call.prompt_text
    return tokenizer.decode(call.prompt, skip_special_tokens=call.params.skip_special_tokens)


def choice_of(update: Update, tokenizer: Tokenizer) -> pb.Choice:
    """What came for one choice."""
    choice = pb.Choice(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        logprobs=places(update.logprobs, tokenizer),
        finish_reason=FINISH_REASONS[update.finish_reason],
        score=update.score,
    )
    if isinstance(update.stop_reason, str):
        choice.stop_text = update.stop_reason
    elif update.stop_reason is not None:
        choice.stop_token_id = update.stop_reason
    return choice


def places(found: Iterable[TokenLogprobs | None], tokenizer: Tokenizer) -> list[pb.TokenLogprobs]:
    """Log probabilities with the tokens' texts."""
    texts = TokenTexts(tokenizer)
    return [
        pb.TokenLogprobs()
        if place is None
        else pb.TokenLogprobs(
            own=_token(place.token, place.own, texts),
            top=[_token(token, logprob, texts) for token, logprob in place.top.items()],
        )
        for place in found
    ]


def _token(token: int, found: Logprob, texts: TokenTexts) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token,
        logprob=found.logprob,
        rank=found.rank,
        text=texts.text(token),
        bytes=texts.bytes(token),
    )
