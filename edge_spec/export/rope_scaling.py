"""Rotary scaling schemes of Hugging Face configurations, reduced to divisors of the inverse frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.metadata import Metadata
from edge_spec.export.rope import Rope


def rope_from_config(config: Metadata, head_size: int) -> Rope:
    """Read ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as older configurations have them.

    Raises:
        UnsupportedError: a scheme other than none, linear and llama3, or only part of the head is rotated.
        CheckpointError: a parameter is missing or not a number.
    """
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{config.where}: rope parameters are {values!r}, expected an object")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedError(f"{config.where}: layers with different rope parameters are not supported")
    parameters = Metadata(values, f"rope parameters of {config.where}")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    rotated = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedError(f"{config.where}: only {rotated:g} of each head is rotated; supported is the whole head")
    scheme = parameters.text("rope_type", parameters.text("type", "default"))
    if scheme == "default":
        return Rope(theta)
    if scheme == "linear":
        return Rope(theta, (parameters.number("factor"),) * (head_size // 2))
    if scheme == "llama3":
        return Rope(theta, _llama3_factors(theta, head_size, parameters))
    raise UnsupportedError(f"{config.where}: rope scaling {scheme!r} is not supported; supported are linear, llama3")


def _llama3_factors(theta: float, head_size: int, parameters: Metadata) -> tuple[float, ...]:
    """Divide low frequencies by ``factor``, leave high ones alone and blend between (Llama 3.1 model card)."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    trained = parameters.integer("original_max_position_embeddings")
    if high <= low:
        raise CheckpointError(f"{parameters.where}: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    factors = []
    for pair in range(head_size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_size)
        blend = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - blend) / factor + blend))
    return tuple(factors)
