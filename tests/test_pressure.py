"""Memory runs short while a text is being generated: what is given up, what comes back, and that the text stays."""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_group import control_group
from edge_spec.bundle import open_bundle
from edge_spec.errors import ProviderError
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.loaded_pair import load_pair
from edge_spec.runtime.pressure import MemoryPressure, Sheddable, usual_reserve

Bundles = Callable[..., Path]

MIB = 1 << 20
RESERVE = 100 * MIB
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PAIR: dict[str, Any] = {"recipe": "w8a8", "draft": "close", "letters": LETTERS, "vocab_size": 32, "eos": None}
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]
TESTS = Path(__file__).parent


class Part:
    """Something of a size that can be given up."""

    def __init__(self, name: str, size: int, pays: bool = True) -> None:
        self.size, self.there, self.pays = size, True, pays
        self.sheddable = Sheddable(
            name,
            memory_bytes=lambda: self.size if self.there else 0,
            shed=lambda: setattr(self, "there", False),
            cost_bytes=lambda: 0 if self.there else self.size,
            admit=lambda: setattr(self, "there", True),
            pays=lambda tokens: self.pays,
        )


class Machine:
    """Memory of a size, parts that take some of it, and a clock."""

    def __init__(self, *parts: Part, free: int) -> None:
        self.parts, self.free, self.now, self.looks = parts, free, 0.0, 0
        self.pressure = MemoryPressure(
            [part.sheddable for part in parts], self.available, RESERVE, clock=lambda: self.now
        )

    def available(self) -> int:
        self.looks += 1
        return self.free + sum(part.size for part in self.parts if not part.there)

    def check(self, after: float = 1.0, remaining: int = 100) -> list[tuple[str, str]]:
        self.now += after
        return [(event.action, event.part) for event in self.pressure.check(7, remaining)]


def test_no_more_is_given_up_than_it_takes() -> None:
    machine = Machine(Part("first", 10 * MIB), Part("second", 60 * MIB), Part("third", 500 * MIB), free=50 * MIB)
    assert machine.check() == [("shed", "first"), ("shed", "second")]
    assert machine.check() == []


def test_everything_comes_back_in_the_reverse_order_when_there_is_room_for_it() -> None:
    first, second = Part("first", 10 * MIB), Part("second", 60 * MIB)
    machine = Machine(first, second, free=20 * MIB)
    assert machine.check() == [("shed", "first"), ("shed", "second")]
    machine.free = 145 * MIB
    assert machine.check(after=5.0) == [("admitted", "second")]
    assert machine.check() == []  # 155 are free, and 150 have to be left
    machine.free = 160 * MIB
    assert machine.check() == [("admitted", "first")]
    assert machine.check() == []


def test_what_there_is_no_room_for_keeps_nothing_else_away() -> None:
    machine = Machine(Part("first", 10 * MIB), Part("second", 60 * MIB), free=20 * MIB)
    assert machine.check() == [("shed", "first"), ("shed", "second")]
    machine.free = 100 * MIB
    assert machine.check(after=5.0) == [("admitted", "first")]


def test_nothing_comes_back_at_once_or_if_it_does_not_pay() -> None:
    part = Part("draft", 60 * MIB, pays=False)
    machine = Machine(part, free=50 * MIB)
    assert machine.check() == [("shed", "draft")]
    machine.free = 1000 * MIB
    part.pays = True
    assert machine.check(after=1.0) == []  # it was short a moment ago
    part.pays = False
    assert machine.check(after=10.0) == []
    part.pays = True
    assert machine.check(after=1.0) == [("admitted", "draft")]


def test_what_cannot_come_back_stays_away_and_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise ProviderError("no memory after all")

    part = Sheddable("draft", lambda: 0 if attempts else 1, lambda: attempts.append(0), lambda: 1, admit=fail)
    free = [0]
    now = [0.0]
    pressure = MemoryPressure([part], lambda: free[0], RESERVE, clock=lambda: now[0])
    assert [event.action for event in pressure.check(1, 100)] == ["shed"]
    free[0] = 1000 * MIB
    for now[0] in (3.0, 4.0, 6.0):
        assert pressure.check(1, 100) == ()
    assert attempts == [0, 1, 1]


def test_the_watch_looks_seldom_enough_to_cost_nothing() -> None:
    machine = Machine(Part("first", MIB), free=1000 * MIB)
    for _ in range(1000):
        machine.check(after=0.001)
    assert machine.looks <= 11


def test_where_the_system_does_not_tell_nothing_is_given_up() -> None:
    part = Part("first", MIB)
    pressure = MemoryPressure([part.sheddable], lambda: None, RESERVE)
    assert pressure.check(1, 1) == ()
    assert part.there


def test_what_happens_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edge_spec"):
        Machine(Part("draft model", 300 * MIB), free=50 * MIB).check()
    assert "gave up the draft model (300 MiB) at token 7: 50 MiB were free" in caplog.text


def test_the_reserve_follows_the_machine_within_bounds() -> None:
    assert usual_reserve(4 << 30) == pytest.approx(0.05 * (4 << 30), abs=1)
    assert usual_reserve(64 << 30) == 512 * MIB
    assert usual_reserve(None) == usual_reserve(100 * MIB) == 32 * MIB


def test_a_plan_that_fills_the_memory_is_no_reason_to_give_anything_up() -> None:
    assert usual_reserve(2 << 30, planned=1 << 30) == usual_reserve(2 << 30)
    assert usual_reserve(2 << 30, planned=50 * MIB) == 25 * MIB
    assert usual_reserve(2 << 30, planned=-10 * MIB) == 8 * MIB


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"speculation": "model"}])
def test_the_text_stays_whatever_is_given_up_and_comes_back(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {**options, "max_draft": 3}
    # A draft of this size saves no time, so it must not seem to take any to load.
    monkeypatch.setattr(
        "edge_spec.runtime.engine.load_pair",
        lambda *arguments: dataclasses.replace(load_pair(*arguments), draft_load_seconds=-1.0),
    )
    free = [1 << 40]
    now = [0.0]
    bundle = open_bundle(tiny_bundle(**PAIR))
    with Engine(
        bundle, conversations=3, available=lambda: free[0], memory_reserve=RESERVE, clock=lambda: now[0]
    ) as engine:
        with engine.session() as session:
            expected = session.generate(PROMPT, max_new_tokens=90, **options).token_ids
        engine.generate([1, 2, 3], max_new_tokens=1)
        draft = weakref.ref(engine._drafters["model"]._read._model)  # type: ignore[attr-defined]
        with engine.session() as session:
            tokens: list[int] = []
            completion = None
            for chunk in session.stream(PROMPT, max_new_tokens=90, **options):
                tokens += chunk.token_ids
                completion = chunk.completion
                # Short of memory for several rounds, whoever drafts: none brings more than four tokens.
                free[0] = 0 if 15 <= len(tokens) < 35 else 1 << 40
                now[0] += 1.0
        assert completion is not None
        assert tuple(tokens) == completion.token_ids == expected
        events = [(event.action, event.part) for event in completion.statistics.memory_events]
        shed = [part for action, part in events if action == "shed"]
        assert shed == ["n-gram table", "caches of idle conversations", "draft model"]
        assert draft() is None, "somebody keeps the model that was given up"
        admitted = [part for action, part in events if action == "admitted"]
        assert admitted == ["draft model", "n-gram table"]
        origins = completion.statistics.accepted_by_drafter
        assert origins.get("model", 0) > 0 or "speculation" not in options
        assert completion.to_dict()["statistics"]["memory_events"][0]["part"] == "n-gram table"


def test_a_neighbour_that_takes_the_memory_does_not_change_the_text(tiny_bundle: Bundles) -> None:
    """A real one, in a real control group whose limit would end either of them."""
    bundle, reserve = tiny_bundle(**PAIR), usual_reserve(400 * MIB)
    with control_group(400 * MIB) as group:
        generating = group.python(TESTS / "pressed_generation.py", str(bundle), "200", json.dumps(PROMPT))
        assert generating.stdout is not None and generating.stdin is not None
        assert json.loads(generating.stdout.readline()) == {"ready": True}
        assert json.loads(generating.stdout.readline())["tokens"] >= 100
        with group.python(TESTS / "hungry_neighbour.py", str(reserve // 2)) as neighbour:
            assert neighbour.stdout is not None and neighbour.stdin is not None
            assert int(neighbour.stdout.readline()) > 50 * MIB
            print(file=generating.stdin, flush=True)
            assert json.loads(generating.stdout.readline())["tokens"] >= 150
            neighbour.communicate("\n")
        print(file=generating.stdin, flush=True)
        answer = json.loads(generating.stdout.readline())
        generating.communicate()
    assert generating.returncode == 0
    assert answer["undisturbed_events"] == 0
    assert [part for action, part in answer["events"] if action == "shed"][:1] == ["n-gram table"]
    assert ["shed", "draft model"] in answer["events"]
    assert answer["tokens"] == answer["expected"] and len(answer["tokens"]) == 200
