"""What a round proposes beyond what a drafter says: the guess of a branch first, and the counts that were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.composite import CompositeDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import FixedDraft
from stub_model import StubDrafter


def context_of(*tokens: int) -> Context:
    return Context(list(tokens), SamplingParams())


def test_a_guess_comes_first_and_the_drafter_continues_it() -> None:
    drafter = StubDrafter(lambda text, budget: [text[-1] + 1, text[-1] + 2][:budget])
    proposal = FixedDraft(drafter, 4, branches=False).propose(context_of(1, 2), (5, 6), 10)
    assert proposal.tokens == (5, 6, 7, 8) and proposal.is_chain
    assert [reason[0] for reason in proposal.evidence or ()] == ["deferred", "deferred", "stub", "stub"]


def test_a_guess_counts_towards_the_tokens_of_a_round() -> None:
    drafter = StubDrafter(lambda text, budget: [9] * budget)
    draft = FixedDraft(drafter, 2, branches=False)
    assert draft.propose(context_of(1), (5, 6, 7), 10).tokens == (5, 6)
    assert draft.propose(context_of(1), (5,), 1).tokens == (5,)
    assert len(draft.propose(context_of(1), (), 0)) == 0


def test_a_tree_behind_a_guess_keeps_its_shape() -> None:
    tree = Proposal((7, 8, 9), parents=(-1, 0, -1), evidence=(("a",), ("b",), ("c",)))
    behind = tree.after((5, 6))
    assert behind.tokens == (5, 6, 7, 8, 9) and behind.parents == (-1, 0, 1, 2, 1)
    assert behind.depths == [1, 2, 3, 4, 3]
    assert behind.evidence == (("deferred", 0), ("deferred", 1), ("a",), ("b",), ("c",))


def test_laws_behind_a_guess_stay_with_their_rows() -> None:
    laws = np.eye(2, dtype=np.float32)
    behind = Proposal((1, 0), laws).after((5,))
    assert behind.law(0) is None
    np.testing.assert_array_equal(behind.law(1), laws[0])
    np.testing.assert_array_equal(behind.law(2), laws[1])


def test_rows_see_their_ancestors_and_themselves() -> None:
    tree = Proposal((7, 8, 9), parents=(-1, 0, -1))
    assert tree.ancestry().astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert tree.first(2) == Proposal((7, 8), parents=(-1, 0))


def drafters(first: Proposal, second: Proposal) -> CompositeDrafter:
    return CompositeDrafter([StubDrafter(lambda *_: first), StubDrafter(lambda *_: second)], AcceptanceTable())


def test_a_composite_lays_proposals_on_top_of_each_other() -> None:
    one = Proposal((1, 2), evidence=(("a",), ("a",)))
    other = Proposal((1, 3), evidence=(("b",), ("b",)))
    merged = drafters(one, other).propose(context_of(0), Budget(9, branches=True))
    assert set(merged.tokens) == {1, 2, 3} and not merged.is_chain


def test_a_composite_continues_the_chain_of_one_with_the_next() -> None:
    chain = StubDrafter(lambda text, budget: [5, 6][:budget] if text[-1] == 0 else [])
    counter = StubDrafter(lambda text, budget: [text[-1] + 1] if text[-1] else [])
    composite = CompositeDrafter([chain, counter], AcceptanceTable())
    assert composite.propose(context_of(0), Budget(3)).tokens == (5, 6, 7)
    assert composite.propose(context_of(0), Budget(2)).tokens == (5, 6)


def test_nothing_is_laid_beside_what_was_drawn() -> None:
    law = np.full((1, 4), 0.25, np.float32)
    drawn = Proposal((2,), law, evidence=(("model",),))
    sampled = Context([0], SamplingParams(temperature=1.0, seed=1), coupled=False)
    other = Proposal((3,), evidence=(("b",),))
    merged = drafters(drawn, other).propose(sampled, Budget(9, branches=True))
    assert merged.tokens == (2,)
    # Nor is what was drawn laid beside anything else; and where nobody asks for the law, all can be merged.
    assert drafters(other, drawn).propose(sampled, Budget(9, branches=True)).tokens == (3,)
    assert set(drafters(drawn, other).propose(context_of(0), Budget(9, branches=True)).tokens) == {2, 3}
    np.testing.assert_array_equal(merged.law(0), law[0])


def test_without_branches_the_likelier_of_two_chains_is_proposed() -> None:
    table = AcceptanceTable({("good",): 0.9, ("bad",): 0.1})
    bad = StubDrafter(lambda *_: Proposal((1,), evidence=(("bad",),)))
    good = StubDrafter(lambda *_: Proposal((2,), evidence=(("good",),)))
    assert CompositeDrafter([bad, good], table).propose(context_of(0), Budget(1)).tokens == (2,)


@pytest.mark.parametrize("part", ["observe", "rollback"])
def test_a_composite_passes_on_what_drafters_must_know(part: str) -> None:
    told: list[str] = []

    class Listening(StubDrafter):
        def observe(self, outcome: object) -> None:
            told.append("observe")

        def rollback(self, length: int) -> None:
            told.append("rollback")

    silent = lambda *_: []  # noqa: E731
    composite = CompositeDrafter([Listening(silent), Listening(silent)], AcceptanceTable())
    getattr(composite, part)(0)
    assert told == [part, part]
