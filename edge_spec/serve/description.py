"""The server's own OpenAPI description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Say in a route's description that its body is such a request."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def may_answer(*statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Say in a route's description with which statuses it may answer."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": "What is wrong", "content": content} for status in statuses
    }
    if streams:
        kinds = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}}
        answers[200] = {"description": "The answer, whole or piece by piece", "content": kinds}
    return answers


def describe(app: FastAPI, *kinds: type[BaseModel]) -> None:
    """Have the app describe its requests, which it reads itself."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFERENCE)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            schemas["Error"] = _ERROR
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]
