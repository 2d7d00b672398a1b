"""The HTTP application: routes, and errors in one form for all of them."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime.server.guard import Guard
from pagec.runtime.server.metrics import Metrics
from pagec.runtime.server.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from pagec.runtime.server.openai.calls import check_model, encode, encode_chat
from pagec.runtime.server.openai.chats import chat
from pagec.runtime.server.openai.completions import complete
from pagec.runtime.server.openai.failures import (
    failure,
    failure_response,
    invalid_response,
    json_response,
)
from pagec.runtime.server.openai.sending import EventStream, answer
from pagec.runtime.server.service import Service, Stats
from pagec.runtime.server.tool_choice import check_tools

PAGE: Final = Path(__file__).parent / "page"
WATCH_S: Final = 0.25
# The page talks to its own server only, and runs nothing that did not come with it.
PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
BODIES: Final[Mapping[str, type[Body]]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def make_app(
    service: Service, metrics: Metrics, *, api_keys: Collection[str] = (), tool_format: str | None = None
) -> ASGIApp:
    """The whole application. `api_keys`: one of them is needed, if there are any; `tool_format`: how tool
    calls are written, if the chat template does not tell."""
    app = FastAPI(title="pagec", version=service.info.version, redoc_url=None, docs_url=None)
    _add_openai(app, service, tool_format)
    _add_tokenizer(app, service)
    _add_state(app, service, metrics)
    paths = _add_page(app, PAGE)
    _add_failures(app)
    return Guard(
        app,
        keys=api_keys,
        open_paths={"/health", *paths},
        max_body_bytes=service.limits.max_body_bytes,
    )


# -------------------------------------------------------------------------------------- routes


def _add_openai(app: FastAPI, service: Service, tool_format: str | None) -> None:
    info = service.info

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service, name) for name in info.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(_model(service, check_model(info, name)))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await answer(request, complete(service, body))

    @app.post("/v1/chat/completions")
    async def chats(request: Request, body: ChatBody) -> Response:
        return await answer(request, chat(service, body, tool_format))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.began_at),
        "owned_by": "pagec",
        "root": service.info.engine.model,
        "max_model_len": service.info.engine.max_len,
    }


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    tokenizer, engine = service.tokenizer, service.info.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(service.info, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", place="prompt")
        if body.prompt is not None:
            ids = await encode(service, body.prompt, must_fit=False)
        else:
            tools = check_tools(body.tools)
            names = body.chat_template_kwargs
            ids = await encode_chat(service, body.messages or [], tools, names, must_fit=False)
        return json_response({"count": len(ids), "max_model_len": engine.max_len, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        check_model(service.info, body.model)
        for i, token in enumerate(body.tokens):
            if not 0 <= token < engine.vocab:
                raise RequestError(f"{token} is not in 0..{engine.vocab - 1}", place=f"tokens[{i}]")
        return json_response({"prompt": tokenizer.decode(body.tokens)})


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        service.check_ready()
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": service.info.version})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await metrics.text(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/stats")
    async def stats() -> Response:
        return json_response(stats_json(await service.stats()))

    @app.get("/stats/stream")
    async def stats_stream() -> Response:
        await service.stats(max_age_s=WATCH_S)  # an error shall be one
        return EventStream(_watch(service))


async def _watch(service: Service) -> AsyncIterator[Mapping[str, Any]]:
    async for stats in service.watch(WATCH_S):
        yield stats_json(stats)


def stats_json(stats: Stats) -> dict[str, Any]:
    """As /stats shows them."""
    engine = {name: getattr(stats.engine, name) for name in stats.engine.__struct_fields__}
    plain: dict[str, Any] = msgspec.to_builtins(engine)
    return {"model": stats.model, "uptime_s": round(stats.uptime_s, 3), **plain}


def _add_page(app: FastAPI, directory: Path) -> Collection[str]:
    """The page's files, read once; the paths that they have."""
    paths = []
    for file in sorted(directory.glob("*.*")) if directory.is_dir() else ():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        if file.suffix == ".py":
            continue
        app.add_api_route(path, _file(file.read_bytes(), kind), methods=["GET"], include_in_schema=False)
        paths.append(path)
    return paths


def _file(data: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def get() -> Response:
        return Response(data, headers=PAGE_HEADERS, media_type=kind)

    return get


# -------------------------------------------------------------------------------------- errors


def _add_failures(app: FastAPI) -> None:
    @app.exception_handler(PagecError)
    async def pagec_error(_request: Request, error: PagecError) -> Response:
        return failure_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return invalid_response(error, BODIES.get(request.url.path))

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return json_response(failure(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fault(_request: Request, error: Exception) -> Response:
        return json_response(failure(500, f"a fault of the server: {type(error).__name__}"), 500)
