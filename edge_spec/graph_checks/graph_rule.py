"""What a rule about a kind of node is, and what rules ask of a node's inputs.

Types are ONNX's numbers for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.manifest import ArchitectureRecord
from edge_spec.onnx_file import FLOAT, FLOAT16, INT64, Declared, Shape

CONTRIB = "com.microsoft"

FLOATS = (FLOAT, FLOAT16)

Inputs = Sequence[Declared | None]
Attributes = Mapping[str, int | float | str]


class Surroundings(Protocol):
    """What a rule may ask about the graph.

    Attributes:
        facts: sizes of the model.
        float: type of activations.
        tree: whether attention takes positions and a bias.
        positions: rows that the rotary tables must have more than.
        cache: keys or values of one layer.
        quantized_cache: whether they are integers with a scale for each channel.
        selects: whether the graph gives the likeliest tokens of each row.
        steps: tokens that a call drafts, each by a step of the model; 1 for a graph that only gives logits.
        columns: how many columns of the logits stand for ids; the others are padding.
        column_ids: which, as int64, where column i does not stand for id i.
    """

    facts: ArchitectureRecord
    float: int
    tree: bool
    positions: int
    cache: Declared
    quantized_cache: bool
    selects: bool
    steps: int
    columns: int
    column_ids: bytes

    def name(self, value: Declared | None) -> str:
        """What an input of the node at hand is called."""
        ...

    def contents(self, value: Declared | None) -> bytes:
        """The bytes of a constant in the graph; none for other values."""
        ...

    def kind(self, value: Declared | None) -> str:
        """The kind of node that gives an input of the node at hand; none for other values."""
        ...

    def counts_rows(self, size: int | str) -> bool:
        """Whether a dimension is the rows of a step: those of the call, or the one row of each later step."""
        ...

    def names_rows(self, value: Declared | None) -> bool:
        """Whether an input of the node at hand is the ids of a step's rows, which the embedding has."""
        ...


@dataclass(frozen=True)
class Rule:
    """What a kind of node is given, and what comes out."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, Sequence[int | str] | type]
    shape: Callable[[Surroundings, Inputs, Attributes], Sequence[Declared]]
    optional: tuple[str, ...] = ()


class MismatchError(Exception):
    """The inputs of a node do not fit each other."""


def need(condition: bool) -> None:
    """Raise MismatchError unless it holds."""
    if not condition:
        raise MismatchError


def given(value: Declared | None, dtype: int | tuple[int, ...], shape: Shape | None = None) -> Declared:
    """Return an input, which must be there, of such a type, and of that shape if one is named."""
    if value is None or value.dtype not in ((dtype,) if isinstance(dtype, int) else dtype):
        raise MismatchError
    need(shape is None or value.shape == shape)
    return value


def last_size(value: Declared) -> int:
    """Size of the last dimension."""
    last = value.shape[-1] if value.shape else None
    if not isinstance(last, int):
        raise MismatchError
    return last


def constants(graph: Surroundings, value: Declared | None, *numbers: int) -> None:
    """Ask for a constant int64 [numbers] that holds these numbers."""
    given(value, INT64, (len(numbers),))
    need(graph.contents(value) == b"".join(number.to_bytes(8, "little", signed=True) for number in numbers))


def scalar(graph: Surroundings, value: Declared | None, number: int) -> None:
    """Ask for a constant int64 scalar that is this number."""
    given(value, INT64, ())
    need(graph.contents(value) == number.to_bytes(8, "little", signed=True))
