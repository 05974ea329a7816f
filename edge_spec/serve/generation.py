"""From a request to an answer: reads it, gives it a place, generates, and writes what comes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edge_spec.errors import EdgeSpecError
from edge_spec.runtime.completion import Completion
from edge_spec.runtime.engine import Engine
from edge_spec.serve.accounting import record_of
from edge_spec.serve.answer import Answer
from edge_spec.serve.api_error import ApiError, internal, of_request, shutting_down
from edge_spec.serve.chat_answer import ChatAnswer
from edge_spec.serve.chat_request import ChatRequest
from edge_spec.serve.completion_answer import CompletionAnswer
from edge_spec.serve.completion_request import CompletionRequest
from edge_spec.serve.desk import Desk
from edge_spec.serve.event_stream import ALIVE, DONE, ClientGoneError, EventStream, event, while_connected
from edge_spec.serve.job import Arrival, Job, Streams
from edge_spec.serve.json_body import parse, read_body
from edge_spec.serve.logprob_shapes import LogprobShapes
from edge_spec.serve.settings import ServeSettings

_LOG = logging.getLogger(__name__)

# A stream's status is settled when it begins: as long as this it waits for a first word, which may be an error.
_FIRST_SECONDS = 2.0
# Between two signs of life of a stream that has nothing to say.
_ALIVE_SECONDS = 10.0
_CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class Prepared:
    """A request that has been checked.

    Attributes:
        answer: the shape of its answer.
        streams: begin what is to be generated.
        stream: whether the answer is to come piece by piece.
        usage: whether a stream is to end with how many tokens it took.
        speculation: who drafts.
        prompt: what was asked.
    """

    answer: Answer
    streams: Streams
    stream: bool
    usage: bool
    speculation: str
    prompt: Any


class Generation:
    """Answers requests for text."""

    def __init__(self, engine: Engine, settings: ServeSettings, desk: Desk) -> None:
        """Answer with an engine."""
        self._engine, self._settings, self._desk = engine, settings, desk
        self._shapes = LogprobShapes(engine.token_bytes)
        self._ends = frozenset(engine.manifest.eos_token_ids)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, self._prepare_chat)

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        return await self._answer(request, self._prepare_completion)

    async def _answer(self, request: Request, prepare: Callable[[bytes, Callable[[], bool]], Prepared]) -> Response:
        """Read a request and answer it; whatever happens, its place is given back."""
        record = record_of(request)
        try:
            body = await read_body(request, self._settings.max_request_bytes)
            place = self._desk.enter(request.state.client)
            try:
                work = self._desk.aside(partial(prepare, body, place.cancelled.is_set))
                prepared = await while_connected(request.receive, work)
                job = self._desk.begin(place, prepared.streams)
            except BaseException:
                self._desk.queue.leave(place)
                raise
            record.speculation, record.times = prepared.speculation, job.times
            record.completions = job.completions
            record.prompt = prepared.prompt if self._settings.log_prompts else None
            if prepared.stream:
                return await self._streamed(request, prepared, job)
            return await self._whole(request, prepared, job)
        except (ClientGoneError, ClientDisconnect):
            record.gone = True
            return Response(status_code=_CLIENT_CLOSED_REQUEST)  # nobody reads it

    async def _whole(self, request: Request, prepared: Prepared, job: Job) -> Response:
        async def completions() -> list[Completion]:
            async for _ in job.chunks(_ALIVE_SECONDS, _ALIVE_SECONDS):
                pass
            return job.completions

        try:
            whole = await while_connected(request.receive, completions())
            self._require_complete(job, prepared)
            return JSONResponse(await self._desk.aside(lambda: prepared.answer.whole(whole)))
        except (ClientGoneError, ApiError):
            raise
        except Exception as error:
            raise self._fault(error, request) from error
        finally:
            await self._desk.finish(job)

    async def _streamed(self, request: Request, prepared: Prepared, job: Job) -> Response:
        """Begin a stream, once it is likely that there is one."""
        chunks = job.chunks(_FIRST_SECONDS, _ALIVE_SECONDS)
        try:
            first = await while_connected(request.receive, _first(chunks))
            if job.cancelled:
                raise shutting_down()
        except BaseException as error:
            await self._desk.finish(job)
            if isinstance(error, Exception) and not isinstance(error, ClientGoneError | ApiError):
                raise self._fault(error, request) from error
            raise
        record_of(request).gone = True  # until the stream has come to its end
        return EventStream(self._pieces(request, prepared, job, first, chunks), partial(self._desk.finish, job))

    async def _pieces(
        self,
        request: Request,
        prepared: Prepared,
        job: Job,
        first: Arrival,
        chunks: AsyncGenerator[Arrival, None],
    ) -> AsyncGenerator[bytes, None]:
        """Write a stream."""
        record = record_of(request)
        answer = prepared.answer
        try:
            for opening in answer.opening():
                yield event(opening)
            async for arrived in _continued(first, chunks):
                if job.cancelled:
                    break
                if arrived is None:
                    yield ALIVE
                    continue
                for piece in answer.piece(*arrived):
                    yield event(piece)
            self._require_complete(job, prepared)
            if prepared.usage:
                yield event({**answer.envelope.piece(), "usage": answer.envelope.usage(job.completions)})
            yield DONE
            record.gone = False
        except ApiError as error:
            record.error, record.gone = error.code, False
            yield event(error.body())
        except Exception as error:
            fault = self._fault(error, request)
            record.error, record.gone = fault.code, False
            yield event(fault.body())

    def _require_complete(self, job: Job, prepared: Prepared) -> None:
        """Raise ApiError if answers are missing, or end early: the server has cancelled them."""
        cut = any(completion.finish_reason == "cancelled" for completion in job.completions)
        if cut or len(job.completions) < len(prepared.streams):
            raise shutting_down()

    def _fault(self, error: Exception, request: Request) -> ApiError:
        """Say what to answer for an exception of the engine; what is not the client's fault is logged."""
        record = record_of(request)
        fault = of_request(error)
        if fault is None:
            record.error = type(error).__name__
            _LOG.error("the engine failed", exc_info=error, extra={"fields": {"id": record.id}})
            fault = internal()
        return fault

    def _prepare_chat(self, body: bytes, cancelled: Callable[[], bool]) -> Prepared:
        request = parse(ChatRequest, body)
        request.require_supported(self._settings.model)
        messages, tools = request.conversation(), request.offered_tools()
        options = request.options(self._engine.context)
        try:
            tokens = self._engine.encode(messages, tools)
        except EdgeSpecError as error:
            raise of_request(error, "messages") or error from error
        self._record(tokens if tools else messages, options)
        return Prepared(
            ChatAnswer(request, self._settings.model, self._shapes, self._ends),
            self._streams([tokens], request.choices, options, cancelled),
            request.streams,
            request.includes_usage,
            options["speculation"],
            messages,
        )

    def _prepare_completion(self, body: bytes, cancelled: Callable[[], bool]) -> Prepared:
        request = parse(CompletionRequest, body)
        request.require_supported(self._settings.model)
        options = request.options(self._engine.context)
        prompts = request.prompts()
        try:
            tokens = [self._engine.encode(prompt) for prompt in prompts]
        except EdgeSpecError as error:
            raise of_request(error, "prompt") or error from error
        for prompt in prompts:
            self._record(prompt, options)
        return Prepared(
            CompletionAnswer(request, self._settings.model, self._shapes, self._ends),
            self._streams(tokens, request.choices, options, cancelled),
            request.streams,
            request.includes_usage,
            options["speculation"],
            prompts,
        )

    def _streams(
        self, prompts: Sequence[list[int]], choices: int, options: dict[str, Any], cancelled: Callable[[], bool]
    ) -> Streams:
        """Check what is asked of the engine. The answers to a prompt have consecutive seeds, if it has one."""
        seed = options["seed"]
        seeds = [None if seed is None else seed + choice for choice in range(choices)]
        try:
            return [
                self._engine.stream(tokens, **{**options, "seed": each, "cancelled": cancelled})
                for tokens in prompts
                for each in seeds
            ]
        except EdgeSpecError as error:
            raise of_request(error) or error from error

    def _record(self, prompt: Any, options: dict[str, Any]) -> None:
        if self._settings.recorder is not None:
            self._settings.recorder.record(prompt, options)


async def _first(chunks: AsyncIterator[Arrival]) -> Arrival:
    return await anext(chunks, None)


async def _continued(first: Arrival, chunks: AsyncIterator[Arrival]) -> AsyncIterator[Arrival]:
    yield first
    async for chunk in chunks:
        yield chunk
