"""``edge-spec distill --kind tiny``: a draft model of a few of the target's layers, from training to the bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import edge_spec
from edge_spec.bundle import read_manifest
from edge_spec.cli import main
from edge_spec.distill.held_out import measure_acceptance
from edge_spec.distill.student import Ids
from edge_spec.distill.tap_files import TapFiles, TapHeader
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.text_batch import pack
from edge_spec.distill.tiny_files import read_draft_ids
from edge_spec.distill.tiny_student import TinyStudent, begin_tiny, spread_layers
from edge_spec.distill.train_progress import TrainProgress
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.trainer import train
from edge_spec.distill.training_state import STATE
from edge_spec.errors import EdgeSpecError, UnsupportedError
from edge_spec.export import export_pair
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.decoder import read_final_norm, read_layer
from edge_spec.export.reference import Float32Reference
from tiny_models import CHAT_TEMPLATE, LLAMA3_ROPE, random_model, save_checkpoint

TOP = 8
RUN = TrainSettings(
    kind="tiny", epochs=3, batch_tokens=60, draft_vocabulary=64, evaluate_every=4, held_out_share=0.1, save_minutes=0
)


def target_of(folder: Path, **changes: Any) -> Path:
    """A target whose weights are stored without rounding what float16 rounds."""
    model = random_model(**{"num_hidden_layers": 4, "max_position_embeddings": 512, **changes}).half()
    return save_checkpoint(folder, model, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_of(tmp_path_factory.mktemp("target"))


def text_of(token_ids: np.ndarray, prompt: int, seed: int = 0, vocabulary: int = 288) -> TappedText:
    top = np.argsort(np.random.default_rng(seed).random((len(token_ids), vocabulary)), axis=1)[:, :TOP]
    log_probs = np.full(top.shape, -3.0, np.float16)
    return TappedText(
        token_ids.astype(np.int32), prompt, np.empty((len(token_ids), 0), np.float16), top.astype(np.int32), log_probs
    )


def texts_in(folder: Path, texts: list[TappedText]) -> TapFiles:
    files = TapFiles.begin(folder, TapHeader("digest", (), 64, TOP, seed=0, prompts="none", max_new_tokens=8))
    files.append(texts)
    return files


def random_texts(count: int) -> list[TappedText]:
    return [text_of(np.random.default_rng(seed).integers(0, 260, 24), 6, seed) for seed in range(count)]


def columns_of(ids: Ids) -> torch.Tensor:
    columns = torch.full((288,), -1)
    columns[torch.from_numpy(ids)] = torch.arange(len(ids))
    return columns


def logits_of(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """What the exporter's float32 reference makes of a checkpoint: float32 [tokens, vocabulary]."""
    checkpoint = open_checkpoint(folder)
    facts = checkpoint.architecture
    reference = Float32Reference(facts, checkpoint.tensor("embed_tokens.weight")[token_ids])
    for index in range(facts.layers):
        reference.run_layer(read_layer(checkpoint, index))
    logits: np.ndarray = reference.final_hidden(read_final_norm(checkpoint)) @ checkpoint.tensor("lm_head.weight").T
    return logits


def begin(target: Path, settings: TrainSettings = RUN) -> TinyStudent:
    return begin_tiny(open_checkpoint(target), np.random.default_rng(3).random(288), settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "llama", "rope_parameters": LLAMA3_ROPE},
        {"family": "qwen2", "tie_word_embeddings": False},
        {"family": "qwen3", "head_dim": 32},
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_a_written_draft_computes_what_the_student_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    student = begin(target_of(tmp_path / "target", **changes), replace(RUN, layers=2))
    (tmp_path / "draft").mkdir()
    with torch.no_grad():  # away from the target, to where float16 rounds nothing
        for parameter in student.network.parameters():
            parameter.copy_((parameter + 0.02 * torch.randn(parameter.shape)).half())
    texts = random_texts(3)
    batch = pack(texts, columns_of(student.draft_ids), 64)
    with torch.no_grad():
        steps = list(student.roll_out(batch, 3))
    student.write(tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    for span, text in zip(batch.spans, texts, strict=True):
        written = logits_of(tmp_path / "draft", text.token_ids)
        with torch.no_grad():
            theirs = loaded(torch.from_numpy(text.token_ids.astype(np.int64))[None]).logits[0].numpy()
        np.testing.assert_allclose(written, theirs, atol=1e-4)
        for step, drafted in enumerate(steps):
            rows = drafted.rows - span.start
            mine = (rows >= 0) & (rows < len(text.token_ids))
            # The first token that is drafted follows the first one of the answer; nothing follows the last one.
            assert rows[mine].tolist() == list(range(6 + step, 23))
            expected = written[rows[mine]][:, student.draft_ids]
            np.testing.assert_allclose(drafted.logits[mine].numpy(), expected, atol=1e-4)
    assert read_draft_ids(tmp_path / "draft").tolist() == student.draft_ids.tolist()


def test_what_belongs_to_the_text_is_the_targets(target: Path, tmp_path: Path) -> None:
    begin(target).write(tmp_path)
    theirs, ours = open_checkpoint(target).vocabulary, open_checkpoint(tmp_path).vocabulary
    assert ours.tokenizer.to_str() == theirs.tokenizer.to_str()
    assert replace(ours, tokenizer=theirs.tokenizer) == theirs


def test_all_layers_of_a_target_are_the_target(target: Path, tmp_path: Path) -> None:
    begin(target, replace(RUN, layers=4)).write(tmp_path)
    token_ids = np.arange(20)
    np.testing.assert_allclose(logits_of(tmp_path, token_ids), logits_of(target, token_ids), atol=1e-4)


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert [spread_layers(count, 30) for count in (1, 2, 3, 4)] == [(0,), (0, 29), (0, 14, 29), (0, 10, 19, 29)]
    assert spread_layers(3, 3) == (0, 1, 2)


def test_acceptance_is_that_of_greedy_drafts(target: Path) -> None:
    """Of texts that a draft wrote itself everything is accepted, up to where the target is made to want another."""
    student = begin(target, replace(RUN, draft_vocabulary=288))
    token_ids, wanted = np.array([5, 9, 40, 7], np.int64), []
    while len(token_ids) < 16:
        text = text_of(np.concatenate([token_ids, [0, 0]]), 1)
        with torch.no_grad():
            (drafted,) = student.roll_out(pack([text], columns_of(student.draft_ids), 64), 1)
        wanted = student.draft_ids[drafted.logits.argmax(1).numpy()]  # behind rows 1, 2, ...
        token_ids = np.append(token_ids, wanted[len(token_ids) - 2])
    text = text_of(np.append(token_ids, 0), 4)
    likeliest = text.top_ids.copy()
    likeliest[3:15, 0] = token_ids[4:16]
    likeliest[9, 0] = (token_ids[10] + 1) % 260
    text = replace(text, top_ids=likeliest)
    measured = measure_acceptance(student, [pack([text], columns_of(student.draft_ids), 64)])
    # Rollouts are compared at rows 4 to 15 first; at row 15 nothing is known, and at row 9 the target wants another.
    known = [row != 9 for row in range(4, 15)] + [bool(likeliest[15, 0] == wanted[-1])]
    assert measured.rollouts == 12
    assert measured.by_position[0] == pytest.approx(sum(known) / 12)
    # At the second position: of those that were right, and whose text goes on with what the target wants.
    alive = [row for row in range(4, 15) if row != 9]
    assert measured.by_position[1] == pytest.approx(sum(known[row - 3] for row in alive) / len(alive))


def test_a_tiny_model_learns(target: Path, tmp_path: Path) -> None:
    texts = []
    for seed in range(40):
        token_ids = np.empty(24, np.int64)
        token_ids[0] = seed
        for index in range(1, 24):
            token_ids[index] = (token_ids[index - 1] * 7 + 3) % 50
        text = text_of(token_ids, 6)
        top = np.repeat((token_ids * 7 + 3)[:, None] % 50, TOP, 1)
        top[:, 1:] = 60 + np.arange(TOP - 1)
        log_probs = np.full(top.shape, -8.0, np.float16)
        log_probs[:, 0] = -0.01
        texts.append(replace(text, top_ids=top.astype(np.int32), top_log_probs=log_probs))
    run = replace(
        RUN, epochs=20, learning_rate=5e-3, batch_tokens=200, warmup_steps=5, evaluate_every=30, patience=100, layers=1
    )
    reports: list[TrainProgress] = []
    train(texts_in(tmp_path / "texts", texts), target, tmp_path / "run", run, reports.append)
    measured = [report.acceptance for report in reports if report.acceptance is not None]
    assert measured[-1].by_position[0] > 0.9 and measured[-1].accepted_length > 3


def test_a_killed_run_ends_as_one_that_was_not_and_can_be_improved_on(target: Path, tmp_path: Path) -> None:
    files = texts_in(tmp_path / "texts", random_texts(16))
    whole = train(files, target, tmp_path / "whole", RUN, lambda report: None)

    def kill(report: TrainProgress) -> None:
        if report.step >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(files, target, tmp_path / "killed", RUN, kill)
    resumed = train(files, target, tmp_path / "killed", RUN, lambda report: None)
    assert (resumed.steps, resumed.best_length) == (whole.steps, whole.best_length)
    states = [torch.load(tmp_path / name / STATE) for name in ("whole", "killed")]
    for name, value in states[0]["head"].items():
        assert torch.equal(value, states[1]["head"][name]), name
    token_ids = np.arange(12)
    assert np.array_equal(*(logits_of(tmp_path / name, token_ids) for name in ("whole", "killed")))

    idle = replace(RUN, epochs=1, learning_rate=1e-12, start_from=tmp_path / "whole", draft_vocabulary=8)
    train(files, target, tmp_path / "second", idle, lambda report: None)
    np.testing.assert_allclose(
        *(logits_of(tmp_path / name, token_ids) for name in ("whole", "second")), atol=1e-5, rtol=0
    )
    assert np.array_equal(*(read_draft_ids(tmp_path / name) for name in ("whole", "second")))


def test_what_cannot_be_made_tiny_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    granite = save_checkpoint(tmp_path / "granite", random_model("granite"))
    with pytest.raises(UnsupportedError, match=r"is a granite.*llama, qwen2, qwen3"):
        begin(granite)
    biased = save_checkpoint(tmp_path / "biased", random_model("llama", attention_bias=True))
    with pytest.raises(UnsupportedError, match="biases other than those of its family"):
        begin(biased)
    windowed = random_model("qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)
    with pytest.raises(UnsupportedError, match="a window of the text"):
        begin(save_checkpoint(tmp_path / "windowed", windowed))
    with pytest.raises(EdgeSpecError, match="layers is 9, but the target has 4"):
        begin(target, replace(RUN, layers=9))
    begin(target).write(tmp_path)
    with pytest.raises(EdgeSpecError, match="made for another target"):
        begin(target_of(tmp_path / "other", hidden_size=96), replace(RUN, start_from=tmp_path))
    for changes, message in (({"steps": 2}, "steps is for kind='head'"), ({"kind": "huge"}, "'head' or 'tiny'")):
        with pytest.raises(EdgeSpecError, match=message):
            replace(RUN, **changes)


def test_a_bundle_gets_a_tiny_draft_and_its_texts_stay_the_same(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = export_pair(target, None, tmp_path / "bundle", recipe="w8a8", check=False).path
    before = read_manifest(bundle)
    prompts = tmp_path / "log.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Number {number} says"}) for number in range(12)))
    work = tmp_path / "work"
    options = ["--prompts", str(prompts), "--tokens", "200", "--batch", "4", "--epochs", "1", "--draft-vocab", "64"]
    command = ["distill", str(bundle), "--work", str(work), "--kind", "tiny", *options]
    assert main([*command, "--layers", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["identical"] and report["training"]["folder"] == str(work / "tiny")
    assert TapFiles(work / "texts").header.taps == ()
    manifest = read_manifest(bundle)
    assert manifest.draft is not None and manifest.draft.architecture.layers == 2
    assert manifest.draft.architecture.logits_size == 64
    assert (bundle / "draft" / "ids.bin").read_bytes() == read_draft_ids(work / "tiny").astype("<u4").tobytes()
    assert manifest.target == before.target  # no taps are needed
    assert before.files.items() <= manifest.files.items()
    with edge_spec.load(bundle) as engine:
        plain = engine.generate("Number 3 says", max_new_tokens=24, speculation="off")
        drafted = engine.generate("Number 3 says", max_new_tokens=24, speculation="model", max_draft=3)
        assert drafted.token_ids == plain.token_ids
        assert drafted.statistics.drafted > 0

    # The same draft by hand, with another part of its vocabulary, in another bundle and in a new one.
    again = ["--draft", str(work / "tiny"), "--draft-vocab", "270", "--output"]
    assert main(["export", "--bundle", str(bundle), *again, str(tmp_path / "by-hand")]) == 0
    assert main(["export", "--target", str(target), "--no-check", *again, str(tmp_path / "new")]) == 0
    for name in ("by-hand", "new"):
        draft = read_manifest(tmp_path / name).draft
        assert draft is not None and draft.architecture.layers == 2 and draft.architecture.tied_embeddings


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["distill", "b", "--kind", "tiny", "--steps", "2"], "--steps is for --kind head, but the kind is tiny"),
        (["distill", "b", "--layers", "2"], "--layers is for --kind tiny, but the kind is head"),
        (["export", "--bundle", "b", "--draft", "d", "--head", "h"], "give --head or --draft, not both"),
        (["export", "--bundle", "b", "--draft", "d", "--taps", "2"], "leave out --taps"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command)
    assert message in capsys.readouterr().err
