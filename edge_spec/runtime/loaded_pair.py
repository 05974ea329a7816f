"""The models of a bundle, loaded and measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.heap import give_back
from edge_spec.manifest import DRAFT_TOKENIZER, CacheType, Manifest, ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.processor import integer_products_saturate
from edge_spec.runtime.calibration import TEXT, Calibration, Progress, calibrate
from edge_spec.runtime.calibration_cache import default_folder, load_or_calibrate, machine
from edge_spec.runtime.capturing import capture
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary, read_draft_vocabulary
from edge_spec.runtime.exactness import Exactness, load_at_level
from edge_spec.runtime.memory_profile import MemoryNotes, write_profile
from edge_spec.runtime.model import Model
from edge_spec.runtime.tokenizer import TextTokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPair:
    """A target and perhaps a draft, with empty caches.

    Attributes:
        target: the model whose text it is.
        draft: the other one; ``None`` if there is none, or no room for it.
        load_draft: loads the draft again, once its memory was needed for something else.
        draft_load_seconds: how long that takes.
        tokenizer: of the target, and of the draft unless that has its own.
        draft_tokenizer: the draft's own; ``None`` where it reads the target's ids.
        draft_vocabulary: what the columns of the draft's logits stand for.
        exactness: the level that holds with the target here.
        calibration: what calls of both cost here.
    """

    target: Model
    draft: Model | None
    load_draft: Callable[[], Model] | None
    draft_load_seconds: float
    tokenizer: TextTokenizer
    draft_tokenizer: TextTokenizer | None
    draft_vocabulary: DraftVocabulary
    exactness: Exactness
    calibration: Calibration


def load_pair(
    bundle: Bundle,
    providers: Sequence[str],
    configuration: Configuration,
    threads: int | None,
    exactness: Exactness | None,
    calibration: Calibration | Literal["fresh"] | None,
    progress: Progress | None,
) -> LoadedPair:
    """Load the models, and measure what was not given; see :func:`edge_spec.load`.

    Args:
        bundle: the validated bundle.
        providers: execution providers, the one that does the work first.
        configuration: what the memory plan decided.
        threads: CPU threads.
        exactness: what is owed.
        calibration: what calls cost here, if it is known.
        progress: told what is being measured.

    Raises:
        BundleError: ONNX Runtime refuses a graph, or the bundle was made for another processor.
        ProviderError: the wanted exactness cannot be had.
    """
    manifest = bundle.manifest
    _require_exact_integers(bundle)
    for lack in settings_for(providers).lacks:
        _LOG.warning("not on this device: %s", lack)
    notes = MemoryNotes()
    # First, since reading it takes several times its size for a moment, and weights need that room later.
    with notes.of("tokenizer"):
        tokenizer = TextTokenizer(bundle.tokenizer_path)
        give_back()
    draft_tokenizer, draft_vocabulary = None, WHOLE
    if configuration.draft:
        draft_vocabulary = read_draft_vocabulary(bundle)
        if manifest.draft_vocabulary is not None and manifest.draft_vocabulary.reads == "own tokens":
            draft_tokenizer = TextTokenizer(bundle.path / DRAFT_TOKENIZER)
            give_back()

    def model(
        record: ModelRecord, context: int, kv: CacheType, exact_rows: bool, fixed_rows: int | None = None
    ) -> Model:
        # The rotary table ends one row behind the context, and padding rows need their place in it. Another exporter's
        # model ends with the context, and so one token earlier if calls have a padding row.
        own = record.graphs[0].via == "native"
        longest = record.architecture.context_length + 1 - (fixed_rows or (1 if own or not exact_rows else 2))
        is_target = record is manifest.target
        settings = settings_for(providers)
        if not is_target:  # a draft writes chains
            settings = replace(settings, tree_graph=False)
        with notes.of("target_weights" if is_target else "draft_weights"):
            loaded = Model(
                bundle, record, providers, min(context, longest), exact_rows, threads, fixed_rows, kv, settings
            )
            give_back()
        capture(loaded, last_row=not is_target)
        if loaded.eager_reason is not None and loaded.eager_reason not in settings.lacks:
            _LOG.warning("some calls run without CUDA graphs: %s", loaded.eager_reason)
        return loaded

    def target_of(fixed_rows: int | None) -> Model:
        return model(manifest.target, configuration.context, configuration.target_kv, True, fixed_rows)

    target, level = load_at_level(target_of, exactness, manifest.vocab_size)
    draft, load_draft, draft_load_seconds = None, None, 0.0
    if manifest.draft is not None and configuration.draft:
        load_draft = partial(model, manifest.draft, configuration.draft_window, configuration.draft_kv, False)
        started = perf_counter()
        draft = load_draft()
        draft_load_seconds = perf_counter() - started
    write_profile(manifest, notes.profile())
    if isinstance(calibration, Calibration):
        calibration = Calibration.from_dict(calibration.to_dict())  # costs learn, and belong to one engine
    else:
        key = {
            "bundle": manifest.digest,
            "machine": machine(),
            "provider": providers[0],
            "threads": threads,
            "context": target.context,
            "widest": configuration.widest,
            "draft": draft is not None,
            "draft_window": configuration.draft_window,
            "target_kv": configuration.target_kv,
            "draft_kv": configuration.draft_kv,
            "fixed_rows": target.fixed_rows,
            "onnxruntime": import_onnxruntime().__version__,
        }
        text = tokenizer.encode(TEXT)
        draft_text = None if draft_tokenizer is None else _known(draft_tokenizer.encode(TEXT), manifest)
        calibration = load_or_calibrate(
            key,
            lambda: calibrate(
                target,
                draft,
                text,
                progress,
                most_rows=1 + configuration.widest,
                vocabulary=draft_vocabulary,
                draft_tokens=draft_text,
            ),
            default_folder(),
            fresh=calibration == "fresh",
        )
    # What was measured with is not the size of what comes.
    for loaded in (target, draft):
        if loaded is not None:
            loaded.shrink(loaded.cache)
    give_back()
    return LoadedPair(
        target,
        draft,
        load_draft,
        draft_load_seconds,
        tokenizer,
        draft_tokenizer,
        draft_vocabulary,
        level,
        calibration,
    )


def _known(tokens: Sequence[int], manifest: Manifest) -> list[int]:
    """The tokens that the draft's embedding has, whatever its tokenizer says."""
    speech = manifest.draft_vocabulary
    return [token for token in tokens if speech is not None and token < speech.size]


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
