"""What a ``tokenizer.json`` may do to a text: rewrite it, but not blow it up, and not search it for ever.

The library runs whatever the file describes. Its work is linear in the text but for two kinds of parts: replacements,
whose results can grow from one to the next, and regular expressions, whose search can take exponential time.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A text may become so many times as long. SentencePiece's mark of a space takes 3 bytes instead of 1.
_MOST_GROWTH = 64
_MOST_PARTS = 64
_LONGEST_PREFIX = 256
_LONGEST_REASON = 300
_LONGEST_PATTERN = 8192


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Let the library fail with exceptions: where it panics, it raises a class that is none, and nobody catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizers library panics: {error}") from error


def reason(error: BaseException) -> str:
    """What the library says, which may quote all of a file, as it may appear in a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError if a ``tokenizers.Tokenizer`` has parts that could take all memory or time."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        part = getattr(tokenizer, name)
        # The library writes a part's JSON for pickle; that of the whole tokenizer would be megabytes of vocabulary.
        parts = [] if part is None else list(_flat(json.loads(part.__getstate__())))
        if len(parts) > _MOST_PARTS:
            raise ValueError(f"its {name} has {len(parts)} parts, expected at most {_MOST_PARTS}")
        growth = 1.0
        for entry in parts:
            growth *= _growth(entry)
            _check_template(entry)
        if growth > _MOST_GROWTH:
            raise ValueError(f"its {name} can make a text {growth:.0f} times as long")


def _flat(part: Any) -> Iterator[dict[str, Any]]:
    """The parts of nested sequences, in their order."""
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        if part.get("type") == "Sequence" and name in part:
            for inner in part[name]:
                yield from _flat(inner)
            return
    yield part


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a part can make a text."""
    kind = part.get("type")
    pattern = part.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if expression is not None:
        _check_expression(expression)
    if kind == "Prepend" and len(part["prepend"]) > _LONGEST_PREFIX:
        raise ValueError(f"it puts {len(part['prepend'])} characters in front of every text")
    if kind == "Replace":
        shortest = len(pattern["String"].encode()) if isinstance(pattern, dict) and "String" in pattern else 0
        # Nothing at all is found between any two bytes.
        return max(1.0, len(part["content"].encode()) / shortest if shortest else 1 + len(part["content"].encode()))
    if kind == "Precompiled":
        data = base64.b64decode(part["precompiled_charsmap"])
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        if max(map(len, texts), default=0) > _LONGEST_PREFIX:
            raise ValueError("its table replaces a character by a long text")
    return 1.0


def _check_template(part: dict[str, Any]) -> None:
    """Refuse a template that repeats the text, or adds many tokens to it."""
    if part.get("type") != "TemplateProcessing":
        return
    pieces = part["single"]
    ids = [token["ids"] for token in part["special_tokens"].values()]
    if len(pieces) > _MOST_PARTS or any(len(each) > _MOST_PARTS for each in ids):
        raise ValueError("it puts a long row of tokens around every text")
    if sum("Sequence" in piece for piece in pieces) != 1:
        raise ValueError("its template does not hold the text once")
    named = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
    if unknown := named - part["special_tokens"].keys():
        raise ValueError(f"its template uses {min(unknown)!r}, which it does not define")


def _check_expression(pattern: str) -> None:
    """Refuse repetition inside of repetition, such as ``(a+)+``, whose search takes exponential time."""
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"it searches for an expression of {len(pattern)} characters")
    # For every open group, whether something in it repeats without limit.
    groups = [False]
    position, closed = 0, False
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            if pattern[position + 1 : position + 2] in (*"123456789kg",):
                raise ValueError("it searches for an expression that refers to itself")
            position, closed = position + 2, False
            continue
        if character == "[":
            position, closed = _after_class(pattern, position), False
            continue
        if character == "(":
            groups.append(False)
        elif character == ")" and len(groups) > 1:
            repeats = groups.pop()
            groups[-1] |= repeats
            position, closed = position + 1, repeats
            continue
        elif character in "*+" or (character == "{" and _is_repetition(pattern, position)):
            if closed:
                raise ValueError("it searches for a repetition inside of a repetition, which can take for ever")
            groups[-1] = True
        position, closed = position + 1, False


def _is_repetition(pattern: str, position: int) -> bool:
    """Whether a brace opens a repetition of more than a few times: ``{1,3}`` does not, ``{2,}`` does."""
    body = pattern[position + 1 :].partition("}")[0]
    low, _, high = body.partition(",")
    if not (low + high).isdecimal():
        return False
    return body.endswith(",") or int(high or low) > 16


def _after_class(pattern: str, position: int) -> int:
    """The place behind the bracket expression that starts at ``position``."""
    depth, position = 1, position + 1
    if pattern[position : position + 1] == "^":
        position += 1
    if pattern[position : position + 1] == "]":
        position += 1
    while position < len(pattern) and depth:
        character = pattern[position]
        depth += (character == "[") - (character == "]")
        position += 2 if character == "\\" else 1
    return position
