"""What is decided from the likeliest tokens of a row is what the whole row decides, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selected_rows import SelectingModel, selected

from edge_spec.errors import LogitsError
from edge_spec.runtime.draft_vocabulary import WHOLE
from edge_spec.runtime.drafters.model_choice import choose, known_columns
from edge_spec.runtime.drafters.protocol import Outcome
from edge_spec.runtime.drafters.recycling import RecyclingDrafter
from edge_spec.runtime.history import History, chain_paths, tree_paths
from edge_spec.runtime.logit_rows import LogitRows
from edge_spec.runtime.logits_processors import LogitsPipeline, ProcessedRows
from edge_spec.runtime.noise import Noise
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.target_laws import TargetLaws
from edge_spec.runtime.top_law import law_of_top
from edge_spec.runtime.verification import RULES, verify_greedy
from stub_model import StubDrafter, StubModel, context_of, rounds_of

TEXT = (3, 1, 4, 1, 5, 9, 2, 6)


class Parity:
    """A mask that allows tokens of one parity, by the length of the text."""

    def allowed(self, history: History, path: Sequence[int]) -> np.ndarray | None:
        length = len(history.tokens) + len(path)
        return None if length % 3 == 0 else np.arange(200) % 2 == length % 2


def doubled(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    logits[token_ids[-1] % len(logits)] += 30.0
    return logits


def rows_of(dice: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Rows flat and peaked, with ties, with tokens that are impossible, and now and then broken."""
    rows = dice.normal(0, dice.choice([0.01, 1.0, 4.0, 12.0]), (count, vocab)) + dice.choice([0.0, -40.0, 300.0])
    kind = dice.integers(0, 8)
    if kind < 3:
        rows = np.round(rows * 2) / 2  # ties everywhere
    elif kind < 5:
        rows = rows.astype(np.float16)
    if dice.random() < 0.2:
        rows[dice.random(rows.shape) < dice.choice([0.05, 0.5, 0.99])] = -np.inf
    if dice.random() < 0.1:
        rows[dice.integers(count), dice.integers(vocab)] = dice.choice([np.nan, np.inf])
    return rows.astype(np.float32)


def params_of(dice: np.random.Generator, vocab: int, greedy: bool) -> SamplingParams:
    def maybe(chance: float, *values: Any) -> Any:
        return values[1 + int(dice.integers(len(values) - 1))] if dice.random() < chance else values[0]

    def tokens(most: int) -> list[int]:
        return dice.integers(0, vocab, dice.integers(1, most)).tolist()

    processed = dice.random() < 0.5
    return SamplingParams(
        temperature=0.0 if greedy else maybe(0.6, 0.7, 1e-300, 1e-3, 0.3, 1.0, 1.5, 20.0, 1e300),
        top_k=maybe(0.4, 0, 1, 3, 8, 20, 64, vocab - 1, vocab + 5),
        top_p=maybe(0.5, 1.0, 1e-9, 0.3, 0.8, 0.95, 0.9999999),
        min_p=maybe(0.3, 0.0, 1e-9, 1e-3, 0.05, 1.0),
        seed=int(dice.integers(2**40)),
        repetition_penalty=maybe(0.3, 1.0, 1.3, 0.5) if processed else 1.0,
        presence_penalty=maybe(0.3, 0.0, 1.5, -1.5) if processed else 0.0,
        frequency_penalty=maybe(0.3, 0.0, 0.3, -0.3) if processed else 0.0,
        logit_bias={token: float(dice.choice([-5, -100, 0.5, 20])) for token in tokens(4)}
        if processed and dice.random() < 0.4
        else (),
        banned_token_ids=tokens(vocab // 2) if processed and dice.random() < 0.3 else (),
        allowed_token_ids=range(0, vocab, int(dice.integers(1, 9))) if processed and dice.random() < 0.2 else None,
    )


def proposal_of(dice: np.random.Generator, rows: np.ndarray, rule: str) -> Proposal:
    """A chain or a tree for all rows but one, of likely tokens, drawn or determined."""
    count, vocab = len(rows) - 1, rows.shape[1]
    likely = [int(np.argsort(-row)[dice.integers(0, 3)]) for row in rows[:count]]
    tokens = tuple(token if dice.random() < 0.8 else int(dice.integers(vocab)) for token in likely)
    if RULES[rule].trees and dice.random() < 0.5:
        parents = tuple(int(dice.integers(-1, node)) for node in range(count))
        taken = list(zip(parents, tokens, strict=True))
        if len(set(taken)) == count:
            return Proposal(tokens, parents=parents)
    if dice.random() < 0.5 or rule == "coupled" or not count:
        return Proposal(tokens)
    laws = dice.dirichlet(np.full(vocab, 0.1), count).astype(np.float32)
    laws[np.arange(count), tokens] += 0.1
    return Proposal(tokens, list(laws / laws.sum(axis=1, keepdims=True)))


class Plain:
    """Laws that are only read."""

    def __init__(self, laws: TargetLaws) -> None:
        self._laws = laws

    def __getitem__(self, row: int) -> np.ndarray:
        return self._laws[row]


def decided(rows: LogitRows, proposal: Proposal, params: SamplingParams, rule: str, more: dict[str, Any]) -> Any:
    """The verdict, or the error, and the laws of all rows, as bytes."""
    pipeline, history = LogitsPipeline(params, **more), History(list(TEXT), 3)
    paths = chain_paths(proposal.tokens) if proposal.is_chain else tree_paths(proposal.tokens, proposal.parents or ())
    processed: Any = ProcessedRows(pipeline, rows, history, paths) if pipeline.active else rows
    try:
        if params.greedy:
            return verify_greedy(processed, proposal)
        laws = TargetLaws(processed, rows.shape[1], params)
        assert params.seed is not None
        read: Any = Plain(laws) if isinstance(rows, np.ndarray) and params.seed % 2 else laws
        verdict = RULES[rule].verify(read, proposal, Noise(params.seed).round(len(TEXT)))
        return verdict, [laws[row].tobytes() for row in (0, *(node + 1 for node in verdict.path))]
    except LogitsError as error:
        return type(error), error.row, error.problem


@given(st.integers(0, 2**32), st.sampled_from(["greedy", *RULES]))
@settings(max_examples=600, deadline=None)
def test_every_rule_decides_as_by_whole_rows(seed: int, rule: str) -> None:
    dice = np.random.default_rng(seed)
    vocab = int(dice.integers(20, 200))
    rows = rows_of(dice, int(dice.integers(1, 7)), vocab)
    params = params_of(dice, vocab, rule == "greedy")
    more: dict[str, Any] = {}
    if dice.random() < 0.2:
        more["grammar"] = Parity()
    if dice.random() < 0.1:
        more["processors"] = [doubled]
    rule = "coupled" if rule == "greedy" else rule
    proposal = proposal_of(dice, rows, rule)
    known = selected(rows, int(dice.integers(1, min(vocab, 64) + 1)), dice, dice.uniform(-1, 1))
    assert decided(known, proposal, params, rule, more) == decided(rows, proposal, params, rule, more)


@given(st.integers(0, 2**32))
@settings(max_examples=600, deadline=None)
def test_a_law_of_the_likeliest_tokens_is_that_of_the_whole_row(seed: int) -> None:
    dice = np.random.default_rng(seed)
    vocab = int(dice.integers(100, 3000))
    row = rows_of(dice, 1, vocab)
    known = selected(row, int(dice.integers(1, 65)), dice, dice.uniform(-1, 1))
    top = known.top(0)
    if top is None:
        return
    for _ in range(10):
        params = params_of(dice, vocab, False)
        law = law_of_top(top, vocab, params)
        if law is not None:
            whole = np.zeros(vocab, np.float32)
            whole[law[0]] = law[1]
            assert whole.tobytes() == probabilities(row, params)[0].tobytes()


def peaked(text: Sequence[int]) -> np.ndarray:
    """A row as language models have them: few likely tokens, many of which each is all but impossible."""
    dice = np.random.default_rng([int(token) for token in text[-3:]])
    row = dice.normal(0, 2.0, 2000)
    row[dice.integers(0, 2000, 12)] += np.linspace(8, 16, 12)
    return row.astype(np.float32)


USUAL = [
    {},
    {"repetition_penalty": 1.1, "logit_bias": {5: -3.0}, "banned_token_ids": (7,)},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40},
]


@pytest.mark.parametrize("params", USUAL, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_usual_requests_bring_no_whole_row_from_the_device(params: dict[str, Any], rule: str) -> None:
    sampling = SamplingParams(seed=4, **params)
    guesses = StubDrafter(lambda text, most: [int(np.argmax(peaked(text)))][:most])
    texts = []
    for model in (SelectingModel(peaked, count=64), StubModel(peaked)):
        context = context_of(TEXT, sampling, rule)
        for _ in rounds_of(model, guesses, context, 60, rule=rule):
            pass
        texts.append(context.tokens)
        if isinstance(model, SelectingModel):
            assert model.fetched == 0 and model.rows >= 52
    assert texts[0] == texts[1]


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {}], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_whole_laws_and_top_p_alone_seldom_bring_a_whole_row(params: dict[str, Any], temperature: float) -> None:
    def confident(text: Sequence[int]) -> np.ndarray:
        return peaked(text) * np.float32(1.0 if params else 2.0)

    sampling = SamplingParams(seed=4, temperature=temperature, **params)
    model, whole = SelectingModel(confident, count=64), StubModel(confident)
    contexts = [context_of(TEXT, sampling) for _ in range(2)]
    for target, context in zip((model, whole), contexts, strict=True):
        for _ in rounds_of(target, None, context, 200):
            pass
    assert contexts[0].tokens == contexts[1].tokens
    assert model.fetched < 0.1 * model.rows


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_token_of_a_whole_law_is_that_of_the_whole_row(seed: int) -> None:
    dice = np.random.default_rng(seed)
    vocab = int(dice.integers(100, 2000))
    row = rows_of(dice, 1, vocab)
    known = selected(row, int(dice.integers(2, 65)), dice)
    for temperature in (1e-300, 1e-2, 0.3, 0.8, 1.0, 3.0, 1e300):
        params = SamplingParams(temperature=temperature, seed=seed)
        decisions = [decided(rows, Proposal(), params, "coupled", {}) for rows in (known, row)]
        assert decisions[0] == decisions[1]


def test_log_probabilities_bring_the_rows_of_emitted_tokens() -> None:
    sampling = SamplingParams(logprobs=3)
    model, whole = SelectingModel(peaked), StubModel(peaked)
    rounds = [list(rounds_of(target, None, context_of(TEXT, sampling), 20)) for target in (model, whole)]
    assert [r.logprobs for r in rounds[0]] == [r.logprobs for r in rounds[1]]
    assert model.fetched == 12


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 5}, {"banned_token_ids": (1,)}], ids=str)
def test_a_row_that_is_broken_somewhere_is_an_error(params: dict[str, Any]) -> None:
    def broken(text: Sequence[int]) -> np.ndarray:
        row = peaked(text)
        if len(text) == 15:
            row[1999] = np.nan
        return row

    context = context_of(TEXT, SamplingParams(seed=1, **params))
    with pytest.raises(LogitsError, match="the largest logit is nan"):
        list(rounds_of(SelectingModel(broken), None, context, 30))
    assert len(context.tokens) == 15


def test_a_processor_of_the_app_sees_the_whole_row() -> None:
    seen = []

    def look(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append(bool(np.isfinite(logits).all()))
        return logits

    context = context_of(TEXT, SamplingParams(), processors=[look])
    list(rounds_of(SelectingModel(peaked), None, context, 20))
    assert seen and all(seen)


def test_recycling_remembers_what_it_would_of_whole_rows() -> None:
    dice = np.random.default_rng(2)
    rows = np.stack([peaked([3, 1, token]) for token in range(4)])
    rows[2, 5] = np.nan
    proposals = []
    for given_rows in (rows, selected(rows, 64, dice)):
        drafter = RecyclingDrafter()
        drafter.observe(Outcome(6, Proposal((10, 11, 12)), (0,), 13, given_rows))
        found = [drafter._find(-1, token) for token in (6, 10, 11, 12)]
        proposals.append(found)
    for whole, known in zip(*proposals, strict=True):
        if whole is None:
            assert known is None
            continue
        assert known is not None
        likely = [token for token, level in zip(whole[0], whole[1], strict=True) if level]
        assert known[0][: len(likely)] == likely
        np.testing.assert_allclose(known[1], whole[1], atol=13)  # of 255: whole rows are estimated by their columns


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 8}, {"frequency_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("branches", [False, True])
def test_a_draft_proposes_what_it_would_by_whole_rows(params: dict[str, Any], branches: bool) -> None:
    dice = np.random.default_rng(7)
    context = context_of(TEXT, SamplingParams(seed=3, **params))
    for token in range(20):
        row = peaked([token])[None]
        whole, _ = choose(context, [], row[0], branches)
        rows = selected(row, 64, dice)
        logits, vocabulary, left_out = known_columns(rows, WHOLE)
        known, _ = choose(context, [], logits, branches, vocabulary, left_out)
        assert known == whole and rows.fetched == 0
