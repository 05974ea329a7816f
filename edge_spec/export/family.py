"""The lines of models that can be exported, and how checkpoints name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_spec.errors import UnsupportedError


@dataclass(frozen=True)
class Family:
    """A line of models that share one layer layout. Supporting a new line starts with an entry in ``FAMILIES``.

    Attributes:
        name: the family's name in manifests and messages.
        hf_model_types: values of ``model_type`` in a Hugging Face ``config.json``.
        gguf_architectures: values of ``general.architecture`` in a GGUF file.
        qkv_bias: whether q, k and v carry a bias when the configuration does not say.
        gguf_permuted_qk: whether GGUF stores the rows of q and k in interleaved rotary order.
    """

    name: str
    hf_model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    qkv_bias: bool = False
    gguf_permuted_qk: bool = False


FAMILIES: Sequence[Family] = (
    Family("llama", ("llama", "mistral"), ("llama",), gguf_permuted_qk=True),
    Family("qwen2", ("qwen2",), ("qwen2",), qkv_bias=True),
)


def family_of_model_type(model_type: str, where: str) -> Family:
    """Return the family of a Hugging Face ``model_type``. Raises UnsupportedError, naming ``where``, if unknown."""
    names = {name: family for family in FAMILIES for name in family.hf_model_types}
    if model_type not in names:
        raise UnsupportedError(
            f"{where}: model_type {model_type!r} is not supported; supported are {', '.join(names)}. "
            "--via optimum exports many others, slower ones"
        )
    return names[model_type]


def family_of_gguf_architecture(architecture: str, where: str) -> Family:
    """Return the family of a GGUF ``general.architecture``. Raises UnsupportedError, naming ``where``, if unknown."""
    names = {name: family for family in FAMILIES for name in family.gguf_architectures}
    return _find_family(names, architecture, f"{where}: GGUF architecture")


def _find_family(names: Mapping[str, Family], name: str, what: str) -> Family:
    if name not in names:
        raise UnsupportedError(f"{what} {name!r} is not supported; supported are {', '.join(names)}")
    return names[name]
