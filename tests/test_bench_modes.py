"""Modes of a benchmark as they are written, and the order in which they take turns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from edge_spec.bench import modes
from edge_spec.bench.measurement import Lane, rotated
from edge_spec.bench.modes import Mode, parse_modes, require_drafters
from edge_spec.errors import RequestError


def test_modes_have_options_and_a_level_of_exactness() -> None:
    assert parse_modes("auto, model:max_draft=4:verification=block,suffix@distribution") == [
        Mode("off"),
        Mode("auto", "auto"),
        Mode("model:max_draft=4:verification=block", "model", {"max_draft": 4, "verification": "block"}),
        Mode("suffix@distribution", "suffix", {}, "distribution"),
    ]


def test_trees_are_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modes._OPTIONS, "tree", modes._switch)  # whether or not the engine takes it yet
    assert [mode.options for mode in parse_modes("auto:tree=on,auto:tree=off")[1:]] == [{"tree": True}, {"tree": False}]
    with pytest.raises(RequestError, match="'tree=maybe', expected on or off"):
        parse_modes("auto:tree=maybe")


@pytest.mark.parametrize("text", ["", "off", "off,"])
def test_plain_decoding_is_always_there(text: str) -> None:
    assert parse_modes(text) == [Mode("off")]


def test_plain_decoding_comes_first_and_once() -> None:
    assert [mode.name for mode in parse_modes("lookup,off,off@distribution")] == ["off", "lookup", "off@distribution"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto,auto", "'auto' is named twice"),
        ("auto@roughly", "exactness 'roughly', expected 'bitwise' or 'distribution'"),
        ("auto@", "exactness ''"),
        (":max_draft=4", "names no drafter"),
        ("model:depth=4", "option 'depth=4', expected one of max_draft=..."),
        ("model:max_draft", "'max_draft', expected a number"),
        ("model:max_draft=-1", "'max_draft=-1', expected a number"),
        ("model:verification=", "expected a name"),
        ("off:max_draft=2", "plain decoding has none"),
    ],
)
def test_a_malformed_mode_is_named(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_modes(text)


def test_a_mode_without_its_drafter_is_refused() -> None:
    require_drafters(parse_modes("auto,lookup"), ("lookup",))
    with pytest.raises(RequestError, match="'model', expected one of 'off', 'auto', 'lookup'.*no draft model"):
        require_drafters(parse_modes("model:max_draft=2"), ("lookup",))
    with pytest.raises(RequestError, match="'guess:max_draft=2' asks for the drafter 'guess'"):
        require_drafters(parse_modes("guess:max_draft=2"), ("lookup",))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_mode_answers_equally_often_at_each_place(count: int) -> None:
    engine: Any = None
    lanes = [Lane(Mode(str(number)), engine) for number in range(count)]
    orders = [[lane.mode.name for lane in rotated(lanes, number)] for number in range(2 * count)]
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    assert ["".join(lane.mode.name for lane in rotated(lanes[:2], number)) for number in range(4)] == [
        "01",
        "10",
        "10",
        "01",
    ]
