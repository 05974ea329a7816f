"""A checkpoint that transformers reads and optimum-onnx exports, for architectures that edge-spec does not build."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.errors import CheckpointError, MissingDependencyError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.hub import fetch
from edge_spec.export.hub_name import parse_hub_name
from edge_spec.export.huggingface_folder import HuggingFaceFolder
from edge_spec.manifest_check import LARGEST_SIZES

Float32Array = npt.NDArray[np.float32]

_TASK = "text-generation-with-past"
_LONGEST_REASON = 300  # characters of what another package says

# Where configurations say how many positions there are. Where none does (ALiBi), weights set no limit.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_UNLIMITED = 2048


@dataclass(frozen=True)
class ConfiguredSizes:
    """What the configuration says of a model and its graph does not."""

    logits_size: int
    context_length: int
    heads: int


class OptimumCheckpoint:
    """A Hugging Face folder, or a hub id, whose model transformers runs.

    Attributes:
        source: what the checkpoint is called.
        model_type: what its configuration says it is.
        architecture: its sizes.
        default_sampling: the checkpoint's own suggestion.
    """

    def __init__(self, source: str | os.PathLike[str], context: int | None = None, offline: bool = False) -> None:
        """Read the configuration, and see that optimum-onnx knows the model.

        Args:
            source: the folder or its name on the hub.
            context: positions that are wanted; ``None`` for what the model was trained for.
            offline: take what is named on the hub from its cache only.

        Raises:
            MissingDependencyError: optimum-onnx is not installed.
            CheckpointError: nothing is there, or a file is missing or damaged.
            UnsupportedError: optimum-onnx does not export such a model with its past, or it is quantized.
        """
        self._path, self.source = _folder_of(source, offline)
        self._folder = HuggingFaceFolder(self._path)
        config = self._folder.config
        self.model_type = config.text("model_type")
        if config.get("quantization_config"):
            raise UnsupportedError(f"{config.where}: the checkpoint is quantized; give the original one")
        _require_exportable(self.model_type, config.where)
        self.architecture = self._sizes(context)
        self.default_sampling: Mapping[str, float] = self._folder.default_sampling

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer and what belongs to it, read on first use.

        Raises:
            CheckpointError: a file is damaged, or tokens reach beyond the embedding.
            UnsupportedError: there is no tokenizer.json.
        """
        return self._folder.vocabulary(self.architecture.logits_size)

    def sha256(self) -> str:
        """Return the hex digest of the weight files' contents, in the order of their names."""
        return self._folder.sha256()

    def load(self) -> Any:
        """Load the model as transformers has it, in float32, without running code that comes with it.

        Raises:
            CheckpointError: transformers cannot, or a tensor is missing.
        """
        from transformers import AutoModelForCausalLM

        with _quiet(), self._errors("transformers cannot load"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._path,
                dtype="float32",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        model, report = loaded
        if absent := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
            raise CheckpointError(f"{self.source} lacks the tensor {absent[0]!r}, or has it in another shape")
        return model.eval()

    def logits(self, model: Any, token_ids: npt.NDArray[np.int64]) -> Float32Array:
        """Run a text through the loaded model; float32 [tokens, vocab]. Raises CheckpointError if it fails."""
        import torch

        with _quiet(), self._errors("transformers cannot run"), torch.no_grad():
            logits: Float32Array = model(torch.from_numpy(token_ids[None])).logits[0].float().numpy()
        if not np.isfinite(logits).all():
            raise CheckpointError(f"{self.source} is damaged: its logits are infinite or not a number")
        return logits

    def export(self, model: Any, folder: Path) -> Path:
        """Have optimum-onnx write the loaded model's graph into a folder, and return the file.

        Raises:
            CheckpointError: it cannot.
        """
        from optimum.exporters.onnx import onnx_export_from_model

        with _quiet(), self._errors("optimum-onnx cannot export"):
            onnx_export_from_model(model, folder, task=_TASK, do_validation=False, no_post_process=True)
        return folder / "model.onnx"

    def _sizes(self, wanted: int | None) -> ConfiguredSizes:
        from transformers import AutoConfig

        with _quiet(), self._errors("transformers cannot read the configuration of"):
            config = AutoConfig.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config()

        def size(*names: str, default: int | None = None) -> int:
            values = (getattr(config, name, None) for name in names)
            value = next((value for value in values if isinstance(value, int) and value > 0), default)
            if value is None:
                raise CheckpointError(f"{self.source}: config.json has no {names[0]}")
            return value

        context = min(size(*_CONTEXTS, default=_UNLIMITED), LARGEST_SIZES["context_length"])
        if wanted is not None and not 2 <= wanted <= context:
            raise CheckpointError(f"{self.source}: a context of {wanted} tokens is wanted, expected 2 to {context}")
        context = context if wanted is None else wanted
        return ConfiguredSizes(size("vocab_size"), context, size("num_attention_heads", "n_head", default=1))

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn whatever a model's own code raises into an error about its checkpoint."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise CheckpointError(f"{what} {self.source}: {reason or type(error).__name__}") from error


def _folder_of(source: str | os.PathLike[str], offline: bool) -> tuple[Path, str]:
    """Return where the folder is and what it is called."""
    path = Path(os.path.expanduser(source))  # noqa: PTH111 - Path's own raises RuntimeError on an unknown ~user
    if path.is_dir():
        return path, str(source)
    if isinstance(source, str) and not path.exists() and (name := parse_hub_name(source)) is not None:
        fetched = fetch(name, offline)
        if fetched.path.is_dir():
            return fetched.path, fetched.source
    raise CheckpointError(
        f"no checkpoint at {str(source)!r} that optimum-onnx can read; give a folder with config.json, safetensors "
        "and tokenizer.json, or a hub id (owner/name)"
    )


def _require_exportable(model_type: str, where: str) -> None:
    try:
        with _quiet():
            from optimum.exporters.onnx import onnx_export_from_model  # noqa: F401 - registers what it can export
            from optimum.exporters.tasks import TasksManager
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting by way of optimum needs optimum-onnx ({error}): pip install 'edge-spec[optimum]'"
        ) from error
    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(model_type, "onnx", library_name="transformers")
    except KeyError:
        tasks = {}
    if _TASK not in tasks:
        raise UnsupportedError(
            f"{where}: optimum-onnx does not export model_type {model_type!r} as a decoder with its past"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the packages print and warn of to themselves: tracing a model makes a lot of it."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
