"""A head on disk: config.json and model.safetensors, in the layout that EAGLE-3 heads are published in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edge_spec.distill.half_weights import half_weights
from edge_spec.distill.head import Head, HeadConfig
from edge_spec.errors import CheckpointError

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_head(folder: Path, head: Head, draft_ids: npt.NDArray[np.int64]) -> None:
    """Write a head as float16; each of the two files appears whole.

    Args:
        folder: exists.
        head: the head.
        draft_ids: int64 [draft vocabulary], ascending: the target's id of each column. Stored as ``d2t``, their
            distance from the column, and ``t2d``, which ids of the target are among them.
    """
    tensors = half_weights(head.state_dict())
    ids = torch.from_numpy(draft_ids)
    tensors["d2t"] = ids - torch.arange(len(ids))
    kept = torch.zeros(head.config.vocabulary_size, dtype=torch.bool)
    kept[ids] = True
    tensors["t2d"] = kept
    temporary = folder / f".{WEIGHTS}.new"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    temporary = folder / f".{CONFIG}.new"
    temporary.write_text(json.dumps(_to_json(head.config), indent=2) + "\n", "utf-8")
    temporary.replace(folder / CONFIG)


def read_head(folder: str | os.PathLike[str]) -> tuple[Head, npt.NDArray[np.int64]]:
    """Return a head that :func:`write_head` wrote, as float32, and its ``draft_ids``.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    path, config = Path(folder), read_head_config(folder)
    try:
        tensors = load_file(path / WEIGHTS)
        ids = (tensors.pop("d2t") + torch.arange(config.draft_vocabulary_size)).numpy()
        tensors.pop("t2d")
        if ids.dtype != np.int64 or ids[0] < 0 or ids[-1] >= config.vocabulary_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"d2t does not name ids from 0 to {config.vocabulary_size - 1:,}, ascending")
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds values that are infinite or not a number")
        head = Head(config)
        if others := sorted(tensors.keys() - head.state_dict().keys()):
            raise ValueError(f"it has {others[0]!r}, which heads that are trained here have not")
        head.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, IndexError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return head, ids


def read_head_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Return the sizes of a head that :func:`write_head` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = Path(folder)
    try:
        return _from_json(json.loads((path / CONFIG).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
    return CheckpointError(f"{path} holds no head that can be read: {reason}; expected one that was trained here")


def _to_json(config: HeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocabulary_size,
        "draft_vocab_size": config.draft_vocabulary_size,
        "max_position_embeddings": config.context_length,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        # After how many layers of the target each hidden state is taken, in the order of fc's columns.
        "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
    }


def _from_json(fields: dict[str, Any]) -> HeadConfig:
    return HeadConfig(
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        head_size=fields["head_dim"],
        norm_epsilon=fields["rms_norm_eps"],
        rope_theta=fields["rope_theta"],
        vocabulary_size=fields["vocab_size"],
        draft_vocabulary_size=fields["draft_vocab_size"],
        tap_layers=tuple(fields["eagle_aux_hidden_state_layer_ids"]),
        context_length=fields["max_position_embeddings"],
    )
