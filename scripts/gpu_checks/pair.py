"""A pair for CUDA, made on the spot: of random weights in real shapes, or of real checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from random_checkpoint import SIZES, with_layers, write_checkpoint

from edge_spec.bundle import Bundle, open_bundle
from edge_spec.export import export_pair

# Layers of the draft whose weights are random: its shapes matter, its proposals are as good as none.
_DRAFT_LAYERS = 8
TINY = "tiny"
_TINY = replace(with_layers(SIZES["small"], 2), hidden_size=256, intermediate_size=512, heads=2, kv_heads=1)


@dataclass(frozen=True)
class Pairs:
    """The bundles of a run.

    Attributes:
        cuda: target and draft in the flavour for CUDA.
        exact: the same target in float32 for the CPU.
    """

    cuda: Bundle
    exact: Bundle


def make_pairs(folder: Path, size: str, target: str | None, draft: str | None, tell: Callable[[str], None]) -> Pairs:
    """Write the bundles into a folder.

    Args:
        folder: an empty one.
        size: whose shapes the random target has, a key of ``SIZES`` or ``"tiny"``.
        target: a checkpoint to take instead.
        draft: a checkpoint for its draft.
        tell: told what is being done.
    """
    if target is None:
        facts = _TINY if size == TINY else SIZES[size]
        narrow = (
            facts
            if size == TINY
            else replace(with_layers(SIZES["small"], _DRAFT_LAYERS), logits_size=facts.logits_size)
        )
        sources = []
        for name, shapes in (("target", facts), ("draft", narrow)):
            tell(f"random weights of the {name}")
            (folder / name).mkdir()
            sources.append(str(write_checkpoint(folder / name, shapes, "safetensors", lambda done, total: None)))
        target, draft = sources
    tell("export for CUDA")
    cuda = export_pair(target, draft, folder / "cuda.pair", device="cuda", check=False).path
    tell("export in float32")
    exact = export_pair(target, None, folder / "exact.pair", recipe="fp32", check=False).path
    return Pairs(open_bundle(cuda), open_bundle(exact))
