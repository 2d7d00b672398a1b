"""The methods of pagec.v1.Pagec."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf import message_factory

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime.server.errors import Draining, EngineDead, Overloaded
from pagec.runtime.server.generation import Generation
from pagec.runtime.server.grpc import pagec_v1_pb2 as pb
from pagec.runtime.server.grpc.convert import call_of, choice_of, closing, echo_of, opening, prompt_ids
from pagec.runtime.server.service import Service

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Pagec"]
CODES: Final = (
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EngineDead, grpc.StatusCode.UNAVAILABLE),
    (Draining, grpc.StatusCode.UNAVAILABLE),
)


class Servicer:
    """Answers from a service. A call that its client cancels is cancelled here, which aborts it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def handlers(self) -> Any:
        """For a server: each method of the .proto is one of this class."""
        found = {}
        for method in SERVICE.methods:
            make = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            found[method.name] = make(
                getattr(self, method.name),
                request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE.full_name, found)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        """All choices, when they are complete."""
        async with _refusing(context), await self._start(request) as generation:
            tokenizer = self._service.tokenizer
            echo = echo_of(generation.call, tokenizer)
            choices: dict[int, pb.Choice] = {}
            texts: dict[int, list[str]] = defaultdict(lambda: [echo])
            async for update in generation:
                texts[update.index].append(update.text)
                choice = choices.setdefault(update.index, pb.Choice(index=update.index))
                choice.MergeFrom(choice_of(update, tokenizer))
            for index, pieces in texts.items():
                choices[index].text = "".join(pieces)
            response = opening(generation, tokenizer)
            response.MergeFrom(closing(generation))
            response.choices.extend(choices[index] for index in sorted(choices))
            return response

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """What is new, as it comes."""
        tokenizer = self._service.tokenizer
        async with _refusing(context), await self._start(request) as generation:
            echo = echo_of(generation.call, tokenizer)
            begun: set[int] = set()
            async for update in generation:
                choice = choice_of(update, tokenizer)
                # The prompt's log probabilities are there with the first tokens.
                response = pb.GenerateResponse() if begun else opening(generation, tokenizer)
                if update.index not in begun:
                    begun.add(update.index)
                    choice.text = echo + choice.text
                response.choices.append(choice)
                yield response
            yield closing(generation)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """A prompt's token ids."""
        async with _refusing(context):
            return pb.TokenizeResponse(
                token_ids=await prompt_ids(request, self._service), max_len=self._service.info.engine.max_len
            )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        async with _refusing(context):
            vocab = self._service.info.engine.vocab
            for token in request.token_ids:
                if token >= vocab:
                    raise RequestError(f"{token} is not in 0..{vocab - 1}", place="token_ids")
            return pb.DetokenizeResponse(text=self._service.tokenizer.decode(request.token_ids))

    async def GetModel(self, _request: pb.GetModelRequest, _context: Any) -> pb.Model:  # noqa: N802
        """What is served."""
        info = self._service.info
        return pb.Model(
            name=info.model,
            vocab=info.engine.vocab,
            max_len=info.engine.max_len,
            max_seqs=info.engine.max_rows,
            block_size=info.engine.block_size,
            num_blocks=info.engine.num_blocks,
            target=info.engine.target,
            digest=info.engine.digest,
            version=info.version,
        )

    async def _start(self, request: pb.GenerateRequest) -> Generation:
        return await self._service.start(await call_of(request, self._service))


@asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    """Errors become a status: its code, a message that names the field, and trailing metadata."""
    try:
        yield
    except PagecError as error:
        code = next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
        metadata = []
        if isinstance(error, RequestError) and error.place.isascii() and error.place.isprintable():
            metadata.append(("field", error.place))
        if isinstance(error, Overloaded):
            metadata.append(("retry-after", str(math.ceil(error.retry_after_s))))
        await context.abort(code, str(error), tuple(metadata))
