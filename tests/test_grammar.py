"""Texts that obey a grammar: which tokens are allowed where, whoever drafts; and grammars that are refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_pairs, loaded, sentence_pieces
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import edge_spec
from edge_spec import Engine, Grammar, cli
from edge_spec.errors import GrammarLimitError, MissingDependencyError, NoTokenLeftError, RequestError
from edge_spec.runtime.grammar_mask import GrammarMask
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.history import History
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.tokenizer import TextTokenizer
from tiny_models import EOS, IM_END

Bundles = Callable[..., Path]

RULES = ("coupled", "token", "block", "traversal")
DRAFTERS = ("auto", "grammar", "composite", "model", "suffix")
END = "</s>"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
# A random model writes white space wherever it may.
TIGHT = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01]) (is|was) (the day|the end)"

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def vocabulary_of(tokenizer: TextTokenizer) -> GrammarVocabulary:
    ends = [token for token, text in tokenizer.special_texts.items() if text == END]
    return GrammarVocabulary(tokenizer, ends)


def allowed_after(mask: GrammarMask, output: Sequence[int], path: Sequence[int] = ()) -> list[int] | None:
    allowed = mask.allowed(History([7, *output], 1), path)
    return None if allowed is None else np.flatnonzero(allowed).tolist()


# Tokens as bytes

_MERGES = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("h", "e"), ("n", "d"), ("t", "a")]
merges = st.integers(0, len(_MERGES)).map(lambda count: _MERGES[:count])


def tokenizer_of(kind: str, merges: Sequence[tuple[str, str]]) -> TextTokenizer:
    specials = ["<s>", END]
    if kind == "bytes":
        return loaded(byte_pairs([*merges, ("Ġ", "a"), ("Ġ", "t"), ("Ã", "©")], specials))
    return loaded(sentence_pieces([*merges, ("▁", "a"), ("▁", "t"), ("▁", "▁")], specials))


def bytes_of_all(tokenizer: TextTokenizer) -> list[bytes]:
    return tokenizer.bytes_of_each(range(tokenizer.vocab_size))


@given(st.sampled_from(["bytes", "pieces"]), merges, st.text(alphabet="aethnd lé€\n😀", min_size=1, max_size=12))
@quick
def test_a_text_is_the_bytes_of_its_tokens(kind: str, merges: list[tuple[str, str]], text: str) -> None:
    tokenizer = tokenizer_of(kind, merges)
    texts = bytes_of_all(tokenizer)
    before = tokenizer.encode("a", add_special_tokens=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(texts[token] for token in tokens)
    assert tokenizer.decode([*before, *tokens]) == "a" + joined.decode()


def test_added_tokens_and_halves_of_characters_have_their_bytes() -> None:
    plain = byte_pairs([("Ã", "©")], [END])
    plain.add_tokens([AddedToken("<tool é call>", special=False)])
    texts = bytes_of_all(loaded(plain))
    assert texts[plain.token_to_id("<tool é call>")] == "<tool é call>".encode()
    assert texts[plain.token_to_id("Ã©")] == "é".encode()
    assert texts[plain.token_to_id("Ã")] == "é".encode()[:1]
    assert sorted(text for text in texts if len(text) == 1) == [bytes([byte]) for byte in range(256)]


def test_a_decoder_that_does_not_tell_a_tokens_bytes_leaves_the_token_out() -> None:
    mixed = byte_pairs([("Ã", "©")], [END])
    mixed.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = loaded(mixed)
    texts = bytes_of_all(tokenizer)
    assert texts[mixed.token_to_id("Ã©")] == "é".encode()
    assert texts[mixed.token_to_id("Ã")] == b""


# Which tokens are allowed


@given(
    st.sampled_from(["bytes", "pieces"]),
    merges,
    st.lists(st.text(alphabet="aethnd ", min_size=1, max_size=6), min_size=1, max_size=5),
    st.data(),
)
@settings(max_examples=150, deadline=None)
@example("pieces", [], [" a", " and", "the"], None)
@example("pieces", [], ["  ", "a  b"], None)
def test_the_tokens_that_lead_to_a_word_are_allowed(
    kind: str, merges: list[tuple[str, str]], words: list[str], data: st.DataObject | None
) -> None:
    tokenizer = tokenizer_of(kind, merges)
    vocabulary = vocabulary_of(tokenizer)
    mask = GrammarMask(vocabulary, Grammar.regex("|".join(map(re.escape, words))))
    (end,) = vocabulary.end_token_ids
    output: list[int] = []
    while end not in output:
        expected = [
            token
            for token in range(tokenizer.vocab_size)
            if not tokenizer.is_special(token)
            and any(word.startswith(tokenizer.decode([*output, token])) for word in words)
        ]
        expected += [end] if tokenizer.decode(output) in words else []
        allowed = allowed_after(mask, output)
        assert allowed
        text = tokenizer.decode(output)
        if len({word[len(text) : len(text) + 1] for word in words if word.startswith(text)}) > 1:
            assert allowed == sorted(expected)
        # Where only one text is left, it is written as the tokenizer does.
        assert {*allowed} <= {*expected}
        ahead = expected if data is None or data.draw(st.booleans()) else allowed
        output.append(ahead[-1] if data is None else data.draw(st.sampled_from(ahead)))
    assert tokenizer.decode(output) in words


LANGUAGES = {
    "schema": Grammar.json_schema(PERSON),
    "regex": Grammar.regex(DATE),
    "lark": Grammar.lark('start: sum\nsum: product ("+" product)*\nproduct: /[0-9]{1,2}/ | "(" sum ")"'),
    "ambiguous": Grammar.lark('start: e\ne: e e | "a" | "aa" | "b"'),
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@given(data=st.data())
@quick
def test_what_is_allowed_depends_on_the_text_alone(kind: str, language: str, data: st.DataObject) -> None:
    """Asked in any order, about texts that are then rejected, or break the grammar: as a fresh matcher says."""
    vocabulary = vocabulary_of(tokenizer_of(kind, [("t", "h"), ("a", "n")]))
    grammar = LANGUAGES[language]
    mask = GrammarMask(vocabulary, grammar)
    known: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 25))):
        text = list(data.draw(st.sampled_from(known)))
        if data.draw(st.booleans()):
            text = text[: data.draw(st.integers(0, len(text)))]
        cut = data.draw(st.integers(0, len(text)))
        answer = allowed_after(mask, text[:cut], text[cut:])
        assert answer == allowed_after(GrammarMask(vocabulary, grammar), text)
        legal = answer if answer and data.draw(st.integers(0, 5)) else range(vocabulary.size)
        known.append([*text, data.draw(st.sampled_from(list(legal)))])


def test_where_the_text_is_complete_only_end_tokens_are_left() -> None:
    tokenizer = tokenizer_of("bytes", [])
    vocabulary = GrammarVocabulary(tokenizer, sorted(tokenizer.special_texts), END)
    ends = sorted(tokenizer.special_texts)
    assert tokenizer.special_texts[vocabulary.end_token_ids[0]] == END
    mask = GrammarMask(vocabulary, Grammar.regex("ab?"))
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    assert allowed_after(mask, []) == [a]
    assert allowed_after(mask, [a]) == sorted([b, *ends])
    assert allowed_after(mask, [a], [b]) == ends
    assert allowed_after(mask, [a], [b, ends[0]]) == ends  # nothing behind the end is part of the text
    assert allowed_after(mask, [b]) is None  # no part of a text either
    assert allowed_after(mask, [a]) == sorted([b, *ends])


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    tokenizer = tokenizer_of("bytes", [])
    mask = GrammarMask(vocabulary_of(tokenizer), Grammar.regex("[^x]*"))
    pipeline = LogitsPipeline(SamplingParams(), grammar=mask)
    padded = pipeline.process_row(np.zeros(tokenizer.vocab_size + 40, np.float32), History([1]), [])
    assert (padded[tokenizer.vocab_size :] == -np.inf).all()
    assert (padded[: tokenizer.vocab_size] == 0).sum() > 150


def test_the_prompt_is_no_part_of_the_text() -> None:
    tokenizer = tokenizer_of("bytes", [])
    mask = GrammarMask(vocabulary_of(tokenizer), Grammar.regex("ab"))
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    assert np.flatnonzero(mask.allowed(History([a, b, b, a], 4), [])).tolist() == [a]
    assert np.flatnonzero(mask.allowed(History([a, b, b, a], 3), [])).tolist() == [b]


def test_a_grammar_that_takes_too_much_is_an_error_of_its_step_and_of_no_other() -> None:
    tokenizer = tokenizer_of("bytes", [])
    mask = GrammarMask(vocabulary_of(tokenizer), LANGUAGES["ambiguous"])  # every substring may be an e
    pipeline = LogitsPipeline(SamplingParams(), grammar=mask)
    logits, history = np.zeros(tokenizer.vocab_size, np.float32), History([1, 2])
    a = tokenizer.encode("a")[0]
    for _ in range(2):
        with pytest.raises(GrammarLimitError, match="at position 602, it takes too much") as caught:
            pipeline.process_row(logits, history, [a] * 600, row=5)
        assert caught.value.row == 5
        assert len(str(caught.value)) < 1000
        assert pipeline.process_row(logits, history, [a]).max() == 0


def test_a_matcher_that_gave_up_is_made_again_only_if_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("bytes", [])
    vocabulary = vocabulary_of(tokenizer)
    made: list[str] = []
    matcher = vocabulary.matcher
    monkeypatch.setattr(vocabulary, "matcher", lambda definition: (made.append(definition), matcher(definition))[1])
    mask = GrammarMask(vocabulary, LANGUAGES["ambiguous"])
    a = tokenizer.encode("a")[0]
    with pytest.raises(GrammarLimitError):
        mask.allowed(History([1, 2]), [a] * 600)
    assert len(made) == 1
    assert mask.allowed(History([1, 2]), [a]) is not None
    assert len(made) == 2


def test_a_grammar_too_large_to_prepare_is_refused_before_anything_is_generated(pair: Engine) -> None:
    many = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2500)}}
    with pytest.raises(RequestError, match="The grammar cannot be used: .*too big"):
        pair.stream([1, 2], grammar=Grammar.json_schema(many))
    allowed = {"type": "object", "properties": {f"p{index}": {"enum": [index]} for index in range(1000)}}
    allowed = {**allowed, "required": list(allowed["properties"]), "x-guidance": {"whitespace_flexible": False}}
    assert pair.generate([1, 2], grammar=Grammar.json_schema(allowed), max_new_tokens=4).text.startswith("{")


# Whole generations


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundles) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(recipe="w8a8", draft="close", eos=[EOS, IM_END])) as engine:
        yield engine


GRAMMARS = {"schema": Grammar.json_schema(TIGHT), "regex": Grammar.regex(DATE), "lark": LANGUAGES["lark"]}


def assert_obeys(language: str, text: str) -> None:
    if language == "regex":
        assert re.fullmatch(DATE, text)
    elif language == "lark":
        assert re.fullmatch(r"[0-9+()]+", text)
        assert text.count("(") == text.count(")")
        assert re.search(r"\d", text)
    else:
        person = json.loads(text)
        assert list(person) == ["name", "age", "likes"]
        assert len(person["name"]) <= 6
        assert 0 <= person["age"] <= 120 and isinstance(person["age"], int)
        assert 1 <= len(person["likes"]) <= 2 and {*person["likes"]} <= {"red", "green"}


@pytest.mark.parametrize("language", GRAMMARS)
@given(seed=st.integers(0, 10**6), drafter=st.sampled_from(DRAFTERS), max_draft=st.sampled_from([None, 1, 4, 9]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafting_does_not_show_and_the_text_obeys(
    pair: Engine, language: str, seed: int, drafter: str, max_draft: int | None
) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS[language], "max_new_tokens": 160}
    if seed % 3:
        options |= {"temperature": 0.5 + seed % 2, "seed": seed, "top_p": 0.95}
    if seed % 5 == 0:
        options |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {40: 3.0}}
    prompt = np.random.default_rng(seed).integers(0, 256, 8).tolist()
    plain = pair.generate(prompt, speculation="off", **options)
    drafted = pair.generate(prompt, speculation=drafter, max_draft=max_draft, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason
    if plain.finish_reason == "stop":
        assert_obeys(language, plain.text)
        assert plain.token_ids[-1] in (EOS, IM_END)


@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("drafter", ["grammar", "composite", "model"])
@pytest.mark.parametrize("language", ["schema", "regex"])
def test_every_rule_obeys(pair: Engine, verification: str, drafter: str, language: str) -> None:
    endings = set()
    for seed in range(4):
        completion = pair.generate(
            [seed, 3, 4],
            grammar=GRAMMARS[language],
            temperature=1.0,
            seed=seed,
            verification=verification,
            speculation=drafter,
            max_draft=6,
            max_new_tokens=160,
        )
        endings.add(completion.finish_reason)
        if completion.finish_reason == "stop":
            assert_obeys(language, completion.text)
    assert "stop" in endings


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_a_text_that_is_cut_is_the_beginning_of_one_that_obeys(pair: Engine, speculation: str) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS["regex"], "speculation": speculation}
    whole = pair.generate([5, 6], **options)
    assert whole.finish_reason == "stop"
    cut = pair.generate([5, 6], max_new_tokens=7, **options)
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)
    stopped = pair.generate([5, 6], stop="-", **options)
    assert (stopped.text, stopped.finish_reason) == (whole.text[:4], "stop")


@pytest.mark.parametrize("speculation", ["off", "grammar", "composite"])
def test_a_banned_token_stays_banned_and_no_token_left_is_an_error(pair: Engine, speculation: str) -> None:
    digits = [byte_id(pair, digit) for digit in "0123456789"]
    options: dict[str, Any] = {"grammar": Grammar.regex("is ([0-9]|x)"), "speculation": speculation, "max_draft": 4}
    completion = pair.generate([5, 6], banned_token_ids=digits, **options)
    assert completion.text == "is x"
    with pytest.raises(NoTokenLeftError, match="at position 5, no token is left to choose: grammar"):
        pair.generate([5, 6], banned_token_ids=[*digits, byte_id(pair, "x")], **options)
    with pytest.raises(NoTokenLeftError, match="grammar"):
        pair.generate([5, 6], allowed_token_ids=[*digits], **options)


def byte_id(engine: Engine, letter: str) -> int:
    return engine.generate([1], grammar=Grammar.regex(re.escape(letter)), max_new_tokens=1).token_ids[0]


def test_sessions_and_chats_take_a_grammar(tiny_bundle: Bundles) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with edge_spec.load(tiny_bundle(draft="close", chat_template=template)) as engine:
        messages = [{"role": "user", "content": "the day"}]
        grammar = Grammar.regex("yes|no")
        expected = engine.chat(messages, grammar=grammar).text
        assert expected in ("yes", "no")
        with engine.session() as session:
            assert session.chat(messages, grammar=grammar).text == expected
            assert session.chat(messages, grammar=Grammar.regex("maybe")).text == "maybe"
        pieces = [chunk.text for chunk in engine.stream(messages, grammar=grammar)]
        assert "".join(pieces) == expected


def test_json_objects_of_any_kind_can_be_asked_for(pair: Engine) -> None:
    completion = pair.generate([1], grammar=Grammar.json_object(), temperature=1.5, seed=1, max_new_tokens=200)
    assert completion.text.startswith("{")
    if completion.finish_reason == "stop":
        assert isinstance(json.loads(completion.text), dict)


def test_a_tokenizer_without_bytes_can_obey_as_far_as_its_letters_go(tiny_bundle: Bundles) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz ."
    path = tiny_bundle(recipe="fp32", draft="same", letters=letters, vocab_size=32, eos=len(letters))
    with edge_spec.load(path) as engine:
        for speculation in ("off", "auto", "composite"):
            completion = engine.generate([3, 9], grammar=Grammar.regex("(the|a) (day|end)[.]"), speculation=speculation)
            assert re.fullmatch("(the|a) (day|end)[.]", completion.text)
            with pytest.raises(NoTokenLeftError, match="grammar"):
                engine.generate([3, 9], grammar=Grammar.regex("[0-9]+"), speculation=speculation)


# What is refused


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.regex("(a"), "unclosed group"),
        (lambda: Grammar.regex("a(?=b)"), "look-around"),
        (lambda: Grammar.regex(5), "a int, expected a regular expression"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("\ud800"), "surrogates not allowed"),
        (lambda: Grammar.regex("a" * 300_000), "300000 characters, expected at most"),
        (lambda: Grammar.lark("start: foo"), "foo"),
        (lambda: Grammar.lark(""), "Empty grammar"),
        (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 1}), "Unsatisfiable"),
        (lambda: Grammar.json_schema({"$ref": "http://example.com/schema"}), "not present"),
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (lambda: Grammar.json_schema("{bad"), "cannot be read"),
        (lambda: Grammar.json_schema("[1]"), "expected an object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "cannot be read"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be read"),
        (lambda: Grammar("gbnf", "root ::= a"), "kind is 'gbnf'"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_grammar_is_refused_with_a_reason(make: Callable[[], Grammar], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        make()
    assert len(str(caught.value)) < 1200


def test_deep_nesting_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError):
        Grammar.json_schema(schema)
    with pytest.raises(RequestError):
        Grammar.regex("(" * 50_000 + ")" * 50_000)
    with pytest.raises(RequestError):
        Grammar.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000)


@given(st.sampled_from([Grammar.regex, Grammar.lark, Grammar.json_schema]), st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_grammar_or_refused(make: Callable[[str], Grammar], text: str) -> None:
    try:
        grammar = make(text)
    except RequestError:
        return
    assert GrammarMask(VOCABULARY, grammar).allowed(History([]), []) is not None


VOCABULARY = vocabulary_of(tokenizer_of("bytes", []))


def test_a_grammar_is_a_value() -> None:
    assert Grammar.json_schema(PERSON) == Grammar.json_schema(json.dumps(PERSON))
    assert hash(Grammar.regex("a")) == hash(Grammar.regex("a"))
    assert Grammar.regex("a") != Grammar.lark("start: /a/")
    assert edge_spec.Grammar is Grammar


@pytest.mark.parametrize("grammar", [{"type": "object"}, "[a-z]+", 5])
def test_a_grammar_that_is_none_is_refused_by_a_request(pair: Engine, grammar: Any) -> None:
    with pytest.raises(RequestError, match=r"expected a Grammar, such as edge_spec.Grammar.json_schema"):
        pair.generate([1], grammar=grammar)


def test_a_bundle_without_an_end_token_refuses_grammars(tiny_bundle: Bundles) -> None:
    with (
        edge_spec.load(tiny_bundle(draft="close", eos=None)) as engine,
        pytest.raises(RequestError, match="names no token that ends a text"),
    ):
        engine.generate([1], grammar=Grammar.regex("a"))


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'edge-spec\[grammar\]'"):
        Grammar.regex("a")


# The command line


def test_run_takes_a_schema_an_expression_or_a_grammar(
    tmp_path: Path, tiny_bundle: Bundles, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tiny_bundle(recipe="w8a8", draft="close", eos=[EOS, IM_END])
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(TIGHT))
    lark = tmp_path / "sums.lark"
    lark.write_text('start: "the" | "day"\n')

    def text_of(*arguments: str | Path) -> str:
        assert cli.main(["run", str(bundle), "the day", *map(str, arguments), "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    assert_obeys("schema", text_of("--json-schema", schema))
    assert text_of("--json-schema", schema) == text_of("--json-schema", json.dumps(TIGHT), "--speculation", "off")
    assert text_of("--regex", "yes|no") in ("yes", "no")
    assert text_of("--grammar", lark) in ("the", "day")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--regex", "(a"], "unclosed group"),
        (["--json-schema", "missing.json"], "missing.json"),
        (["--grammar", "missing.lark"], "missing.lark"),
        (["--regex", "a", "--json-schema", "{}"], "one of"),
    ],
)
def test_run_refuses_broken_grammars_before_loading(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["run", str(tmp_path / "no.pair"), "hi", *arguments])
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    assert code != 0
    error = capsys.readouterr().err
    assert reason in error or "not allowed with" in error
    assert "no.pair" not in error.replace(" ".join(arguments), "")


def test_texts_that_begin_with_a_space_are_written_whole_where_the_first_space_is_dropped() -> None:
    """SentencePiece's decoders drop a text's first space, so a first token's text is not that of its bytes."""
    tokenizer = tokenizer_of("pieces", [])
    spaced = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    spaced.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    spaced.add_special_tokens([AddedToken(END, special=True)])
    for each in (tokenizer, loaded(spaced)):
        vocabulary = vocabulary_of(each)
        mask = GrammarMask(vocabulary, Grammar.regex(" a"))
        output: list[int] = []
        while not output or output[-1] not in vocabulary.end_token_ids:
            output.append((allowed_after(mask, output) or [])[-1])
        assert each.decode(output) == " a"
