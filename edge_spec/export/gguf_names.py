"""What a tensor is called in GGUF files (``gguf.TensorNameMap``, read from right to left)."""

from __future__ import annotations

from edge_spec.export.architecture import Architecture

_GLOBAL_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # the gate's rows come first
    "mlp.down_proj": "ffn_down",
}
# Where what attention gives is normed too, Hugging Face calls that norm as elsewhere the one before the MLP.
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, architecture: Architecture) -> str:
    """Return the GGUF name of a tensor: ``layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    module, _, kind = name.rpartition(".")
    if module in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    names = _LAYER_NAMES | _POST_NORM_NAMES if architecture.post_norms else _LAYER_NAMES
    return f"blk.{layer}.{names[module]}.{kind}"
