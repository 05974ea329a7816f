"""Training of a head that drafts: that a kill costs nothing, that it learns, and what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tapped_texts import TOP, random_text

from edge_spec.distill import trainer
from edge_spec.distill.column_sample import ColumnSample
from edge_spec.distill.draft_ids import choose_draft_ids
from edge_spec.distill.head_files import read_head, write_head
from edge_spec.distill.initial_weights import head_config, initial_head, read_embedding
from edge_spec.distill.student import Student
from edge_spec.distill.tap_files import TapFiles, TapHeader
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.text_survey import plan_batches
from edge_spec.distill.train_progress import LOG, TrainProgress
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.trainer import TrainReport, batch_loss, learning_rate, train
from edge_spec.distill.training_state import STATE
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.lm_head_rows import lm_head_rows
from tiny_models import random_model, save_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), random_model(num_hidden_layers=2))


def texts_of(target: Path, folder: Path, count: int, teach: Callable[[np.ndarray], np.ndarray] | None) -> TapFiles:
    """Texts for a target; ``teach`` tells the next token from the one before, and the taps hold the one before."""
    facts = open_checkpoint(target).architecture
    taps = (1, 2)
    files = TapFiles.begin(
        folder, TapHeader("digest", taps, facts.hidden_size, TOP, seed=0, prompts="none", max_new_tokens=8)
    )
    width, texts = 2 * facts.hidden_size, []
    codes = np.random.default_rng(9).standard_normal((facts.logits_size, width))
    for index in range(count):
        text = random_text(index, 24, 6, width, facts.logits_size)
        if teach is not None:
            # The feature of token t tells token t + 2, which the row that reads it proposes.
            tokens = np.random.default_rng(index).integers(0, 50, 24)
            wanted = teach(tokens)
            top = np.repeat(wanted[:, None], TOP, 1)
            top[:, 1:] = 60 + np.arange(TOP - 1)
            log_probs = np.full(top.shape, -8.0)
            log_probs[:, 0] = -0.01
            text = TappedText(
                np.concatenate([[0], wanted[:-1]]).astype(np.int32),
                6,
                np.concatenate([codes[wanted[1:]], codes[:1]]).astype(np.float16),
                top.astype(np.int32),
                log_probs.astype(np.float16),
            )
        texts.append(text)
    files.append(texts)
    return files


RUN = TrainSettings(
    epochs=3, batch_tokens=60, draft_vocabulary=64, evaluate_every=4, held_out_share=0.1, save_minutes=0, steps=2
)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def train_quietly(files: TapFiles, target: Path, folder: Path, run: TrainSettings = RUN) -> TrainReport:
    return train(files, target, folder, run, lambda report: None)


def test_the_first_part_of_a_run_learns_one_step(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 16, None)

    def weights(name: str, **changed: Any) -> dict[str, torch.Tensor]:
        run = TrainSettings(**{**vars(RUN), "epochs": 1, **changed})
        learned: dict[str, torch.Tensor] = torch.load(
            train_quietly(files, target, tmp_path / name, run).folder / STATE
        )["head"]
        return learned

    one_step = weights("one", steps=1)
    assert all(torch.equal(value, one_step[name]) for name, value in weights("all", first_step_share=1.0).items())
    both, two_steps = weights("half", first_step_share=0.5), weights("none", first_step_share=0.0)
    # A head that is gone on from has learnt its first step.
    further = {"start_from": tmp_path / "none"}
    on, on_with_two = (weights(f"on {share}", **further, first_step_share=share) for share in (1.0, 0.0))
    assert torch.equal(on["fc.weight"], on_with_two["fc.weight"])
    assert not torch.equal(both["fc.weight"], one_step["fc.weight"])
    assert not torch.equal(both["fc.weight"], two_steps["fc.weight"])


def test_a_killed_run_that_is_taken_up_again_ends_as_one_that_was_not(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 16, None)
    whole = train_quietly(files, target, tmp_path / "whole")

    def kill(report: TrainProgress) -> None:
        if report.step >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(files, target, tmp_path / "killed", RUN, kill)
    assert torch.load(tmp_path / "killed" / STATE)["state"]["step"] == 7  # what came after the last save is lost
    resumed = train_quietly(files, target, tmp_path / "killed")
    assert (resumed.steps, resumed.best_length) == (whole.steps, whole.best_length)
    states = [torch.load(tmp_path / name / STATE) for name in ("whole", "killed")]
    for name, value in states[0]["head"].items():
        assert torch.equal(value, states[1]["head"][name]), name
    written = [weights_of(tmp_path / name) for name in ("whole", "killed")]
    for name, value in written[0].items():
        assert torch.equal(value, written[1][name]), name
    logs = [
        [json.loads(line) for line in (tmp_path / name / LOG).read_text().splitlines()] for name in ("whole", "killed")
    ]
    assert [(line["step"], line["acceptance"]) for line in logs[0]] == [
        (line["step"], line["acceptance"]) for line in logs[1]
    ]


def test_one_seed_gives_one_head_and_another_seed_another(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 8, None)
    runs = {
        name: TrainSettings(**{**vars(RUN), "epochs": 1, "seed": seed}) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    }
    for name, run in runs.items():
        train_quietly(files, target, tmp_path / name, run)
    a, b, c = (torch.load(tmp_path / name / STATE)["head"] for name in runs)
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert not torch.equal(a["fc.weight"], c["fc.weight"])


def test_another_run_in_the_same_folder_is_refused(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 8, None)
    run = TrainSettings(**{**vars(RUN), "epochs": 1})
    train_quietly(files, target, tmp_path / "run", run)
    with pytest.raises(EdgeSpecError, match="learning_rate 0.001, not 0.5"):
        train_quietly(files, target, tmp_path / "run", TrainSettings(**{**vars(run), "learning_rate": 0.5}))
    assert train_quietly(files, target, tmp_path / "run", run).reason == "all epochs are over"
    (tmp_path / "run" / STATE).write_bytes(b"damaged")
    with pytest.raises(EdgeSpecError, match="remove it to begin anew"):
        train_quietly(files, target, tmp_path / "run", run)


def test_training_ends_when_the_time_is_over_or_nothing_gets_better(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 8, None)
    reports: list[TrainProgress] = []
    short = TrainSettings(**{**vars(RUN), "epochs": None, "minutes": 1e-6})
    report = train(files, target, tmp_path / "short", short, reports.append)
    assert (report.steps, report.reason) == (1, "the time is over")
    assert reports[-1].acceptance is not None and (report.folder / "model.safetensors").exists()
    longer = TrainSettings(**{**vars(RUN), "epochs": None, "minutes": 0.01})
    assert train_quietly(files, target, tmp_path / "short", longer).steps > 1  # a limit can be raised afterwards
    idle = replace(RUN, epochs=100, learning_rate=1e-12, evaluate_every=1, patience=2, first_step_share=0.0)
    assert train_quietly(files, target, tmp_path / "idle", idle).steps == 3
    # As long as the first step is learnt alone, patience is not tried.
    half = replace(idle, epochs=4, first_step_share=0.5)
    batches = train_quietly(files, target, tmp_path / "epoch", replace(idle, epochs=1, patience=99)).steps
    assert train_quietly(files, target, tmp_path / "half", half).steps == 2 * batches + 2


def test_a_run_that_learned_all_steps_does_not_go_back(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = texts_of(target, tmp_path / "texts", 8, None)
    learned: list[int] = []

    def spy(student: Student, sample: ColumnSample, steps: int, depth_weight: float) -> torch.Tensor:
        learned.append(steps)
        return batch_loss(student, sample, steps, depth_weight)

    monkeypatch.setattr(trainer, "batch_loss", spy)
    train_quietly(files, target, tmp_path / "run", replace(RUN, epochs=1))
    assert set(learned) == {1, 2} and learned == sorted(learned)
    learned.clear()
    train_quietly(files, target, tmp_path / "run", replace(RUN, epochs=8))
    assert set(learned) == {2}


def test_measurements_come_four_times_an_epoch_but_not_too_often(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = texts_of(target, tmp_path / "texts", 40, None)

    def measured() -> list[int]:
        reports: list[TrainProgress] = []
        run = replace(RUN, epochs=1, batch_tokens=20, evaluate_every=None, first_step_share=1.0)
        train(files, target, tmp_path / str(trainer._LEAST_STEPS), run, reports.append)
        return [report.step for report in reports if report.acceptance is not None]

    [last] = measured()  # at the end
    monkeypatch.setattr(trainer, "_LEAST_STEPS", 1)
    assert measured()[:4] == [last // 4 * quarter for quarter in (1, 2, 3, 4)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", ["target", "random"])
def test_a_head_learns_what_the_taps_tell(target: Path, tmp_path: Path, start: str, precision: str) -> None:
    files = texts_of(target, tmp_path / "texts", 60, lambda tokens: (tokens * 7 + 3) % 50)
    run = TrainSettings(
        epochs=20, batch_tokens=200, draft_vocabulary=64, learning_rate=5e-3, warmup_steps=5, evaluate_every=30,
        steps=1, patience=100, start=start, precision=precision,
    )  # fmt: skip
    reports: list[TrainProgress] = []
    train(files, target, tmp_path / "run", run, reports.append)
    measured = [report.acceptance for report in reports if report.acceptance is not None]
    assert measured[-1].by_position[0] > 0.9


def test_half_precision_makes_another_head_and_a_run_may_change_to_it(target: Path, tmp_path: Path) -> None:
    files = texts_of(target, tmp_path / "texts", 12, lambda tokens: tokens)
    half = replace(RUN, precision="bfloat16")
    for name, first in (("exact", RUN), ("half", half)):
        train_quietly(files, target, tmp_path / name, replace(first, epochs=1))
    exact, rounded = weights_of(tmp_path / "exact"), weights_of(tmp_path / "half")
    assert not torch.equal(exact["fc.weight"], rounded["fc.weight"])
    steps = train_quietly(files, target, tmp_path / "exact", replace(half, epochs=2)).steps
    assert steps == 2 * train_quietly(files, target, tmp_path / "half", replace(half, epochs=1)).steps


def test_training_goes_on_from_a_head_and_is_never_worse_for_it(target: Path, tmp_path: Path) -> None:
    def teach(tokens: np.ndarray) -> np.ndarray:
        taught: np.ndarray = (tokens * 7 + 3) % 50
        return taught

    run = TrainSettings(
        epochs=20, batch_tokens=200, draft_vocabulary=48, intermediate_size=24, learning_rate=5e-3, warmup_steps=5,
        evaluate_every=30, steps=1, patience=100,
    )  # fmt: skip
    first = train_quietly(texts_of(target, tmp_path / "texts", 60, teach), target, tmp_path / "first", run)
    idle = TrainSettings(epochs=1, steps=1, learning_rate=1e-12, start_from=first.folder, seed=1)
    reports: list[TrainProgress] = []
    second = train(TapFiles(tmp_path / "texts"), target, tmp_path / "second", idle, reports.append)
    assert reports[0].step == 0 and reports[0].acceptance is not None
    assert reports[0].acceptance.by_position[0] > 0.8  # another seed holds out other texts
    before, after = weights_of(first.folder), weights_of(second.folder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    damaging = replace(idle, learning_rate=10.0)
    third = train_quietly(TapFiles(tmp_path / "texts"), target, tmp_path / "third", damaging)
    assert third.best_length >= reports[0].acceptance.accepted_length


def test_a_head_of_another_target_is_no_start(target: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", random_model(num_hidden_layers=2, hidden_size=96))
    files = texts_of(target, tmp_path / "texts", 4, None)
    write_head(tmp_path, initial_head(open_checkpoint(other), head_config(open_checkpoint(other), (1, 2), 8, 20),
               "target", 0), np.arange(8))  # fmt: skip
    with pytest.raises(EdgeSpecError, match="made for another target"):
        train_quietly(files, target, tmp_path / "run", TrainSettings(epochs=1, start_from=tmp_path))


def test_what_is_written_is_complete_and_reads_back(target: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target)
    facts = checkpoint.architecture
    ids = np.arange(3, 60, 2, dtype=np.int64)
    config = head_config(checkpoint, (1, 2), len(ids), 20)
    head = initial_head(checkpoint, config, "target", seed=0)
    write_head(tmp_path, head, ids)
    tensors = weights_of(tmp_path)
    hidden, heads, rows = facts.hidden_size, facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "fc.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (rows, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (rows, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (20, hidden),
        "midlayer.mlp.up_proj.weight": (20, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 20),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "d2t": (len(ids),),
        "t2d": (facts.logits_size,),
    }
    types = {name: value.dtype for name, value in tensors.items()}
    assert (types.pop("d2t"), types.pop("t2d")) == (torch.int64, torch.bool)
    assert set(types.values()) == {torch.float16}
    assert (torch.arange(len(ids)) + tensors["d2t"]).tolist() == ids.tolist()
    assert torch.nonzero(tensors["t2d"]).flatten().tolist() == ids.tolist()
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert (fields["vocab_size"], fields["draft_vocab_size"]) == (facts.logits_size, len(ids))

    again, ids_again = read_head(tmp_path)
    assert again.config == config and np.array_equal(ids_again, ids)
    for name, value in head.state_dict().items():
        assert torch.equal(value.half().float(), again.state_dict()[name]), name
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="expected one that was trained here"):
        read_head(tmp_path)


def test_embedding_and_lm_head_are_the_targets(target: Path) -> None:
    checkpoint = open_checkpoint(target)
    ids = np.array([2, 7, 11], np.int64)
    name = "embed_tokens.weight" if checkpoint.architecture.tied_embeddings else "lm_head.weight"
    assert np.array_equal(lm_head_rows(checkpoint, ids), checkpoint.tensor(name)[ids])
    assert torch.equal(read_embedding(checkpoint), torch.from_numpy(checkpoint.tensor("embed_tokens.weight")).half())


def test_the_ids_that_are_needed_most_are_proposed(target: Path) -> None:
    vocabulary = open_checkpoint(target).vocabulary
    shares = np.zeros(vocabulary.size + 8)
    shares[[50, 20, 30]] = 1.0, 3.0, 2.0
    shares[vocabulary.size] = 9.0  # padding, which nobody may sample
    needed = len({*vocabulary.eos_token_ids, *vocabulary.special_token_ids})
    ids = choose_draft_ids(shares, vocabulary, needed + 2)
    assert {20, 30, *vocabulary.eos_token_ids} <= set(ids.tolist()) and 50 not in ids
    assert ids.tolist() == sorted(set(ids.tolist())) and len(ids) == needed + 2


@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_every_text_is_in_one_batch_and_none_is_too_full(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths)
    batches = plan_batches(np.arange(len(sizes)), sizes, 50, np.random.default_rng(seed))
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all(sizes[batch].sum() <= 50 for batch in batches)


def test_the_learning_rate_rises_and_falls() -> None:
    run = TrainSettings(epochs=1, learning_rate=1.0, warmup_steps=9)
    assert learning_rate(run, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(run, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(run, 99, 1.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "give minutes, epochs, or both"),
        ({"minutes": 0}, "minutes is 0"),
        ({"epochs": 1, "steps": 0}, "steps is 0"),
        ({"epochs": 1, "first_step_share": 1.5}, "first_step_share is 1.5"),
        ({"epochs": 1, "negative_samples": 0}, "negative_samples is 0"),
        ({"epochs": 1, "held_out_share": 1.0}, "held_out_share is 1.0"),
        ({"epochs": 1, "start": "zero"}, "start is 'zero'"),
        ({"epochs": 1, "precision": "float16"}, "precision is 'float16'"),
        ({"epochs": "1"}, "epochs is '1'; expected a number"),
        ({"minutes": True}, "minutes is True; expected a number"),
        ({"epochs": 1, "steps": 1.5}, "steps is 1.5; expected a whole number"),
        ({"epochs": 1, "weight_decay": float("inf")}, "weight_decay is inf; expected a finite number"),
        ({"epochs": 1, "device": 5}, "device is 5; expected text"),
        ({"epochs": 1, "kind": []}, "kind is ..; expected text"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgeSpecError, match=message):
        TrainSettings(**wrong)


def test_texts_of_another_target_are_refused(target: Path, tmp_path: Path) -> None:
    files = TapFiles.begin(tmp_path / "texts", TapHeader("digest", (1,), 10, TOP, 0, "none", 8))
    files.append([random_text(index, 12, 3, 10) for index in range(3)])
    with pytest.raises(EdgeSpecError, match="taps of 10 columns"):
        train_quietly(files, target, tmp_path / "run")
