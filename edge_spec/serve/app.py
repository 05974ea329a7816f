"""The routes of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import edge_spec
from edge_spec.runtime.engine import Engine
from edge_spec.serve.accounting import Accounting, record_of
from edge_spec.serve.api_error import ApiError
from edge_spec.serve.chat_request import ChatRequest
from edge_spec.serve.completion_request import CompletionRequest
from edge_spec.serve.description import describe, may_answer, takes
from edge_spec.serve.desk import Desk
from edge_spec.serve.gate import Gate
from edge_spec.serve.generation import Generation
from edge_spec.serve.metrics import Metrics
from edge_spec.serve.settings import ServeSettings
from edge_spec.serve.status import engine_status, memory, queue_status

_PAGE = Path(__file__).with_name("page.html")
# The page holds everything it needs, and talks to nobody but this server.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(engine: Engine, settings: ServeSettings) -> FastAPI:
    """Build the app that serves an engine; whoever made the engine closes it after the app has ended.

    Its ``state.desk`` is where requests are taken in.
    """
    desk = Desk(settings.parallel, settings.queue_limit)
    metrics = Metrics(desk.queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await desk.close()

    app = FastAPI(
        title="edge-spec",
        summary="OpenAI-compatible server of one model",
        version=edge_spec.__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load from elsewhere
        redoc_url=None,
    )
    app.state.desk = desk
    _add_generation(app, Generation(engine, settings, desk))
    _add_models(app, settings.model)
    _add_health(app, engine, settings.model, desk, metrics)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    describe(app, ChatRequest, CompletionRequest)
    # The last one comes first.
    app.add_middleware(
        Gate, api_keys=settings.api_keys, allowed_hosts=settings.allowed_hosts, origins=settings.cors_origins
    )
    app.add_middleware(Accounting, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    return app


def _add_generation(app: FastAPI, generation: Generation) -> None:
    wrong = may_answer(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, streams=True)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=wrong)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generation.chat(request)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=wrong)
    async def completions(request: Request) -> Response:
        """Continue a text, or several."""
        return await generation.complete(request)

    @app.post("/v1/embeddings", responses=may_answer(400, 401, 403), status_code=400)
    async def embeddings() -> Response:
        """Refuse: this server generates text."""
        raise ApiError(
            400,
            "This server generates text and has no embeddings; use a model that was trained for them.",
            code="unsupported",
        )


def _add_models(app: FastAPI, model: str) -> None:
    description = {"id": model, "object": "model", "created": 0, "owned_by": "edge-spec"}

    @app.get("/v1/models", responses=may_answer(401, 403))
    async def models() -> dict[str, Any]:
        """List the model there is."""
        return {"object": "list", "data": [description]}

    @app.get("/v1/models/{name:path}", responses=may_answer(401, 403, 404))
    async def find_model(name: str) -> dict[str, Any]:
        """Describe the model there is."""
        if name != model:
            raise ApiError(404, f"There is no model {name[:200]!r} here, only {model!r}.", "model", "model_not_found")
        return description


def _add_health(app: FastAPI, engine: Engine, model: str, desk: Desk, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the server lives."""
        return {"status": "ok"}

    @app.get("/ready", responses=may_answer(503))
    async def ready() -> Response:
        """Say whether requests are taken in."""
        if desk.closing:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/status", responses=may_answer(401, 403))
    async def status() -> dict[str, Any]:
        """Describe the model, its memory, the queue and what was done so far."""
        described = await desk.aside(partial(engine_status, engine, model))
        return {**described, "queue": queue_status(desk.queue)}

    @app.get("/metrics", responses=may_answer(401, 403))
    async def prometheus() -> Response:
        """Everything Prometheus may want to know."""
        now = await desk.aside(partial(memory, engine))
        sizes = {"resident": now["resident_bytes"], "planned": now["planned_bytes"], "budget": engine.plan.budget_bytes}
        return Response(metrics.text(sizes), media_type=metrics.content_type)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Show a page to chat on."""
        return HTMLResponse(_PAGE.read_bytes(), headers=_PAGE_HEADERS)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # registered for these
    record_of(request).error = error.code or error.message
    return Response(error.content(), error.status, error.headers, "application/json")


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape."""
    assert isinstance(error, HTTPException)  # registered for these
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    shape = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}", None, code)
    return Response(shape.content(), shape.status, error.headers, "application/json")
