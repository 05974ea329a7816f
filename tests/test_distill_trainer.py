"""Training of a head that drafts: what it learns from, that a kill costs nothing, and what is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from edge_spec.distill.draft_ids import choose_draft_ids
from edge_spec.distill.draft_loss import draft_losses
from edge_spec.distill.head import Head, HeadConfig
from edge_spec.distill.head_files import read_head, write_head
from edge_spec.distill.head_student import HeadStudent
from edge_spec.distill.held_out import measure_acceptance
from edge_spec.distill.initial_weights import head_config, initial_head, read_embedding
from edge_spec.distill.rollout import roll_out
from edge_spec.distill.tap_files import TapFiles, TapHeader
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.text_batch import pack
from edge_spec.distill.text_survey import plan_batches
from edge_spec.distill.train_progress import LOG, TrainProgress
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.trainer import TrainReport, batch_loss, learning_rate, train
from edge_spec.distill.training_state import STATE
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.checkpoint import open_checkpoint
from tiny_models import random_model, save_checkpoint

CONFIG = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_size=8,
    norm_epsilon=1e-5,
    rope_theta=100.0,
    vocabulary_size=40,
    draft_vocabulary_size=25,
    tap_layers=(1, 2),
    context_length=64,
)
TOP = 8


def random_head(config: HeadConfig = CONFIG, seed: int = 0) -> Head:
    head = Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return head


def random_text(seed: int, length: int, prompt: int, width: int = 32, vocabulary: int = 40) -> TappedText:
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(vocabulary, 0.1), length)
    top = np.argsort(-shares, axis=1)[:, :TOP]
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.take_along_axis(shares, top, 1)).astype(np.float16)
    log_probs[: max(prompt - 1, 0)] = 0
    return TappedText(
        generator.integers(0, vocabulary, length).astype(np.int32),
        prompt,
        generator.standard_normal((length, width)).astype(np.float16),
        top.astype(np.int32),
        log_probs,
    )


def columns_of(ids: np.ndarray, vocabulary: int = 40) -> torch.Tensor:
    columns = torch.full((vocabulary,), -1)
    columns[torch.from_numpy(ids)] = torch.arange(len(ids))
    return columns


IDS = np.sort(np.random.default_rng(5).permutation(40)[:25]).astype(np.int64)
EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))


class CachedHead:
    """Inference as it is told in the papers: one row at a time, with a cache."""

    def __init__(self, head: Head) -> None:
        self.weights = {name: value.double() for name, value in head.state_dict().items()}
        self.config = head.config
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.sqrt((values**2).mean() + self.config.norm_epsilon)
        return values / scale * self.weights[name]

    def rotated(self, vector: torch.Tensor, position: int) -> torch.Tensor:
        half = self.config.head_size // 2
        result = vector.clone()
        for index in range(half):
            angle = position * self.config.rope_theta ** (-index / half)
            first, second = vector[index], vector[index + half]
            result[index] = first * math.cos(angle) - second * math.sin(angle)
            result[index + half] = second * math.cos(angle) + first * math.sin(angle)
        return result

    def feed(self, feature: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, size, attention = self.weights, self.config.head_size, "midlayer.self_attn."
        position = len(self.keys)
        pair = torch.cat(
            [self.norm(embedded, "midlayer.input_layernorm.weight"), self.norm(feature, "midlayer.hidden_norm.weight")]
        )
        queries = (weights[attention + "q_proj.weight"] @ pair).view(-1, size)
        keys = (weights[attention + "k_proj.weight"] @ pair).view(-1, size)
        self.keys.append(torch.stack([self.rotated(key, position) for key in keys]))
        self.values.append((weights[attention + "v_proj.weight"] @ pair).view(-1, size))
        group = self.config.heads // self.config.kv_heads
        mixed = []
        for index, query in enumerate(queries):
            turned = self.rotated(query, position)
            scores = torch.stack([turned @ key[index // group] for key in self.keys]) / math.sqrt(size)
            shares = scores.softmax(0)
            mixed.append(sum(share * value[index // group] for share, value in zip(shares, self.values, strict=True)))
        stream = feature + weights[attention + "o_proj.weight"] @ torch.cat(mixed)
        normed = self.norm(stream, "midlayer.post_attention_layernorm.weight")
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        output = stream + weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return output, weights["lm_head.weight"] @ self.norm(output, "norm.weight")

    def rewind(self, length: int) -> None:
        del self.keys[length:], self.values[length:]


def drafted_one_by_one(head: Head, text: TappedText, steps: int) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of each draft from each row of the answer, by (start, step)."""
    cached, found = CachedHead(head), {}
    taps, tokens = torch.from_numpy(text.taps).double(), text.token_ids.tolist()
    for row in range(len(tokens) - 2):
        feature = cached.weights["fc.weight"] @ taps[row]
        output, logits = cached.feed(feature, EMBEDDING[tokens[row + 1]].double())
        if row >= text.prompt_length - 1:
            found[row, 0] = logits
            for step in range(1, min(steps, len(tokens) - 2 - row)):
                output, logits = cached.feed(output, EMBEDDING[tokens[row + step + 1]].double())
                found[row, step] = logits
            cached.rewind(row + 1)
    return found


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_all_rollouts_at_once_are_what_drafting_one_by_one_gives(
    lengths: list[tuple[int, int]], steps: int, seed: int
) -> None:
    texts = [random_text(seed + at, prompt + answer, prompt) for at, (prompt, answer) in enumerate(lengths)]
    head = random_head(seed=seed)
    expected = [drafted_one_by_one(head, text, steps) for text in texts]
    batch = pack(texts, columns_of(IDS), most=64)
    with torch.no_grad():
        outcomes = list(roll_out(head, EMBEDDING, batch, steps))
    seen = 0
    for step, outcome in enumerate(outcomes):
        logits = head.logits(outcome.outputs)
        for row, given_logits in zip(outcome.rows.tolist(), logits, strict=True):
            text = max(at for at, span in enumerate(batch.spans) if span.start <= row)
            start = row - batch.spans[text].start - step - 1
            torch.testing.assert_close(given_logits.double(), expected[text][start, step], atol=1e-4, rtol=1e-4)
            seen += 1
    assert seen == sum(map(len, expected))


def test_only_what_an_answer_is_drafted_from_and_compared_with_moves_the_weights() -> None:
    run = TrainSettings(epochs=1, steps=3)
    text = random_text(1, 20, 8)

    def gradient(changed: TappedText) -> torch.Tensor:
        head = random_head()
        student = HeadStudent(head, EMBEDDING, IDS, run.steps)
        batch_loss(student, pack([changed], columns_of(IDS), 64), run).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in head.parameters() if parameter.grad is not None])

    def changed(rows: slice, **fields: Any) -> TappedText:
        arrays = {name: getattr(text, name).copy() for name in ("token_ids", "taps", "top_ids", "top_log_probs")}
        for name, value in fields.items():
            arrays[name][rows] = value
        return TappedText(prompt_length=8, **arrays)

    unchanged = gradient(text)
    # Row 8 tells what follows the first token of the answer, which is the first that is ever drafted.
    assert torch.equal(gradient(changed(slice(0, 8), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert torch.equal(gradient(changed(slice(19, 20), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert torch.equal(gradient(changed(slice(18, 20), taps=3.0)), unchanged)
    assert not torch.equal(gradient(changed(slice(8, 9), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert not torch.equal(gradient(changed(slice(18, 19), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert not torch.equal(gradient(changed(slice(0, 1), taps=3.0)), unchanged)  # the prompt is read


def test_each_step_weighs_less_than_the_one_before() -> None:
    batch = pack([random_text(2, 20, 8)], columns_of(IDS), 64)
    head = random_head()
    of_steps = []
    for step, outcome in enumerate(roll_out(head, EMBEDDING, batch, 3)):
        probabilities = batch.probabilities[outcome.rows]
        cross_entropy, overlap = draft_losses(head.logits(outcome.outputs), batch.columns[outcome.rows], probabilities)
        of_steps.append(0.5**step * (cross_entropy + probabilities.sum(1) - overlap).sum() / 11)
    loss = batch_loss(HeadStudent(head, EMBEDDING, IDS, 3), batch, TrainSettings(epochs=1, steps=3, depth_weight=0.5))
    torch.testing.assert_close(loss, sum(of_steps))


def test_losses_are_cross_entropy_and_overlap_with_the_tokens_that_the_head_has() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    # Of the second row the likeliest token (0.7) is not in the draft vocabulary.
    columns, probabilities = torch.tensor([[2, 0], [0, 1]]), torch.tensor([[0.6, 0.3], [0.0, 0.2]])
    cross_entropy, overlap = draft_losses(logits, columns, probabilities)
    q = logits.softmax(1)
    expected = -0.6 * math.log(q[0, 2]) - 0.3 * math.log(q[0, 0])
    assert cross_entropy.tolist() == pytest.approx([expected, -0.2 * math.log(1 / 3)])
    assert overlap.tolist() == pytest.approx([0.6 + float(q[0, 0]), 0.2])


def test_gradients_of_the_losses_are_those_of_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    columns = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(5)])
    columns[:, 3] = columns[:, 0]  # what the draft vocabulary lacks stands in some column, too
    probabilities = torch.rand(5, 4, generator=generator, dtype=torch.float64) / 4
    probabilities[:, 3] = 0
    weights = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    log_q = logits.log_softmax(1).gather(1, columns)
    plain = -(probabilities * log_q).sum(1), torch.minimum(probabilities, log_q.exp()).sum(1)
    gradients = []
    for losses in (plain, draft_losses(logits, columns, probabilities)):
        total = sum((weight * loss).sum() for weight, loss in zip(weights, losses, strict=True))
        gradients.append(torch.autograd.grad(total, logits)[0])
    torch.testing.assert_close(*gradients)


def test_acceptance_counts_drafts_up_to_the_first_wrong_token() -> None:
    # Four ids, the first three proposed. The head is made to propose the id of the token it has read last.
    config = HeadConfig(4, 1, 1, 1, 4, 1e-6, 100.0, 4, 3, (1,), 64)
    head = Head(config)
    embedding = torch.eye(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
            head.get_submodule(name).weight.fill_(1.0)
        # Rows see none but themselves: the key of the same embedding is nearest by far.
        head.midlayer.self_attn.q_proj.weight[:, :4] = 100 * torch.eye(4)
        head.midlayer.self_attn.k_proj.weight[:, :4] = 100 * torch.eye(4)
        head.midlayer.self_attn.v_proj.weight[:, :4] = torch.eye(4)
        head.midlayer.self_attn.o_proj.weight.copy_(1000 * torch.eye(4))
        head.lm_head.weight.copy_(torch.eye(4)[:3])
    head.rotate.sines.zero_()
    head.rotate.cosines.fill_(1.0)
    tokens = np.array([3, 0, 0, 0, 1, 3], np.int32)
    likeliest = np.array([0, 0, 0, 1, 3, 0])
    text = TappedText(
        tokens,
        1,
        np.zeros((6, 4), np.float16),
        likeliest[:, None].astype(np.int32),
        np.full((6, 1), math.log(0.5), np.float16),
    )
    batch = pack([text], columns_of(np.arange(3), 4), 64)
    measured = measure_acceptance(HeadStudent(head, embedding, np.arange(3)), [batch])
    # Starts are rows 0 to 3. At step 0 they read 0, 0, 0, 1 and propose that; the target wants 0, 0, 1, 3.
    # At step 1 row 0 proposes 0 and is right, row 1 proposes 0 where 1 is wanted. At step 2 row 0 proposes 0, wanted 1.
    assert measured.by_position == pytest.approx((2 / 4, 1 / 2, 0.0, 0.0))
    assert measured.accepted_length == pytest.approx(0.5 + 0.25)
    assert measured.rollouts == 4
    # In the first row that can be right q is all but one for the id, and p is a half.
    assert measured.overlap == pytest.approx((0.5 + 0.5 + 0.0 + 0.0) / 4, abs=0.05)


def test_a_sampled_token_that_is_not_the_likeliest_ends_what_is_measured() -> None:
    text = random_text(3, 12, 3)
    batch = pack([text], columns_of(IDS), 64)
    likeliest = text.top_ids[:, 0]
    agrees = likeliest[text.prompt_length : -2] == text.token_ids[text.prompt_length + 1 : -1]
    assert not agrees.any()
    measured = measure_acceptance(HeadStudent(random_head(), EMBEDDING, IDS), [batch])
    assert measured.by_position[1:] == (0.0, 0.0, 0.0)


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
    idle = TrainSettings(**{**vars(RUN), "epochs": 100, "learning_rate": 1e-12, "evaluate_every": 1, "patience": 2})
    assert train_quietly(files, target, tmp_path / "idle", idle).steps == 3


def test_a_half_precise_logit_costs_the_losses_no_more_than_its_own_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    rounded = torch.randn(5, 9, generator=generator).bfloat16()
    columns = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(5)])
    probabilities = torch.rand(5, 4, generator=generator) / 4
    exact, half = (logits.detach().requires_grad_() for logits in (rounded.float(), rounded))
    sums = [sum(loss.sum() for loss in draft_losses(logits, columns, probabilities)) for logits in (exact, half)]
    assert sums[0].detach() == sums[1].detach()
    gradients = [torch.autograd.grad(total, logits)[0] for total, logits in zip(sums, (exact, half), strict=True)]
    assert torch.equal(gradients[0].bfloat16(), gradients[1])


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
    assert not torch.equal(exact["lm_head.weight"], rounded["lm_head.weight"])
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
               np.arange(8), "target", 0), np.arange(8))  # fmt: skip
    with pytest.raises(EdgeSpecError, match="made for another target"):
        train_quietly(files, target, tmp_path / "run", TrainSettings(epochs=1, start_from=tmp_path))


def test_what_is_written_is_complete_and_reads_back(target: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target)
    facts = checkpoint.architecture
    ids = np.arange(3, 60, 2, dtype=np.int64)
    config = head_config(checkpoint, (1, 2), len(ids), 20)
    head = initial_head(checkpoint, config, ids, "target", seed=0)
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
        "lm_head.weight": (len(ids), hidden),
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
    with pytest.raises(CheckpointError, match="train it again"):
        read_head(tmp_path)


def test_a_head_starts_with_the_rows_of_the_targets_lm_head(target: Path) -> None:
    checkpoint = open_checkpoint(target)
    ids = np.array([2, 7, 11], np.int64)
    head = initial_head(checkpoint, head_config(checkpoint, (1, 2), 3, None), ids, "random", seed=0)
    name = "embed_tokens.weight" if checkpoint.architecture.tied_embeddings else "lm_head.weight"
    assert torch.equal(head.lm_head.weight.detach(), torch.from_numpy(checkpoint.tensor(name)[ids]))
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
        ({"epochs": 1, "held_out_share": 1.0}, "held_out_share is 1.0"),
        ({"epochs": 1, "start": "zero"}, "start is 'zero'"),
        ({"epochs": 1, "precision": "float16"}, "precision is 'float16'"),
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
