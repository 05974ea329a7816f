"""A web app of your own that has the engine inside, and streams answers.

    python examples/embed_in_fastapi.py coder.pair --port 8000
    curl --no-buffer localhost:8000/answer --json '{"question": "Why is the sky blue?"}'

Needs the extra: pip install 'edge-spec[serve]'. For OpenAI's protocol there is 'edge-spec serve'; this is for apps that
have requests of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

import edge_spec


class Question(BaseModel):
    """What is asked."""

    question: str = Field(min_length=1, max_length=4000)
    max_new_tokens: int = Field(default=200, ge=1, le=1000)
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    seed: int | None = None


def build_app(bundle: str) -> FastAPI:
    """An app that loads the bundle when it starts, and closes it when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with edge_spec.load(bundle, context=2048, conversations=2) as engine:
            app.state.engine = engine
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/answer")
    async def answer(question: Question, request: Request) -> StreamingResponse:
        engine: edge_spec.Engine = request.app.state.engine
        options = question.model_dump(exclude={"question"})
        messages = [{"role": "user", "content": question.question}]

        chunks = engine.astream(messages, **options)
        # Waited for, so that what is refused is answered with an error instead of half a text.
        first = await anext(chunks)

        async def text() -> AsyncIterator[str]:
            # When the client goes away, this is left, and the engine goes on with the next request.
            yield first.text
            async for chunk in chunks:
                yield chunk.text

        return StreamingResponse(text(), media_type="text/plain; charset=utf-8")

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        engine: edge_spec.Engine = request.app.state.engine
        return {"running": engine.running, "waiting": engine.waiting, **engine.statistics().to_dict()}

    @app.exception_handler(edge_spec.EdgeSpecError)
    async def refused(request: Request, error: edge_spec.EdgeSpecError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=400 if isinstance(error, ValueError) else 500)

    return app


def main() -> None:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; only this machine by default")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (8000)")
    arguments = parser.parse_args()
    uvicorn.run(build_app(arguments.bundle), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
