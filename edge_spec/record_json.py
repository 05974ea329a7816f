"""JSON that a stranger may have written, turned into the dataclass it is said to be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

_SHOWN = 60  # characters of a value in a message


def parse_json(text: bytes) -> Any:
    """Parse UTF-8 JSON of a size that has been checked. Raises ValueError also where it nests too deep.

    NaN and Infinity, which Python would take, are not JSON.
    """
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def decode(kind: type[Record], value: Any, where: str) -> Record:
    """Turn parsed JSON into a dataclass of containers, unions, literals and scalars, or raise ValueError.

    What has a default may be missing.
    """
    result: Record = _decode(kind, value, where)
    return result


def shown(value: object) -> str:
    """A value as it may appear in a message, however long it is."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shown_list(names: Iterable[str]) -> str:
    """The first names of a set, as they may appear in a message."""
    first = sorted(names)[:5]
    return f"[{', '.join(map(shown, first))}]"


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() and len(key) <= _SHOWN else f"[{shown(key)}]"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Turn parsed JSON into ``kind`` (a dataclass, container, union, literal or scalar), or raise ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        options = [option for option in arguments if option is not type(None)]
        if value is None and len(options) < len(arguments):
            return None
        if len(options) == 1:
            return _decode(options[0], value, where)
        if type(value) not in options:  # scalars
            raise ValueError(
                f"{where} is {shown(value)}, expected {' or '.join(option.__name__ for option in options)}"
            )
        return value
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise ValueError(f"{where} is {shown(value)}, expected one of {arguments}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{where} is not a list")
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {key: _decode(arguments[1], item, f"{where}{_step(key)}") for key, item in value.items()}
    if kind in (str, int, float, bool):
        if not isinstance(value, (int, float) if kind is float else kind) or (
            kind is not bool and isinstance(value, bool)
        ):
            raise ValueError(f"{where} is {shown(value)}, expected {kind.__name__}")
        return kind(value)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    types = get_type_hints(kind)
    if unknown := value.keys() - types.keys():
        raise ValueError(f"{where} has unknown entries {shown_list(unknown)}")
    # An older manifest does not know what has been added since with a default.
    required = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    if missing := required - value.keys():
        raise ValueError(f"{where} lacks {shown_list(missing)}")
    return kind(**{name: _decode(types[name], item, f"{where}.{name}") for name, item in value.items()})
