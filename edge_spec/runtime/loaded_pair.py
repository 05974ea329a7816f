"""The models of a bundle, loaded and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge_spec.bundle import Bundle, ModelRecord
from edge_spec.errors import BundleError
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.processor import integer_products_saturate
from edge_spec.runtime.calibration import TEXT, Calibration, Progress, calibrate
from edge_spec.runtime.calibration_cache import default_folder, load_or_calibrate, machine
from edge_spec.runtime.exactness import Exactness, load_at_level
from edge_spec.runtime.memory import require_memory
from edge_spec.runtime.model import Model
from edge_spec.runtime.tokenizer import TextTokenizer


@dataclass(frozen=True)
class LoadedPair:
    """A target and perhaps a draft, with empty caches.

    Attributes:
        target, draft: the models; no draft is ``None``.
        tokenizer: of both.
        exactness: the level that holds with the target here.
        calibration: what calls of both cost here.
    """

    target: Model
    draft: Model | None
    tokenizer: TextTokenizer
    exactness: Exactness
    calibration: Calibration


def load_pair(
    bundle: Bundle,
    providers: Sequence[str],
    context: int,
    threads: int | None,
    exactness: Exactness | None,
    calibration: Calibration | Literal["fresh"] | None,
    progress: Progress | None,
) -> LoadedPair:
    """Load the models, and measure what was not given; arguments as in :func:`edge_spec.load`.

    Raises:
        BundleError: ONNX Runtime refuses a graph, or the bundle was made for another processor.
        ProviderError: the wanted exactness cannot be had.
    """
    manifest = bundle.manifest
    _require_exact_integers(bundle)
    weights = sum(record.bytes for record in manifest.files.values())
    require_memory(weights, f"The weights of {bundle.path}", "export it with a smaller recipe")

    def model(record: ModelRecord, exact_rows: bool, fixed_rows: int | None = None) -> Model:
        # The rotary table ends one row behind the context, and padding rows need their place in it.
        longest = record.architecture.context_length + 1 - (fixed_rows or 1)
        return Model(bundle, record, providers, min(context, longest), exact_rows, threads, fixed_rows)

    def target_of(fixed_rows: int | None) -> Model:
        return model(manifest.target, exact_rows=True, fixed_rows=fixed_rows)

    target, level = load_at_level(target_of, exactness, manifest.vocab_size)
    draft = None if manifest.draft is None else model(manifest.draft, exact_rows=False)
    tokenizer = TextTokenizer(bundle.tokenizer_path)
    if isinstance(calibration, Calibration):
        calibration = Calibration.from_dict(calibration.to_dict())  # costs learn, and belong to one engine
    else:
        key = {
            "bundle": manifest.to_json()["digest"],
            "machine": machine(),
            "provider": providers[0],
            "threads": threads,
            "context": target.context,
            "fixed_rows": target.fixed_rows,
            "onnxruntime": import_onnxruntime().__version__,
        }
        text = tokenizer.encode(TEXT)
        calibration = load_or_calibrate(
            key, lambda: calibrate(target, draft, text, progress), default_folder(), fresh=calibration == "fresh"
        )
    return LoadedPair(target, draft, tokenizer, level, calibration)


def _require_exact_integers(bundle: Bundle) -> None:
    """Refuse int8 weights on a processor that would saturate their products."""
    manifest = bundle.manifest
    models = [record for record in (manifest.target, manifest.draft) if record is not None]
    if manifest.device != "cpu" or all(record.integer_weights != "int8" for record in models):
        return
    if integer_products_saturate():
        raise BundleError(
            f"{bundle.path} holds int8 weights, whose products overflow on this processor (x86 without VNNI). "
            "Export it again on this machine, which stores them in a form that is exact here."
        )
