"""Write a draft of a bundle's own size whose weights are random: a draft that is no good, to see what it costs.

    python benchmarks/random_draft.py BUNDLE DIR
    edge-spec export --target TARGET --draft DIR --output sabotaged.pair --no-check

DIR becomes a Hugging Face folder with the architecture and the tokenizer of the bundle's draft.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edge_spec.bundle import open_bundle


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    manifest = bundle.manifest
    if manifest.draft is None:
        parser.error(f"{arguments.bundle} has no draft model")
    facts = manifest.draft.architecture
    hidden, heads, kv_heads, size = facts.hidden_size, facts.heads, facts.kv_heads, facts.head_size
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns), np.float32) * 0.02).astype(np.float16)

    tensors = {"model.embed_tokens.weight": matrix(facts.logits_size, hidden)}
    tensors["lm_head.weight"] = matrix(facts.logits_size, hidden)
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    for layer in range(facts.layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads * size, hidden),
            ("self_attn.k_proj", kv_heads * size, hidden),
            ("self_attn.v_proj", kv_heads * size, hidden),
            ("self_attn.o_proj", hidden, heads * size),
            ("mlp.gate_proj", facts.intermediate_size, hidden),
            ("mlp.up_proj", facts.intermediate_size, hidden),
            ("mlp.down_proj", hidden, facts.intermediate_size),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        if facts.family == "qwen2":
            for name, rows in (("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)):
                tensors[f"{prefix}self_attn.{name}.bias"] = np.zeros(rows, np.float16)
        tensors[f"{prefix}input_layernorm.weight"] = np.ones(hidden, np.float16)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.ones(hidden, np.float16)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, arguments.folder / "model.safetensors")
    config = {
        "architectures": ["Qwen2ForCausalLM" if facts.family == "qwen2" else "LlamaForCausalLM"],
        "model_type": facts.family,
        "hidden_size": hidden,
        "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": facts.logits_size,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": facts.ropes[0].theta,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": list(manifest.eos_token_ids),
        "bos_token_id": manifest.bos_token_id,
    }
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    shutil.copy(bundle.tokenizer_path, arguments.folder / "tokenizer.json")


if __name__ == "__main__":
    main()
