"""Texts that share an engine take turns, and begin in the order in which they came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edge_spec.runtime import turns as module
from edge_spec.runtime.turns import Turns


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to that")


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order, at_once = Turns(100), [], []

    def worker(number: int) -> None:
        with turns.turn(turns.enter(1)) as admitted:
            at_once.append(number)
            order.append((number, admitted, list(at_once)))
            at_once.remove(number)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    with turns.turn(turns.enter(1)):
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda waiting=number + 1: turns.waiting == waiting)  # type: ignore[misc]
        assert not order
    for thread in threads:
        thread.join(10)
    assert order == [(number, True, [number]) for number in range(6)]


def test_texts_with_room_alternate_until_one_ends() -> None:
    turns, order = Turns(100), []
    barrier = threading.Barrier(2)

    def worker(name: str, count: int) -> None:
        ticket = turns.enter(10)
        with turns.turn(ticket):
            pass
        barrier.wait()
        for _ in range(count):
            with turns.turn(ticket):
                order.append(name)
                until(lambda: turns.waiting > 0 or "b" in order[-1:] or order.count("b") == 3)
        turns.leave(ticket)

    threads = [threading.Thread(target=worker, args=arguments) for arguments in (("a", 5), ("b", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(order) == ["a"] * 5 + ["b"] * 3
    assert turns.running == turns.waiting == 0


def test_who_gives_up_waits_no_longer_and_holds_nobody_up() -> None:
    turns, gone = Turns(100), threading.Event()
    answers = []

    def impatient() -> None:
        ticket = turns.enter(1)
        with turns.turn(ticket, gone.is_set) as admitted:
            answers.append(admitted)
        turns.leave(ticket)

    thread = threading.Thread(target=impatient)
    with turns.turn(turns.enter(1)):
        thread.start()
        until(lambda: turns.waiting == 1)
        gone.set()
        thread.join(10)
        assert answers == [False]
        assert turns.waiting == 0
    with turns.turn(turns.enter(1)) as admitted:
        assert admitted


def test_who_finds_no_room_waits_until_one_ends_and_the_next_do_not_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALLED", 1000.0)
    turns, order = Turns(100), []
    first = turns.enter(80)
    with turns.turn(first):
        pass

    def worker(name: str, slots: int) -> None:
        ticket = turns.enter(slots)
        with turns.turn(ticket):
            order.append(name)
        turns.leave(ticket)

    large, small = (threading.Thread(target=worker, args=arguments) for arguments in (("large", 90), ("small", 10)))
    large.start()
    until(lambda: turns.waiting == 1)
    small.start()
    until(lambda: turns.waiting == 2)
    with turns.turn(first):
        assert not order
    turns.leave(first)
    large.join(10)
    small.join(10)
    assert order == ["large", "small"]


def test_a_text_that_nobody_reads_makes_room_and_queues_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALLED", 0.01)
    turns = Turns(100)
    forgotten, other = turns.enter(80), turns.enter(80)
    with turns.turn(forgotten):
        pass
    assert forgotten.admitted
    with turns.turn(other):  # in the same thread, which could wait for ever
        assert not forgotten.admitted
    time.sleep(0.02)
    with turns.turn(forgotten):
        assert forgotten.admitted and not other.admitted


def test_one_text_alone_is_admitted_whatever_it_needs() -> None:
    turns = Turns(10)
    with turns.turn(turns.enter(1000)) as admitted:
        assert admitted


def test_an_error_in_a_turn_ends_it() -> None:
    turns = Turns(10)
    ticket = turns.enter(1)
    with pytest.raises(KeyError), turns.turn(ticket):
        raise KeyError
    with turns.turn(ticket) as admitted:
        assert admitted
