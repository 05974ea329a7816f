"""Texts that the production loop samples follow the target's law, whichever rule verifies and whoever drafts.

Every text of a few tokens is a cell. Its probability comes from the reference decoder's float64 arithmetic, its
frequency from one generation a seed. The same measurement has to notice faults that were planted.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from text_tokenizers import loaded
from tokenizers import Tokenizer, decoders, models

from edge_spec.runtime import logits_processors
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.medusa import MedusaDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import Budget, Drafter
from edge_spec.runtime.drafters.reencoded import ReencodedDrafter
from edge_spec.runtime.drafters.reencoded_text import ReencodedText
from edge_spec.runtime.noise import RoundNoise, Stream, sample
from edge_spec.runtime.penalties import penalize
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.tap_rows import TapRows
from edge_spec.runtime.tokenizer import TextTokenizer
from edge_spec.runtime.verification import RULES
from reference_decoder import law_of, penalized
from stub_head import Histories, TappedModel, head_for
from stub_model import LogitsOf, StubDrafter, StubModel, context_of, rounds_of
from tiny_models import letter_tokenizer

VOCAB, LENGTH, DRAFT, SAMPLES = 3, 4, 2, 1200

# Every pair of tokens occurs, so that looking up always finds something.
PROMPT = [0, 0, 1, 1, 2, 2, 0, 2, 1, 0]

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 2},
    "top-p": {"temperature": 1.1, "top_p": 0.85},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
    },
}
DRAFTERS = ("lookup", "model", "garbage", "trimmed", "other tokens", "head", "trimmed head", "medusa")


# Logits of the next token, by the last one. The draft overrates one token wherever it is, so that rounds meet the same
# rejections again and reused noise shows.
TARGET = np.random.default_rng(10).normal(0, 0.3, (VOCAB, VOCAB)).astype(np.float32)
TARGET += np.array([0.8, 0.0, -0.8], np.float32)
DRAFT_MODEL = np.tile(np.array([3.2, 0.0, -0.8], np.float32), (VOCAB, 1))


def target_logits(history: Sequence[int]) -> np.ndarray:
    return TARGET[history[-1]]


def draft_logits(history: Sequence[int]) -> np.ndarray:
    return DRAFT_MODEL[history[-1]]


# The draft's own tokens are c, a, b, ab and aa; its proposals are one to four of the target's.
OTHER_MODEL = np.random.default_rng(11).normal(0, 1.0, (5, 5)).astype(np.float32)


# Logits of two heads, by the token before the last one.
HEADS = np.random.default_rng(12).normal(0, 0.8, (VOCAB, 2, VOCAB)).astype(np.float32)
HEADS += np.array([1.0, 0.0, -0.8], np.float32)


class HeadsOfText(MedusaDrafter):
    """Heads over a target whose hidden state is the token itself."""

    def __init__(self) -> None:
        heads: Any = SimpleNamespace(count=2, logits=lambda state: HEADS[int(state[0, 0])])
        self.cache = SimpleNamespace(taps=None)
        target: Any = SimpleNamespace(cache=self.cache)
        super().__init__(heads, target)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        self.cache.taps = TapRows(1, 64)
        self.cache.taps.append(0, [np.array(context.tokens[:-1], np.float32)[:, None]])
        return super().propose(context, budget, prefix)


@functools.cache
def other_tokens() -> tuple[TextTokenizer, TextTokenizer]:
    own = Tokenizer(models.BPE(vocab={"c": 0, "a": 1, "b": 2, "ab": 3, "aa": 4}, merges=[("a", "b"), ("a", "a")]))
    own.decoder = decoders.Fuse()
    return loaded(letter_tokenizer("abc")), loaded(own)


def drafter_of(kind: str, seed: int, target: TappedModel) -> Drafter:
    if kind == "lookup":
        return LookupDrafter(max_ngram=2, min_ngram=1)
    if kind == "model":
        return ModelDrafter(StubModel(draft_logits))  # type: ignore[arg-type]
    if kind == "trimmed":
        vocabulary = DraftVocabulary(np.array([0, 2]), VOCAB)
        model: Any = StubModel(lambda history: draft_logits(history)[[0, 2]])
        return ModelDrafter(model, vocabulary=vocabulary)
    if kind == "medusa":
        return HeadsOfText()
    if kind == "other tokens":
        model = StubModel(lambda history: OTHER_MODEL[history[-1]])
        return ReencodedDrafter(model, ReencodedText(*other_tokens(), VOCAB, len(OTHER_MODEL)), 1.0)
    if kind == "head":
        return head_for(target, draft_logits)
    if kind == "trimmed head":
        vocabulary = DraftVocabulary(np.array([0, 2]), VOCAB)
        return head_for(target, lambda history: draft_logits(history)[[0, 2]], vocabulary=vocabulary)
    luck = np.random.default_rng(seed)
    return StubDrafter(lambda history, budget: luck.integers(VOCAB, size=budget).tolist())


@functools.cache
def law_of_texts(setting: str) -> dict[tuple[int, ...], float]:
    """Probability of every text of ``LENGTH`` tokens."""
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **SETTINGS[setting]}
    penalties = [given.pop(name, neutral) for name, neutral in NEUTRAL.items()]
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, chance in texts.items():
            logits = penalized(list(target_logits([*PROMPT, *text])), PROMPT, list(text), *penalties)
            law, _ = law_of(logits, **given)
            longer |= {(*text, token): chance * p for token, p in enumerate(law) if p > 0}
        texts = longer
    return texts


NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Measured:
    """How far the texts are from their law.

    Attributes:
        g: the G statistic over joint cells, those of few texts taken together; infinite if a text is impossible.
        g_limit: what it exceeds about once in a million.
        distance: total variation between frequencies and law.
        distance_limit: likewise.
        drafted, accepted: draft tokens in all.
    """

    g: float
    g_limit: float
    distance: float
    distance_limit: float
    drafted: int
    accepted: int

    @property
    def right(self) -> bool:
        return self.g < self.g_limit and self.distance < self.distance_limit


def measure(rule: str, setting: str, make_drafter: Callable[[int, TappedModel], Drafter]) -> Measured:
    law = law_of_texts(setting)
    seen: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    target = TappedModel(target_logits, Histories())
    for seed in range(SAMPLES):
        context = context_of(PROMPT, SamplingParams(seed=seed, **SETTINGS[setting]), rule)
        target.cache.rollback(0)
        # The end of the text lies behind what is counted, so that no proposal is cut for its sake.
        rounds = rounds_of(target, make_drafter(seed, target), context, len(PROMPT) + LENGTH + DRAFT, DRAFT, rule)
        while len(context.tokens) < len(PROMPT) + LENGTH:
            round_ = next(rounds)
            drafted += round_.drafted
            accepted += round_.accepted
        seen[tuple(context.tokens[len(PROMPT) :][:LENGTH])] += 1

    expected = {text: chance * SAMPLES for text, chance in law.items()}
    common = [text for text in law if expected[text] >= 5]
    cells = [(seen[text], expected[text]) for text in common]
    rest = (SAMPLES - sum(count for count, _ in cells), SAMPLES - sum(mean for _, mean in cells))
    if rest[1] > 1:
        cells.append(rest)
    possible = seen.keys() <= law.keys()
    g = 2 * sum(count * math.log(count / mean) for count, mean in cells if count) if possible else math.inf
    distance = sum(abs(seen[text] / SAMPLES - law.get(text, 0.0)) for text in law.keys() | seen.keys()) / 2
    # Its mean is at most half the sum of the cells' deviations, and one text moves it by at most 1 / SAMPLES
    # (McDiarmid 1989): it exceeds its mean by this much once in a million.
    mean = sum(math.sqrt(p * (1 - p) / SAMPLES) for p in law.values()) / 2
    limit = mean + math.sqrt(math.log(1e6) / (2 * SAMPLES))
    return Measured(g, chi_square_limit(len(cells) - 1), distance, limit, drafted, accepted)


def chi_square_limit(freedom: int) -> float:
    """The value a chi-square variable exceeds about once in a million (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


# A trimmed vocabulary and parallel heads change what is proposed, not how it is sampled: not all settings are needed.
_FEWER = ("trimmed", "trimmed head", "medusa")
CASES = [
    (rule, kind, setting)
    for rule, kind, setting in itertools.product(RULES, DRAFTERS, SETTINGS)
    if kind not in _FEWER or setting in ("temperature", "penalties")
]


@pytest.mark.parametrize(("rule", "kind", "setting"), CASES)
def test_texts_follow_the_targets_law(rule: str, kind: str, setting: str) -> None:
    measured = measure(rule, setting, lambda seed, target: drafter_of(kind, seed, target))
    assert measured.right, measured
    assert 0 < measured.accepted < measured.drafted


# Planted faults


def keyed_by_absolute_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position that is decided again meets noise that has been looked at already."""

    def keep(self: Any, node: int, probability: float) -> bool:
        return self._noise.uniform(self._start + node, Stream.ACCEPT) < probability

    def draw_draft(self: Any, node: int, weights: Any) -> int:
        return sample(weights, self._noise.uniform(self._start + node, Stream.DRAFT))

    monkeypatch.setattr(RoundNoise, "keep", keep)
    monkeypatch.setattr(RoundNoise, "draw_draft", draw_draft)


def the_same_noise_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundNoise, "draw", lambda self, weights: sample(weights, self._noise.uniform(0, Stream.TOKEN)))


def penalties_ignore_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_path(values: Any, history: Any, path: Any, params: Any) -> None:
        penalize(values, history, (), params)

    monkeypatch.setattr(logits_processors, "penalize", without_path)


@pytest.mark.parametrize(
    ("plant", "rule", "kind", "setting"),
    [
        (keyed_by_absolute_position, "block", "model", "temperature"),
        (keyed_by_absolute_position, "traversal", "model", "temperature"),
        (the_same_noise_in_every_round, "token", "lookup", "temperature"),
        (penalties_ignore_drafted_tokens, "coupled", "model", "penalties"),
        (penalties_ignore_drafted_tokens, "token", "lookup", "penalties"),
        (penalties_ignore_drafted_tokens, "block", "garbage", "penalties"),
    ],
)
def test_a_planted_fault_of_the_loop_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], rule: str, kind: str, setting: str
) -> None:
    plant(monkeypatch)
    assert not measure(rule, setting, lambda seed, target: drafter_of(kind, seed, target)).right


class Liar(ModelDrafter):
    """Says its tokens were drawn from a law that they were not drawn from."""

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        tokens = super().propose(context, budget, prefix).tokens
        return Proposal(tokens, np.full((len(tokens), VOCAB), 1 / VOCAB, np.float32))


class Choosy(ModelDrafter):
    """Drops the end of a proposal if it does not like the token it drew: tokens it likes come too often."""

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        proposal = super().propose(context, budget, prefix)
        liked = list(itertools.takewhile(lambda token: token == 0, proposal.tokens))
        return Proposal(tuple(liked), None if proposal.q is None else proposal.q[: len(liked)])


def undecided(history: Sequence[int]) -> np.ndarray:
    return np.zeros(VOCAB, np.float32)


cheats = pytest.mark.parametrize(("cheat", "logits_of"), [(Liar, draft_logits), (Choosy, undecided)])


@cheats
@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_a_drafter_that_cheats_is_noticed(rule: str, cheat: Any, logits_of: LogitsOf) -> None:
    assert not measure(rule, "temperature", lambda seed, target: cheat(StubModel(logits_of))).right


@cheats
def test_the_coupled_rule_is_immune_to_drafters_that_cheat(cheat: Any, logits_of: LogitsOf) -> None:
    assert measure("coupled", "temperature", lambda seed, target: cheat(StubModel(logits_of))).right
