"""Several conversations on one engine: what they share, what they reuse, and that none of it shows in their answers."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Completion, EdgeSpecError, Engine
from edge_spec.errors import LogitsError, ProviderError, RequestError
from edge_spec.runtime.model import Model

Bundles = Callable[..., Path]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PAIR: dict[str, Any] = {"recipe": "w8a8", "draft": "close", "letters": LETTERS, "vocab_size": 32, "eos": None}
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]


@functools.cache
def shared(path: Path) -> Engine:
    return edge_spec.load(path)


@pytest.fixture
def engine(tiny_bundle: Bundles) -> Engine:
    return shared(tiny_bundle(**PAIR))


@pytest.fixture
def reference(tiny_bundle: Bundles) -> Callable[..., tuple[int, ...]]:
    """Plain answers of an engine that never reuses anything."""
    other = shared_reference(tiny_bundle(**PAIR))

    def answer(prompt: Sequence[int], **options: Any) -> tuple[int, ...]:
        with other.session() as session:
            completion = session.generate(prompt, **{**options, "speculation": "off"})
        assert completion.statistics.reused_tokens == 0
        return completion.token_ids

    return answer


@functools.cache
def shared_reference(path: Path) -> Engine:
    return edge_spec.load(path)


def test_the_next_turn_reads_only_what_is_new(engine: Engine, reference: Callable[..., tuple[int, ...]]) -> None:
    with engine.session() as session:
        first = session.generate(PROMPT, max_new_tokens=20)
        longer = [*PROMPT, *first.token_ids, 5, 6, 7]
        second = session.generate(longer, max_new_tokens=20)
        assert first.statistics.reused_tokens == 0
        # All but the last emitted token, which nobody has fed to the target yet, and what is new.
        assert second.statistics.reused_tokens >= len(PROMPT) + len(first.token_ids) - 1
        assert second.token_ids == reference(longer, max_new_tokens=20)
        assert session.cached_tokens >= len(longer)


def test_an_engines_own_requests_are_one_conversation(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**PAIR)) as own:
        first = own.generate(PROMPT, max_new_tokens=4)
        assert own.generate([*PROMPT, *first.token_ids, 2], max_new_tokens=4).statistics.reused_tokens >= len(PROMPT)
        assert own.generate([7, 7, 7], max_new_tokens=4).statistics.reused_tokens == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_answer_depends_on_what_was_asked_before(
    engine: Engine, reference: Callable[..., tuple[int, ...]], data: st.DataObject
) -> None:
    sessions = [engine.session() for _ in range(3)]
    texts: list[list[int]] = [[1], [1], [1]]
    for _ in range(data.draw(st.integers(2, 6))):
        index = data.draw(st.integers(0, 2))
        kept = data.draw(st.integers(0, len(texts[index])))
        added = data.draw(st.lists(st.integers(0, 27), min_size=1, max_size=12))
        prompt = [*texts[index][:kept], *added]
        options: dict[str, Any] = {
            "max_new_tokens": data.draw(st.integers(1, 12)),
            **data.draw(st.sampled_from([{}, {"temperature": 1.0, "seed": 5}])),
        }
        if data.draw(st.integers(0, 9)) == 0:
            # Branches that these rules commit are no past that others could build on.
            sessions[index].generate(prompt, temperature=1.0, seed=1, verification="traversal", max_new_tokens=8)
        speculation = data.draw(st.sampled_from(["auto", "composite", "model", "off"]))
        answer = sessions[index].generate(prompt, speculation=speculation, **options)
        assert answer.token_ids == reference(prompt, **options)
        texts[index] = [*prompt, *answer.token_ids]
        if data.draw(st.integers(0, 4)) == 0:
            sessions[index].close()
            sessions[index] = engine.session()
    for session in sessions:
        session.close()


def test_conversations_that_do_not_fit_lose_their_cache_and_go_on(
    tiny_bundle: Bundles, reference: Callable[..., tuple[int, ...]]
) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), context=64, conversations=2) as small:
        slots = small._caches.slots
        sessions = [small.session() for _ in range(4)]
        texts = [[start, *PROMPT] for start in range(4)]
        reused = []
        for _ in range(3):
            for index, session in enumerate(sessions):
                answer = session.generate(texts[index], max_new_tokens=8)
                assert answer.token_ids == reference(texts[index], max_new_tokens=8)
                texts[index] += answer.token_ids
                reused.append(answer.statistics.reused_tokens)
                assert sum(text.cache.capacity for text in small._caches._texts) <= slots
        assert not any(reused)  # four take turns where two fit: each has been evicted when its turn comes
        last = sessions[3].generate(texts[3], max_new_tokens=2)
        assert last.statistics.reused_tokens  # who was served last is still there


def test_sessions_that_are_dropped_do_not_pile_up(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(**PAIR), context=64) as small:
        sessions = []
        for start in range(20):
            session = small.session()
            session.generate([start, *PROMPT], max_new_tokens=2)
            sessions.append(weakref.ref(session._text))
        del session
        assert sum(text() is not None for text in sessions) <= 1


def test_a_closed_session_is_refused_and_its_cache_is_gone(engine: Engine) -> None:
    session = engine.session()
    session.generate(PROMPT, max_new_tokens=3)
    assert session._text.cache.memory_bytes > 0
    session.close()
    session.close()
    assert session._text.cache.memory_bytes == 0
    with pytest.raises(RequestError, match="This session is closed"):
        session.generate(PROMPT)


def test_a_session_closed_while_it_answers_goes_when_the_answer_ends(
    engine: Engine, reference: Callable[..., tuple[int, ...]]
) -> None:
    with engine.session() as session:
        stream = session.stream(PROMPT, max_new_tokens=20)
        late = session.stream(PROMPT)
        next(stream)
    *_, last = stream
    assert last.completion is not None
    assert last.completion.token_ids == reference(PROMPT, max_new_tokens=20)
    assert session._text.cache.memory_bytes == 0
    assert session.cached_tokens == 0
    with pytest.raises(RequestError, match="This session is closed"):
        next(late)


def test_closing_an_engine_frees_both_models(tiny_bundle: Bundles) -> None:
    own = edge_spec.load(tiny_bundle(**PAIR))
    own.generate(PROMPT, max_new_tokens=4)
    models = [weakref.ref(own._target), weakref.ref(own._drafters["model"]._read._model)]  # type: ignore[attr-defined]
    assert all(model() is not None for model in models)
    own.close()
    gc.collect()
    assert all(model() is None for model in models)


def test_a_dropped_engine_is_freed_at_once(tiny_bundle: Bundles) -> None:
    """Gigabytes must not wait for the collector of cycles."""
    own = edge_spec.load(tiny_bundle(**PAIR))
    own.generate(PROMPT, max_new_tokens=4)
    parts = [weakref.ref(own), weakref.ref(own._target), weakref.ref(own._caches)]
    gc.disable()
    try:
        del own
        assert all(part() is None for part in parts)
    finally:
        gc.enable()


def test_an_engine_closed_while_it_reads_a_prompt_says_so_and_frees_the_cache(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = edge_spec.load(tiny_bundle(**PAIR))
    session = own.session()
    forward = Model.forward

    def closing(self: Model, *arguments: Any, **options: Any) -> Any:
        result = forward(self, *arguments, **options)
        own.close()
        return result

    monkeypatch.setattr(Model, "forward", closing)
    with pytest.raises(RequestError, match="This engine is closed"):
        session.generate([5] * 200, max_new_tokens=4)
    assert session.cached_tokens == 0
    assert session._text.cache.memory_bytes == 0


def test_an_option_that_does_not_exist_is_refused(engine: Engine) -> None:
    with engine.session() as session, pytest.raises(TypeError, match="'max_tokens' is no option"):
        session.generate(PROMPT, max_tokens=3)


# Threads


def test_threads_share_an_engine_without_mixing_their_texts(
    engine: Engine, reference: Callable[..., tuple[int, ...]]
) -> None:
    prompts = [[start, *PROMPT] for start in range(8)]
    expected = [reference(prompt, max_new_tokens=16) for prompt in prompts]
    answers: dict[int, list[Completion]] = {index: [] for index in range(8)}

    def worker(index: int) -> None:
        with engine.session() as session:
            for _ in range(3):
                source = session if index % 2 else engine
                answers[index].append(source.generate(prompts[index], max_new_tokens=16))

    threads = [threading.Thread(target=worker, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for index, completions in answers.items():
        assert [completion.token_ids for completion in completions] == [expected[index]] * 3
    assert any(completion.statistics.waiting_seconds > 0.001 for all_ in answers.values() for completion in all_)


def test_who_waits_can_be_cancelled_and_has_deadlines(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=50)
    next(stream)
    gone = threading.Event()
    answers: dict[str, Completion] = {}

    def ask(name: str, **options: Any) -> None:
        answers[name] = engine.generate(PROMPT, **options)

    late = threading.Thread(target=ask, args=("late",), kwargs={"deadline": 0.1})
    cancelled = threading.Thread(target=ask, args=("cancelled",), kwargs={"cancelled": gone.is_set})
    late.start()
    cancelled.start()
    late.join(30)
    gone.set()
    cancelled.join(30)
    assert {name: (answer.finish_reason, answer.token_ids) for name, answer in answers.items()} == {
        "late": ("deadline", ()),
        "cancelled": ("cancelled", ()),
    }
    assert answers["late"].statistics.waiting_seconds >= 0.1
    assert list(stream)[-1].completion is not None


def test_closing_the_engine_ends_who_waits(tiny_bundle: Bundles) -> None:
    engine = edge_spec.load(tiny_bundle(**PAIR))
    stream = engine.stream(PROMPT, max_new_tokens=50)
    next(stream)
    errors: list[EdgeSpecError] = []

    def ask() -> None:
        try:
            engine.generate(PROMPT)
        except EdgeSpecError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    engine.close()
    thread.join(30)
    assert "This engine is closed" in str(errors[0])
    with pytest.raises(RequestError, match="closed"):
        next(stream)


# What goes wrong


@pytest.mark.parametrize("failing_call", [1, 2, 5])
def test_a_failing_call_leaves_the_engine_usable(
    engine: Engine,
    reference: Callable[..., tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    failing_call: int,
) -> None:
    """The provider fails, before or after it has written into the cache."""
    forward = Model.forward
    calls = 0

    def failing(self: Model, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        result = forward(self, *arguments, **options)
        if self is engine._target:
            calls += 1
            if calls == failing_call:
                raise ProviderError("the device went away")
        return result

    with engine.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(Model, "forward", failing)
            with pytest.raises(ProviderError, match="the device went away"):
                session.generate(PROMPT, max_new_tokens=30)
        assert session.generate(PROMPT, max_new_tokens=30).token_ids == reference(PROMPT, max_new_tokens=30)
    assert engine.generate([1, 2], max_new_tokens=5).token_ids == reference([1, 2], max_new_tokens=5)


def test_a_draft_that_fails_is_given_up_and_the_text_goes_on(
    tiny_bundle: Bundles, reference: Callable[..., tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with edge_spec.load(tiny_bundle(**PAIR)) as pair:
        draft = pair._drafters["model"]._read._model  # type: ignore[attr-defined]
        draft._session.session = mock.Mock(wraps=draft._session.session)
        draft._session.session.run_with_iobinding.side_effect = RuntimeError("the device went away")
        answer = pair.generate(PROMPT, max_new_tokens=20, speculation="model", max_draft=3)
        assert answer.token_ids == reference(PROMPT, max_new_tokens=20)
        assert answer.statistics.drafted == 0
        assert "the draft model is given up" in caplog.text
        assert pair.generate(PROMPT, max_new_tokens=20).token_ids == answer.token_ids


def test_logits_that_are_no_numbers_leave_the_engine_usable(
    engine: Engine, reference: Callable[..., tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Model.forward
    calls = 0

    def broken(self: Model, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        logits = forward(self, *arguments, **options)
        if self is engine._target:
            calls += 1
            if calls > 3:
                logits = logits * float("nan")
        return logits

    with engine.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(Model, "forward", broken)
            with pytest.raises(LogitsError):
                session.generate(PROMPT, max_new_tokens=30)
        assert session.generate(PROMPT, max_new_tokens=30).token_ids == reference(PROMPT, max_new_tokens=30)


def test_a_stream_that_is_dropped_frees_the_engine(engine: Engine, reference: Callable[..., tuple[int, ...]]) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=30)
    next(stream)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate(PROMPT, max_new_tokens=30).token_ids == reference(PROMPT, max_new_tokens=30)


def test_a_forked_process_is_told_to_load_its_own(engine: Engine) -> None:
    """Its threads did not come along, so a call would never return."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.generate(PROMPT, max_new_tokens=2)
            message = "it answered"
        except RequestError as error:
            message = str(error)
        except BaseException as error:
            message = repr(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as opened:
        said = opened.read()
    os.waitpid(child, 0)
    assert "loaded before the process was forked" in said
    assert engine.generate(PROMPT, max_new_tokens=2).token_ids


def test_a_forked_process_can_let_go_of_its_parents_engine(tiny_bundle: Bundles) -> None:
    """ONNX Runtime would wait for threads that are not there."""
    own = edge_spec.load(tiny_bundle(**PAIR), threads=2)
    child = os.fork()
    if child == 0:
        own.close()
        gc.collect()
        os._exit(7)
    ended = 0
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 7
    assert own.generate(PROMPT, max_new_tokens=2).token_ids
