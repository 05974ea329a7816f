"""The rotary embedding of a GGUF file: metadata, and tensors of factors, reduced to divisors of the frequencies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.gguf_dequantize import dequantize
from edge_spec.export.gguf_facts import GgufFacts
from edge_spec.export.gguf_file import GgufFile
from edge_spec.export.rope import Rope
from edge_spec.export.rope_scaling import longrope_magnitude, yarn

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({FACTORS, LONG_FACTORS, SHORT_FACTORS})

_SCHEMES = ("none", "linear", "yarn", "longrope")


def read_rope(facts: GgufFacts, file: GgufFile, head_size: int, context: int) -> Rope:
    """Return the rotary embedding, of models with a second one for some layers that of the others.

    Args:
        facts: the keys of the file's architecture.
        file: where the tensors of factors are.
        head_size: elements of a head.
        context: positions that are wanted, which decides between the factors of LongRoPE.

    Raises:
        UnsupportedError: an unknown scheme.
        CheckpointError: a value is missing or out of its range.
    """
    size = facts.integer("rope.dimension_count", head_size)
    theta = facts.number("rope.freq_base", 10000.0)
    scheme = facts.text("rope.scaling.type", "linear")  # older files give a factor without a type
    if scheme not in _SCHEMES:
        raise UnsupportedError(
            f"{facts.where}: rope.scaling.type {scheme!r} is not supported; supported are {', '.join(_SCHEMES)}"
        )
    if size % 2 or size > head_size:
        raise CheckpointError(
            f"{facts.where}: rope.dimension_count is {size}, expected an even number up to the head size {head_size}"
        )
    rope = Rope(theta, size)
    if scheme == "linear":
        older = facts.optional_number("rope.scale_linear")
        factor = facts.optional_number("rope.scaling.factor") or older or 1.0
        rope = replace(rope, frequency_factors=(factor,) * (size // 2))
    elif scheme == "yarn":
        rope = _read_yarn(facts, theta, size)
    elif scheme == "none":
        facts.optional_number("rope.scaling.factor")  # without effect
    magnitude = facts.optional_number("rope.scaling.attn_factor")

    factors = np.array(rope.frequency_factors or (1.0,) * (size // 2))
    if FACTORS in file.tensors:
        factors *= _read_factors(file, FACTORS, size // 2)
    if scheme == "longrope" or LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        trained = facts.integer("context_length")
        original = facts.integer("rope.scaling.original_context_length", trained)
        factors *= _read_factors(file, LONG_FACTORS if context > original else SHORT_FACTORS, size // 2)
        magnitude = magnitude or longrope_magnitude(trained / original, original)
    return replace(
        rope,
        frequency_factors=None if (factors == 1).all() else tuple(factors.tolist()),
        magnitude=rope.magnitude * (magnitude or 1.0),
    )


def _read_yarn(facts: GgufFacts, theta: float, size: int) -> Rope:
    if theta <= 1:
        raise CheckpointError(f"{facts.where}: rope.freq_base {theta:g} is no base for yarn, expected more than 1")
    extrapolation = facts.optional_number("rope.scaling.yarn_ext_factor")
    if extrapolation not in (None, 1.0):
        raise UnsupportedError(
            f"{facts.where}: rope.scaling.yarn_ext_factor is {extrapolation:g}, which is not supported; supported is 1"
        )
    return yarn(
        theta,
        size,
        facts.number("rope.scaling.factor"),
        facts.integer("rope.scaling.original_context_length", facts.integer("context_length")),
        facts.number("rope.scaling.yarn_beta_fast", 32.0),
        facts.number("rope.scaling.yarn_beta_slow", 1.0),
        facts.optional_number("rope.scaling.yarn_attn_factor"),
    )


def _read_factors(file: GgufFile, name: str, count: int) -> npt.NDArray[np.float64]:
    """Return a tensor of divisors of the frequencies."""
    where, stored = file.path, file.tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{where} lacks tensor {name!r}, which its rope scaling needs; convert the model again")
    if stored.type is not GGMLQuantizationType.F32 or stored.shape != (count,):
        raise CheckpointError(
            f"{where}: {name!r} is {stored.type.name} of shape {stored.shape}, expected F32 of shape {(count,)}"
        )
    factors = dequantize(file.read_rows(stored, 0, 1), stored.type)[0].astype(np.float64)
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise CheckpointError(f"{where}: {name!r} holds values that are no finite number above 0")
    return factors
