"""How each class of layers is stored: the quantization recipes, chosen for verification as well as for decoding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from edge_spec.errors import EdgeSpecError

Device = Literal["cpu", "cuda"]
MatrixFormat = Literal["fp32", "fp16", "w8a8", "int4"]
EmbeddingFormat = Literal["fp32", "fp16", "int8", "int4"]


@dataclass(frozen=True)
class Recipe:
    """The storage format of every layer class of one model.

    Attributes:
        name: what the user asked for.
        embedding: ``int8`` and ``int4`` are symmetric, in blocks of 32 along a row.
        attention, mlp_up, mlp_down, lm_head: ``w8a8`` is int8 per output channel times uint8 per row,
            ``int4`` is symmetric in blocks of 32 along the input.
        max_mean_kl: mean KL divergence to the float32 reference, in nats, beyond which an export is refused.
    """

    name: str
    embedding: EmbeddingFormat
    attention: MatrixFormat
    mlp_up: MatrixFormat
    mlp_down: MatrixFormat
    lm_head: MatrixFormat
    max_mean_kl: float

    def to_dict(self) -> dict[str, str]:
        """Return the formats by layer class, as written to the manifest."""
        return {name: value for name, value in asdict(self).items() if name != "max_mean_kl"}


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "fp32", "fp32", "fp32", "fp32", "fp32", max_mean_kl=1e-4),
        Recipe("fp16", "fp16", "fp16", "fp16", "fp16", "fp16", max_mean_kl=1e-2),
        Recipe("w8a8", "int8", "w8a8", "w8a8", "w8a8", "w8a8", max_mean_kl=0.2),
        Recipe("int4", "int4", "int4", "int4", "int4", "int4", max_mean_kl=0.5),
    )
}

# On CPU the target verifies several rows at once, where w8a8 is nearly free; the draft runs single rows.
DEFAULT_RECIPES: dict[Device, tuple[str, str]] = {"cpu": ("w8a8", "int4"), "cuda": ("int4", "int4")}


def find_recipe(name: str, device: Device) -> Recipe:
    """Return the recipe called ``name``. Raises EdgeSpecError if it is unknown or does not run on ``device``."""
    if name not in RECIPES:
        raise EdgeSpecError(f"Unknown recipe {name!r}; expected one of {', '.join(RECIPES)}.")
    if device == "cuda" and name in ("w8a8", "fp32"):
        why = "has no w8a8 kernel" if name == "w8a8" else "computes attention in float16"
        raise EdgeSpecError(f"Recipe {name!r} does not run on CUDA, which {why}; use int4 or fp16.")
    return RECIPES[name]
