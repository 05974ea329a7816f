"""What a text has to be: JSON of a schema, a match of an expression, a sentence of a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from edge_spec.errors import MissingDependencyError, RequestError

Kind = Literal["json_schema", "regex", "lark"]

# Compiling takes time and memory that grow with the text.
_LONGEST_TEXT = 1 << 18
# llguidance may quote all of what it refuses.
_LONGEST_REASON = 500
_EXPECTED = {
    "json_schema": "a JSON schema",
    "regex": "a regular expression in Rust's syntax",
    "lark": "a grammar in Lark's syntax with a rule 'start'",
}

# Where JSON may hold white space: none, a space, or a line break and an indent. Without a limit, small models have been
# seen to go on with spaces for ever.
_WHITESPACE = r"(\x20|\n[\x20\x09]{0,64})"
# How most JSON is written, which is what drafting goes by: on one line as Python does it, without any space, and over
# several lines. What is written otherwise is as good.
_STYLES: tuple[dict[str, Any], ...] = (
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    {"whitespace_pattern": _WHITESPACE, "key_separator": ": "},
)


@dataclass(frozen=True)
class Grammar:
    """What a text has to be, from its first character to its last; see the class methods.

    Attributes:
        kind: what ``text`` is.
        text: a JSON schema, a regular expression or a grammar.

    Raises:
        RequestError: the text is none, is too long, or describes nothing that could be written.
        MissingDependencyError: llguidance is not installed.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RequestError(f"A grammar's kind is {self.kind!r}, expected one of {', '.join(get_args(Kind))}.")
        expected = _EXPECTED[self.kind]
        given: object = self.text
        if not isinstance(given, str):
            raise RequestError(f"The grammar is a {type(given).__name__}, expected {expected}.")
        if len(given) > _LONGEST_TEXT:
            raise RequestError(f"The grammar has {len(given)} characters, expected at most {_LONGEST_TEXT}.")
        matcher = import_llguidance().LLMatcher
        try:
            given.encode()
            problem = matcher.validate_grammar(self.definition())
        except Exception as error:  # of several kinds, by what is wrong
            problem = str(error)
        # The reason is a warning where the grammar can be used.
        if problem and not problem.startswith("WARNING"):
            raise RequestError(
                f"The grammar {bounded(given, 80)!r} cannot be used: {bounded(problem)}. Expected {expected}."
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that obeys a schema (JSON Schema, draft 2020-12 and older), with its properties in the schema's order.

        Args:
            schema: the schema as an object or as text.
        """
        given: object = schema
        try:
            parsed = json.loads(given) if isinstance(given, str) else given
            if not isinstance(parsed, Mapping):
                raise RequestError(f"The JSON schema is {bounded(repr(parsed), 80)}, expected an object.")
            # In ASCII, so that half a character is an error with a place.
            return cls("json_schema", json.dumps(dict(parsed), allow_nan=False))
        except RequestError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(
                f"The JSON schema cannot be read: {bounded(str(error))}. Expected a mapping or the text of one."
            ) from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from beginning to end.

        Args:
            pattern: in the syntax of Rust's ``regex``, without look-around and back references.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A sentence of a context-free grammar.

        Args:
            text: in llguidance's variant of Lark's syntax; the rule ``start`` is the whole text.
        """
        return cls("lark", text)

    def definition(self) -> str:
        """The grammar as llguidance reads it."""
        matcher = import_llguidance().LLMatcher
        if self.kind == "regex":
            return str(matcher.grammar_from_regex(self.text))
        if self.kind == "lark":
            return str(matcher.grammar_from_lark(self.text))
        return str(matcher.grammar_from_json_schema(self.text, defaults={"whitespace_pattern": _WHITESPACE}))

    def usual_definitions(self) -> tuple[str, ...]:
        """Parts of the grammar that most of its texts belong to, as llguidance reads them."""
        if self.kind != "json_schema":
            return ()
        matcher = import_llguidance().LLMatcher
        return tuple(str(matcher.grammar_from_json_schema(self.text, overrides=style)) for style in _STYLES)


def import_llguidance() -> ModuleType:
    """Import llguidance.

    Raises:
        MissingDependencyError: it is not installed, or the installation is broken.
    """
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError(
            f"A grammar needs llguidance, which cannot be imported ({error}). Install it with: "
            "pip install 'edge-spec[grammar]'."
        ) from error
    module: ModuleType = llguidance
    return module


def bounded(text: str, longest: int = _LONGEST_REASON) -> str:
    """A text on one line that is not too long for a message."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= longest else f"{text[:longest]}..."
