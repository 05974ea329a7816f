"""The queue in front of the engine: bounded, fair, and left as soon as nobody wants the answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edge_spec
from edge_spec import Engine
from edge_spec.serve.fair_queue import FairQueue, Place, QueueFullError
from running_server import HELLO, Running, serving, slowed, wait_until
from tiny_models import CHAT_TEMPLATE


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def order_of(arrivals: list[str]) -> list[str]:
    """In which order requests of these clients get their turn, one at a time, if all of them are there."""

    async def go() -> list[str]:
        queue = FairQueue(1, len(arrivals))
        served: list[str] = []
        first = queue.enter("somebody")
        assert await queue.wait(first)

        async def be(name: str, place: Place) -> None:
            assert await queue.wait(place)
            served.append(name)
            queue.leave(place)

        tasks = []
        for number, client in enumerate(arrivals):
            tasks.append(asyncio.create_task(be(f"{client}{number}", queue.enter(client))))
            await settle()
        queue.leave(first)
        await asyncio.gather(*tasks)
        assert (queue.running, queue.waiting) == (0, 0)
        return served

    result: list[str] = run(go())
    return result


def test_clients_take_turns() -> None:
    assert order_of(list("aaabba")) == ["a0", "b3", "a1", "b4", "a2", "a5"]


@given(st.lists(st.sampled_from("abcd"), max_size=12))
def test_everybody_is_served_in_order_and_none_waits_for_two_of_another(arrivals: list[str]) -> None:
    served = order_of(arrivals)
    assert len(served) == len(arrivals)
    for client in set(arrivals):
        numbers = [int(name[1:]) for name in served if name[0] == client]
        assert numbers == sorted(numbers)
        places = [place for place, name in enumerate(served) if name[0] == client]
        for start, end in zip([-1, *places], places, strict=False):
            between = [name[0] for name in served[start + 1 : end]]
            assert len(between) == len(set(between))


def test_a_full_queue_says_when_to_come_again_by_how_long_requests_take() -> None:
    async def go() -> None:
        now = 0.0
        queue = FairQueue(2, 1, clock=lambda: now)
        for _ in range(40):
            place = queue.enter("a")
            await queue.wait(place)
            now += 60.0
            queue.leave(place)
        for _ in range(3):
            queue.enter("a")
        with pytest.raises(QueueFullError) as full:
            queue.enter("b")
        assert full.value.retry_after == 30

    run(go())


def test_whoever_gives_up_while_waiting_leaves_the_queue_at_once() -> None:
    async def go() -> None:
        queue = FairQueue(1, 3)
        running, waiting, last = (queue.enter("a") for _ in range(3))
        assert await queue.wait(running)
        turns = [asyncio.create_task(queue.wait(place)) for place in (waiting, last)]
        await settle()
        queue.cancel(waiting)
        assert await turns[0] is False
        queue.leave(waiting)
        queue.leave(waiting)
        assert queue.waiting == 1
        queue.leave(running)
        assert await turns[1] is True
        late = queue.enter("a")
        queue.cancel(late)
        assert await queue.wait(late) is False

    run(go())


@pytest.fixture
def slow_engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    bundle = tiny_bundle(chat_template=CHAT_TEMPLATE, eos=None)
    with edge_spec.load(bundle) as engine:
        slowed(engine, 0.05)
        yield engine


def endless(server: Running) -> dict[str, Any]:
    return {"url": f"{server.url}/v1/chat/completions", "json": {"messages": HELLO, "stream": True, "temperature": 0}}


def test_a_client_that_goes_away_frees_the_engine(slow_engine: Engine) -> None:
    with serving(slow_engine, parallel=1) as server:
        with httpx.Client(timeout=30) as client, client.stream("POST", **endless(server)) as response:
            next(response.iter_lines())
            wait_until(lambda: server.desk.queue.running == 1)
        wait_until(lambda: server.desk.queue.running == 0, 5)
        whole = threading.Thread(target=ask_and_leave, args=(server,))
        whole.start()
        wait_until(lambda: server.desk.queue.running == 1)
        whole.join()
        wait_until(lambda: server.desk.queue.running == 0, 5)
        assert server.chat(max_tokens=2).status_code == 200


def ask_and_leave(server: Running) -> None:
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO}, timeout=1.0)


def test_a_client_that_goes_away_while_it_waits_frees_its_place(slow_engine: Engine) -> None:
    with (
        serving(slow_engine, parallel=1, queue_limit=1) as server,
        httpx.Client(timeout=30) as client,
        client.stream("POST", **endless(server)),
    ):
        wait_until(lambda: server.desk.queue.running == 1)
        ask_and_leave(server)
        wait_until(lambda: server.desk.queue.waiting == 0, 5)
        assert server.desk.queue.running == 1


def test_beyond_the_queue_clients_are_asked_to_come_again(slow_engine: Engine) -> None:
    with serving(slow_engine, parallel=1, queue_limit=1) as server, httpx.Client(timeout=30) as client:
        with client.stream("POST", **endless(server)), client.stream("POST", **endless(server)):
            wait_until(lambda: (server.desk.queue.running, server.desk.queue.waiting) == (1, 1))
            refused = server.chat()
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert server.client.get("/health").status_code == 200
        wait_until(lambda: server.desk.queue.running + server.desk.queue.waiting == 0, 5)
        assert server.chat(max_tokens=2).status_code == 200


def test_as_many_requests_run_at_once_as_are_allowed(slow_engine: Engine) -> None:
    with (
        serving(slow_engine, parallel=3) as server,
        httpx.Client(timeout=30) as client,
        client.stream("POST", **endless(server)),
        client.stream("POST", **endless(server)),
    ):
        wait_until(lambda: server.desk.queue.running == 2)
        assert server.chat(max_tokens=2).status_code == 200


def test_an_engine_that_fails_is_the_servers_fault_and_nobody_elses(tiny_bundle: Callable[..., Path]) -> None:
    with edge_spec.load(tiny_bundle(chat_template=CHAT_TEMPLATE)) as engine:
        stream = engine.stream

        def broken(*args: Any, **options: Any) -> Iterator[Any]:
            yield from (next(iter(stream(*args, **options))),)
            raise OSError("secret of the machine")

        engine.stream = broken  # type: ignore[method-assign]
        with serving(engine) as server:
            failed = server.chat()
            assert failed.status_code == 500
            assert failed.json()["error"]["type"] == "server_error" and "secret" not in failed.text
            streamed = server.chat(stream=True).text
            assert '"internal_error"' in streamed and "secret" not in streamed and "[DONE]" not in streamed
            engine.stream = stream  # type: ignore[method-assign]
            assert server.chat().status_code == 200
