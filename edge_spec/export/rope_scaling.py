"""Rotary scaling schemes, reduced to divisors of the inverse frequencies and a factor of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.metadata import Metadata
from edge_spec.export.rope import Rope

_SCHEMES = ("default", "linear", "llama3", "yarn", "longrope")


def rope_from_config(config: Metadata, head_size: int, context: int, layer_type: str = "full_attention") -> Rope:
    """Read ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as older configurations have them.

    Args:
        config: a Hugging Face configuration, defaults of its family included.
        head_size: elements of a head.
        context: positions that are wanted, which decides between the factors of LongRoPE.
        layer_type: which layers' parameters, where there are several.

    Raises:
        UnsupportedError: an unknown scheme.
        CheckpointError: a parameter is missing or out of its range.
    """
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{config.where}: rope parameters are {values!r}, expected an object")
    if any(isinstance(value, Mapping) for value in values.values()):
        values = values.get(layer_type)
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{config.where}: rope parameters lack those of layers of type {layer_type!r}")
    parameters = Metadata(values, f"rope parameters of {config.where}")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    share = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    size = int(head_size * share)
    if share > 1 or size % 2 or size == 0:
        raise CheckpointError(
            f"{config.where}: partial_rotary_factor {share:g} rotates {size} of a head's {head_size} elements, "
            "expected an even number of them"
        )
    scheme = parameters.text("rope_type", parameters.text("type", "default"))
    if scheme == "su" or (scheme == "yarn" and "short_factor" in parameters):  # what early Phi-3 files call it
        scheme = "longrope"
    if scheme == "default":
        return Rope(theta, size)
    if scheme == "linear":
        return Rope(theta, size, (parameters.number("factor"),) * (size // 2))
    if scheme == "llama3":
        return Rope(theta, size, _llama3_factors(theta, size, parameters))
    if scheme == "yarn":
        return _yarn_from_config(theta, size, parameters, config)
    if scheme == "longrope":
        return _longrope_from_config(theta, size, parameters, config, context)
    known = ", ".join(_SCHEMES)
    raise UnsupportedError(f"{config.where}: rope_type {scheme!r} is not supported; supported are {known}")


def longrope_context(config: Metadata) -> int | None:
    """Return the positions a LongRoPE model was first trained for, up to which it has factors of its own."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping) or "short_factor" not in values:
        return None
    parameters = Metadata(values, f"rope parameters of {config.where}")
    return _original_context(parameters, config)


def yarn(
    theta: float,
    size: int,
    factor: float,
    original_context: int,
    fast: float = 32.0,
    slow: float = 1.0,
    magnitude: float | None = None,
    truncate: bool = True,
) -> Rope:
    """Stretch low frequencies by ``factor``, leave high ones, and blend between (Peng et al. 2023, YaRN).

    Args:
        theta: base of the frequencies.
        size: elements of a head that are rotated.
        factor: by how much the context is stretched.
        original_context: positions before it was.
        fast: rotations within the original context from which on a frequency is high.
        slow: rotations within it up to which a frequency is low.
        magnitude: of cos and sin; ``None`` for the paper's 0.1 ln(factor) + 1.
        truncate: whether the blend begins and ends at whole dimensions.
    """

    def dimension(rotations: float) -> float:
        """Where the frequency makes so many rotations within the original context."""
        return size * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    factors = []
    for pair in range(size // 2):
        stretched = min(max((pair - low) / width, 0.0), 1.0)
        factors.append(1 / (stretched / factor + 1 - stretched))
    return Rope(theta, size, tuple(factors), _yarn_magnitude(factor) if magnitude is None else magnitude)


def longrope_magnitude(factor: float, original_context: int) -> float:
    """Return what cos and sin are multiplied by where LongRoPE stretches the context (Ding et al. 2024, LongRoPE)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_from_config(theta: float, size: int, parameters: Metadata, config: Metadata) -> Rope:
    original = _original_context(parameters, config)
    factor = parameters.number("factor", config.integer("max_position_embeddings") / original)
    magnitude = _number_or_none(parameters, "attention_factor")
    scale, scale_all = (_number_or_none(parameters, name) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None and scale is not None and scale_all is not None:
        magnitude = _yarn_magnitude(factor, scale) / _yarn_magnitude(factor, scale_all)
    if theta <= 1:
        raise CheckpointError(f"{parameters.where}: rope_theta {theta:g} is no base for yarn, expected more than 1")
    return yarn(
        theta,
        size,
        factor,
        original,
        parameters.number("beta_fast", 32.0),
        parameters.number("beta_slow", 1.0),
        magnitude,
        parameters.flag("truncate", True),
    )


def _longrope_from_config(theta: float, size: int, parameters: Metadata, config: Metadata, context: int) -> Rope:
    original = _original_context(parameters, config)
    name = "long_factor" if context > original else "short_factor"
    factors = parameters.get(name)
    if not isinstance(factors, list) or len(factors) != size // 2 or not all(_positive(value) for value in factors):
        given = f"{len(factors)} entries" if isinstance(factors, list) else repr(factors)
        raise CheckpointError(f"{parameters.where}: {name!r} has {given}, expected {size // 2} numbers above zero")
    magnitude = _number_or_none(parameters, "attention_factor")
    if magnitude is None:
        factor = parameters.number("factor", config.integer("max_position_embeddings") / original)
        magnitude = longrope_magnitude(factor, original)
    return Rope(theta, size, tuple(float(value) for value in factors), magnitude)


def _original_context(parameters: Metadata, config: Metadata) -> int:
    key = "original_max_position_embeddings"
    return config.integer(key) if key in config and config[key] is not None else parameters.integer(key)


def _number_or_none(values: Metadata, key: str) -> float | None:
    return None if values.get(key) is None else values.number(key)


def _positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < math.inf


def _llama3_factors(theta: float, size: int, parameters: Metadata) -> tuple[float, ...]:
    """Divide low frequencies by ``factor``, leave high ones alone and blend between (Llama 3.1 model card)."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    trained = parameters.integer("original_max_position_embeddings")
    if high <= low:
        raise CheckpointError(f"{parameters.where}: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / size)
        blend = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - blend) / factor + blend))
    return tuple(factors)
