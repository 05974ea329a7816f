"""What is known of all texts before the first batch: how long they are, which are held out, which tokens they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.distill.tap_files import TapFiles
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.text_batch import first_rollout
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.errors import EdgeSpecError


@dataclass(frozen=True)
class TextSurvey:
    """A look at all texts.

    Attributes:
        lengths: int64 [texts], tokens of each that are read.
        training: int64, indices of those to learn from.
        held_out: int64, indices of those to measure with.
        shares: float64 [vocabulary], how often the target expects each id in the answers to learn from.
    """

    lengths: npt.NDArray[np.int64]
    training: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


def survey(files: TapFiles, vocabulary_size: int, tap_width: int | None, settings: TrainSettings) -> TextSurvey:
    """Look at all texts. Those whose answers are too short to draft in are left out.

    Args:
        files: the texts.
        vocabulary_size: ids of the target.
        tap_width: columns that the taps must have; ``None`` if nobody reads them.
        settings: of the run.

    Raises:
        EdgeSpecError: there are too few texts, or they do not fit the target.
    """
    lengths = np.zeros(len(files), np.int64)
    usable = []
    shares = np.zeros(vocabulary_size)
    keys = np.random.default_rng([settings.seed, 0]).permutation(len(files))
    # The measure must not change with the texts that are added, so it has no more tokens than it needs.
    held: list[int] = []
    held_tokens, most_held = 0, max(int(len(files) * settings.held_out_share), 1)
    for index in keys.tolist():
        text = files.read(index)
        _require_fit(text, index, vocabulary_size, tap_width)
        length = min(len(text.token_ids), settings.text_tokens)
        if length - 2 <= first_rollout(text.prompt_length):
            continue
        lengths[index] = length
        usable.append(index)
        holds = len(held) < most_held and held_tokens + length <= settings.held_out_tokens
        if holds or not held:
            held.append(index)
            held_tokens += length
            continue
        rows = slice(first_rollout(text.prompt_length), length)
        mass = np.exp(text.top_log_probs[rows].astype(np.float32))
        np.add.at(shares, text.top_ids[rows].reshape(-1), mass.reshape(-1))
    training = np.sort(np.setdiff1d(usable, held))
    if not len(training):
        raise EdgeSpecError(
            f"{len(files)} texts, {len(usable)} of them with answers of at least two tokens; expected two such texts "
            "at least, one to learn from and one to measure with."
        )
    return TextSurvey(lengths, training, np.sort(np.array(held, np.int64)), shares)


def _require_fit(text: TappedText, index: int, vocabulary_size: int, tap_width: int | None) -> None:
    if tap_width is not None and text.taps.shape[1] != tap_width:
        raise EdgeSpecError(
            f"Text {index} has taps of {text.taps.shape[1]} columns; expected {tap_width}, one of the target's "
            "hidden size for each tap. Were the texts written by this target?"
        )
    ids = (text.token_ids, text.top_ids)
    if len(text.token_ids) and (max(map(np.max, ids)) >= vocabulary_size or min(map(np.min, ids)) < 0):
        raise EdgeSpecError(
            f"Text {index} has token ids below 0, or of {vocabulary_size:,} and above, which the target lacks. Were "
            "the texts written by this target?"
        )


def plan_batches(
    indices: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    batch_tokens: int,
    shuffle: np.random.Generator | None,
) -> list[list[int]]:
    """Put texts together until a batch has about as many tokens as asked for.

    Args:
        indices: int64, the texts.
        lengths: int64 [all texts], in tokens.
        batch_tokens: tokens of a batch. A text that is longer is a batch of its own.
        shuffle: what order to take them in; ``None`` for the order of ``indices``.
    """
    batches: list[list[int]] = []
    filled = batch_tokens
    for index in (indices if shuffle is None else shuffle.permutation(indices)).tolist():
        if filled + lengths[index] > batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += int(lengths[index])
    return batches
