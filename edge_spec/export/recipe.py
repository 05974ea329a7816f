"""How each class of layers is stored: the quantization recipes, chosen for verification as well as for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from edge_spec.errors import EdgeSpecError

Device = Literal["cpu", "cuda"]
MatrixFormat = Literal["fp32", "fp16", "w8a8", "int4"]
EmbeddingFormat = Literal["fp32", "fp16", "int8", "int4"]

# What the int4 kernels of ONNX Runtime take.
BLOCK_SIZES = (16, 32, 64, 128, 256)

# The layer classes of a model, and what each can be stored as.
FORMATS: dict[str, tuple[str, ...]] = {
    "embedding": get_args(EmbeddingFormat),
    **dict.fromkeys(("attention", "mlp_up", "mlp_down", "lm_head"), get_args(MatrixFormat)),
}


@dataclass(frozen=True)
class Recipe:
    """The storage format of every layer class of one model.

    Attributes:
        name: what the user asked for.
        embedding: ``int8`` is in blocks of 32 along a row, ``int4`` in blocks of ``block_size``.
        attention, mlp_up, mlp_down, lm_head: ``w8a8`` is 8 bits per output channel times uint8 per row, ``int4`` is
            in blocks of ``block_size`` along the input.
        max_mean_kl: mean KL divergence to the float32 reference, in nats, beyond which an export is refused.
        block_size: int4 weights that share a scale, one of :data:`BLOCK_SIZES`.
    """

    name: str
    embedding: EmbeddingFormat
    attention: MatrixFormat
    mlp_up: MatrixFormat
    mlp_down: MatrixFormat
    lm_head: MatrixFormat
    max_mean_kl: float
    block_size: int = 32

    @property
    def formats(self) -> dict[str, str]:
        """The formats by layer class."""
        return {layer_class: getattr(self, layer_class) for layer_class in FORMATS}

    def to_dict(self) -> dict[str, str | int]:
        """Return the name, the formats by layer class and the size of int4 blocks, as written to the manifest."""
        blocks = {"block_size": self.block_size} if "int4" in self.formats.values() else {}
        return {"name": self.name, **self.formats, **blocks}


# What an automatic choice starts from. By itself it is no choice: export replaces it by one that was measured.
AUTO = Recipe("auto", "int8", "w8a8", "w8a8", "w8a8", "w8a8", max_mean_kl=0.1)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "fp32", "fp32", "fp32", "fp32", "fp32", max_mean_kl=1e-4),
        Recipe("fp16", "fp16", "fp16", "fp16", "fp16", "fp16", max_mean_kl=1e-2),
        Recipe("w8a8", "int8", "w8a8", "w8a8", "w8a8", "w8a8", max_mean_kl=0.1),
        Recipe("int4", "int4", "int4", "int4", "int4", "int4", max_mean_kl=0.4),
        Recipe("int4-128", "int4", "int4", "int4", "int4", "int4", max_mean_kl=0.6, block_size=128),
        AUTO,
    )
}

# On CPU the target verifies several rows at once, where w8a8 is nearly free; the draft runs single rows, for which
# fewer scales are less to read.
DEFAULT_RECIPES: dict[Device, tuple[str, str]] = {"cpu": ("w8a8", "int4-128"), "cuda": ("int4", "int4")}

# Of heads that draft from the target's hidden states, which are small: what they lose in acceptance costs more.
DEFAULT_HEAD_RECIPES: dict[Device, str] = {"cpu": "w8a8", "cuda": "fp16"}

# CUDA's kernel for several rows takes blocks of one size.
_CUDA_BLOCK_SIZE = 32
_NOT_ON_CUDA = {"w8a8": "has no w8a8 kernel", "fp32": "computes attention in float16"}


def runs_on(recipe: str | Recipe | None, device: Device) -> bool:
    """Whether a recipe is known and one for ``device``; ``None``, the device's own choice, always is."""
    try:
        return recipe is None or find_recipe(recipe, device) is not None
    except EdgeSpecError:
        return False


def find_recipe(recipe: str | Recipe, device: Device) -> Recipe:
    """Return a recipe by its name, or the one given; ``auto`` is int4 on CUDA, which has no w8a8.

    Raises:
        EdgeSpecError: it is unknown, or not for ``device``.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise EdgeSpecError(f"Unknown recipe {recipe!r}; expected one of {', '.join(RECIPES)}.")
        recipe = RECIPES[recipe]
    if recipe == AUTO and device == "cuda":
        return RECIPES["int4"]
    if recipe.block_size not in BLOCK_SIZES:
        expected = ", ".join(map(str, BLOCK_SIZES))
        raise EdgeSpecError(
            f"Recipe {recipe.name!r} has int4 blocks of {recipe.block_size!r}; expected one of {expected}."
        )
    if device == "cuda":
        for layer_class, stored in recipe.formats.items():
            if stored in _NOT_ON_CUDA:
                raise EdgeSpecError(
                    f"Recipe {recipe.name!r} does not run on CUDA, which {_NOT_ON_CUDA[stored]}, but it stores "
                    f"{layer_class} as {stored}; use int4 or fp16."
                )
            if stored == "int4" and recipe.block_size != _CUDA_BLOCK_SIZE:
                raise EdgeSpecError(
                    f"Recipe {recipe.name!r} does not run on CUDA, whose int4 kernel for several rows takes blocks of "
                    f"{_CUDA_BLOCK_SIZE}, but it stores {layer_class} in blocks of {recipe.block_size}; use int4 or "
                    "fp16."
                )
    return recipe


def with_formats(recipe: Recipe, formats: Mapping[str, Any]) -> Recipe:
    """Return ``recipe`` with some layer classes stored otherwise, named after both.

    How far the result may stray from the reference is decided by the coarsest format in it.

    Args:
        recipe: what holds for every other layer class.
        formats: format by layer class.

    Raises:
        EdgeSpecError: there is no such layer class, or it has no such format.
    """
    for layer_class, stored in formats.items():
        if layer_class not in FORMATS:
            raise EdgeSpecError(f"Unknown layer class {layer_class!r}; expected one of {', '.join(FORMATS)}.")
        if stored not in FORMATS[layer_class]:
            expected = ", ".join(FORMATS[layer_class])
            raise EdgeSpecError(f"Unknown format {stored!r} of {layer_class}; expected one of {expected}.")
    if not formats:
        return recipe
    name = f"{recipe.name} ({', '.join(f'{layer_class} {stored}' for layer_class, stored in formats.items())})"
    mixed = replace(recipe, name=name, **formats)
    return replace(mixed, max_mean_kl=max(_limit(stored, mixed.block_size) for stored in mixed.formats.values()))


def _limit(stored: str, block_size: int) -> float:
    """The limit of the recipe that stores everything so. An embedding in int8 is the one of the recipe w8a8."""
    named = [recipe for recipe in RECIPES.values() if recipe.lm_head == ("w8a8" if stored == "int8" else stored)]
    alike = [recipe for recipe in named if recipe.block_size == block_size]
    return max(recipe.max_mean_kl for recipe in alike or named)
