"""The grammar that a request asks its answer to obey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_spec.errors import RequestError
from edge_spec.serve.api_error import ApiError, of_request
from edge_spec.serve.generation_fields import GrammarFields

if TYPE_CHECKING:
    from edge_spec import Grammar


def grammar_of(fields: GrammarFields | None, schema: Mapping[str, Any] | None, any_object: bool) -> Grammar | None:
    """Return the grammar of a request; ``None`` if any text will do.

    Args:
        fields: edge-spec's own field.
        schema: a JSON schema.
        any_object: any JSON object will do.

    Raises:
        ApiError: the request asks for two forms at once, or for one that cannot be.
    """
    if fields is None and schema is None and not any_object:
        return None
    if fields is not None and (schema is not None or any_object):
        raise ApiError(400, "An answer has one form: give grammar or response_format.", "grammar", "invalid_value")
    from edge_spec import Grammar

    param = "response_format" if fields is None else "grammar"
    try:
        if schema is not None:
            return Grammar.json_schema(schema)
        if fields is None:
            return Grammar.json_object()
        return Grammar.lark(fields.lark or "") if fields.regex is None else Grammar.regex(fields.regex)
    except RequestError as error:
        raise of_request(error, param) or error from error
