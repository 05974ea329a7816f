"""Verification leaves the target's law untouched: shown by measuring, not by sampling.

``joint_law`` treats a verification rule as a black box that maps proposed tokens and noise to a verdict, and
measures, to the last bit of a float64, for which share of the noise it gives which verdict. The tokens of the round
must then follow the target's law exactly. Broken rules show that the measurement would notice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.errors import EdgeSpecError
from edge_spec.runtime.sampling import Stream, sample
from edge_spec.runtime.verification import (
    Law,
    Verdict,
    acceptance_probability,
    residual,
    verify_greedy,
    verify_token,
)

Prefix = tuple[int, ...]
Laws = dict[Prefix, Law]
LARGEST_NOISE = 1.0 - 2.0**-53  # rejects whatever can be rejected
Rule = Callable[[Law, Law | None, Sequence[int], Callable[[int, int], float]], Verdict]


def share_below(holds: Callable[[float], bool]) -> float:
    """The share of noise for which ``holds``, which must be true up to some number and false from there on."""
    low, high = 0, 2**53
    while low < high:
        middle = (low + high) // 2
        if holds(middle * 2.0**-53):
            low = middle + 1
        else:
            high = middle
    return low * 2.0**-53


def law_of_round(rule: Rule, p: Law, q: Law | None, proposed: Prefix) -> dict[Prefix, float]:
    """The exact law of the tokens a round emits, given what was proposed."""
    vocab = p.shape[1]
    law: dict[Prefix, float] = {}
    reached = 1.0
    for row in range(len(proposed) + 1):

        def verdict(accept: float, token: float, row: int = row) -> Verdict:
            """The verdict if all rows before this one are accepted."""
            noise = {Stream.ACCEPT: accept, Stream.TOKEN: token}
            return rule(p, q, proposed, lambda at, stream: 0.0 if at < row else noise[Stream(stream)])

        last = row == len(proposed)
        accepted = 0.0 if last else share_below(lambda u, row=row, verdict=verdict: verdict(u, 0.0).accepted > row)
        if accepted < 1.0:
            below = 0.0
            for token in range(vocab):
                edge = share_below(
                    lambda u, token=token, verdict=verdict: verdict(LARGEST_NOISE, u).next_token <= token
                )
                emitted = (*proposed[:row], token)
                law[emitted] = law.get(emitted, 0.0) + reached * (1.0 - accepted) * (edge - below)
                below = edge
            assert verdict(LARGEST_NOISE, 0.0).accepted == row
        reached *= accepted
        if reached == 0.0:
            break
    return law


def joint_law(rule: Rule, p: Laws, q: Laws | None, depth: int, drafted: Prefix | None = None) -> dict[Prefix, float]:
    """The exact law of ``depth + 1`` tokens: those of a round with ``depth`` draft tokens, then plain sampling.

    Draft tokens are drawn from ``q``, or are always ``drafted``.
    """
    vocab = len(p[()])
    law: dict[Prefix, float] = dict.fromkeys(itertools.product(range(vocab), repeat=depth + 1), 0.0)
    for proposed in itertools.product(range(vocab), repeat=depth) if drafted is None else [drafted]:
        prefixes = [proposed[:length] for length in range(depth + 1)]
        chance = 1.0 if q is None else math.prod(float(q[proposed[:i]][proposed[i]]) for i in range(depth))
        if chance == 0.0:
            continue
        p_rows = np.stack([p[prefix] for prefix in prefixes])
        q_rows = None if q is None else np.stack([q[prefix] for prefix in prefixes[:depth]])
        for emitted, share in law_of_round(rule, p_rows, q_rows, proposed).items():
            for rest in itertools.product(range(vocab), repeat=depth + 1 - len(emitted)):
                whole = emitted + rest
                law[whole] += chance * share * plain_chance(p, whole, start=len(emitted))
    return law


def plain_chance(p: Laws, tokens: Prefix, start: int = 0) -> float:
    return math.prod(float(p[tokens[:i]][tokens[i]]) for i in range(start, len(tokens)))


def distance_to_target(rule: Rule, p: Laws, q: Laws | None, depth: int, drafted: Prefix | None = None) -> float:
    """Total variation between what the rule emits and what the target would have emitted."""
    law = joint_law(rule, p, q, depth, drafted)
    return sum(abs(share - plain_chance(p, tokens)) for tokens, share in law.items()) / 2


def random_laws(seed: int, vocab: int, depth: int, zeros: float, dtype: type = np.float64) -> Laws:
    """A different law after every prefix, some of its entries zero."""
    generator = np.random.default_rng(seed)
    laws: Laws = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            weights = generator.exponential(size=vocab) ** 2
            weights[generator.random(vocab) < zeros] = 0.0
            weights[generator.integers(vocab)] += 0.1
            laws[prefix] = (weights / weights.sum()).astype(dtype)
    return laws


def one_hot(token: int, vocab: int) -> Law:
    return np.eye(vocab)[token]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (2, 3)]),
    zeros=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_drawn_drafts_leave_the_law_of_the_text_unchanged(seed: int, shape: tuple[int, int], zeros: float) -> None:
    vocab, depth = shape
    p, q = random_laws(seed, vocab, depth, zeros), random_laws(seed + 1, vocab, depth, zeros)
    assert distance_to_target(verify_token, p, q, depth) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    drafted=st.lists(st.integers(0, 2), max_size=3).map(tuple),
    zeros=st.sampled_from([0.0, 0.5]),
)
def test_determined_drafts_leave_the_law_of_the_text_unchanged(seed: int, drafted: Prefix, zeros: float) -> None:
    p = random_laws(seed, 3, len(drafted), zeros)
    assert distance_to_target(verify_token, p, None, len(drafted), drafted) < 1e-12


SPECIAL_PAIRS = {
    "equal": ([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]),
    "disjoint": ([0.0, 0.75, 0.25], [1.0, 0.0, 0.0]),
    "one-hot draft": ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),
    "one-hot target": ([0.0, 0.0, 1.0], [0.4, 0.4, 0.2]),
    "same one-hot": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "different one-hots": ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
    "target inside the draft": ([0.0, 0.5, 0.5], [0.2, 0.4, 0.4]),
    "draft inside the target": ([0.2, 0.4, 0.4], [0.0, 0.5, 0.5]),
    "equal but for rounding": ([0.1 + 0.2, 0.7, 0.0], [0.3, 0.7, 0.0]),
    "tiny shares": ([1e-300, 1.0, 1e-17], [1e-17, 1.0, 1e-300]),
}


@pytest.mark.parametrize("pair", SPECIAL_PAIRS)
def test_edge_cases_leave_the_law_of_the_text_unchanged(pair: str) -> None:
    p, q = (np.array(law) for law in SPECIAL_PAIRS[pair])
    after = np.array([0.5, 0.125, 0.375])
    p_laws = {(): p, **{(token,): after for token in range(3)}}
    assert distance_to_target(verify_token, p_laws, {(): q}, 1) < 1e-12


def test_a_one_hot_law_and_a_determined_draft_are_the_same() -> None:
    p = random_laws(5, 4, 2, 0.2)
    for drafted in itertools.product(range(4), repeat=2):
        rows = np.stack([p[drafted[:length]] for length in range(3)])
        hot = np.stack([one_hot(token, 4) for token in drafted])
        for noise in itertools.product([0.0, 0.2, 0.45, 0.7, 0.95], repeat=3):
            table = {
                (0, Stream.ACCEPT): noise[0],
                (1, Stream.ACCEPT): noise[1],
                **{(row, Stream.TOKEN): noise[2] for row in range(3)},
            }
            verdicts = [verify_token(rows, q, drafted, lambda *key, table=table: table[key]) for q in (hot, None)]
            assert verdicts[0] == verdicts[1]


def test_single_precision_laws_are_kept_to_single_precision() -> None:
    p, q = random_laws(1, 3, 2, 0.3, np.float32), random_laws(2, 3, 2, 0.3, np.float32)
    assert distance_to_target(verify_token, p, q, 2) < 3e-7
    assert residual(p[()], q[()], 0).dtype == np.float32


def accept_everything(p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]) -> Verdict:
    return Verdict(len(proposed), sample(p[len(proposed)], uniform(len(proposed), Stream.TOKEN)))


def replace_from_the_target(
    p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]
) -> Verdict:
    verdict = verify_token(p, q, proposed, uniform)
    row = verdict.accepted
    return verdict if row == len(proposed) else Verdict(row, sample(p[row], uniform(row, Stream.TOKEN)))


def replace_from_the_wrong_side(
    p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]
) -> Verdict:
    verdict = verify_token(p, q, proposed, uniform)
    row = verdict.accepted
    if row == len(proposed) or q is None:
        return verdict
    return Verdict(row, sample(residual(q[row], p[row], proposed[row]), uniform(row, Stream.TOKEN)))


def bonus_from_the_row_before(
    p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]
) -> Verdict:
    return verify_token(np.concatenate([p[:-1], p[-2:-1]]), q, proposed, uniform)


def accept_by_the_target_alone(
    p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]
) -> Verdict:
    for row, token in enumerate(proposed):
        if uniform(row, Stream.ACCEPT) >= p[row, token]:
            rest = residual(p[row], None if q is None else q[row], token)
            return Verdict(row, sample(rest, uniform(row, Stream.TOKEN)))
    return Verdict(len(proposed), sample(p[-1], uniform(len(proposed), Stream.TOKEN)))


def laws_shifted_by_one_row(
    p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]
) -> Verdict:
    return verify_token(p, None if q is None else np.roll(q, 1, axis=0), proposed, uniform)


@pytest.mark.parametrize(
    "broken",
    [
        accept_everything,
        replace_from_the_target,
        replace_from_the_wrong_side,
        bonus_from_the_row_before,
        accept_by_the_target_alone,
        laws_shifted_by_one_row,
    ],
)
def test_the_measurement_notices_a_broken_rule(broken: Rule) -> None:
    p, q = random_laws(1, 3, 2, 0.2), random_laws(2, 3, 2, 0.2)
    assert distance_to_target(broken, p, q, 2) > 1e-3


@pytest.mark.parametrize("broken", [accept_everything, replace_from_the_target, bonus_from_the_row_before])
def test_the_measurement_notices_a_rule_broken_for_determined_drafts(broken: Rule) -> None:
    assert distance_to_target(broken, random_laws(1, 3, 2, 0.0), None, 2, (0, 2)) > 1e-3


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [(0.2, 0.4, 0.5), (0.4, 0.2, 1.0), (0.3, 0.3, 1.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.0), (0.3, 0.0, 1.0)],
)
def test_acceptance_probability(p: float, q: float, expected: float) -> None:
    assert acceptance_probability(p, q) == expected


def test_a_token_the_target_excludes_is_rejected_whatever_the_noise() -> None:
    p = np.array([[0.0, 1.0], [1.0, 0.0]])
    for q in (None, np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])):
        assert verify_token(p, q, [0], lambda row, stream: 0.0) == Verdict(0, 1)


def test_the_residual_is_where_the_target_exceeds_the_draft() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.5, 0.25])
    assert residual(p, q, 1).tolist() == [0.25, 0.0, 0.0]
    assert residual(p, None, 0).tolist() == [0.0, 0.3, 0.2]
    assert p.tolist() == [0.5, 0.3, 0.2]


def test_noise_is_asked_for_at_most_once_per_decision() -> None:
    p, q = np.full((4, 3), 1 / 3), np.full((3, 3), 1 / 3)
    asked: list[tuple[int, int]] = []

    def noise(row: int, stream: int) -> float:
        asked.append((row, stream))
        return 0.5

    assert verify_token(p, q, [0, 1, 2], noise).accepted == 3
    assert asked == [(0, Stream.ACCEPT), (1, Stream.ACCEPT), (2, Stream.ACCEPT), (3, Stream.TOKEN)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_greedy_keeps_the_common_beginning_and_adds_the_targets_token(own: list[int], data: st.DataObject) -> None:
    proposed = data.draw(st.lists(st.integers(0, 3), min_size=len(own) - 1, max_size=len(own) - 1))
    logits = np.random.default_rng(0).random((len(own), 4)).astype(np.float32)
    logits[np.arange(len(own)), own] = 2.0
    verdict = verify_greedy(logits, proposed)
    assert proposed[: verdict.accepted] == own[: verdict.accepted]
    assert verdict.next_token == own[verdict.accepted]
    assert verdict.accepted == len(proposed) or proposed[verdict.accepted] != own[verdict.accepted]


def test_greedy_refuses_broken_logits() -> None:
    with pytest.raises(EdgeSpecError, match="row 1"):
        verify_greedy(np.array([[0, 1], [np.nan, 1]], np.float32), [1])
