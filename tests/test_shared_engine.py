"""Texts that are written at the same time on one engine: none shows in another, and all of them fit."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Chunk, Completion, Engine
from edge_spec.errors import RequestError
from edge_spec.runtime import turns

Bundles = Callable[..., Path]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PAIR: dict[str, Any] = {"recipe": "w8a8", "draft": "close", "letters": LETTERS, "vocab_size": 32, "eos": None}
LONG = {**PAIR, "max_position_embeddings": 1024}
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]


@functools.cache
def loaded(path: Path, **options: Any) -> Engine:
    return edge_spec.load(path, **options)


@pytest.fixture
def engine(tiny_bundle: Bundles) -> Engine:
    return loaded(tiny_bundle(**PAIR))


@pytest.fixture
def plain(tiny_bundle: Bundles) -> Callable[..., Completion]:
    """Answers of an engine that writes one text at a time and never drafts."""
    path = tiny_bundle(**PAIR)

    def answer(prompt: Sequence[int], **options: Any) -> Completion:
        with loaded(path, threads=1).session() as session:
            return session.generate(prompt, **{**options, "speculation": "off"})

    return answer


def finished(chunks: Sequence[Chunk]) -> Completion:
    completion = chunks[-1].completion
    assert completion is not None
    assert "".join(chunk.text for chunk in chunks) == completion.text
    return completion


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_order_of_turns_changes_a_text(
    engine: Engine, plain: Callable[..., Completion], data: st.DataObject
) -> None:
    requests: list[tuple[list[int], dict[str, Any]]] = []
    streams = []
    for _ in range(data.draw(st.integers(2, 4))):
        prompt = data.draw(st.lists(st.integers(0, 27), min_size=1, max_size=90))
        options = {
            "max_new_tokens": data.draw(st.integers(1, 25)),
            **data.draw(st.sampled_from([{}, {"temperature": 1.0, "seed": 7}])),
        }
        drafter = data.draw(st.sampled_from(["auto", "composite", "model", "suffix", "lookup", "off"]))
        fixed = {} if drafter in ("auto", "off") else {"max_draft": data.draw(st.integers(1, 5))}
        requests.append((prompt, options))
        streams.append(engine.stream(prompt, speculation=drafter, **fixed, **options))
    # Not drawn one by one: how many chunks there are depends on what calls take.
    random = Random(data.draw(st.integers(0, 1000)))
    chunks: list[list[Chunk]] = [[] for _ in streams]
    alive = list(range(len(streams)))
    while alive:
        index = random.choice(alive)
        chunk = next(streams[index], None)
        if chunk is None:
            alive.remove(index)
        else:
            chunks[index].append(chunk)
    for (prompt, options), parts in zip(requests, chunks, strict=True):
        assert finished(parts).token_ids == plain(prompt, **options).token_ids
    assert engine.running == engine.waiting == 0


def test_texts_that_do_not_fit_together_lose_their_cache_and_go_on(
    tiny_bundle: Bundles, plain: Callable[..., Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_STALLED", 0.0)
    with edge_spec.load(tiny_bundle(**PAIR), context=100) as small:
        prompts = [[start, *PROMPT, *[5, 6] * start] for start in range(4)]
        streams = [small.stream(prompt, max_new_tokens=30) for prompt in prompts]
        chunks: list[list[Chunk]] = [[] for _ in streams]
        for row in itertools.zip_longest(*streams):
            for own, chunk in zip(chunks, row, strict=True):
                own += [chunk] if chunk is not None else []
            assert sum(text.cache.capacity for text in small._caches._texts) <= small._caches.slots
        for prompt, parts in zip(prompts, chunks, strict=True):
            assert finished(parts).token_ids == plain(prompt, max_new_tokens=30).token_ids


def test_a_text_with_the_engine_to_itself_is_not_kept_waiting_by_a_stream_nobody_reads(
    tiny_bundle: Bundles, plain: Callable[..., Completion]
) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), context=100) as small:
        forgotten = small.stream(PROMPT, max_new_tokens=50)
        head = next(forgotten)
        assert small.generate([1, 2], max_new_tokens=50).token_ids == plain([1, 2], max_new_tokens=50).token_ids
        assert finished([head, *forgotten]).token_ids == plain(PROMPT, max_new_tokens=50).token_ids


def test_a_session_that_is_answering_takes_another_question(engine: Engine, plain: Callable[..., Completion]) -> None:
    with engine.session() as session:
        first = session.stream(PROMPT, max_new_tokens=20)
        head = [next(first)]
        assert session.generate([8, 8], max_new_tokens=9).token_ids == plain([8, 8], max_new_tokens=9).token_ids
        tail = list(first)
        assert finished([*head, *tail]).token_ids == plain(PROMPT, max_new_tokens=20).token_ids


def test_a_new_text_copies_what_it_shares_with_another_and_leaves_that_whole(
    tiny_bundle: Bundles, plain: Callable[..., Completion]
) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), conversations=4) as engine:
        system = [7, 3, 5, 1] * 5
        one = [*system, *[2, 4] * 15]
        engine.generate(one, max_new_tokens=4)
        other = [*system, 9, 9]
        answer = engine.generate(other, max_new_tokens=12)
        assert answer.statistics.reused_tokens == len(system)
        assert answer.token_ids == plain(other, max_new_tokens=12).token_ids
        again = engine.generate([*one, 1], max_new_tokens=4)
        assert again.statistics.reused_tokens >= len(one)
        assert again.token_ids == plain([*one, 1], max_new_tokens=4).token_ids


def test_texts_that_hold_nothing_do_not_pile_up(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), context=100) as small:
        for start in range(12):
            small.generate([7, 3, *[start, 5] * 10], max_new_tokens=2)  # shares a little, and finds no room beside
        assert len(small._caches._own) <= len(small._caches._texts) <= 2


def test_the_draft_keeps_what_it_read_of_texts_that_take_turns(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**LONG), context=1024) as engine:
        drafter = engine._drafters["model"]
        streams = [
            engine.stream([start, *PROMPT], max_new_tokens=30, speculation="model", max_draft=3) for start in (1, 2)
        ]
        for _ in range(4):
            for stream in streams:
                next(stream)
        assert len(drafter._readings) == 2  # type: ignore[attr-defined]
        for read in drafter._readings.values():  # type: ignore[attr-defined]
            assert read.cached >= len(PROMPT)
        limit = drafter._network.cache.bytes_of(drafter._network.cache.slots_for(drafter.window))  # type: ignore[attr-defined]
        assert drafter.memory_bytes <= limit
        for stream in streams:
            list(stream)


def test_what_is_cached_of_all_drafted_texts_is_no_more_than_one_window(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), context=200) as engine:
        drafter = engine._drafters["model"]
        streams = [engine.stream([s, *PROMPT], max_new_tokens=20, speculation="model", max_draft=3) for s in range(5)]
        for _ in itertools.zip_longest(*streams):
            limit = drafter._network.cache.bytes_of(drafter._network.cache.slots_for(drafter.window))  # type: ignore[attr-defined]
            assert drafter.memory_bytes <= limit


def test_statistics_of_an_engine_are_the_sums_of_its_answers(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**LONG), context=1024) as engine:
        answers = [engine.generate([start, *PROMPT], max_new_tokens=20) for start in range(3)]
        engine.generate(PROMPT, cancelled=lambda: True)
        totals = engine.statistics()
        for name in ("new_tokens", "rounds", "drafted", "accepted", "verify_seconds"):
            assert getattr(totals, name) == pytest.approx(sum(getattr(answer.statistics, name) for answer in answers))
        assert totals.prompt_tokens == sum(a.statistics.prompt_tokens for a in answers) + len(PROMPT)
        assert totals.finished == {"length": 3, "cancelled": 1}
        assert sum(totals.accepted_by_drafter.values()) == totals.accepted
        assert totals.accepted_by_position[0] <= totals.drafted_by_position[0]
        assert totals.running == totals.waiting == 0
        assert totals.memory.planned == engine.plan.total_bytes
        assert totals.memory.target_caches > 0
        record = totals.to_dict()
        assert record["mean_accepted_length"] == totals.new_tokens / totals.rounds
        drafted, accepted = totals.drafted_by_position, totals.accepted_by_position
        assert record["acceptance_by_position"] == [a / d for a, d in zip(accepted, drafted, strict=True)]
        assert record["memory"]["resident"] > 0
        totals.accepted_by_drafter.clear()
        assert sum(engine.statistics().accepted_by_drafter.values()) == totals.accepted


# asyncio


def test_async_streams_run_beside_each_other_and_the_event_loop(
    engine: Engine, plain: Callable[..., Completion]
) -> None:
    prompts = [[start, *PROMPT] for start in range(6)]
    beats = 0

    async def pulse() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    async def read(prompt: list[int]) -> Completion:
        return finished([chunk async for chunk in engine.astream(prompt, max_new_tokens=20)])

    async def main() -> list[Completion]:
        heart = asyncio.create_task(pulse())
        answers = await asyncio.gather(*map(read, prompts))
        heart.cancel()
        return answers

    for prompt, answer in zip(prompts, asyncio.run(main()), strict=True):
        assert answer.token_ids == plain(prompt, max_new_tokens=20).token_ids
    assert beats > 0


def test_async_answers_are_the_same_as_others(engine: Engine) -> None:
    async def main() -> tuple[Completion, Completion]:
        with engine.session() as session:
            return await engine.agenerate("abc", max_new_tokens=5), await session.agenerate("abc", max_new_tokens=5)

    plain = engine.generate("abc", max_new_tokens=5)
    assert [answer.token_ids for answer in asyncio.run(main())] == [plain.token_ids] * 2


def test_a_cancelled_task_frees_the_engine(engine: Engine) -> None:
    async def main() -> None:
        first_chunk = asyncio.Event()

        async def read() -> None:
            async for _ in engine.astream(PROMPT, max_new_tokens=3000):
                first_chunk.set()

        task = asyncio.create_task(read())
        await first_chunk.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    for _ in range(500):
        if engine.running == 0:
            break
        threading.Event().wait(0.01)
    assert engine.running == 0


@pytest.mark.parametrize("place", ["cancelled", "logits_processors", "cancelled while waiting"])
def test_a_function_that_asks_the_engine_that_calls_it_fails_rather_than_waits_for_itself(
    engine: Engine, place: str
) -> None:
    caught: list[BaseException] = []
    waits = place == "cancelled while waiting"

    def asks() -> bool:
        if not waits or engine.waiting:
            engine.generate(PROMPT, max_new_tokens=1)
        return False

    def process(tokens: Any, logits: Any) -> Any:
        asks()
        return logits

    def outer() -> None:
        options: dict[str, Any] = {"cancelled": asks} if "cancelled" in place else {"logits_processors": [process]}
        try:
            engine.generate(PROMPT, max_new_tokens=3, **options)
        except edge_spec.EdgeSpecError as error:
            caught.append(error)

    thread = threading.Thread(target=outer, daemon=True)
    ticket = engine._turns.enter(1)
    if waits:
        with engine._turns.turn(ticket):
            thread.start()
            thread.join(10)
    else:
        thread.start()
        thread.join(10)
    engine._turns.leave(ticket)
    assert not thread.is_alive()
    assert "by a function that it called itself" in str(caught[0])
    assert engine.running == engine.waiting == 0
    assert len(engine.generate(PROMPT, max_new_tokens=3).token_ids) == 3


def test_errors_of_a_request_reach_the_task_that_asked(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="temperature"):
            await engine.agenerate(PROMPT, temperature=-1.0)
        with pytest.raises(RequestError, match="messages"):
            await engine.achat("hello")  # type: ignore[arg-type]

    asyncio.run(main())
