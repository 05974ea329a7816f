"""What an app's drafter does wrong costs its proposals, never the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec import Budget, Engine, Proposal
from edge_spec.errors import RequestError

PROMPT = [1, 2, 3]
VOCAB = 29


class Odd:
    """Does what it is told to."""

    memory_bytes = 0

    def __init__(self, name: Any, propose: Callable[..., Any]) -> None:
        self.name = name
        self._propose = propose
        self.failing = ""

    def propose(self, context: Any, budget: Budget, prefix: Sequence[int] = ()) -> Any:
        return self._propose(context, budget)

    def observe(self, outcome: Any) -> None:
        if self.failing == "observe":
            raise RuntimeError("observe")

    def rollback(self, length: int) -> None:
        if self.failing == "rollback":
            raise RuntimeError("rollback")


def fails(context: Any, budget: Budget) -> Proposal:
    raise KeyError("oh")


def writes(context: Any, budget: Budget) -> Proposal:
    context.tokens.append(5)
    return Proposal((1,))


def law(values: Any) -> Callable[..., Proposal]:
    return lambda context, budget: Proposal((1,), [np.asarray(values, np.float32)])


ODD: dict[str, Callable[..., Any]] = {
    "nothing": lambda context, budget: None,
    "a list": lambda context, budget: [1, 2],
    "an exception": fails,
    "text": lambda context, budget: Proposal(("a",)),  # type: ignore[arg-type]
    "floats": lambda context, budget: Proposal((1.5,)),  # type: ignore[arg-type]
    "a negative id": lambda context, budget: Proposal((-1,)),
    "an id beyond the vocabulary": lambda context, budget: Proposal((VOCAB + 1000,)),
    "too many": lambda context, budget: Proposal((1,) * 500),
    "a tree": lambda context, budget: Proposal((1, 2, 3), parents=(-1, -1, 0)),
    "numpy ids": lambda context, budget: Proposal(tuple(np.arange(3))),
    "empty evidence": lambda context, budget: Proposal((1,), evidence=((),)),
    "unhashable evidence": lambda context, budget: Proposal((1,), evidence=((["x"],),)),  # type: ignore[arg-type]
    "a short law": law([0.5, 0.5]),
    "a law of zeros": law(np.zeros(VOCAB)),
    "a law with NaN": law(np.full(VOCAB, np.nan)),
    "no law": lambda context, budget: Proposal((1,), 5),  # type: ignore[arg-type]
    "somebody else's text": writes,
}


@pytest.fixture
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    kind = {"draft": "close", "letters": "abcdefghijklmnopqrstuvwxyz .", "vocab_size": 32, "eos": None}
    with edge_spec.load(tiny_bundle(recipe="w8a8", **kind)) as engine:
        yield engine


@pytest.mark.parametrize("what", ODD)
def test_the_text_goes_on_whatever_a_drafter_returns(engine: Engine, what: str) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=20, speculation="off").token_ids
    engine.add_drafter(Odd("odd", ODD[what]))
    for options in ({"speculation": "odd", "max_draft": 4}, {"speculation": "odd"}, {"speculation": "auto"}):
        completion = engine.generate(PROMPT, max_new_tokens=20, **options)
        assert completion.token_ids == plain
        assert all(type(token) is int for token in completion.token_ids)
    for rule in ("token", "block", "traversal"):
        options = {"verification": rule, "temperature": 1.0, "seed": 3, "max_new_tokens": 20}
        completion = engine.generate(PROMPT, speculation="odd", max_draft=4, **options)
        assert len(completion.token_ids) == 20 and all(0 <= token < VOCAB for token in completion.token_ids)


@pytest.mark.parametrize("part", ["observe", "rollback"])
def test_a_drafter_that_fails_is_named_and_left_alone(
    engine: Engine, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=20, speculation="off").token_ids
    odd = Odd("odd", lambda context, budget: Proposal((1,)))
    engine.add_drafter(odd)
    odd.failing = part
    with caplog.at_level(logging.WARNING):
        assert engine.generate(PROMPT, max_new_tokens=20, speculation="odd", max_draft=2).token_ids == plain
    assert f"the drafter 'odd' is not asked again for this text: {part} failed" in caplog.text
    assert engine.generate(PROMPT, max_new_tokens=20, speculation="off").token_ids == plain


@pytest.mark.parametrize("name", [["x"], 5, "", None])
def test_a_name_is_text(engine: Engine, name: Any) -> None:
    with pytest.raises(RequestError, match="expected some text"):
        engine.add_drafter(Odd(name, fails))


def test_a_stream_of_a_closed_engine_says_so(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=20)
    next(stream)
    engine.close()
    with pytest.raises(RequestError, match="This engine is closed"):
        list(stream)
