"""Drafts that do not speak in the target's ids, or in a part of them: what is written and proposed, and the text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_tokenizers import byte_pairs
from tokenizers import Tokenizer, pre_tokenizers

import edge_spec
from edge_spec.bundle import MANIFEST, open_bundle, read_manifest
from edge_spec.errors import BundleError, EdgeSpecError
from edge_spec.export import export_pair
from edge_spec.inspection import describe_bundle
from edge_spec.manifest import DRAFT_IDS, DRAFT_TOKENIZER, Manifest
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.drafters.model_choice import choose
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from hostile_files import seal, write_manifest
from tiny_models import TOKENS, byte_tokenizer, letter_tokenizer, perturbed, random_model, save_checkpoint

BYTES = TOKENS - 3
MOST = 262
PROMPT = "The ant and the eel"


def renumbered() -> Tokenizer:
    """The usual tokenizer with all ids but those of the special tokens the other way round."""
    body = json.loads(byte_tokenizer().to_str())
    vocab = body["model"]["vocab"]
    body["model"]["vocab"] = {text: BYTES - 1 - index for text, index in vocab.items()}
    return Tokenizer.from_str(json.dumps(body))


def renumbered_rows(model: Any) -> Any:
    """The same model for that tokenizer."""
    copy = perturbed(model, 0.0)
    weight = copy.get_input_embeddings().weight.data
    weight[:BYTES] = weight[:BYTES].flip(0).clone()
    return copy


def export(folder: Path, draft: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Path:
    target = save_checkpoint(folder / "target", random_model(num_hidden_layers=1))
    eos = (tokenizer or byte_tokenizer()).token_to_id("<|endoftext|>")
    source = save_checkpoint(folder / "draft", draft, tokenizer, eos)
    options = {"recipe": "fp32", "draft_recipe": "fp32", **options}
    return export_pair(target, source, folder / "bundle", check=False, **options).path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    model = random_model(num_hidden_layers=1)
    other = byte_pairs([("h", "e"), ("t", "he"), ("n", "Ġ"), ("Ġ", "Ġ")], ["<|endoftext|>"])
    return {
        "whole": export(folder / "whole", model),
        "trimmed": export(folder / "trimmed", model, draft_vocab=MOST),
        "trimmed int4": export(folder / "int4", perturbed(model, 0.05), draft_recipe="int4", draft_vocab=MOST),
        "other ids": export(folder / "ids", renumbered_rows(model), renumbered()),
        "other ids, trimmed": export(folder / "both", renumbered_rows(model), renumbered(), draft_vocab=MOST),
        "other tokens": export(folder / "tokens", model, other),
        "other tokens, trimmed": export(folder / "few", model, other, draft_vocab=258),
    }


KINDS = ["trimmed", "trimmed int4", "other ids", "other ids, trimmed", "other tokens", "other tokens, trimmed"]


def load(path: Path) -> edge_spec.Engine:
    return edge_spec.load(path, context=128, threads=1)


def draft_of(path: Path) -> tuple[Manifest, Model]:
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    return bundle.manifest, Model(bundle, bundle.manifest.draft, ["CPUExecutionProvider"], 64, exact_rows=False)


def ids_of(path: Path) -> list[int]:
    return list(np.frombuffer((path / DRAFT_IDS).read_bytes(), "<u4"))


# What is written


def test_a_trimmed_draft_has_the_logits_of_the_ids_it_kept(bundles: dict[str, Path]) -> None:
    whole, (manifest, trimmed) = draft_of(bundles["whole"])[1], draft_of(bundles["trimmed"])
    ids = ids_of(bundles["trimmed"])
    assert len(ids) == MOST and ids == sorted(set(ids))
    assert manifest.draft is not None and manifest.draft.architecture.logits_size == MOST
    text, rows = list(range(0, 260, 20)), range(13)
    kept = trimmed.forward(text, rows)
    np.testing.assert_allclose(kept, whole.forward(text, rows)[:, ids], rtol=0, atol=1e-4)
    assert read_manifest(bundles["whole"]).draft_vocabulary is None


@pytest.mark.parametrize("kind", ["other ids", "other ids, trimmed"])
def test_a_draft_with_other_ids_is_written_in_the_targets(bundles: dict[str, Path], kind: str) -> None:
    whole, mapped = draft_of(bundles["whole"])[1], draft_of(bundles[kind])[1]
    ids = ids_of(bundles[kind])
    assert len(ids) == (TOKENS if kind == "other ids" else MOST)
    text, rows = list(range(0, 260, 20)), range(13)
    np.testing.assert_allclose(mapped.forward(text, rows), whole.forward(text, rows)[:, ids], rtol=0, atol=1e-4)


def test_what_ends_a_text_and_the_single_bytes_are_always_kept(tmp_path: Path) -> None:
    path = export(tmp_path, random_model(num_hidden_layers=1), draft_vocab=257)
    vocab = byte_tokenizer().get_vocab()
    manifest = read_manifest(path)
    assert {*manifest.eos_token_ids, *(token for text, token in vocab.items() if len(text) == 1)} == set(ids_of(path))


def test_too_few_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="A draft vocabulary of 100 ids is too small; expected at least 257"):
        export(tmp_path, random_model(num_hidden_layers=1), draft_vocab=100)
    assert not (tmp_path / "bundle").exists()


def test_options_without_what_they_are_about_are_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", random_model(num_hidden_layers=1))
    with pytest.raises(EdgeSpecError, match="trims a draft, but there is none"):
        export_pair(checkpoint, None, tmp_path / "bundle", draft_vocab=MOST)
    with pytest.raises(EdgeSpecError, match="say how many by draft_vocab"):
        export_pair(checkpoint, checkpoint, tmp_path / "bundle", draft_vocab_text=[tmp_path / "text"])
    assert not (tmp_path / "bundle").exists()


def test_the_tokens_of_a_text_come_first(tmp_path: Path) -> None:
    vocab = byte_tokenizer().get_vocab()
    for words, wanted in (
        ("ll ll ll ll ll ll ll er er er er er er er", ("ll", "er")),
        ("the a the a " * 9, ("Ġthe", "Ġa")),
    ):
        (tmp_path / "text").write_text(words)
        folder = tmp_path / wanted[0]
        path = export(folder, random_model(num_hidden_layers=1), draft_vocab=259, draft_vocab_text=[tmp_path / "text"])
        assert {vocab[text] for text in wanted} <= set(ids_of(path))


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match=r"nowhere\.txt' cannot be read"):
        export(tmp_path, random_model(num_hidden_layers=1), draft_vocab=259, draft_vocab_text=["nowhere.txt"])


@pytest.mark.parametrize(
    ("target", "draft", "reads"),
    [
        (byte_tokenizer(), renumbered(), "target ids"),
        (letter_tokenizer("abcdef"), letter_tokenizer("cbadef"), "target ids"),
        (letter_tokenizer("abcdef"), letter_tokenizer("abc"), "own tokens"),
        (byte_tokenizer(), letter_tokenizer("abc"), "own tokens"),
    ],
)
def test_how_a_draft_reads_follows_from_how_it_splits_text(
    tmp_path: Path, target: Tokenizer, draft: Tokenizer, reads: str
) -> None:
    model = random_model(num_hidden_layers=1)
    sources = [
        save_checkpoint(tmp_path / name, model, tokenizer, tokenizer.get_vocab_size() - 1)
        for name, tokenizer in (("target", target), ("draft", draft))
    ]
    report = export_pair(*sources, tmp_path / "bundle", recipe="fp32", draft_recipe="fp32", check=False)
    speech = report.manifest.draft_vocabulary
    assert speech is not None and speech.reads == reads
    assert ("draft reads the text in its own tokens" in report.notes[0]) == (reads == "own tokens")
    assert (DRAFT_TOKENIZER in report.manifest.files) == (reads == "own tokens")


def test_tokens_that_only_the_target_has_are_read_by_their_parts(tmp_path: Path) -> None:
    fewer = Tokenizer.from_str(byte_tokenizer().to_str())
    more = byte_tokenizer()
    more.add_tokens(["theater"])
    more.add_special_tokens(["<|tool|>"])
    model = random_model(num_hidden_layers=1)
    target = save_checkpoint(tmp_path / "target", model, more)
    draft = save_checkpoint(tmp_path / "draft", model, fewer)
    path = export_pair(target, draft, tmp_path / "bundle", recipe="fp32", draft_recipe="fp32", check=False).path
    manifest, mapped = draft_of(path)
    assert manifest.vocab_size == TOKENS + 2
    logits = mapped.forward([TOKENS, TOKENS + 1, 5], [0, 1, 2])
    assert np.isfinite(logits).all() and logits.shape[1] == TOKENS
    assert TOKENS not in ids_of(path)


def test_a_person_is_told_what_the_draft_proposes(bundles: dict[str, Path]) -> None:
    said = {kind: describe_bundle(path, read_manifest(path)) for kind, path in bundles.items()}
    assert "the target's" in said["whole"]
    assert "reads 267 of the target's ids, proposes 262 of them" in said["trimmed"]
    assert "reads 261 tokens of its own tokenizer, proposes 261 of them" in said["other tokens"]


def test_a_manifest_from_before_is_still_read(bundles: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(bundles["whole"], tmp_path / "old"))
    body = json.loads((path / MANIFEST).read_text())
    del body["draft_vocabulary"], body["target"]["architecture"]["embedding_rows"]
    write_manifest(path, body)
    assert read_manifest(path).draft_vocabulary is None


def test_the_plan_counts_a_smaller_head_and_a_second_tokenizer(bundles: dict[str, Path]) -> None:
    def items(kind: str) -> dict[str, int]:
        plan = plan_memory(read_manifest(bundles[kind]), None, 64, 1)
        return {item.name: item.bytes for item in plan.items}

    whole, trimmed, other = items("whole"), items("trimmed"), items("other tokens")
    assert trimmed["draft weights"] < whole["draft weights"]
    assert "draft tokenizer" not in whole and other["draft tokenizer"] > 0


# What is proposed


def context_of(pipeline: SamplingParams, coupled: bool = True) -> Context:
    return Context([1, 2], pipeline, LogitsPipeline(pipeline), coupled)


IDS = np.array([1, 4, 6])
VOCABULARY = DraftVocabulary(IDS, 9)
LOGITS = np.array([0.5, 2.0, 1.0], np.float32)


def test_the_law_is_zero_for_ids_that_the_draft_does_not_have() -> None:
    drawn = context_of(SamplingParams(temperature=1.0, seed=3), coupled=False)
    candidates, law = choose(drawn, [], LOGITS, False, VOCABULARY)
    assert law is not None and law.shape == (9,)
    np.testing.assert_allclose(law[IDS], np.exp(LOGITS) / np.exp(LOGITS).sum(), rtol=1e-6)
    assert law.sum() == pytest.approx(1.0) and np.count_nonzero(law) == 3
    assert candidates[0][0] in IDS


@pytest.mark.parametrize("seed", range(20))
def test_shared_noise_is_that_of_the_targets_ids(seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    wide = np.full(9, -np.inf, np.float32)
    wide[IDS] = LOGITS
    narrow, _ = choose(context_of(params), [], LOGITS, True, VOCABULARY)
    assert [token for token, _ in narrow] == [token for token, _ in choose(context_of(params), [], wide, True)[0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),
        ({"banned_token_ids": [4]}, 6),
        ({"logit_bias": {1: 9.0}}, 1),
        ({"allowed_token_ids": [1, 2, 3]}, 1),
        ({"repetition_penalty": 8.0}, 4),
    ],
)
def test_penalties_and_masks_are_about_the_targets_ids(options: dict[str, Any], expected: int) -> None:
    params = SamplingParams(**{**options, "logit_bias": tuple(options.get("logit_bias", {}).items())})
    assert choose(context_of(params), [], LOGITS, False, VOCABULARY)[0][0][0] == expected


# The text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "banned_token_ids": [5, 7]},
    ],
)
def test_no_draft_changes_the_text(bundles: dict[str, Path], kind: str, options: dict[str, Any]) -> None:
    with load(bundles[kind]) as engine:
        for prompt in (PROMPT, [3, 200, 130, 9], "é🙂 the"):
            plain = engine.generate(prompt, max_new_tokens=40, speculation="off", **options)
            for drafted in ({"speculation": "model", "max_draft": 4}, {"speculation": "auto"}):
                assert engine.generate(prompt, max_new_tokens=40, **drafted, **options).token_ids == plain.token_ids


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
@pytest.mark.parametrize("kind", ["trimmed", "other tokens"])
def test_every_rule_takes_what_such_drafts_propose(bundles: dict[str, Path], kind: str, rule: str) -> None:
    with load(bundles[kind]) as engine:
        statistics = [
            engine.generate(
                PROMPT,
                max_new_tokens=60,
                temperature=0.7,
                seed=seed,
                speculation="model",
                max_draft=3,
                verification=rule,
            ).statistics
            for seed in range(3)
        ]
    assert sum(each.drafted for each in statistics) > 0


def accepted(path: Path) -> tuple[int, int]:
    with load(path) as engine:
        done = engine.generate(PROMPT, max_new_tokens=60, speculation="model", max_draft=3, tree=False)
        return done.statistics.accepted, done.statistics.drafted


def test_a_draft_that_is_the_target_under_other_ids_is_always_right(bundles: dict[str, Path]) -> None:
    right, drafted = accepted(bundles["other ids"])
    assert right == drafted > 0


# Bundles from strangers


def forged(source: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    path = Path(shutil.copytree(source, folder / "forged"))
    change(path)
    seal(path)
    return path


def rewritten(ids: Sequence[int]) -> Callable[[Path], object]:
    return lambda path: (path / DRAFT_IDS).write_bytes(np.array(ids, "<u4").tobytes())


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([*range(MOST - 1), TOKENS], "not ascending and below 267"),
        ([*range(MOST - 1), 2**32 - 1], "not ascending and below 267"),
        ([0, *range(MOST - 1)], "not ascending and below 267"),
        ([1, 0, *range(2, MOST)], "not ascending and below 267"),
        (range(MOST - 1), "expected 4 for each of 262 logits"),
        (range(MOST + 1), "expected 4 for each of 262 logits"),
        ([], "expected 4 for each of 262 logits"),
    ],
)
def test_ids_that_cannot_be_are_refused(
    bundles: dict[str, Path], tmp_path: Path, ids: Sequence[int], reason: str
) -> None:
    path = forged(bundles["trimmed"], tmp_path, rewritten(ids))
    with pytest.raises(BundleError, match=reason):
        load(path)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("trimmed", {"size": 266}, "the target has 267 ids"),
        ("trimmed", {"size": 289}, "draft_vocabulary.size is 289, expected 1 to 288"),
        ("trimmed", {"names_columns": False}, "draft_vocabulary.size is 267, but there are 262 logits"),
        ("trimmed", {"reads": "own tokens"}, r"lacks \['draft/tokenizer.json'\]"),
        ("trimmed", {"reads": "minds"}, "expected one of"),
        ("other tokens", {"size": 0}, "draft_vocabulary.size is 0"),
        ("other tokens", {"size": 289}, "draft_vocabulary.size is 289, expected 1 to 288"),
        ("other tokens", {"names_columns": True}, r"lacks \['draft/ids.bin'\]"),
    ],
)
def test_a_vocabulary_that_the_draft_does_not_have_is_refused(
    bundles: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    def change(path: Path) -> None:
        body = json.loads((path / MANIFEST).read_text())
        body["draft_vocabulary"] |= changes
        write_manifest(path, body)

    with pytest.raises(BundleError, match=reason):
        load(forged(bundles[kind], tmp_path, change))


def test_an_embedding_with_other_rows_than_it_says_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    def change(path: Path) -> None:
        body = json.loads((path / MANIFEST).read_text())
        body["draft"]["architecture"]["embedding_rows"] = 300
        write_manifest(path, body)

    with pytest.raises(BundleError, match="does not fit its inputs"):
        load(forged(bundles["trimmed"], tmp_path, change))


@pytest.mark.parametrize("content", ["", "{}", "[" * 100000, '{"model": 1}'])
def test_a_draft_tokenizer_that_is_none_is_refused(bundles: dict[str, Path], tmp_path: Path, content: str) -> None:
    path = forged(bundles["other tokens"], tmp_path, lambda path: (path / DRAFT_TOKENIZER).write_text(content))
    with pytest.raises(BundleError, match=r"draft/tokenizer\.json is not a readable tokenizer"):
        load(path)


def test_a_draft_tokenizer_that_blows_texts_up_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    def change(path: Path) -> None:
        body = json.loads((path / DRAFT_TOKENIZER).read_text())
        body["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
        (path / DRAFT_TOKENIZER).write_text(json.dumps(body))

    with pytest.raises(BundleError, match="times as long"):
        load(forged(bundles["other tokens"], tmp_path, change))


def test_tokens_beyond_the_drafts_embedding_are_never_fed(bundles: dict[str, Path], tmp_path: Path) -> None:
    """A stranger's tokenizer may give any id; reading one beyond the embedding would read beyond the weights."""

    def change(path: Path) -> None:
        tokenizer = Tokenizer.from_file(str(path / DRAFT_TOKENIZER))
        tokenizer.add_tokens([f"{letter}{other}" for letter in "Theantl " for other in "Theantl "])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        (path / DRAFT_TOKENIZER).write_text(tokenizer.to_str())

    with load(forged(bundles["other tokens"], tmp_path, change)) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=20, speculation="off")
        assert engine.generate(PROMPT, max_new_tokens=20, speculation="model", max_draft=3).token_ids == plain.token_ids
