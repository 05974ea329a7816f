"""Whoever drafts, however much, in whatever chunks: the loop emits the tokens of the naive one-token-a-time decoder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_spec.errors import NoTokenLeftError
from edge_spec.runtime import loop
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.chain import ChainDrafter
from edge_spec.runtime.drafters.head import HeadDrafter
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import Budget, Drafter
from edge_spec.runtime.output import Output
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.verification import RULES
from reference_decoder import DeadEndError, Reference, reference_decode
from stub_head import Histories, TappedModel, head_for
from stub_model import Pausing, StubDrafter, StubModel, context_of, rounds_of
from test_reference_decoder import EOS, VOCAB, Letters, grammar, hash_of_prefix, options_of, requests, tokens

CONTEXT = 30
DRAFTERS = (
    "nobody",
    "empty",
    "garbage",
    "good",
    "mixed",
    "lookup",
    "model",
    "twin",
    "short model",
    "tree",
    "model tree",
    "head",
    "short head",
    "head tree",
)

_hashed = functools.lru_cache(200_000)(hash_of_prefix())
_strange = functools.lru_cache(200_000)(hash_of_prefix(1.0))


def target_logits(history: Sequence[int]) -> np.ndarray:
    return _hashed(tuple(history)).copy()


def draft_logits(history: Sequence[int]) -> np.ndarray:
    """The target's, and as much again of something else."""
    return target_logits(history) + _strange((*history, 255))


class Bushy(ChainDrafter[Any, Any]):
    """Keeps the chain short, so that there is room for siblings."""

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        short = Budget(budget.tokens, budget.branches, lambda chain: len(chain) < 2)
        return super().propose(context, short, prefix)


class BushyModel(Bushy, ModelDrafter):
    pass


class BushyHead(Bushy, HeadDrafter):
    pass


def target_of(kind: str) -> StubModel:
    if "head" in kind:
        return TappedModel(target_logits, Histories(), context=CONTEXT)
    return StubModel(target_logits, CONTEXT)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], SamplingParams, list[Any], str, str, int, int, bool, int]:
    params = draw(requests)
    return (
        draw(st.lists(tokens, min_size=1, max_size=12)),
        params,
        [grammar] if draw(st.booleans()) else [],
        draw(st.sampled_from(DRAFTERS)),
        # Without noise there is one rule.
        draw(st.sampled_from(tuple(RULES))) if params.greedy else "coupled",
        draw(st.integers(0, 8)),  # most tokens a round
        draw(st.integers(1, 13)),  # rows of a prefill chunk
        draw(st.booleans()),  # whether branches are deferred
        draw(st.integers(0, 2**32 - 1)),
    )


def drafter_of(kind: str, text: list[int], luck: np.random.Generator, target: StubModel) -> Drafter | None:
    """A drafter for a target; ``text`` is what that will say."""

    def propose(history: Sequence[int], budget: int) -> list[int]:
        skill = {"garbage": 0.0, "good": 1.0, "mixed": 0.8}[kind]
        future = text[len(history) : len(history) + budget]
        future += [int(token) for token in luck.integers(VOCAB, size=budget - len(future))]
        return [token if luck.random() < skill else int(luck.integers(VOCAB)) for token in future]

    def propose_tree(history: Sequence[int], budget: int) -> Proposal:
        parents = [int(luck.integers(-1, node)) if luck.random() < 0.5 else node - 1 for node in range(budget)]
        paths: list[list[int]] = []
        for parent in parents:
            before = paths[parent] if parent >= 0 else []
            right = [*history, *before] == text[: len(history) + len(before)] and len(history) + len(before) < len(text)
            lucky = right and luck.random() < 0.8
            paths.append([*before, text[len(history) + len(before)] if lucky else int(luck.integers(VOCAB))])
        return Proposal(tuple(path[-1] for path in paths), parents=tuple(parents))

    def cap() -> int:
        return int(luck.integers(-2, 9))

    drafter: Drafter
    if kind == "nobody":
        return None
    if kind == "empty":
        return StubDrafter(lambda history, budget: ())
    if kind == "lookup":
        drafter = LookupDrafter(min_ngram=1)
    elif kind == "tree":
        drafter = StubDrafter(propose_tree)
    elif kind in ("model", "twin", "short model", "model tree"):
        model = StubModel(target_logits if kind == "twin" else draft_logits, 12 if kind == "short model" else CONTEXT)
        drafter = (BushyModel if kind == "model tree" else ModelDrafter)(model)  # type: ignore[arg-type]
    elif isinstance(target, TappedModel):
        drafter_kind = BushyHead if kind == "head tree" else HeadDrafter
        drafter = head_for(target, draft_logits, 12 if kind == "short head" else None, kind=drafter_kind)
    else:
        drafter = StubDrafter(propose)
    return Pausing(drafter, cap)


@settings(max_examples=2200, deadline=None)
@given(cases())
def test_same_seed_same_tokens_whoever_drafts(case: Any) -> None:
    prompt, params, processors, kind, rule, max_draft, chunk, defer, luck = case
    letters = Letters()

    def reference_of(limit: int) -> Reference:
        return reference_decode(
            target_logits,
            prompt,
            **{**options_of(params), "max_new_tokens": limit},
            logits_processors=processors,
            eos_token_ids=[EOS],
            decode=lambda ids: letters.decode([token for token in ids if token != EOS]),
            context=CONTEXT,
        )

    dead_end = None
    try:
        reference = reference_of(params.max_new_tokens)
    except DeadEndError as error:  # the grammar wants an even token, and all of them are banned
        dead_end = error.position
        reference = reference_of(dead_end - len(prompt))
    assume(reference.margin > 1e-5)

    target = target_of(kind)
    drafter = drafter_of(kind, [*prompt, *reference.token_ids], np.random.default_rng(luck), target)
    context = context_of(prompt, params, rule, processors)
    output = Output(letters, params, [EOS], CONTEXT - len(prompt))  # type: ignore[arg-type]

    def run() -> None:
        with mock.patch.object(loop, "PREFILL_ROWS", chunk):
            rounds = rounds_of(
                target, drafter, context, len(prompt) + output.limit, max_draft, rule, "tree" in kind, defer
            )
        while output.finish_reason is None:
            round_ = next(rounds)
            assert round_.drafted <= max_draft and round_.accepted <= round_.drafted
            output.push(round_.tokens)
            # Everything but the last token, and nothing else: no draft token stays behind.
            assert target.cache.tokens == context.tokens[:-1]

    if dead_end is not None:
        with pytest.raises(NoTokenLeftError, match=f"at position {dead_end}, no token is left"):
            run()
        # What could be said before was said.
        assert context.tokens == [*prompt, *reference.token_ids]
        return
    run()
    assert output.token_ids == reference.token_ids
    assert output.finish_reason == reference.finish_reason


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_drafters_above_are_what_they_are_called(kind: str, temperature: float, defer: bool) -> None:
    """Or else the test above would compare plain decoding with itself."""
    drafted = accepted = deferred = 0
    for seed in range(30):
        params = SamplingParams(temperature=temperature, seed=seed)
        prompt = [seed % 10, 1, 2, 3, 1, 2, 3]
        plain = context_of(prompt, params)
        list(rounds_of(StubModel(target_logits, CONTEXT), None, plain, CONTEXT))
        target = target_of(kind)
        drafter = drafter_of(kind, plain.tokens, np.random.default_rng(seed), target)
        context = context_of(prompt, params)
        rounds = list(rounds_of(target, drafter, context, CONTEXT, 8, branches="tree" in kind, defer=defer))
        assert context.tokens == plain.tokens
        drafted += sum(round_.drafted for round_ in rounds)
        accepted += sum(round_.accepted for round_ in rounds)
        deferred += sum(round_.deferred for round_ in rounds)
    assert (drafted > 0) == (kind not in ("nobody", "empty"))
    assert (deferred > 0) == ("tree" in kind and defer)
    if kind in ("good", "twin"):
        assert accepted == drafted
    elif drafted:
        assert 0 < accepted < drafted
