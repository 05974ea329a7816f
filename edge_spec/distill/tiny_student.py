"""A tiny draft model in training. It reads tokens alone, so its own drafts look to it as any text does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_spec.distill.draft_folder import require_draft
from edge_spec.distill.draft_ids import choose_draft_ids
from edge_spec.distill.initial_weights import read_embedding
from edge_spec.distill.student import DraftedStep, Ids
from edge_spec.distill.text_batch import TextBatch
from edge_spec.distill.tiny_files import TinyFiles, read_draft_ids
from edge_spec.distill.tiny_model import CLASSES, TinyModel
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.errors import EdgeSpecError, UnsupportedError
from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Checkpoint, open_checkpoint
from edge_spec.export.lm_head_rows import lm_head_rows

_SPREAD = 0.02


class TinyStudent:
    """Implements :class:`~edge_spec.distill.student.Student`.

    One step of each rollout is learnt from: the later ones are the first steps of the next rollouts.
    """

    learned_steps = 1

    def __init__(
        self, network: TinyModel, embedding: Tensor, lm_head: Tensor, draft_ids: Ids, files: TinyFiles
    ) -> None:
        """Put together what drafts.

        Args:
            network: the layers.
            embedding: [vocabulary, hidden], the target's.
            lm_head: float32 [draft vocabulary, hidden], the target's rows.
            draft_ids: int64 [draft vocabulary], ascending.
            files: write it.
        """
        self.network, self.draft_ids = network, draft_ids
        self._embedding, self._lm_head, self._files = embedding, lm_head, files

    def roll_out(self, batch: TextBatch, steps: int, columns: Tensor | None = None) -> Iterator[DraftedStep]:
        """Read each text once: what a rollout gives at a step is what the row gives that the step has read last."""
        spans, rows = batch.spans, batch.starts(0) + 1
        if not len(rows):
            return
        read = torch.cat([torch.arange(span.start, span.start + span.rows + 1) for span in spans]).to(rows.device)
        outputs = self.network(
            self._embedding[batch.token_ids[read]].float(),
            batch.positions[read],
            [span.rows + 1 for span in spans],
            [span.rollouts(0) for span in spans],
        )
        logits = outputs @ (self._lm_head if columns is None else self._lm_head[columns]).T
        yield DraftedStep(rows, logits)
        place = torch.empty_like(batch.token_ids)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for step in range(1, steps):
            rows = batch.starts(step) + step + 1
            if not len(rows):
                return
            yield DraftedStep(rows, logits[place[rows]])

    def write(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self._files.write(folder, self.network, self._embedding, self.draft_ids)


def tiny_to_begin_with(checkpoint: Checkpoint, settings: TrainSettings) -> tuple[Checkpoint, Ids] | None:
    """The tiny model that ``start_from`` names, with the ids that it proposes; ``None`` if it names none.

    Args:
        checkpoint: the target.
        settings: of the run.

    Raises:
        UnsupportedError: the target is of a family whose layers are not built.
        EdgeSpecError: the target has fewer layers than are asked for, or the tiny model is made for another one.
    """
    facts = checkpoint.architecture
    _require_supported(facts, checkpoint.source)
    if settings.start_from is None:
        spread_layers(settings.layers, facts.layers)
        return None
    require_draft(settings.start_from, "tiny")
    source, ids = open_checkpoint(settings.start_from), read_draft_ids(settings.start_from)
    if replace(source.architecture, attention=()) != replace(facts, attention=()) or ids[-1] >= facts.logits_size:
        raise EdgeSpecError(
            f"The draft in {settings.start_from} is made for another target: it has {source.architecture}, "
            f"expected the sizes of {facts}."
        )
    return source, ids


def begin_tiny(checkpoint: Checkpoint, shares: npt.NDArray[np.float64], settings: TrainSettings) -> TinyStudent:
    """A tiny model to start with.

    Args:
        checkpoint: the target.
        shares: float64 [vocabulary], how often the target expects each id.
        settings: of the run.

    Raises:
        UnsupportedError: the target is of a family whose layers are not built.
        EdgeSpecError: it has fewer layers than are asked for, or the draft to go on from is made for another target.
    """
    facts = checkpoint.architecture
    begun = tiny_to_begin_with(checkpoint, settings)
    if begun is None:
        source, layers = checkpoint, spread_layers(settings.layers, facts.layers)
        ids = choose_draft_ids(shares, checkpoint.vocabulary, settings.draft_vocabulary)
    else:
        source, ids = begun
        layers = tuple(range(source.architecture.layers))
    tiny = replace(facts, attention=tuple(facts.attention[0] for _ in layers))
    network = TinyModel(tiny, min(facts.context_length, settings.text_tokens))
    _initialize(network, source, layers, settings)
    device = settings.device
    lm_head = torch.from_numpy(lm_head_rows(checkpoint, ids)).to(device)
    embedding = read_embedding(checkpoint).to(device)
    return TinyStudent(network.to(device), embedding, lm_head, ids, TinyFiles(checkpoint, tiny))


def spread_layers(wanted: int, there: int) -> tuple[int, ...]:
    """Return which layers a tiny model starts with: the first, the last, and between them evenly.

    Args:
        wanted: layers of the tiny model.
        there: layers of the target.

    Raises:
        EdgeSpecError: the target has fewer.
    """
    if wanted > there:
        raise EdgeSpecError(f"layers is {wanted}, but the target has {there}; ask for a few of them, such as 2.")
    if wanted == 1:
        return (0,)
    return tuple(round(index * (there - 1) / (wanted - 1)) for index in range(wanted))


def _initialize(network: TinyModel, source: Checkpoint, layers: tuple[int, ...], settings: TrainSettings) -> None:
    """Give the network the weights of these layers of a checkpoint, or random ones, and the final norm."""
    generator = torch.Generator().manual_seed(settings.seed)
    random = settings.start == "random" and settings.start_from is None
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if random and name != "norm.weight":
                if name.endswith(".bias"):
                    parameter.zero_()
                elif parameter.dim() == 2:
                    parameter.normal_(0.0, _SPREAD, generator=generator)
                continue
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                name = f"layers.{layers[int(index)]}.{rest}"
            parameter.copy_(torch.from_numpy(source.tensor(name)))


def _require_supported(facts: Architecture, source: str) -> None:
    """Raise UnsupportedError for a target whose layers are not those of :mod:`edge_spec.distill.tiny_model`."""
    if facts.family not in CLASSES:
        raise UnsupportedError(
            f"{source} is a {facts.family}, whose layers a tiny model cannot have; supported are {', '.join(CLASSES)}. "
            "Train a head instead (--kind head)."
        )
    usual = facts.qkv_bias == (facts.family == "qwen2") and not (facts.output_bias or facts.mlp_bias)
    rotated = len(set(facts.attention)) == 1 and [rope.size for rope in facts.ropes] == [facts.head_size]
    for kind, fits in (
        ("biases other than those of its family", usual),
        ("layers that see a window of the text", facts.window is None),
        ("heads that are rotated in part", rotated),
    ):
        if not fits:
            raise UnsupportedError(
                f"{source} has {kind}, which a tiny model cannot have; train a head instead (--kind head)."
            )
