"""Trees through real graphs: deferred they change no bit, committed they leave the cache a chain would have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import RequestError
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Proposal
from row_independence import require_bitwise_kernels

Bundles = Callable[..., Path]

PAIR = {"draft": "close", "letters": "abcdefghijklmnopqrstuvwxyz .", "vocab_size": 32, "eos": None}
VOCAB = 29
PROMPT = [1, 2, 3, 1, 2, 3, 1]


class Bush:
    """Proposes a tree that holds the right text, mostly on branches, as it knows the text beforehand."""

    name = "bush"
    memory_bytes = 0

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self._text = text
        self._luck = np.random.default_rng(seed)

    def propose(self, context: Any, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        start = len(context.tokens) + len(prefix)
        tokens: list[int] = []
        parents: list[int] = []
        right = -1  # the last node of the right path
        for token in self._text[start : start + 3]:
            wrong = [int(other) for other in self._luck.permutation(VOCAB) if other != token]
            siblings = [*wrong[: self._luck.integers(0, 3)], token]
            parent = right
            for sibling in siblings[: budget.tokens - len(tokens)]:
                tokens.append(sibling)
                parents.append(parent)
                if sibling == token:
                    right = len(tokens) - 1
        return Proposal(tuple(tokens), parents=tuple(parents)) if budget.branches else Proposal()

    def observe(self, outcome: Outcome) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("recipe", ["w8a8", "int4", "fp32"])
def test_deferred_branches_change_no_bit(tiny_bundle: Bundles, recipe: str, options: dict[str, Any]) -> None:
    require_bitwise_kernels()
    with edge_spec.load(tiny_bundle(recipe=recipe, **PAIR)) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=60, speculation="off", logprobs=2, **options)
        engine.add_drafter(Bush([*PROMPT, *plain.token_ids], seed=1))
        bushy = engine.generate(PROMPT, max_new_tokens=60, speculation="bush", max_draft=8, logprobs=2, **options)
        assert bushy.token_ids == plain.token_ids
        assert bushy.logprobs == plain.logprobs  # computed by the very same bits
        assert bushy.statistics.deferred > 0 and bushy.statistics.accepted_by_drafter["deferred"] > 0


def test_committed_branches_leave_the_cache_of_a_chain(tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[list[int]] = []
    keep = KVCache.keep

    def watched(self: KVCache, length: int, slots: Sequence[int]) -> None:
        moved.append(list(slots))
        keep(self, length, slots)

    monkeypatch.setattr(KVCache, "keep", watched)
    with edge_spec.load(tiny_bundle(recipe="fp32", **PAIR), exactness="distribution") as engine:
        plain = engine.generate(PROMPT, max_new_tokens=60, speculation="off")
        engine.add_drafter(Bush([*PROMPT, *plain.token_ids], seed=1))
        bushy = engine.generate(PROMPT, max_new_tokens=60, speculation="bush", max_draft=8)
        assert bushy.token_ids == plain.token_ids  # float32: no decision here is that narrow
        assert bushy.statistics.deferred == 0 and len(moved) > 5
        assert bushy.statistics.rounds < plain.statistics.rounds / 2

        target = engine._target
        text = [*PROMPT, *bushy.token_ids]
        length = target.cache.length
        held = [value.numpy()[:, :, :length].copy() for value in target.cache._buffers.values()]
        target.cache.rollback(0)
        target.forward(text[:length], ())
        for before, value in zip(held, target.cache._buffers.values(), strict=True):
            np.testing.assert_allclose(before, value.numpy()[:, :, :length], rtol=0, atol=1e-5)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rules_for_chains_are_given_chains(tiny_bundle: Bundles, verification: str) -> None:
    with edge_spec.load(tiny_bundle(recipe="w8a8", **PAIR)) as engine:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_new_tokens": 40, "verification": verification}
        for speculation in ("recycling", "suffix", "composite", "auto"):
            assert engine.generate(PROMPT, speculation=speculation, max_draft=8, **options).statistics.deferred == 0


def test_trees_can_be_declined(tiny_bundle: Bundles) -> None:
    with edge_spec.load(tiny_bundle(recipe="w8a8", **PAIR)) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=60, speculation="off")
        engine.add_drafter(Bush([*PROMPT, *plain.token_ids], seed=1))
        chains = engine.generate(PROMPT, max_new_tokens=60, speculation="bush", max_draft=8, tree=False)
        assert chains.statistics.drafted == 0  # it has nothing but trees
        with pytest.raises(RequestError, match="tree is 'no', expected True or False"):
            engine.generate(PROMPT, tree="no")


def test_slots_that_hold_nothing_cannot_be_kept(tiny_bundle: Bundles) -> None:
    bundle = open_bundle(tiny_bundle(recipe="fp32", **PAIR))
    model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 40, exact_rows=True)
    model.prefill([1, 2, 3, 4])
    for length, slots in ((2, [4]), (3, [2]), (2, [3, 3]), (2, [3, 2])):
        with pytest.raises(RequestError, match="Cannot keep slots"):
            model.cache.keep(length, slots)
    assert model.cache.length == 4


@pytest.mark.parametrize(("drafter", "reason"), [(object(), "has no name and no memory_bytes"), ("Bush", "is taken")])
def test_what_is_no_drafter_is_refused(tiny_bundle: Bundles, drafter: Any, reason: str) -> None:
    with edge_spec.load(tiny_bundle(recipe="fp32", **PAIR)) as engine:
        if drafter == "Bush":
            drafter = Bush([], 0)
            engine.add_drafter(drafter)
        with pytest.raises(RequestError, match=reason):
            engine.add_drafter(drafter)
