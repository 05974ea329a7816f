"""What the metadata of a GGUF file says of the architecture, and what llama.cpp knows of it without being told.

The keys are those of llama.cpp's ``src/llama-arch.cpp``; what is not stored is written down in ``src/models``, one
file for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Architecture, LayerAttention, Scales, require_size
from edge_spec.export.family import Family
from edge_spec.export.gguf_facts import GgufFacts
from edge_spec.export.gguf_file import GgufFile, GgufTensor
from edge_spec.export.gguf_rope import LONG_FACTORS, read_rope
from edge_spec.export.rope import Rope

# Whose window is one of all layers, or of every layer but some.
_SLIDING_FAMILIES = ("llama", "phi3", "gemma3")

_GEMMA_PATTERN = 6  # every sixth layer sees all tokens
_GEMMA_LOCAL_THETA = 10000.0
_LAYERS_OF_GEMMA_27B = 62
_SMOLLM3_PATTERN = 4  # every fourth layer has no rotary embedding

# Phi-3 with 4,096 positions had a window before its files had the key for it.
_PHI3_WINDOW = 2047
_PHI3_LAYERS, _PHI3_CONTEXT = (32, 40), 4096


def read_architecture(file: GgufFile, family: Family, context: int | None) -> Architecture:
    """Return the sizes of a model.

    Args:
        file: the checkpoint.
        family: that of its ``general.architecture``.
        context: positions that are wanted; ``None`` for what the model was trained for.

    Raises:
        CheckpointError: a value is missing, out of its range or contradicts another.
        UnsupportedError: a key asks for what is not built.
    """
    facts, tensors = GgufFacts(file.metadata), file.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{facts.where} lacks tensor 'token_embd.weight'; it holds no complete language model")
    _refuse_what_is_not_built(facts, family)
    heads, hidden = facts.integer("attention.head_count"), facts.integer("embedding_length")
    head_size = facts.integer("attention.key_length", max(1, hidden // heads))
    require_size("head_size", head_size, facts.where)
    if facts.integer("attention.value_length", head_size) != head_size:
        raise UnsupportedError(f"{facts.where}: attention.value_length differs from the head size {head_size}")
    layers = facts.integer("block_count")
    require_size("layers", layers, facts.where)
    context_length = _context_length(facts, tensors, context)
    architecture = Architecture(
        family=family.name,
        hidden_size=hidden,
        intermediate_size=facts.integer("feed_forward_length"),
        heads=heads,
        kv_heads=facts.integer("attention.head_count_kv", heads),
        head_size=head_size,
        logits_size=tensors["token_embd.weight"].shape[0],
        context_length=context_length,
        norm_epsilon=facts.number("attention.layer_norm_rms_epsilon"),
        attention=_read_attention(facts, file, family, layers, head_size, context_length),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        fused_projections=family.fused_projections,
        activation=family.activation,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        **_read_scales(facts, family, layers, hidden, heads, head_size),
    )
    facts.refuse_unread()
    return architecture


def _refuse_what_is_not_built(facts: GgufFacts, family: Family) -> None:
    if facts.integer("expert_count", 0, minimum=0):
        raise UnsupportedError(f"{facts.where} is a mixture of experts; only dense models are supported")
    if not facts.flag("attention.causal", True):
        raise UnsupportedError(f"{facts.where}: attention.causal is false; only decoders are supported")
    if family.name == "granite" and not facts.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            f"{facts.where}: rope.scaling.finetuned is false, a Granite without positions, which is not supported"
        )


def _context_length(facts: GgufFacts, tensors: Mapping[str, GgufTensor], wanted: int | None) -> int:
    """The positions a bundle is made for. LongRoPE models have factors of their own for short texts: those, if none."""
    trained = facts.integer("context_length")
    if wanted is None:
        if LONG_FACTORS not in tensors:
            return trained
        return min(trained, facts.integer("rope.scaling.original_context_length", trained))
    if not 2 <= wanted <= trained:
        raise CheckpointError(f"{facts.where}: a context of {wanted} tokens is wanted, expected 2 to {trained}")
    return wanted


def _read_attention(
    facts: GgufFacts, file: GgufFile, family: Family, layers: int, head_size: int, context: int
) -> tuple[LayerAttention, ...]:
    rope = read_rope(facts, file, head_size, context)
    if rope.size != head_size and family.gguf_permuted_qk:
        raise UnsupportedError(
            f"{facts.where}: rope.dimension_count {rope.size} differs from the head size {head_size}, which is not "
            f"supported for {family.name}"
        )
    local = rope
    if family.local_rope:
        local = Rope(facts.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA), rope.size, magnitude=rope.magnitude)
    attention = []
    for layer, window in enumerate(_read_windows(facts, family, layers)):
        rotates = not family.skips_rotation or (layer + 1) % _SMOLLM3_PATTERN
        kind = rope if window is None else local
        hides = window is not None and window < context
        attention.append(LayerAttention(kind if rotates else None, window if hides else None))
    return tuple(attention)


def _read_windows(facts: GgufFacts, family: Family, layers: int) -> list[int | None]:
    """Return for each layer how many tokens it sees, ``None`` for all."""
    default = 0
    trained = facts.integer("context_length")
    if family.name == "phi3" and layers in _PHI3_LAYERS and trained == _PHI3_CONTEXT:
        default = _PHI3_WINDOW
    window = facts.integer("attention.sliding_window", default, minimum=0)
    if window == 0:
        return [None] * layers
    if family.name not in _SLIDING_FAMILIES:
        if window < trained:
            raise UnsupportedError(
                f"{facts.where}: attention.sliding_window is {window}, which is not supported for {family.name}"
            )
        return [None] * layers
    if family.windows == "most":
        return [window if slides else None for slides in _gemma_pattern(facts, layers)]
    return [window] * layers


def _gemma_pattern(facts: GgufFacts, layers: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    key = "attention.sliding_window_pattern"
    listed = facts.list(key)
    if listed is None:
        pattern = facts.integer(key, _GEMMA_PATTERN)
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if len(listed) != layers or any(value not in (0, 1) for value in listed):
        raise CheckpointError(f"{facts.where}: {key} has {len(listed)} entries, expected {layers} of true and false")
    return [bool(value) for value in listed]


def _read_scales(facts: GgufFacts, family: Family, layers: int, hidden: int, heads: int, head_size: int) -> Scales:
    """Return the factors of a family that has some."""
    if family.scaled_by_size:
        query_size = hidden // heads if layers == _LAYERS_OF_GEMMA_27B else head_size
        return {"embedding_scale": hidden**0.5, "attention_scale": query_size**-0.5}
    scales: Scales = {}
    if not family.multipliers:
        return scales
    if (scale := facts.optional_number("embedding_scale")) is not None:
        scales["embedding_scale"] = scale
    if (scale := facts.optional_number("attention.scale")) is not None:
        scales["attention_scale"] = scale
    if (scale := facts.optional_number("residual_scale")) is not None:
        scales["residual_scale"] = scale
    if (divisor := facts.optional_number("logit_scale")) is not None:
        scales["logits_scale"] = 1 / divisor
    return scales
