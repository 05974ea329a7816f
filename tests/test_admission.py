"""Threads that share an engine take turns, in the order in which they came."""

from __future__ import annotations

import threading
import time

import pytest

from edge_spec.errors import RequestError
from edge_spec.runtime.admission import Admission


def waiting(admission: Admission, count: int) -> None:
    """Wait until so many wait or have a turn."""
    for _ in range(2000):
        if len(admission._queue) == count:
            return
        time.sleep(0.005)
    raise AssertionError(f"{len(admission._queue)} in the queue, not {count}")


def test_turns_come_in_the_order_of_arrival() -> None:
    admission, order, at_once = Admission(), [], []

    def worker(number: int) -> None:
        with admission.turn() as admitted:
            at_once.append(number)
            order.append((number, admitted, list(at_once)))
            at_once.remove(number)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    with admission.turn():
        for number, thread in enumerate(threads):
            thread.start()
            waiting(admission, number + 2)
        assert not order
    for thread in threads:
        thread.join(10)
    assert order == [(number, True, [number]) for number in range(6)]


def test_who_gives_up_waits_no_longer_and_holds_nobody_up() -> None:
    admission, gone = Admission(), threading.Event()
    answers = []

    def impatient() -> None:
        with admission.turn(gone.is_set) as admitted:
            answers.append(admitted)

    thread = threading.Thread(target=impatient)
    with admission.turn():
        thread.start()
        waiting(admission, 2)
        gone.set()
        thread.join(10)
        assert answers == [False]
        waiting(admission, 1)
    with admission.turn() as admitted:
        assert admitted


def test_a_thread_does_not_wait_for_itself() -> None:
    admission = Admission()
    with admission.turn():
        with pytest.raises(RequestError, match="already generating for this thread"):
            admission.require_no_turn()
        with pytest.raises(RequestError, match="already generating"), admission.turn():
            pass
    with admission.turn() as admitted:
        assert admitted


def test_an_error_during_a_turn_ends_it() -> None:
    admission = Admission()
    with pytest.raises(ZeroDivisionError), admission.turn():
        raise ZeroDivisionError
    with admission.turn() as admitted:
        assert admitted


def test_asking_for_a_turn_waits_until_the_queue_stands_still() -> None:
    """Threads that come and go while it is looked through would be an error of Python's."""
    admission = Admission()
    thread = threading.Thread(target=admission.require_no_turn)
    with admission._changed:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()
