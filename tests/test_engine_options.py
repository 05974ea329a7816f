"""Each option of a request, through the public surface on tiny pairs: what it does, and that drafting does not show."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Completion, Engine, LogitsError, TokenLogprobs
from edge_spec.bundle import open_bundle
from edge_spec.errors import NoTokenLeftError, RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.model import Model
from row_independence import require_bitwise_kernels

Bundles = Callable[..., Path]
Array = npt.NDArray[np.float32]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
VOCABULARY = len(LETTERS) + 1  # and an end-of-text token, which these models do not end a text with
SPECULATIONS = ("off", "lookup", "model")
RULES = ("coupled", "token", "block", "traversal")
PROMPT = [3, 9, 4, 3, 9, 4]

# Penalties, bias and masks at once.
MIXED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": {0: 1.5, 7: -2.0},
    "banned_token_ids": [5, 28],
}

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def load(path: Path) -> Engine:
    return edge_spec.load(path)


@pytest.fixture(scope="module")
def pair_path(tiny_bundle: Bundles) -> Path:
    """A pair whose draft is right now and then."""
    return tiny_bundle(recipe="w8a8", draft="close", letters=LETTERS, vocab_size=32, eos=None)


@pytest.fixture(scope="module")
def pair(pair_path: Path) -> Engine:
    return load(pair_path)


@pytest.fixture(scope="module")
def writer(tiny_bundle: Bundles) -> Engine:
    """A pair whose draft is the target itself: at temperature 0 whole blocks are accepted."""
    return load(tiny_bundle(recipe="fp32", draft="same", letters=LETTERS, vocab_size=32, eos=None))


def result(completion: Completion) -> tuple[str, tuple[int, ...], str]:
    return completion.text, completion.token_ids, completion.finish_reason


def tokens_of(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> tuple[int, ...]:
    return engine.generate(prompt, **{"max_new_tokens": 30, **options}).token_ids


# Verification


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.7, 1.0, 1e-6]),
    top_p=st.sampled_from([1.0, 0.9]),
    more=st.sampled_from([{}, MIXED, {"top_k": 5}, {"min_p": 0.1}]),
)
@quick
def test_the_same_seed_gives_the_same_text_whoever_drafts(
    pair: Engine, prompt: list[int], seed: int, temperature: float, top_p: float, more: dict[str, Any]
) -> None:
    require_bitwise_kernels()
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_new_tokens": 24, **more}
    plain = pair.generate(prompt, speculation="off", **options)
    for speculation in ("lookup", "model"):
        for max_draft in (0, 1, 2, 5, 8):
            drafted = pair.generate(prompt, speculation=speculation, max_draft=max_draft, **options)
            assert result(drafted) == result(plain)


def test_coupled_is_the_default_and_keeps_drafted_tokens(pair: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_new_tokens": 120}
    default = pair.generate(PROMPT, speculation="model", max_draft=4, **options)
    named = pair.generate(PROMPT, speculation="model", max_draft=4, verification="coupled", **options)
    assert result(default) == result(named)
    assert default.statistics.accepted > default.statistics.drafted / 3  # else the test above would show nothing


@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_every_rule_gives_the_likeliest_text_at_temperature_0(
    pair: Engine, verification: str, speculation: str
) -> None:
    require_bitwise_kernels()
    for options in ({}, MIXED):
        plain = pair.generate(PROMPT, speculation="off", **options)
        drafted = pair.generate(PROMPT, speculation=speculation, verification=verification, max_draft=5, **options)
        assert result(drafted) == result(plain)


@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_every_rule_repeats_itself_with_a_seed(pair: Engine, verification: str, speculation: str) -> None:
    options: dict[str, Any] = {"verification": verification, "speculation": speculation, "temperature": 0.9, **MIXED}
    options["max_draft"] = 4
    first, second, other = (pair.generate(PROMPT, seed=seed, **options) for seed in (1, 1, 2))
    assert result(first) == result(second) != result(other)
    if speculation == "model":
        assert first.statistics.accepted > 0
    assert not {5, 28} & set(first.token_ids)


def test_traversal_equals_block_on_the_chains_that_are_proposed(pair: Engine) -> None:
    for seed in range(10):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "speculation": "model", "max_draft": 4}
        block, traversal = (pair.generate(PROMPT, verification=rule, **options) for rule in ("block", "traversal"))
        assert result(block) == result(traversal)


# Log-probabilities


def reference_logprobs(path: Path, tokens: Sequence[int], prompt_length: int) -> npt.NDArray[np.float64]:
    """Log-softmax of the target's logits before each new token, float64 [new tokens, vocab]."""
    bundle = open_bundle(path)
    model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], len(tokens), exact_rows=True, threads=1)
    logits = model.forward(tokens, range(prompt_length - 1, len(tokens) - 1)).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 3, "top_k": 4, **MIXED}], ids=["plain", "mixed"])
def test_logprobs_are_those_of_the_targets_own_logits_whoever_drafts(
    pair: Engine, pair_path: Path, options: dict[str, Any]
) -> None:
    require_bitwise_kernels()
    seen = []
    for speculation, max_draft in (("off", 0), ("model", 1), ("model", 6), ("lookup", 4)):
        completion = pair.generate(
            PROMPT, logprobs=3, max_new_tokens=40, speculation=speculation, max_draft=max_draft, **options
        )
        assert completion.logprobs is not None
        seen.append(completion.logprobs)
    assert all(other == seen[0] for other in seen)

    expected = reference_logprobs(pair_path, [*PROMPT, *completion.token_ids], len(PROMPT))
    assert tuple(entry.token_id for entry in seen[0]) == completion.token_ids
    for entry, row in zip(seen[0], expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-5)
        assert entry.logprob < 0
        best = np.argsort(-row, kind="stable")[:3]
        assert [token for token, _ in entry.top] == best.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(row[best], abs=1e-5)


def test_logprobs_come_with_the_chunks_of_their_tokens(writer: Engine) -> None:
    *chunks, last = writer.stream(PROMPT, logprobs=2, max_new_tokens=17, max_draft=5)
    assert last.completion is not None
    entries: list[TokenLogprobs] = []
    for chunk in (*chunks, last):
        assert chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids)
        entries.extend(chunk.logprobs)
    assert tuple(entries) == last.completion.logprobs
    reported = json.loads(json.dumps(last.completion.to_dict()))["logprobs"]
    assert [entry["token_id"] for entry in reported] == list(last.completion.token_ids)


def test_how_many_logprobs_are_reported(writer: Engine) -> None:
    assert writer.generate(PROMPT, max_new_tokens=2).logprobs is None
    for asked, given_ in ((0, 0), (1, 1), (1000, VOCABULARY)):
        entries = writer.generate(PROMPT, max_new_tokens=2, logprobs=asked).logprobs
        assert entries is not None and [len(entry.top) for entry in entries] == [given_] * 2


def test_the_only_token_allowed_does_not_have_logprob_0(writer: Engine) -> None:
    completion = writer.generate(PROMPT, max_new_tokens=5, allowed_token_ids=[11], logprobs=0)
    assert completion.token_ids == (11,) * 5
    assert completion.logprobs is not None and all(entry.logprob < -0.01 for entry in completion.logprobs)


def test_logprobs_end_with_the_text(writer: Engine) -> None:
    whole = tokens_of(writer, max_draft=5)
    stopped = writer.generate(PROMPT, logprobs=1, max_draft=5, stop_token_ids=[whole[8]])
    assert stopped.logprobs is not None and len(stopped.logprobs) == len(stopped.token_ids)


# Where a text ends


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("position", range(8))
def test_a_text_ends_with_a_stop_token_wherever_in_a_block_it_is(
    writer: Engine, position: int, speculation: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "speculation": speculation, "max_draft": 5}
    whole = writer.generate(PROMPT, **options)
    firsts = [index for index, token in enumerate(whole.token_ids) if token not in whole.token_ids[:index]]
    end = firsts[min(position, len(firsts) - 1)]
    stopped = writer.generate(PROMPT, stop_token_ids=[whole.token_ids[end], 28], **options)
    # The token is emitted, but is no part of the text; one token is one letter here.
    assert result(stopped) == (whole.text[:end], whole.token_ids[: end + 1], "stop")
    assert stopped.statistics.new_tokens == end + 1


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_no_token_comes_after_cancellation_wherever_in_a_block_it_falls(writer: Engine, speculation: str) -> None:
    whole = tokens_of(writer, max_new_tokens=24)
    lengths = []
    for asked in range(27):
        polls = itertools.count()
        completion = writer.generate(
            PROMPT,
            max_new_tokens=24,
            speculation=speculation,
            max_draft=5,
            cancelled=lambda polls=polls, asked=asked: next(polls) >= asked,
        )
        assert next(polls) == asked + 1  # once it said so, it is not asked again
        assert completion.finish_reason == "cancelled"
        assert completion.token_ids == whole[: len(completion.token_ids)]
        assert completion.statistics.new_tokens == len(completion.token_ids)
        lengths.append(len(completion.token_ids))
    assert lengths[0] == 0
    steps = {later - earlier for earlier, later in itertools.pairwise(lengths)}
    assert steps <= {0, 1}  # asked before every token: the end falls anywhere in a block


def test_an_event_cancels_a_stream_between_two_chunks(writer: Engine) -> None:
    event = threading.Event()
    seen: list[int] = []
    for chunk in writer.stream(PROMPT, cancelled=event.is_set, max_draft=5):
        seen.extend(chunk.token_ids)
        if len(seen) >= 7:
            event.set()
    assert chunk.token_ids == () and chunk.completion is not None
    assert chunk.completion.finish_reason == "cancelled"
    assert chunk.completion.token_ids == tuple(seen) == tokens_of(writer)[: len(seen)]


def test_a_deadline_in_the_past_of_the_first_token_gives_an_empty_text(writer: Engine) -> None:
    completion = writer.generate(PROMPT, deadline=1e-9)
    assert result(completion) == ("", (), "deadline")
    assert completion.statistics.rounds == 0


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_no_token_comes_after_the_deadline(writer: Engine, speculation: str) -> None:
    slow_at = len(PROMPT) + 6

    def sleep_once(token_ids: Sequence[int], logits: Array) -> Array:
        if len(token_ids) == slow_at:
            time.sleep(1.1)
        return logits

    whole = tokens_of(writer)
    completion = writer.generate(
        PROMPT, deadline=1.0, max_draft=5, speculation=speculation, logits_processors=[sleep_once]
    )
    assert completion.finish_reason == "deadline"
    assert completion.token_ids == whole[: len(completion.token_ids)]
    assert 1 <= len(completion.token_ids) <= 6  # what the slow round brought came too late
    assert completion.statistics.new_tokens == len(completion.token_ids)


def test_a_deadline_that_is_not_met_changes_nothing(writer: Engine) -> None:
    assert tokens_of(writer, deadline=1000, cancelled=lambda: False) == tokens_of(writer)


ENDINGS: dict[str, dict[str, Any]] = {
    "length": {"max_new_tokens": 9},
    "none": {"max_new_tokens": 0},
    "one": {"max_new_tokens": 1},
    "stop token": {"stop_token_ids": range(3, 20)},
    "stop string": {"stop": list("abcdefghijkl")},
    "cancelled": {"cancelled": None},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_nothing_behind_the_end_is_left_in_cache_or_context(
    writer: Engine, monkeypatch: pytest.MonkeyPatch, ending: str, speculation: str
) -> None:
    contexts: list[Context] = []

    def recorded(*arguments: Any) -> Context:
        contexts.append(Context(*arguments))
        return contexts[-1]

    monkeypatch.setattr("edge_spec.runtime.request.Context", recorded)
    options = dict(ENDINGS[ending])
    if ending == "cancelled":
        polls = itertools.count()
        options["cancelled"] = lambda: next(polls) >= 6
    completion = writer.generate(PROMPT, speculation=speculation, max_draft=5, **options)
    text = [*PROMPT, *completion.token_ids]
    assert contexts[-1].tokens == text

    target = writer._target
    assert target.cache.length <= len(text)
    held = [value.numpy()[:, :, : target.cache.length].copy() for value in target.cache._buffers.values()]
    kept = target.cache.length
    target.cache.rollback(0)
    if kept:
        target.forward(text[:kept], ())
    for before, value in zip(held, target.cache._buffers.values(), strict=True):
        np.testing.assert_allclose(before, value.numpy()[:, :, :kept], rtol=0, atol=1e-5)
    if speculation == "model":
        assert writer._drafters["model"]._read._model.cache.length <= len(text)  # type: ignore[attr-defined]
    if speculation == "lookup":
        indexed = writer._drafters["lookup"]._tokens  # type: ignore[attr-defined]
        assert indexed == text[: len(indexed)]


# What changes the logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"logit_bias": {1: 3.0, 2: -3}},
        {"allowed_token_ids": range(4, 18)},
        {"banned_token_ids": range(10)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_changes_the_text_and_drafting_does_not(
    pair: Engine, options: dict[str, Any], temperature: float
) -> None:
    require_bitwise_kernels()
    common: dict[str, Any] = {"temperature": temperature, "seed": 8, "max_new_tokens": 40}
    without = tokens_of(pair, speculation="off", **common)
    plain = tokens_of(pair, speculation="off", **common, **options)
    assert plain != without
    for speculation, max_draft in itertools.product(("lookup", "model"), (1, 6)):
        assert tokens_of(pair, speculation=speculation, max_draft=max_draft, **common, **options) == plain


@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_banned_tokens_never_come_and_allowed_ones_alone_do(pair: Engine, verification: str, speculation: str) -> None:
    options: dict[str, Any] = {"verification": verification, "speculation": speculation, "temperature": 1.5, "seed": 1}
    assert not set(tokens_of(pair, banned_token_ids=range(0, 28, 2), **options)) & set(range(0, 28, 2))
    assert set(tokens_of(pair, allowed_token_ids=[2, 3, 11], banned_token_ids=[3], **options)) == {2, 11}
    # A bias does not bring a banned token back.
    assert 6 not in tokens_of(pair, logit_bias={6: 100}, banned_token_ids=[6], **options)
    assert set(tokens_of(pair, logit_bias={6: 100}, **options)) == {6}


def no_repeats(token_ids: Sequence[int], logits: Array) -> Array:
    """A rule of an app: no token twice in a row, and no more than five different ones apart."""
    logits[list(token_ids[-5:])] = -np.inf
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_processor_sees_the_path_of_its_row(pair: Engine, temperature: float) -> None:
    require_bitwise_kernels()
    options: dict[str, Any] = {"logits_processors": [no_repeats], "temperature": temperature, "seed": 2}
    plain = tokens_of(pair, speculation="off", **options)
    text = [*PROMPT, *plain]
    assert all(token not in text[max(0, index - 5) : index] for index, token in enumerate(text[6:], 6))
    for speculation, max_draft in itertools.product(("lookup", "model"), (1, 4, 8)):
        assert tokens_of(pair, speculation=speculation, max_draft=max_draft, **options) == plain


def test_processors_run_in_the_order_given(pair: Engine) -> None:
    def only(token: int) -> Callable[[Sequence[int], Array], Array]:
        def rule(token_ids: Sequence[int], logits: Array) -> Array:
            logits[:] = -50.0
            logits[token] = 0.0
            return logits

        return rule

    assert set(tokens_of(pair, logits_processors=[only(3), only(7)])) == {7}
    assert set(tokens_of(pair, logits_processors=(only(7), only(3)))) == {3}


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_a_processor_that_fails_is_an_error_that_names_the_step(pair: Engine, speculation: str) -> None:
    def fails(token_ids: Sequence[int], logits: Array) -> Array:
        if len(token_ids) >= len(PROMPT) + 5:
            raise KeyError("no rule")
        return logits

    seen: list[int] = []

    def read() -> None:
        for chunk in pair.stream(PROMPT, speculation=speculation, logits_processors=[fails], max_draft=4):
            seen.extend(chunk.token_ids)

    with pytest.raises(LogitsError, match=r"at position 11, the logits processor .*fails raised KeyError\('no rule'\)"):
        read()
    assert tuple(seen) == tokens_of(pair, speculation="off", max_new_tokens=5)  # all that could be said was said
    assert len(tokens_of(pair)) == 30  # and the engine is free


def test_a_processor_that_excludes_everything_is_an_error(pair: Engine) -> None:
    with pytest.raises(NoTokenLeftError, match="at position 6, no token is left to choose"):
        pair.generate(PROMPT, logits_processors=[lambda token_ids, logits: np.full_like(logits, -np.inf)])


def test_a_processor_that_returns_something_else_is_an_error(pair: Engine) -> None:
    with pytest.raises(LogitsError, match=r"expected floating point \[29\]"):
        pair.generate(PROMPT, logits_processors=[lambda token_ids, logits: logits[:3]])


# Bad values


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"verification": "typical"}, "verification is 'typical', expected one of 'coupled', 'token', 'block', 'trav"),
        ({"verification": ["token"]}, "verification is "),
        ({"verification": 1}, "verification is 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number from 0.01 to 100"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, expected a number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1 is 101"),
        ({"logit_bias": {29: 1}}, "logit_bias holds token id 29, which is out of range; this vocabulary has ids 0 to"),
        ({"logit_bias": 5}, "logit_bias is 5"),
        ({"allowed_token_ids": []}, "allowed_token_ids is .*leaves none of them"),
        ({"allowed_token_ids": [29]}, "allowed_token_ids holds token id 29"),
        ({"allowed_token_ids": [1], "banned_token_ids": [1]}, "banned_token_ids leaves none of them"),
        ({"banned_token_ids": range(29)}, "banned_token_ids holds all 29 tokens"),
        ({"banned_token_ids": [-1]}, "banned_token_ids is "),
        ({"banned_token_ids": "ab"}, "banned_token_ids is 'ab'"),
        ({"stop_token_ids": [29]}, "stop_token_ids holds token id 29"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3"),
        ({"logits_processors": [1]}, "logits_processors holds 1, expected functions"),
        ({"logits_processors": no_repeats}, "logits_processors is <function"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": True}, "logprobs is True"),
        ({"deadline": 0}, "deadline is 0, expected None or a finite number of seconds above 0"),
        ({"deadline": float("inf")}, "deadline is inf"),
        ({"cancelled": True}, "cancelled is True, expected a function without arguments"),
    ],
)
def test_a_bad_value_is_refused_before_anything_runs(writer: Engine, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        writer.stream(PROMPT, **options)
    assert len(tokens_of(writer, max_new_tokens=1)) == 1


# Public names


def test_public_names_lead_to_what_they_name() -> None:
    for name in edge_spec.__all__:
        assert getattr(edge_spec, name).__name__ == name
    assert set(edge_spec.__all__) <= set(dir(edge_spec))
    assert issubclass(edge_spec.LogitsError, edge_spec.EdgeSpecError)
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        edge_spec.Sampler  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture(autouse=True)
def _engines_are_left_idle(pair: Engine, writer: Engine) -> Iterator[None]:
    """Engines are shared by the tests of this file; a test that left one busy would break the next."""
    yield
    assert not pair._turns._tickets and not writer._turns._tickets
