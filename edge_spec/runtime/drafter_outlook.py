"""What a head or a draft model is expected to gain for its memory, where one has to be chosen (docs/memory.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from edge_spec.manifest import Manifest, ModelRecord
from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.calibration_cache import KeptCalibration
from edge_spec.runtime.drafters.model_choice import PRIORS
from edge_spec.runtime.head_law import head_weights
from edge_spec.runtime.weight_law import weights_of

# A drafter with a network of its own; at most one of them is loaded.
Costly = Literal["head", "model"]

# Longer chains are hardly ever worth their time.
USUAL_CHAIN = 8
# Tokens in the caches at which calls are compared.
_USUAL_PAST = 256

# What each further row of a target's call takes, in plain steps, before anything was measured.
_ROW = 0.1


@dataclass(frozen=True)
class Outlook:
    """What is expected of a drafter.

    Attributes:
        drafter: which one.
        gain: tokens a second beyond those of plain decoding, as a share of them: 0.5 is half as fast again.
        bytes: what it takes beside the target.
        basis: ``"law"`` follows from sizes and from what is usual; ``"measured"`` from an earlier load's calibration.
    """

    drafter: Costly
    gain: float
    bytes: int
    basis: Literal["law", "measured"]

    @property
    def worth(self) -> float:
        """By which drafters are compared: the gain of each byte; where nothing is gained, what is lost in all."""
        return self.gain / max(1, self.bytes) if self.gain > 0.0 else self.gain


def best_speed(
    acceptance: float, verify: Callable[[int], float], draft: Callable[[int], float], most: int = USUAL_CHAIN
) -> float:
    """Tokens in the time of a plain step, with chains of the length that is best for it.

    A chain of k tokens brings 1 + a + ... + a^k (Leviathan et al. 2023), in the time of its call and of drafting.

    Args:
        acceptance: how likely a token is right if all before it are.
        verify: told the rows of a call, what it takes; with 1 row that is a plain step.
        draft: told a number of tokens, what drafting them takes.
        most: tokens of the longest chain.
    """
    speeds = []
    for tokens in range(1, most + 1):
        expected = sum(acceptance**depth for depth in range(tokens + 1))
        speeds.append(expected * verify(1) / (verify(1 + tokens) + draft(tokens)))
    return max(speeds)


def outlook(drafter: Costly, manifest: Manifest, size: int, kept: Sequence[KeptCalibration] = ()) -> Outlook:
    """Return what is expected of one of a bundle's drafters.

    Args:
        drafter: which one; the bundle has it.
        manifest: what the bundle says of itself.
        size: bytes that it takes.
        kept: calibrations of this bundle on this machine, the latest first.
    """
    head = manifest.head if drafter == "head" else None
    most = USUAL_CHAIN if head is None or head.tokens == 1 else head.tokens
    steps = 1 if head is None else head.tokens
    own = next((one.calibration for one in kept if one.drafter == drafter), None)
    table = AcceptanceTable(PRIORS)
    if own is None or own.costs.draft_model is None:
        share = _read(drafter, manifest) / weights_of(manifest.target, manifest, 0).read
        verify = _verify(kept[0].calibration) if kept else lambda rows: 1.0 + _ROW * (rows - 1)
        step = share * verify(1)
    else:
        table.record(((drafter,), agreed) for _, agreed in own.agreement)
        verify = _verify(own)
        step = own.costs.draft(_USUAL_PAST) * (own.costs.chain_step if head is None else 1.0)
    speed = best_speed(table.estimate((drafter,)), verify, lambda tokens: step * ceil(tokens / steps), most)
    return Outlook(drafter, speed - 1.0, size, "law" if own is None else "measured")


def _verify(calibration: Calibration) -> Callable[[int], float]:
    return lambda rows: calibration.costs.verify(rows, _USUAL_PAST)


def _read(drafter: Costly, manifest: Manifest) -> int:
    """Bytes of the weights that a step reads."""
    if drafter == "head":
        assert manifest.head is not None  # or nobody asks
        return head_weights(manifest.head, manifest, 0).read
    model: ModelRecord = next(iter(manifest.drafts.values()))
    return weights_of(model, manifest, 0).read
