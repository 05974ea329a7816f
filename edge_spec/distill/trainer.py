"""Trains a draft for a target from the texts that the target wrote."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from edge_spec.distill.column_sample import ColumnSample, sample_columns
from edge_spec.distill.draft_loss import draft_losses
from edge_spec.distill.head_student import begin_head
from edge_spec.distill.held_out import Acceptance, measure_acceptance
from edge_spec.distill.student import Student
from edge_spec.distill.tap_files import TapFiles
from edge_spec.distill.text_batch import TextBatch, pack
from edge_spec.distill.text_survey import TextSurvey, plan_batches, survey
from edge_spec.distill.tiny_student import begin_tiny
from edge_spec.distill.train_progress import TrainProgress, forget_after
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.training_state import TrainingState
from edge_spec.distill.work_folder import disk_errors_told
from edge_spec.errors import EdgeSpecError
from edge_spec.export.checkpoint import open_checkpoint

# Seconds from one report to the next.
_REPORT_EVERY = 20.0
# What counts as better, in accepted tokens.
_BETTER = 0.002
# Measurements in an epoch, and from one to the next so many steps at least.
_MEASURED_IN_EPOCH, _LEAST_STEPS = 4, 200
# Of the highest learning rate, what is left at the end.
_LAST_RATE = 0.05


@dataclass(frozen=True)
class TrainReport:
    """How a run ended.

    Attributes:
        folder: where the best draft was written.
        steps: batches learnt from.
        tokens: tokens read, those of prompts too.
        seconds: time spent.
        best_length: the accepted length of the draft that was written.
        reason: why the run is over.
    """

    folder: Path
    steps: int
    tokens: int
    seconds: float
    best_length: float
    reason: str


def train(
    files: TapFiles,
    target_checkpoint: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    settings: TrainSettings,
    progress: Callable[[TrainProgress], None],
    threads: int | None = None,
) -> TrainReport:
    """Train a draft, or go on with a run that was killed.

    Without ``minutes`` one seed gives one draft on the same machine with as many threads, whether the run was killed on
    the way or not. With ``minutes`` the learning rate follows the clock.

    Args:
        files: texts that the target wrote.
        target_checkpoint: the target's float weights: a GGUF file, a Hugging Face folder or a name on the hub.
        output_folder: where the draft, the log and the state are written; created if need be.
        settings: how to train.
        progress: told every some seconds, and of every measurement.
        threads: of the CPU; ``None`` for torch's choice.

    Raises:
        CheckpointError: the target's weights cannot be read.
        EdgeSpecError: texts and target do not fit, or the folder holds another run.
    """
    folder = Path(output_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EdgeSpecError(f"{folder} cannot be written: {error.strerror or error}; name another folder.") from error
    require_device(settings.device)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads or usual)
    try:
        return _Run(files, target_checkpoint, folder, settings, progress).finish()
    finally:
        torch.set_num_threads(usual)


def require_device(device: str) -> None:
    """Raise EdgeSpecError if there is no such device."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise EdgeSpecError(f"The device is {device!r}, but torch finds no CUDA device; expected 'cpu'.")
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise EdgeSpecError(f"The device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices.")


def learning_rate(settings: TrainSettings, step: int, done: float) -> float:
    """The learning rate of a step: a straight rise, then a cosine.

    Args:
        settings: of the run.
        step: counted from 0.
        done: which part of the run is over, from 0 to 1.
    """
    rise = min((step + 1) / (settings.warmup_steps + 1), 1.0)
    fall = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return settings.learning_rate * rise * fall


def batch_loss(student: Student, sample: ColumnSample, steps: int, depth_weight: float) -> Tensor:
    """The loss of a batch: cross-entropy and total variation, over all steps, per rollout.

    Args:
        student: drafts.
        sample: the texts, and of which columns the logits are compared.
        steps: of the rollouts that are learnt from.
        depth_weight: how much each step weighs, in terms of the one before.
    """
    batch = sample.batch
    total = torch.zeros((), device=batch.token_ids.device)
    rollouts = 0
    for step, drafted in enumerate(student.roll_out(batch, steps, sample.columns)):
        rollouts = rollouts or len(drafted.rows)
        probabilities = batch.probabilities[drafted.rows]
        logits = drafted.logits + sample.offsets.to(drafted.logits.dtype)
        cross_entropy, overlap = draft_losses(logits, batch.columns[drafted.rows], probabilities)
        rows = cross_entropy + probabilities.sum(1) - overlap
        total = total + depth_weight**step * rows.sum()
    return total / max(rollouts, 1)


class _Run:
    """One run of training."""

    def __init__(
        self,
        files: TapFiles,
        target_checkpoint: str | os.PathLike[str],
        folder: Path,
        settings: TrainSettings,
        progress: Callable[[TrainProgress], None],
    ) -> None:
        self._files, self._folder, self._settings, self._progress = files, folder, settings, progress
        checkpoint = open_checkpoint(target_checkpoint)
        facts, header = checkpoint.architecture, files.header
        tap_width = len(header.taps) * facts.hidden_size if settings.reads_taps else None
        self._survey: TextSurvey = survey(files, facts.logits_size, tap_width, settings)
        self._student: Student
        if settings.kind == "head":
            self._student = begin_head(checkpoint, header.taps, self._survey.shares, settings)
        else:
            self._student = begin_tiny(checkpoint, self._survey.shares, settings)
        ids = torch.from_numpy(self._student.draft_ids)
        self._column_of = torch.full((facts.logits_size,), -1)
        self._column_of[ids] = torch.arange(len(ids))
        parameters = list(self._student.network.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
            {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
        ]
        self._mixed = torch.autocast(
            torch.device(settings.device).type, torch.bfloat16, enabled=settings.precision == "bfloat16"
        )
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self._made_of = {
            **settings.fixed(),
            "texts": asdict(header),
            "tokens": int(self._survey.lengths.sum()),
            "target": checkpoint.sha256(),
        }
        self._state = TrainingState.load(folder, self._made_of, self._student.network, self._optimizer)
        with disk_errors_told(folder):
            forget_after(folder, self._state.step)
        self._batches, self._rate = self._plan(self._state.epoch), 0.0
        often = max(len(self._plan(0)) // _MEASURED_IN_EPOCH, _LEAST_STEPS)
        self._evaluate_every = often if settings.evaluate_every is None else settings.evaluate_every
        self._began = time.monotonic() - self._state.seconds
        # Since the last report.
        self._reported, self._tokens_reported, self._losses = self._now(), self._state.tokens, list[float]()
        self._saved = self._now()

    def finish(self) -> TrainReport:
        """Train until the run is over."""
        state = self._state
        if self._done() < 1 and state.worse < self._settings.patience:
            state.finished = ""  # a limit was raised
        if state.step == 0 and self._settings.start_from is not None:
            self._report(self._measure())  # what is to be improved on
        while not state.finished:
            if state.batch == len(self._batches):
                state.epoch, state.batch = state.epoch + 1, 0
                self._batches = self._plan(state.epoch)
            self._learn(self._batches[state.batch])
            over = self._done() >= 1
            if over:
                state.finished = "the time is over" if self._out_of_time() else "all epochs are over"
            if over or state.step % self._evaluate_every == 0:
                self._report(self._measure())
            elif self._now() - self._reported >= _REPORT_EVERY:
                self._report(None)
            if self._now() - self._saved >= self._settings.save_minutes * 60:
                self._save()
        self._save()
        return TrainReport(self._folder, state.step, state.tokens, state.seconds, state.best_length, state.finished)

    def _plan(self, epoch: int) -> list[list[int]]:
        order = np.random.default_rng([self._settings.seed, 1, epoch])
        return plan_batches(self._survey.training, self._survey.lengths, self._settings.batch_tokens, order)

    def _learn(self, indices: list[int]) -> None:
        state = self._state
        self._rate = learning_rate(self._settings, state.step, self._done())
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
        batch = self._read(indices)
        sample = self._sample(batch)
        state.all_steps = state.all_steps or self._is_past_first_step()
        steps = self._student.learned_steps if state.all_steps else 1
        with self._mixed:
            loss = batch_loss(self._student, sample, steps, self._settings.depth_weight)
        self._require_finite(loss, batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._student.network.parameters(), self._settings.clip)
        self._optimizer.step()
        state.step, state.batch, state.tokens = state.step + 1, state.batch + 1, state.tokens + len(batch.token_ids)
        self._losses.append(loss.item())

    def _is_past_first_step(self) -> bool:
        """Whether there is more to learn now than the first step alone. A draft to go on from knows its first one."""
        settings = self._settings
        has_others = self._student.learned_steps > 1 and settings.start_from is None
        return not has_others or self._done() >= settings.first_step_share

    def _sample(self, batch: TextBatch) -> ColumnSample:
        settings, dice = self._settings, np.random.default_rng([self._settings.seed, 2, self._state.step])
        vocabulary = len(self._student.draft_ids)
        return sample_columns(batch, vocabulary, settings.expected_tokens, settings.negative_samples, dice)

    def _require_finite(self, loss: Tensor, batch: TextBatch) -> None:
        """Raise EdgeSpecError before a step spoils the weights for good."""
        if loss.isfinite():
            return
        if not (batch.taps.isfinite().all() and batch.probabilities.isfinite().all()):
            raise EdgeSpecError(
                f"Texts in {self._files.folder} hold values that are infinite or not a number: they are damaged; "
                "write the texts anew in another folder."
            )
        raise EdgeSpecError(
            f"Training has failed: after {self._state.step} steps the loss is {loss.item()}. Begin another run with a "
            f"lower learning rate (--learning-rate) than {self._settings.learning_rate:g}."
        )

    def _read(self, indices: list[int]) -> TextBatch:
        texts = [self._files.read(index) for index in indices]
        settings = self._settings
        return pack(texts, self._column_of, settings.text_tokens, settings.reads_taps).to(settings.device)

    def _measure(self) -> Acceptance:
        """Measure on the held-out texts; write the draft if it is the best so far."""
        began = self._now()
        batches = plan_batches(self._survey.held_out, self._survey.lengths, self._settings.batch_tokens, None)
        measured = measure_acceptance(self._student, map(self._read, batches))
        state = self._state
        if measured.accepted_length > state.best_length:
            with disk_errors_told(self._folder, SafetensorError):
                self._student.write(self._folder)
        # What is learnt of the first step alone is to be built on, whether or not it shows.
        better = measured.accepted_length > state.best_length + _BETTER
        state.worse = 0 if better or not state.all_steps else state.worse + 1
        state.best_length = max(measured.accepted_length, state.best_length)
        if state.worse >= self._settings.patience:
            state.finished = f"{state.worse} measurements brought nothing better"
        self._reported += self._now() - began  # no part of the speed at which it learns
        return measured

    def _report(self, measured: Acceptance | None) -> None:
        state, done, now = self._state, self._done(), self._now()
        report = TrainProgress(
            step=state.step,
            epochs=state.epoch + state.batch / len(self._batches),
            loss=sum(self._losses) / max(len(self._losses), 1),
            learning_rate=self._rate,
            tokens_per_second=(state.tokens - self._tokens_reported) / max(now - self._reported, 1e-9),
            seconds=now,
            seconds_left=now * (1 / done - 1) if done and not state.finished else 0.0,
            acceptance=measured,
        )
        with disk_errors_told(self._folder):
            report.append_to(self._folder)
        self._progress(report)
        self._reported, self._tokens_reported, self._losses = self._now(), state.tokens, []

    def _save(self) -> None:
        self._state.seconds = self._now()
        with disk_errors_told(self._folder, RuntimeError):  # torch's writer of archives raises that
            self._state.save(self._folder, self._made_of, self._student.network, self._optimizer)
        self._saved = self._now()

    def _now(self) -> float:
        """Seconds that the run has taken, its earlier parts counted in."""
        return time.monotonic() - self._began

    def _out_of_time(self) -> bool:
        return self._settings.minutes is not None and self._now() >= self._settings.minutes * 60

    def _done(self) -> float:
        """Which part of the run is over, from 0 to 1, by the limit that is nearer."""
        settings, state = self._settings, self._state
        parts = []
        if settings.minutes is not None:
            parts.append(self._now() / (settings.minutes * 60))
        if settings.epochs is not None:
            parts.append((state.epoch + state.batch / len(self._batches)) / settings.epochs)
        return max(parts)
