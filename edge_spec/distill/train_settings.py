"""What a training run may be told."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from edge_spec.errors import EdgeSpecError

# What may change between a run and the one that takes it up again.
_CHANGEABLE = ("minutes", "epochs", "patience", "save_minutes", "device", "precision")

# What is trained: a head that reads the target's hidden states, or a draft model of a few of its layers.
Kind = Literal["head", "tiny"]
# Longer chains than this are not drafted.
_MOST_STEPS = 16
# What only one kind has.
_OWN: dict[Kind, tuple[str, ...]] = {
    "head": ("intermediate_size", "steps", "first_step_share", "depth_weight"),
    "tiny": ("layers",),
}


@dataclass(frozen=True)
class TrainSettings:
    """How a draft is trained.

    Attributes:
        minutes: how long to train; ``None`` for no limit. Saves and held-out texts are counted in.
        epochs: how often to read each text; ``None`` for no limit. One of the two is needed.
        kind: of draft.
        draft_vocabulary: ids that the draft proposes at most.
        intermediate_size: of a head's MLP; ``None`` for the target's.
        steps: how many steps of its own drafting a head learns from.
        first_step_share: part of the run in which a head learns its first step alone, which takes a fraction of the
            time and is what the later ones build on; none of it with ``start_from``.
        depth_weight: how much each step weighs, in terms of the one before.
        layers: of a tiny model.
        expected_tokens: of each row's likeliest tokens, how many all rows of a batch learn to tell apart.
        negative_samples: ids drawn from the rest of the draft vocabulary that stand for all of it in a batch.
        learning_rate: the highest one.
        warmup_steps: steps until it is reached; after that it falls as a cosine.
        weight_decay: of the matrices.
        clip: the longest gradient.
        batch_tokens: tokens of a batch, about.
        text_tokens: tokens of a text that are read at most.
        held_out_share: share of the texts that are kept back to measure acceptance.
        held_out_tokens: tokens of those texts at most.
        evaluate_every: steps from one measurement to the next; ``None`` for four in an epoch, at least 200 steps apart.
        patience: measurements without a better one after which to stop, those of the first step alone not counted.
        save_minutes: minutes from one saved state to the next; 0 for every step.
        seed: of the weights and of the order of the texts.
        device: ``cpu`` or ``cuda``.
        precision: of the matrix products. Weights, losses and the optimizer stay in float32, and so does what is
            measured.
        start: what weights to start from: those of the target (a head has its last layer, a tiny model some of them,
            evenly spaced), or random ones. The embedding, the final norm and lm_head are the target's in any case.
        start_from: folder of a draft of this kind to go on from instead; it says which ids are proposed, and how large
            a head's MLP is or how many layers a tiny model has.
    """

    minutes: float | None = None
    epochs: float | None = None
    kind: Kind = "head"
    draft_vocabulary: int = 16384
    intermediate_size: int | None = None
    steps: int = 3
    first_step_share: float = 0.5
    depth_weight: float = 0.8
    layers: int = 2
    expected_tokens: int = 16
    negative_samples: int = 1024
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    batch_tokens: int = 1024
    text_tokens: int = 2048
    held_out_share: float = 0.05
    held_out_tokens: int = 20_000
    evaluate_every: int | None = None
    patience: int = 8
    save_minutes: float = 3.0
    seed: int = 0
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    start: Literal["target", "random"] = "target"
    start_from: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Raise EdgeSpecError for a value out of its range."""
        self._check_types()
        if self.minutes is None and self.epochs is None:
            raise EdgeSpecError("Training needs an end: give minutes, epochs, or both.")
        if self.kind not in _OWN:
            raise EdgeSpecError(f"kind is {self.kind!r}; expected 'head' or 'tiny'.")
        for kind, names in _OWN.items():
            for name in names:
                if kind != self.kind and getattr(self, name) != getattr(TrainSettings, name):
                    raise EdgeSpecError(f"{name} is for kind={kind!r}, but the kind is {self.kind!r}; leave it out.")
        for name in ("minutes", "epochs", "learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise EdgeSpecError(f"{name} is {value}; expected a finite number above 0.")
        counts = ("draft_vocabulary", "intermediate_size", "steps", "layers", "batch_tokens", "evaluate_every")
        for name in (*counts, "patience", "held_out_tokens", "expected_tokens", "negative_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EdgeSpecError(f"{name} is {value}; expected 1 or more.")
        if self.steps > _MOST_STEPS:
            raise EdgeSpecError(f"steps is {self.steps}; expected at most {_MOST_STEPS}, each of which takes memory.")
        if self.seed >= 1 << 63:
            raise EdgeSpecError(f"seed is {self.seed}; expected less than 2 to the power of 63.")
        if not re.fullmatch("cpu|cuda(:[0-9]{1,3})?", self.device):
            raise EdgeSpecError(f"device is {self.device!r}; expected 'cpu' or 'cuda'.")
        if self.text_tokens < 3:
            raise EdgeSpecError(f"text_tokens is {self.text_tokens}; expected 3 or more.")
        for name in ("warmup_steps", "weight_decay", "save_minutes", "seed"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise EdgeSpecError(f"{name} is {value}; expected a finite number, 0 or more.")
        if not 0 < self.held_out_share < 1:
            raise EdgeSpecError(f"held_out_share is {self.held_out_share}; expected more than 0 and less than 1.")
        if not 0 <= self.first_step_share <= 1:
            raise EdgeSpecError(f"first_step_share is {self.first_step_share}; expected 0 to 1.")
        if not 0 < self.depth_weight <= 1:
            raise EdgeSpecError(f"depth_weight is {self.depth_weight}; expected more than 0, and 1 at most.")
        if self.precision not in ("float32", "bfloat16"):
            raise EdgeSpecError(f"precision is {self.precision!r}; expected 'float32' or 'bfloat16'.")
        if self.start not in ("target", "random"):
            raise EdgeSpecError(f"start is {self.start!r}; expected 'target' or 'random'.")

    def _check_types(self) -> None:
        """Raise EdgeSpecError for a value that is no number, text or path where one is expected."""
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if value is None and "None" in kind:
                continue
            if kind.startswith("int"):
                fits, what = type(value) is int, "a whole number"
            elif kind.startswith("float"):
                fits, what = type(value) in (int, float), "a number"
            else:
                fits, what = isinstance(value, str | os.PathLike), "text"
            if not fits:
                raise EdgeSpecError(f"{field.name} is {value!r}; expected {what}.")

    @property
    def reads_taps(self) -> bool:
        """Whether the texts need the target's hidden states."""
        return self.kind == "head"

    def fixed(self) -> dict[str, Any]:
        """What must not change between a run and the one that takes it up again; it tells the kind by what it has."""
        settings = dataclasses.asdict(self)
        settings["start_from"] = None if self.start_from is None else os.fspath(self.start_from)
        others = [name for kind, names in _OWN.items() if kind != self.kind for name in names]
        return {name: value for name, value in settings.items() if name not in (*_CHANGEABLE, "kind", *others)}
