"""Whole generations on tiny random pairs: speculation never shows, endings are exact, bad requests are refused."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import edge_spec
from edge_spec import Completion, Engine
from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, ProviderError, RequestError
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import Outcome
from edge_spec.runtime.model import Model
from edge_spec.runtime.provider import cuda_failure
from edge_spec.runtime.sampling import SamplingParams, probabilities
from row_independence import require_bitwise_kernels
from tiny_models import CHAT_TEMPLATE, EOS, IM_END, TOKENS

Bundles = Callable[..., Path]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
CONTEXT = 256
DRAFTERS = ("model", "suffix", "recycling", "lookup", "composite")

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def letters(recipe: str, draft: str, **more: Any) -> dict[str, Any]:
    """A pair that writes letters and never ends a text by itself."""
    return {"recipe": recipe, "draft": draft, "letters": LETTERS, "vocab_size": 32, "eos": None, **more}


PAIRS: dict[str, dict[str, Any]] = {
    "w8a8-close": {"recipe": "w8a8", "draft": "close"},
    "w8a8-letters": letters("w8a8", "close"),
    "w8a8-far-int4": {"recipe": "w8a8", "draft": "far", "draft_recipe": "int4", "hidden_size": 96},
    "int4-letters": letters("int4", "close", seed=3, hidden_size=112),
    "int4-close": {"recipe": "int4", "draft": "close", "tie_word_embeddings": False},
    "fp32-letters": letters("fp32", "close", seed=5),
}


@pytest.fixture(scope="module", params=PAIRS.values(), ids=PAIRS.keys())
def pair(request: pytest.FixtureRequest, tiny_bundle: Bundles) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(**request.param)) as engine:
        yield engine


@functools.cache
def shared(path: Path) -> Engine:
    """An engine that many tests use one after the other; none may close it."""
    return edge_spec.load(path)


@pytest.fixture(scope="module")
def writer_path(tiny_bundle: Bundles) -> Path:
    """A pair whose draft is the target itself, so that whole blocks are accepted."""
    return tiny_bundle(**letters("fp32", "same", chat_template="{{ messages[0].content }}"))


@pytest.fixture
def writer(writer_path: Path) -> Iterator[Engine]:
    with edge_spec.load(writer_path) as engine:
        yield engine


def result(completion: Completion) -> tuple[str, tuple[int, ...], str]:
    return completion.text, completion.token_ids, completion.finish_reason


@st.composite
def prompts(draw: st.DrawFn, vocabulary: int = TOKENS) -> list[int]:
    """Token ids, sometimes one phrase over and over."""
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=40))
    return tokens * draw(st.integers(1, 4))


# Speculation never shows


@given(data=st.data(), max_draft=st.integers(1, 8), count=st.integers(1, 40))
@quick
def test_greedy_output_is_the_same_however_it_is_drafted(
    pair: Engine, data: st.DataObject, max_draft: int, count: int
) -> None:
    require_bitwise_kernels()
    prompt = data.draw(prompts(pair.manifest.vocab_size))
    plain = pair.generate(prompt, max_new_tokens=count, speculation="off")
    assert plain.statistics.drafted == 0
    for drafter in DRAFTERS:
        drafted = pair.generate(prompt, max_new_tokens=count, speculation=drafter, max_draft=max_draft)
        assert result(drafted) == result(plain)


@pytest.mark.parametrize("kind", ["w8a8-letters", "int4-letters"])
def test_the_logits_behind_every_token_have_the_same_bits(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    require_bitwise_kernels()
    engine = shared(tiny_bundle(**PAIRS[kind]))
    rows: list[npt.NDArray[np.float32]] = []

    def record(drafter: object, outcome: Outcome) -> None:
        rows.extend(outcome.logits[row].copy() for row in (0, *(node + 1 for node in outcome.path)))

    for drafter in (ModelDrafter, LookupDrafter):
        monkeypatch.setattr(drafter, "observe", record)
    for length in (1, 2, 3, 17, 63, 64, 65, 90):
        prompt = [int(token) for token in np.random.default_rng(length).integers(0, len(LETTERS), length)]
        seen = []
        for speculation, max_draft in (("model", 1), ("model", 7), ("lookup", 8)):
            rows.clear()
            engine.generate(prompt, max_new_tokens=24, speculation=speculation, max_draft=max_draft)
            seen.append(np.stack(rows))  # of all rounds but the first, which drafts nothing
        for other in seen[1:]:
            np.testing.assert_array_equal(other, seen[0])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_token_passes_the_target_twice(tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    engine = shared(tiny_bundle(**PAIRS["w8a8-letters"]))
    forward = Model.forward
    widths = []

    def watched(self: Model, token_ids: Sequence[int], *arguments: Any, **options: Any) -> Any:
        if self is engine._target:
            widths.append(len(token_ids))
        return forward(self, token_ids, *arguments, **options)

    monkeypatch.setattr(Model, "forward", watched)
    prompt = [1, 2, 3] * 50
    statistics = engine.generate(prompt, max_new_tokens=40, speculation=drafter, max_draft=4).statistics
    # The prompt, then in every round the last token and what was drafted; the first round's came with the prompt.
    read = len(prompt) - statistics.reused_tokens
    assert sum(widths) == read + (statistics.rounds - 1) + statistics.drafted
    assert statistics.accepted > 0


def test_drafting_pays_on_these_pairs(pair: Engine) -> None:
    # Or else the test above would compare plain decoding with itself.
    drafted = Counter[str]()
    accepted = Counter[str]()
    for seed, drafter in itertools.product(range(16), DRAFTERS):
        prompt = [int(token) for token in np.random.default_rng(seed).integers(0, pair.manifest.vocab_size, 6)] * 3
        statistics = pair.generate(prompt, max_new_tokens=40, speculation=drafter, max_draft=4).statistics
        drafted[drafter] += statistics.drafted
        accepted[drafter] += statistics.accepted
    assert all(0 < accepted[drafter] < drafted[drafter] for drafter in DRAFTERS)


@given(prompt=prompts(len(LETTERS)), max_draft=st.integers(0, 8), seed=st.integers(-(2**63), 2**63 - 1))
@quick
def test_the_same_seed_gives_the_same_text(tiny_bundle: Bundles, prompt: list[int], max_draft: int, seed: int) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "seed": seed, "max_new_tokens": 20}
    engine = shared(tiny_bundle(**PAIRS["w8a8-letters"]))
    for drafter in DRAFTERS:
        first, second = (engine.generate(prompt, speculation=drafter, max_draft=max_draft, **options) for _ in range(2))
        assert result(first) == result(second)
        assert first.statistics.seed == seed


def test_without_a_seed_one_is_drawn_and_reported(writer: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 40}
    completions = [writer.generate([1, 2], **options) for _ in range(4)]
    assert len({completion.token_ids for completion in completions}) == 4
    for completion in completions:
        again = writer.generate([1, 2], seed=completion.statistics.seed, **options)
        assert again.token_ids == completion.token_ids
    assert writer.generate([1, 2], seed=3).statistics.seed is None  # greedy: no noise was used


def chi_square_limit(freedom: int) -> float:
    """The value a chi-square variable exceeds about once in a million (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("speculation", ["off", *DRAFTERS])
def test_sampled_texts_follow_the_targets_law(tiny_bundle: Bundles, speculation: str) -> None:
    path = tiny_bundle(recipe="fp32", draft="far", letters="abcde", vocab_size=8, eos=None, intermediate_size=64)
    sampling = SamplingParams(temperature=0.8, top_p=0.97)
    # Every pair of tokens occurs, so that looking up always finds something.
    pairs = "0010203040511213141522324253343544550"
    prompt = [int(token) for token in pairs]
    length, samples = 3, 1500

    bundle = open_bundle(path)
    model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 48, exact_rows=True, threads=1)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in law.items():
            model.cache.rollback(0)
            row = probabilities(model.forward([*prompt, *tokens], [len(prompt) + len(tokens) - 1]), sampling)[0]
            longer |= {(*tokens, token): chance * float(p) for token, p in enumerate(row) if p > 0}
        law = longer
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)

    drafted = 0
    seen = Counter[tuple[int, ...]]()
    with edge_spec.load(path, threads=1) as engine:
        for seed in range(samples):
            completion = engine.generate(
                prompt,
                max_new_tokens=length,
                temperature=0.8,
                top_p=0.97,
                seed=seed,
                speculation=speculation,
                max_draft=4,
            )
            seen[completion.token_ids] += 1
            drafted += completion.statistics.drafted
    assert seen.keys() <= law.keys()
    assert (drafted > samples / 2) == (speculation != "off")

    rare = [tokens for tokens, chance in law.items() if chance * samples < 8]
    cells = [(seen[tokens], chance * samples) for tokens, chance in law.items() if tokens not in rare]
    cells.append((sum(seen[tokens] for tokens in rare), sum(law[tokens] for tokens in rare) * samples))
    assert len(cells) > 20
    distance = sum((count - expected) ** 2 / expected for count, expected in cells)
    assert distance < chi_square_limit(len(cells) - 1)


# Where a text ends


@given(start=st.integers(0, 60), size=st.integers(1, 5), max_draft=st.integers(0, 8), drafter=st.sampled_from(DRAFTERS))
@quick
def test_a_text_ends_before_a_stop_string_wherever_in_a_block_it_is(
    writer_path: Path, start: int, size: int, max_draft: int, drafter: str
) -> None:
    engine = shared(writer_path)
    options: dict[str, Any] = {"max_new_tokens": 64, "max_draft": max_draft, "speculation": drafter}
    whole = engine.generate([3, 9, 4], **options)
    stop = whole.text[start : start + size]
    end = whole.text.index(stop)
    stopped = engine.generate([3, 9, 4], stop=["never", stop], **options)
    assert stopped.text == whole.text[:end]
    # One token is one letter here, and those of the stop string were emitted.
    assert stopped.token_ids == whole.token_ids[: end + size]
    assert stopped.finish_reason == "stop"
    chunks = list(engine.stream([3, 9, 4], stop=stop, **options))
    assert "".join(chunk.text for chunk in chunks) == stopped.text
    assert all(stop not in chunk.text for chunk in chunks)


@pytest.mark.parametrize("position", range(6))
def test_a_text_ends_with_an_end_token_wherever_in_a_block_it_is(
    tiny_bundle: Bundles, writer: Engine, position: int
) -> None:
    plain = writer.generate([20, 3, 17], max_new_tokens=60, speculation="off")
    whole = plain.token_ids
    firsts = [index for index, token in enumerate(whole) if token not in whole[:index]]
    end = firsts[position]
    with edge_spec.load(tiny_bundle(**letters("fp32", "same") | {"eos": [whole[end]]})) as engine:
        for options in ({"speculation": "off"}, {"speculation": "lookup"}, {"max_draft": 5}, {"max_draft": 1}):
            completion = engine.generate([20, 3, 17], max_new_tokens=60, **options)
            assert completion.token_ids == whole[: end + 1]
            assert completion.text == plain.text[:end]  # one token is one letter here, and the end has no text
            assert completion.finish_reason == "stop"
            assert completion.statistics.new_tokens == end + 1


@pytest.mark.parametrize("count", range(1, 13))
def test_no_more_tokens_come_than_were_asked_for(writer: Engine, count: int) -> None:
    whole = writer.generate([7, 7, 1], max_new_tokens=40, speculation="off").token_ids
    for options in ({"speculation": "off"}, {"speculation": "lookup"}, {"max_draft": 5}):
        completion = writer.generate([7, 7, 1], max_new_tokens=count, **options)
        assert completion.token_ids == whole[:count]
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("speculation", ["off", *DRAFTERS])
@pytest.mark.parametrize("context", [24, CONTEXT])
def test_a_full_context_ends_the_text(writer_path: Path, context: int, speculation: str) -> None:
    with edge_spec.load(writer_path, context=context) as engine:
        assert engine.context == context
        whole = shared(writer_path).generate([5, 6] * 5, max_new_tokens=250, speculation="off")
        for room in (1, 2, 3, 14):
            prompt = ([5, 6] * 5 + list(whole.token_ids))[: context - room]
            completion = engine.generate(prompt, max_new_tokens=1000, speculation=speculation)
            assert len(completion.token_ids) == room
            assert completion.finish_reason == "length"
            unlimited = shared(writer_path).generate(prompt, max_new_tokens=room, speculation="off")
            assert completion.token_ids == unlimited.token_ids


def test_a_draft_with_a_shorter_context_reads_the_end_of_the_text(tiny_bundle: Bundles) -> None:
    kind = letters("w8a8", "far", draft_changes={"max_position_embeddings": 32})
    with edge_spec.load(tiny_bundle(**kind)) as engine:
        plain = engine.generate([1, 2, 3], max_new_tokens=100, speculation="off")
        drafted = engine.generate([1, 2, 3], max_new_tokens=100, speculation="model", max_draft=6)
        assert result(drafted) == result(plain)
        late = engine.generate([1] * 60, max_new_tokens=20, speculation="model", max_draft=6)
        assert result(late) == result(engine.generate([1] * 60, max_new_tokens=20, speculation="off"))
        assert drafted.statistics.drafted > 6 * 32 and late.statistics.drafted > 0


# Streams


@given(prompt=prompts(), max_draft=st.integers(0, 8), temperature=st.sampled_from([0.0, 0.8]))
@quick
def test_chunks_add_up_to_the_completion(
    tiny_bundle: Bundles, prompt: list[int], max_draft: int, temperature: float
) -> None:
    engine = shared(tiny_bundle(**PAIRS["w8a8-close"]))
    options: dict[str, Any] = {"max_new_tokens": 30, "max_draft": max_draft, "temperature": temperature, "seed": 1}
    chunks = list(engine.stream(prompt, **options))
    *before, last = chunks
    assert all(chunk.completion is None for chunk in before) and last.completion is not None
    completion, statistics = last.completion, last.completion.statistics
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == completion.token_ids
    assert all(len(chunk.origins) == len(chunk.token_ids) >= 1 for chunk in chunks)
    origins = Counter(origin for chunk in chunks for origin in chunk.origins)
    assert sum(origins.values()) - origins["target"] == statistics.accepted
    assert {name: count for name, count in origins.items() if name != "target"} == statistics.accepted_by_drafter
    assert len(chunks) == statistics.rounds


def test_streaming_text_equals_decoding_all_tokens(tiny_bundle: Bundles) -> None:
    path = tiny_bundle(**PAIRS["int4-close"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for seed in range(20):
        completion = shared(path).generate("the end, again and again", temperature=1.2, seed=seed, max_new_tokens=50)
        assert completion.text == tokenizer.decode(completion.token_ids)


def test_text_and_its_token_ids_are_the_same_prompt(writer: Engine) -> None:
    ids = [LETTERS.index(letter) for letter in "the end."]
    assert result(writer.generate("the end.")) == result(writer.generate(ids))
    assert result(writer.generate(np.array(ids))) == result(writer.generate(tuple(ids)))


def test_chat_applies_the_template(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(recipe="w8a8", draft="close", chat_template=CHAT_TEMPLATE, eos=IM_END)) as engine:
        messages = [{"role": "user", "content": "the inner"}]
        rendered = "<|im_start|>user\nthe inner<|im_end|>\n<|im_start|>assistant\n"
        assert result(engine.chat(messages)) == result(engine.generate(rendered))
        chunks = list(engine.stream(messages, max_new_tokens=9))
        assert chunks[-1].completion is not None
        assert result(chunks[-1].completion) == result(engine.generate(rendered, max_new_tokens=9))


def test_one_thread_may_read_two_streams(writer: Engine) -> None:
    prompts = ([1, 2, 3], [4, 5, 6])
    streams = [writer.stream(prompt, max_new_tokens=30) for prompt in prompts]
    last: list[Any] = [None, None]
    for chunks in itertools.zip_longest(*streams):
        last = [chunk or before for chunk, before in zip(chunks, last, strict=True)]
    for prompt, chunk in zip(prompts, last, strict=True):
        plain = writer.generate(prompt, max_new_tokens=30, speculation="off")
        assert result(chunk.completion) == result(plain)


def test_a_stream_that_was_never_started_blocks_nothing(writer: Engine) -> None:
    forgotten = writer.stream([1, 2, 3])
    assert writer.generate([1, 2, 3], max_new_tokens=3).token_ids
    del forgotten
    assert writer.generate([1, 2, 3], max_new_tokens=3).token_ids


def test_reading_up_to_the_completion_is_enough(writer: Engine) -> None:
    stream = writer.stream([1, 2, 3], max_new_tokens=7)
    for chunk in stream:
        if chunk.completion is not None:
            break
    assert writer.generate([1, 2, 3], max_new_tokens=7).token_ids == chunk.completion.token_ids


@given(data=st.data(), steps=st.integers(0, 6), drafter=st.sampled_from(["off", *DRAFTERS]))
@quick
def test_a_closed_stream_leaves_no_trace(writer_path: Path, data: st.DataObject, steps: int, drafter: str) -> None:
    engine = shared(writer_path)
    stream = engine.stream(data.draw(prompts(len(LETTERS))), max_new_tokens=60, speculation=drafter)
    for _ in itertools.islice(stream, steps):
        pass
    stream.close()  # type: ignore[attr-defined]
    prompt = data.draw(prompts(len(LETTERS)))
    with edge_spec.load(writer_path) as fresh:
        expected = fresh.generate(prompt, max_new_tokens=20, speculation=drafter, temperature=0.7, seed=4)
    assert result(engine.generate(prompt, max_new_tokens=20, speculation=drafter, temperature=0.7, seed=4)) == result(
        expected
    )


def test_an_interrupted_generation_leaves_no_trace(writer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = result(writer.generate([8, 9, 10], max_new_tokens=20))
    forward = Model.forward
    for stop_at in (0, 1, 4, 7):
        calls = itertools.count()

        def interrupted(
            self: Model, *arguments: Any, calls: Iterator[int] = calls, stop_at: int = stop_at, **options: Any
        ) -> Any:
            if next(calls) == stop_at:
                raise KeyboardInterrupt
            return forward(self, *arguments, **options)

        monkeypatch.setattr(Model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.generate([1, 2, 3], max_new_tokens=20)
        monkeypatch.undo()
        assert result(writer.generate([8, 9, 10], max_new_tokens=20)) == expected


# Statistics


@given(prompt=prompts(len(LETTERS)), max_draft=st.integers(0, 8), drafter=st.sampled_from(["off", *DRAFTERS]))
@quick
def test_statistics_add_up(tiny_bundle: Bundles, prompt: list[int], max_draft: int, drafter: str) -> None:
    engine = shared(tiny_bundle(**PAIRS["w8a8-letters"]))
    completion = engine.generate(prompt, max_new_tokens=30, max_draft=max_draft, speculation=drafter)
    statistics = completion.statistics
    assert statistics.prompt_tokens == len(prompt)
    # Without an end of the text, every round emits what it kept and one token of the target's own.
    assert statistics.new_tokens == len(completion.token_ids) == statistics.rounds + statistics.accepted == 30
    assert statistics.mean_accepted_length == 30 / statistics.rounds
    assert sum(statistics.drafted_by_position) <= statistics.drafted <= statistics.rounds * max_draft
    assert statistics.accepted == sum(statistics.accepted_by_position) <= statistics.drafted
    for counts in (statistics.drafted_by_position, statistics.accepted_by_position):
        assert counts == sorted(counts, reverse=True) and len(counts) <= max_draft
    assert all(0 <= share <= 1 for share in statistics.acceptance_by_position)
    if statistics.drafted:
        assert statistics.acceptance_rate == statistics.accepted / statistics.drafted
    parts = (statistics.prefill_seconds, statistics.draft_seconds, statistics.verify_seconds)
    assert all(seconds >= 0 for seconds in (*parts, statistics.overhead_seconds))
    assert sum(parts) + statistics.overhead_seconds <= statistics.total_seconds
    assert statistics.prefill_seconds <= statistics.ttft_seconds <= statistics.total_seconds
    assert json.loads(json.dumps(completion.to_dict()))["statistics"]["rounds"] == statistics.rounds


def test_only_emitted_draft_tokens_count_as_accepted(writer: Engine) -> None:
    whole = writer.generate([3, 9, 4], max_new_tokens=13, speculation="model", max_draft=5)
    assert whole.statistics.accepted_by_position == [2, 2, 2, 2, 2]
    # The stop string ends in the middle of the second block; the first round drafts nothing.
    stop = whole.text[6:9]
    assert whole.text.index(stop) == 6
    options: dict[str, Any] = {"max_new_tokens": 13, "speculation": "model", "max_draft": 5}
    statistics = writer.generate([3, 9, 4], stop=stop, **options).statistics
    assert (statistics.rounds, statistics.new_tokens, statistics.accepted) == (3, 9, 7)
    assert statistics.accepted_by_position == [2, 2, 1, 1, 1]
    assert statistics.drafted_by_position == [2, 2, 1, 1, 1]


# Bad requests


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ("0123", "prompt is empty"),  # the tokenizer knows letters only
        ([1, len(LETTERS) + 1], "Token id 29 is out of range; this vocabulary has ids 0 to 28"),
        ([-1], "Token id -1 is out of range"),
        ([2**70], "is out of range"),
        ([True], "holds True; expected text"),
        (["1"], "holds '1'; expected text"),
        ([1.0], "holds 1.0; expected text"),
        ([1, None], "holds None; expected text"),
        ([1, {"role": "user"}], "expected text"),
        (np.array([[1, 2]]), "expected text"),
        (np.array([1.5]), "expected text"),
        (b"abc", "prompt is a bytes; expected text"),
        (None, "prompt is a NoneType; expected text"),
        (7, "prompt is a int; expected text"),
        ({1, 2}, "prompt is a set; expected text"),
        ({"role": "user", "content": "a"}, "prompt is a dict; expected text"),
        ("\ud800", "half a character"),
        ([1] * CONTEXT, "has 256 tokens, which leaves no room in the context of 256"),
        ("a" * 300, "has 300 tokens, which leaves no room"),
    ],
)
def test_a_bad_prompt_is_refused(writer_path: Path, prompt: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        shared(writer_path).stream(prompt)
    assert shared(writer_path).generate([1], max_new_tokens=1).token_ids


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"speculation": "guess"},
            "speculation is 'guess', expected one of 'auto', 'off', 'suffix', 'recycling', 'model'",
        ),
        ({"speculation": None}, "speculation is None"),
        ({"speculation": ["model"]}, "speculation is "),
        ({"max_draft": -1}, "max_draft is -1, expected an integer of at least 0"),
        ({"max_draft": 2.0}, "max_draft is 2.0"),
        ({"max_draft": True}, "max_draft is True"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"stop": [""]}, "stop is "),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_a_bad_option_is_refused(writer_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        shared(writer_path).stream([1, 2], **options)


def test_without_a_draft_the_model_drafter_is_refused_and_auto_makes_do(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(recipe="fp32")) as engine:
        assert engine.drafters == ("suffix", "recycling", "lookup", "free", "composite")
        with pytest.raises(RequestError, match="'model', expected one of .* This bundle has no draft model"):
            engine.generate([1, 2], speculation="model")
        origins = {origin for chunk in engine.stream([1, 2] * 9, max_new_tokens=40) for origin in chunk.origins}
        assert origins <= {"target", "suffix", "recycling", "deferred"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [("Hello", "messages is a str"), ([], "messages is empty"), ([1, 2], "message 0 is a int")],
)
def test_chat_takes_nothing_but_messages(writer_path: Path, messages: Any, reason: str) -> None:
    # Text would be continued as it is, which is not what somebody who chats means.
    with pytest.raises(RequestError, match=reason):
        shared(writer_path).chat(messages)


def test_a_broken_template_is_no_obstacle_to_continuing_text(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(recipe="fp32", chat_template="{% if")) as engine:
        assert engine.generate([1, 2], max_new_tokens=2).token_ids
        with pytest.raises(RequestError, match="the chat template cannot be read .* give the prompt as text instead"):
            engine.chat([{"role": "user", "content": "hi"}])


def test_messages_without_a_template_are_refused(tiny_bundle: Bundles) -> None:
    with (
        edge_spec.load(tiny_bundle(recipe="fp32")) as engine,
        pytest.raises(RequestError, match="no chat template; give the prompt as text"),
    ):
        engine.chat([{"role": "user", "content": "hi"}])


def test_a_closed_engine_says_so(writer_path: Path) -> None:
    engine = edge_spec.load(writer_path)
    unstarted = engine.stream([1, 2])
    engine.close()
    engine.close()
    for speculation in ("auto", "off", "model", "lookup"):
        with pytest.raises(RequestError, match="This engine is closed; load the bundle again"):
            engine.generate([1, 2], speculation=speculation)
    with pytest.raises(RequestError, match="This engine is closed"):
        next(unstarted)
    for ask in (lambda: engine.encode("ab"), lambda: engine.token_bytes(1), engine.statistics, engine.session):
        with pytest.raises(RequestError, match="This engine is closed"):
            ask()
    assert engine.manifest.vocab_size == len(LETTERS) + 1


# Loading


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"context": CONTEXT + 1}, "context is 257, expected 2 to 256, the limit of this bundle's target"),
        ({"context": 1}, "context is 1, expected an integer of at least 2"),
        ({"context": 10.0}, "context is 10.0"),
        ({"threads": 0}, "threads is 0, expected an integer of at least 1"),
        ({"threads": True}, "threads is True"),
        ({"device": "tpu"}, "device is 'tpu'; expected one of"),
    ],
)
def test_loading_with_a_bad_argument_is_refused(writer_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        edge_spec.load(writer_path, **options)


def test_a_bundle_for_another_device_is_refused(writer_path: Path, tiny_bundle: Bundles) -> None:
    with pytest.raises(ProviderError, match="exported for 'cpu'"):
        edge_spec.load(writer_path, device="cuda")
    if cuda_failure() is not None:
        with pytest.raises(ProviderError, match="exported for CUDA, which does not run here"):
            edge_spec.load(tiny_bundle(recipe="int4", device="cuda"))


def test_a_damaged_bundle_is_refused(writer_path: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(writer_path, tmp_path / "copy"))
    weights = copied / "target" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="model.onnx.data does not have the SHA-256"):
        edge_spec.load(copied)


def test_signed_weights_are_refused_where_their_products_saturate(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("edge_spec.export.model.integer_products_saturate", lambda: False)
        signed = tiny_bundle(recipe="w8a8", letters=LETTERS, vocab_size=32, eos=None, seed=77)
    with monkeypatch.context() as patched:
        patched.setattr("edge_spec.export.model.integer_products_saturate", lambda: True)
        unsigned = tiny_bundle(recipe="w8a8", letters=LETTERS, vocab_size=32, eos=None, seed=78)
    monkeypatch.setattr("edge_spec.runtime.loaded_pair.integer_products_saturate", lambda: True)
    with pytest.raises(BundleError, match="int8 weights, whose products overflow on this processor"):
        edge_spec.load(signed)
    edge_spec.load(unsigned).close()
    monkeypatch.setattr("edge_spec.runtime.loaded_pair.integer_products_saturate", lambda: False)
    edge_spec.load(signed).close()


def test_importing_the_package_is_quick() -> None:
    code = "import sys, edge_spec; sys.exit(bool({'onnxruntime', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_end_tokens_are_those_of_the_checkpoint(tiny_bundle: Bundles) -> None:
    assert open_bundle(tiny_bundle(recipe="fp32")).manifest.eos_token_ids == (EOS,)


def test_counts_may_be_any_kind_of_integer(writer_path: Path) -> None:
    with edge_spec.load(writer_path, context=np.int64(40), threads=np.int32(1)) as engine:  # type: ignore[arg-type]
        assert engine.context == 40
        engine.generate([1, 2], max_new_tokens=np.int64(2), max_draft=np.int64(1))  # type: ignore[arg-type]
