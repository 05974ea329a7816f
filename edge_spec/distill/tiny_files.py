"""A tiny draft model on disk: an ordinary Hugging Face checkpoint, and which ids it was trained to propose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from edge_spec.distill.half_weights import half_weights
from edge_spec.distill.student import Ids
from edge_spec.distill.tiny_model import CLASSES, TinyModel
from edge_spec.errors import CheckpointError
from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Checkpoint, Vocabulary

DRAFT_IDS = "draft_ids.json"

# What is the target's is written once, what is learnt whenever it has become better.
_VOCABULARY, _LAYERS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class TinyFiles:
    """Writes the tiny models of a target, one in place of the other."""

    def __init__(self, target: Checkpoint, facts: Architecture) -> None:
        """Prepare for drafts of ``target`` with the architecture ``facts``."""
        self._target, self._facts = target, facts
        self._begun = False

    def write(self, folder: Path, network: TinyModel, embedding: Tensor, draft_ids: Ids) -> None:
        """Write weights as float16, and what belongs to them; each file appears whole.

        Args:
            folder: exists.
            network: the layers.
            embedding: [vocabulary, hidden], the target's.
            draft_ids: int64 [draft vocabulary], what it proposes. Its lm_head has all rows of the target's.
        """
        layers = half_weights({f"model.{name}": value for name, value in network.state_dict().items()})
        if not self._begun:
            self._write_what_stays(folder, list(layers), embedding, draft_ids)
            self._begun = True
        _save(folder / _LAYERS, layers)

    def _write_what_stays(self, folder: Path, layers: list[str], embedding: Tensor, draft_ids: Ids) -> None:
        shared = {"model.embed_tokens.weight": embedding}
        if not self._facts.tied_embeddings:
            shared["lm_head.weight"] = torch.from_numpy(self._target.tensor("lm_head.weight"))
        _save(folder / _VOCABULARY, half_weights(shared))
        places = {**dict.fromkeys(shared, _VOCABULARY), **dict.fromkeys(layers, _LAYERS)}
        vocabulary = self._target.vocabulary
        texts = {
            "tokenizer.json": vocabulary.tokenizer.to_str(pretty=True),
            "tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.named_tokens}),
            "generation_config.json": _json({"eos_token_id": list(vocabulary.eos_token_ids)}),
            "model.safetensors.index.json": _json({"metadata": {}, "weight_map": places}),
            DRAFT_IDS: json.dumps(draft_ids.tolist()) + "\n",
            "config.json": _json(config_of(self._facts, vocabulary)),
        }
        if vocabulary.chat_template is not None:
            texts["chat_template.jinja"] = vocabulary.chat_template
        for name, text in texts.items():
            temporary = folder / f".{name}.new"
            temporary.write_text(text, "utf-8")
            temporary.replace(folder / name)


def read_draft_ids(folder: str | os.PathLike[str]) -> Ids:
    """Return which ids a tiny model was trained to propose, int64, ascending.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = Path(folder) / DRAFT_IDS
    try:
        ids = np.array(json.loads(path.read_text("utf-8")), np.int64)
        if ids.ndim != 1 or not len(ids) or ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ValueError("they are not ascending")
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} names no ids that a tiny draft proposes ({error}); train it again") from None
    return ids


def config_of(facts: Architecture, vocabulary: Vocabulary) -> dict[str, Any]:
    """The config.json of a model of one of :data:`~edge_spec.distill.tiny_model.CLASSES`."""
    (rope,) = facts.ropes
    scaling = {}
    if rope.frequency_factors is not None or rope.magnitude != 1.0:
        # Whatever the scheme was, it comes to divisors, which this scheme writes out.
        factors = list(rope.frequency_factors or (1.0,) * (rope.size // 2))
        scaling["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": rope.magnitude,
            "original_max_position_embeddings": facts.context_length,
        }
    return {
        "architectures": [CLASSES[facts.family]],
        "model_type": facts.family,
        "hidden_act": "silu",
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_size,
        "vocab_size": facts.logits_size,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": facts.norm_epsilon,
        "rope_theta": rope.theta,
        **scaling,
        "tie_word_embeddings": facts.tied_embeddings,
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": list(vocabulary.eos_token_ids),
        "torch_dtype": "float16",
    }


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(path)
