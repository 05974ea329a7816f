"""Drafts of what a grammar forces: accepted where they are right, harmless where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_pairs, loaded, sentence_pieces

import edge_spec
from edge_spec import Engine, Grammar
from edge_spec.errors import RequestError
from edge_spec.runtime import grammar_vocabulary
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.forced import ForcedDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.tokenizer import TextTokenizer
from tiny_models import EOS, IM_END

Bundles = Callable[..., Path]

END = "</s>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tokenizer_of(kind: str) -> TextTokenizer:
    merges = [("t", "h"), ("a", "n"), ("n", "a"), ("na", "m"), ("nam", "e")]
    return loaded(byte_pairs(merges, [END]) if kind == "bytes" else sentence_pieces(merges, [END]))


def proposed(
    tokenizer: TextTokenizer, grammar: Grammar, written: str, tokens: int = 40, prefix: str = ""
) -> tuple[str, Proposal]:
    """What is drafted behind a text, as text."""
    ends = [token for token, text in tokenizer.special_texts.items() if text == END]
    drafter = ForcedDrafter(GrammarVocabulary(tokenizer, ends), grammar)
    context = Context([5, 6], SamplingParams())
    context.tokens.extend(behind(tokenizer, written))
    proposal = drafter.propose(context, Budget(tokens), behind(tokenizer, prefix))
    before = tokenizer.encode("x", add_special_tokens=False)
    return tokenizer.decode([*before, *proposal.tokens], skip_special_tokens=False)[1:], proposal


def behind(tokenizer: TextTokenizer, text: str) -> list[int]:
    before = tokenizer.encode("\n", add_special_tokens=False)
    return tokenizer.encode("\n" + text, add_special_tokens=False)[len(before) :]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize(
    ("written", "prefix", "expected"),
    [
        ("", "", '{"name": "'),
        ('{"', "", 'name": "'),
        ('{"na', "", 'me": "'),
        ('{"', "na", 'me": "'),
        ('{"name":', "", ' "'),
        ('{"name":"', "", ""),
        ('{"name":"x",', "", '"age":'),
        ('{\n  "name": "x",\n  "', "", 'age"'),
        ('{\n  "name": "x",\n  "age":', "", " "),
        ('{\n"name"\n:\n"x"\n,\n"', "", 'age"'),
        ('{"name": "x", "age": 5}', "", END),
        ('{"name": "x", "age": 5}' + END, "", ""),
        ("{}", "", ""),
    ],
)
def test_what_a_schema_forces_is_drafted_as_json_is_usually_written(
    kind: str, written: str, prefix: str, expected: str
) -> None:
    text, proposal = proposed(tokenizer_of(kind), Grammar.json_schema(SCHEMA), written, prefix=prefix)
    assert text == expected
    assert proposal.is_chain
    assert all(evidence[0] == "grammar" for evidence in proposal.evidence or ())


def test_an_end_that_is_forced_is_drafted_too() -> None:
    text, proposal = proposed(tokenizer_of("bytes"), Grammar.regex("yes(, | and )then"), "yes,")
    assert text == " then" + END
    assert proposal.evidence is not None
    assert [evidence[1:] for evidence in proposal.evidence[-2:]] == [("forced", "inner"), ("forced", "end")]


@given(st.integers(0, 12), st.sampled_from(["bytes", "pieces"]))
@settings(max_examples=20, deadline=None)
def test_no_more_is_drafted_than_was_asked_for(tokens: int, kind: str) -> None:
    whole, _ = proposed(tokenizer_of(kind), Grammar.json_schema(SCHEMA), "")
    text, proposal = proposed(tokenizer_of(kind), Grammar.json_schema(SCHEMA), "", tokens)
    assert len(proposal) <= tokens
    assert whole.startswith(text)


def test_a_grammar_that_takes_too_much_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=30)
    monkeypatch.setattr(grammar_vocabulary, "_limits", lambda: limits)
    _, proposal = proposed(tokenizer_of("bytes"), Grammar.lark('start: e\ne: e e | "a" | "aa" | "b"'), "a" * 60)
    assert len(proposal) == 0


def test_a_way_of_writing_that_takes_too_much_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=30)
    monkeypatch.setattr(grammar_vocabulary, "_limits", lambda: limits)
    tokenizer = tokenizer_of("bytes")
    ends = [token for token, text in tokenizer.special_texts.items() if text == END]
    vocabulary = GrammarVocabulary(tokenizer, ends)
    made: list[str] = []
    matcher = vocabulary.matcher
    monkeypatch.setattr(vocabulary, "matcher", lambda definition: (made.append(definition), matcher(definition))[1])
    drafter = ForcedDrafter(vocabulary, Grammar.lark('start: e\ne: e e | "a" | "aa" | "b"'))
    context = Context([5, 6], SamplingParams())
    context.tokens.extend(behind(tokenizer, "a" * 60))
    for _ in range(5):
        assert len(drafter.propose(context, Budget(8))) == 0
    assert len(made) == 1


# Whole generations


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundles) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(recipe="w8a8", draft="close", eos=[EOS, IM_END])) as engine:
        yield engine


LIST = Grammar.regex("the first value is [0-9]; the second value is [0-9]; that is all there is to say.")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"speculation": "grammar"}, {"speculation": "composite", "max_draft": 12}])
def test_forced_text_costs_few_rounds(pair: Engine, temperature: float, options: dict[str, Any]) -> None:
    sampling: dict[str, Any] = {"grammar": LIST, "temperature": temperature, "seed": 3}
    plain = pair.generate([1, 2], speculation="off", **sampling)
    assert plain.statistics.accepted_by_drafter == {}
    assert plain.statistics.rounds == plain.statistics.new_tokens
    drafted = pair.generate([1, 2], **sampling, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.accepted_by_drafter["grammar"] > 0
    origins = [origin for chunk in pair.stream([1, 2], **sampling, **options) for origin in chunk.origins]
    assert origins.count("grammar") > 0
    if options:
        assert drafted.statistics.rounds < plain.statistics.rounds / 3


@pytest.mark.parametrize("verification", ["token", "block", "traversal"])
def test_other_rules_accept_forced_text(pair: Engine, verification: str) -> None:
    completion = pair.generate(
        [1, 2], grammar=LIST, temperature=1.0, seed=1, verification=verification, speculation="grammar", max_draft=8
    )
    assert completion.text.startswith("the first value is ")
    assert completion.finish_reason == "stop"
    assert completion.statistics.accepted_by_drafter["grammar"] > 30


def test_the_name_belongs_to_requests_with_a_grammar(pair: Engine) -> None:
    assert "grammar" not in pair.drafters
    with pytest.raises(RequestError, match="This request has no grammar"):
        pair.generate([1], speculation="grammar")

    class Impostor:
        name = "grammar"
        memory_bytes = 0
        propose = observe = rollback = None

    with pytest.raises(RequestError, match="is taken"):
        pair.add_drafter(Impostor())  # type: ignore[arg-type]


def test_a_request_leaves_no_grammar_behind(pair: Engine) -> None:
    prompt = np.arange(8).tolist()
    before = pair.generate(prompt, max_new_tokens=20)
    assert json.loads(pair.generate(prompt, grammar=Grammar.json_schema({"const": [1, "a"]})).text) == [1, "a"]
    after = pair.generate(prompt, max_new_tokens=20)
    assert after.token_ids == before.token_ids
    assert "grammar" not in after.statistics.accepted_by_drafter
