"""Where drawn chains end: never on the ground of what was drawn, or the text would no longer be the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.draft_length import pays
from edge_spec.runtime.drafters.block_choice import propose_block
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.markov_bias import MarkovBias
from edge_spec.runtime.proposal import Evidence, Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from enumeration import CHAIN_RULES, EXACT, LawTable, Prefix, chain, drafts, round_law
from stub_model import context_of

# A vocabulary of two. The target emits the first token with 0.7, the draft draws either with 0.5. Of the first place it
# is said that it is accepted with 0.5; of the second that it very likely is behind the first token, and hardly behind
# the second. One token costs more than it brings, and two cost not much more than one.
P: LawTable = {(): np.array([0.7, 0.3]), **{(token,): np.array([0.6, 0.4]) for token in (0, 1)}}
P |= {(one, two): np.array([0.5, 0.5]) for one in (0, 1) for two in (0, 1)}
Q: LawTable = {prefix: np.array([0.5, 0.5]) for prefix in P}
CONFIDENCE: dict[Prefix, float] = {(): 0.5, (0,): 0.9, (1,): 0.1}
SECONDS = (1.0, 1.6, 1.8)  # of a call with so many draft tokens


def cost(tokens: int) -> float:
    """At the speed of plain decoding, one token a second."""
    return SECONDS[tokens] - SECONDS[0]


def chances(tokens: Prefix) -> list[float]:
    return [1.0, *(CONFIDENCE[tokens[:depth]] for depth in range(len(tokens)))]


def with_stop(tokens: Prefix, parents: tuple[int, ...]) -> int | None:
    """Draw another token as long as it pays, by what is known before it is drawn."""
    wanted = len(tokens) < 2 and pays([*chances(tokens), CONFIDENCE[tokens]], cost)
    return len(tokens) - 1 if wanted else None


def looking_ahead() -> Iterator[tuple[float, Proposal]]:
    """Draw all tokens, then propose as many as promise the highest speed."""
    for chance, drawn in drafts(Q, chain(2)):
        kept = np.cumprod(chances(drawn.tokens)[1:])
        speeds = [(1 + kept[:length].sum()) / SECONDS[length] for length in range(3)]
        yield chance, drawn.first(int(np.argmax(speeds)))


def first_token(rule: str, proposals: Iterator[tuple[float, Proposal]]) -> tuple[float, float]:
    """The probability that a round begins with the first token; and how far its text is from the target's law."""
    law = round_law(CHAIN_RULES[rule], P, proposals)
    return sum(share for tokens, share in law.emitted.items() if tokens[0] == 0), law.distance(P)


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_chain_that_ends_where_it_does_not_pay_leaves_the_law(rule: str) -> None:
    share, distance = first_token(rule, drafts(Q, with_stop))
    assert share == pytest.approx(0.7, abs=EXACT) and distance < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_length_chosen_by_later_draws_bends_the_law(rule: str) -> None:
    """The example in appendix A of the DSpark paper: a draw is proposed because of what it is."""
    share, distance = first_token(rule, looking_ahead())
    assert share == pytest.approx(0.85, abs=EXACT) and distance == pytest.approx(0.15, abs=EXACT)


def test_where_the_first_token_pays_the_second_may_depend_on_it() -> None:
    def grow(tokens: Prefix, parents: tuple[int, ...]) -> int | None:
        wanted = len(tokens) < 2 and pays([*chances(tokens), CONFIDENCE[tokens]], lambda count: 0.3 * count)
        return len(tokens) - 1 if wanted else None

    proposals = list(drafts(Q, grow))
    assert {proposal.tokens for _, proposal in proposals} == {(0, 0), (0, 1), (1,)}
    for rule in CHAIN_RULES:
        assert round_law(CHAIN_RULES[rule], P, iter(proposals)).distance(P) < EXACT


VOCABULARY, PLACES, RANK = 4, 3, 2


def drawn(seed: int, request: int, worth: Callable[[Sequence[Evidence]], bool]) -> Proposal:
    """What a head with random tables proposes to a request with some seed."""
    random = np.random.default_rng(seed)
    tables = (random.normal(size=(VOCABULARY, RANK)).astype(np.float16) for _ in range(2))
    markov = MarkovBias(*tables, random.normal(size=RANK).astype(np.float16) * 3)
    logits = random.normal(size=(PLACES, VOCABULARY)).astype(np.float32)
    context = context_of([1, 2], SamplingParams(temperature=1.0, seed=request), "token")
    return propose_block(context, (), logits, np.zeros(PLACES, np.float32), markov, Budget(PLACES, worth=worth))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.02, 0.5))
def test_whether_a_token_is_proposed_depends_on_those_before_it(seed: int, price: float) -> None:
    """Requests that draw alike so far decide alike, and draw from one law, whatever they draw next."""

    def worth(chain: Sequence[Evidence]) -> bool:
        return pays([1.0, *(0.05 + int(reason[-1]) / 14 for reason in chain)], lambda count: price * count)

    told: dict[Prefix, tuple[bool, bytes]] = {}
    for request in range(40):
        proposal = drawn(seed, request, worth)
        for depth in range(len(proposal) + 1):
            going_on = depth < len(proposal)
            law = proposal.law(depth) if going_on else None
            said = going_on, b"" if law is None else law.tobytes()
            assert told.setdefault(proposal.tokens[:depth], said) == said
            assert proposal.law(depth) is not None or not going_on


def test_a_drawn_token_has_the_law_of_the_biased_logits() -> None:
    random = np.random.default_rng(3)
    before, after = (random.normal(size=(VOCABULARY, RANK)).astype(np.float16) for _ in range(2))
    logits = random.normal(size=(PLACES, VOCABULARY)).astype(np.float32)
    markov = MarkovBias(before, after, np.zeros(RANK, np.float16))
    context = context_of([1, 2], SamplingParams(temperature=0.7, seed=5), "token")
    proposal = propose_block(context, (), logits, None, markov, Budget(PLACES))
    assert len(proposal) == PLACES
    for place, token in enumerate((2, *proposal.tokens[:-1])):
        scores = (logits[place] + after.astype(np.float64) @ before[token].astype(np.float64)) / 0.7
        expected = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(proposal.law(place), expected, atol=1e-5)


def test_logits_with_a_nan_leave_no_token() -> None:
    tables = np.ones((4, RANK), np.float16)
    markov = MarkovBias(tables, tables, np.zeros(RANK, np.float16))
    logits = np.array([[0.0, 1.0, np.nan, 2.0]], np.float32)
    proposal = propose_block(context_of([1], SamplingParams(temperature=0.0)), (), logits, None, markov, Budget(1))
    assert len(proposal) == 0
