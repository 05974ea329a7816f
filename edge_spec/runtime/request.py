"""What one generation is asked for: its options, checked and turned into what the loop works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.runtime.configuration import WIDEST
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafter_pool import DrafterPool
from edge_spec.runtime.drafters.forced import ForcedDrafter
from edge_spec.runtime.exactness import Exactness
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.grammar_mask import GrammarMask
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.prompt import Message, Prompt, PromptEncoder
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import Speculation
from edge_spec.runtime.verification import RULES, Rule

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Request:
    """A generation to be done.

    Attributes:
        context: the prompt and how to continue it.
        rule: which draft tokens are kept.
        speculation: who drafts; ``None`` for plain decoding.
        defer: whether tokens on branches are proposed again rather than committed.
        cancelled: asked before every token whether to end.
    """

    context: Context
    rule: Rule
    speculation: Speculation | None
    defer: bool
    cancelled: Callable[[], bool] | None


class RequestReader:
    """Reads the requests to one engine."""

    def __init__(
        self,
        prompts: PromptEncoder,
        drafters: DrafterPool,
        vocab_size: int,
        exactness: Exactness,
        takes_trees: bool,
        moves_slots: bool,
        widest: int,
        vocabulary: GrammarVocabulary,
    ) -> None:
        """Read requests.

        Args:
            prompts: turns prompts into tokens.
            drafters: who may draft.
            vocab_size: ids there are.
            exactness: the level that is owed.
            takes_trees: whether the target takes trees.
            moves_slots: whether its cache can commit branches at once.
            widest: most draft tokens of a round.
            vocabulary: the target's tokens, for grammars.
        """
        self._prompts = prompts
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._exactness = exactness
        self._takes_trees = takes_trees
        self._moves_slots = moves_slots
        self._widest = widest
        self._vocabulary = vocabulary

    def read(self, prompt: Prompt | Sequence[Message], options: Mapping[str, Any]) -> Request:
        """Check a request; see :meth:`edge_spec.Engine.stream` for what it may ask.

        Raises:
            RequestError: an option is out of range, or the prompt does not fit.
            TypeError: there is no such option.
            MissingDependencyError: there is a grammar, but no llguidance.
        """
        if unknown := options.keys() - GenerationOptions.__annotations__.keys():
            raise TypeError(f"{min(unknown)!r} is no option of a generation.")
        given = {name: value for name, value in options.items() if name in _SAMPLING}
        given["logit_bias"] = given.get("logit_bias") or ()
        sampling = SamplingParams(**given)
        sampling.require_vocabulary(self._vocab_size)
        if not sampling.greedy:
            sampling = sampling.seeded()
        max_draft = options.get("max_draft")
        if max_draft is not None:
            max_draft = checked_count("max_draft", max_draft, 0)
            if max_draft > WIDEST:
                raise RequestError(f"max_draft is {max_draft}, expected at most {WIDEST}.")
            max_draft = min(max_draft, self._widest)
        tree = options.get("tree", True)
        if not isinstance(tree, bool):
            raise RequestError(f"tree is {tree!r}, expected True or False.")
        rule = _choose_rule(options.get("verification"))
        cancelled = options.get("cancelled")
        if cancelled is not None and not callable(cancelled):
            raise RequestError(f"cancelled is {cancelled!r}, expected a function without arguments.")
        grammar = _checked_grammar(options.get("grammar"))
        mask = None if grammar is None else GrammarMask(self._vocabulary, grammar)
        pipeline = LogitsPipeline(sampling, options.get("logits_processors", ()), mask)
        context = Context(self._prompts.encode(prompt), sampling, pipeline, rule.coupled)
        # Only the coupled rule owes the same bits; the others owe the same law, which branches obey. But what a branch
        # told may be proposed again only where chance does not tell twice.
        may_defer = sampling.greedy or rule.coupled
        defer = may_defer and (self._exactness == "bitwise" or not self._moves_slots)
        branches = tree and self._takes_trees and (sampling.greedy or rule.trees) and (defer or self._moves_slots)
        speculation = options.get("speculation", "auto")
        forced = None if grammar is None or speculation == "off" else ForcedDrafter(self._vocabulary, grammar)
        choice = self._drafters.speculation(speculation, max_draft, branches, defer, self._widest, forced)
        return Request(context, rule, choice, defer, cancelled)


def checked_count(name: str, value: Any, lowest: int) -> int:
    """Return an integer of at least ``lowest``. Raises RequestError if it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise RequestError(f"{name} is {value!r}, expected an integer of at least {lowest}.")
    return int(value)


def _checked_grammar(grammar: Any) -> Grammar | None:
    if grammar is not None and not isinstance(grammar, Grammar):
        raise RequestError(
            f"grammar is {grammar!r}, expected a Grammar, such as edge_spec.Grammar.json_schema({{...}}), or None."
        )
    return grammar


def _choose_rule(verification: str | None) -> Rule:
    name = "coupled" if verification is None else verification
    if name not in tuple(RULES):
        known = ", ".join(map(repr, RULES))
        raise RequestError(f"verification is {verification!r}, expected one of {known}.")
    return RULES[name]
