"""The models of a bundle, loaded and measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.heap import give_back
from edge_spec.manifest import DRAFT_TOKENIZER, CacheType, Device, Manifest, ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.processor import integer_products_saturate
from edge_spec.runtime.calibration import TEXT, Calibration, calibrate
from edge_spec.runtime.calibration_cache import default_folder, load_or_calibrate, machine
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.draft_measurement import Progress
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary, read_draft_vocabulary, read_head_vocabulary
from edge_spec.runtime.exactness import Exactness, load_at_level
from edge_spec.runtime.head_measurement import AnyHead
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.memory_profile import MemoryNotes, write_profile
from edge_spec.runtime.model import Model
from edge_spec.runtime.pair_opener import PairOpener
from edge_spec.runtime.provider import CPU_PROVIDER
from edge_spec.runtime.tokenizer import TextTokenizer

_LOG = logging.getLogger(__name__)

# Tokens in the draft's cache at which two places for it are compared.
_USUAL_PAST = 256


@dataclass(frozen=True)
class LoadedPair:
    """A target and perhaps a draft or a head, with empty caches.

    Attributes:
        configuration: how it was loaded.
        target: the model whose text it is.
        draft: the other one; ``None`` if there is none, or no room for it.
        head: in its place, drafts from what the target tells; ``None`` likewise.
        load_draft: loads the draft again, once its memory was needed for something else.
        load_head: likewise the head.
        draft_load_seconds: how long either takes.
        tokenizer: of the target, and of the draft unless that has its own.
        draft_tokenizer: the draft's own; ``None`` where it reads the target's ids.
        draft_vocabulary: what the columns of the draft's or the head's logits stand for.
        exactness: the level that holds with the target here.
        calibration: what calls of both cost here.
    """

    configuration: Configuration
    target: Model
    draft: Model | None
    head: AnyHead | None
    load_draft: Callable[[], Model] | None
    load_head: Callable[[], AnyHead] | None
    draft_load_seconds: float
    tokenizer: TextTokenizer
    draft_tokenizer: TextTokenizer | None
    draft_vocabulary: DraftVocabulary
    exactness: Exactness
    calibration: Calibration


def load_pair(
    bundle: Bundle,
    providers: Sequence[str],
    configurations: Sequence[Configuration],
    threads: int | None,
    exactness: Exactness | None,
    calibration: Calibration | Literal["fresh"] | None,
    progress: Progress | None,
    device_taken: Callable[[], int | None] = lambda: None,
    arenas: Mapping[str, int] | None = None,
) -> LoadedPair:
    """Load the models, and measure what was not given; see :func:`edge_spec.load`.

    Args:
        bundle: the validated bundle.
        providers: execution providers, the one that does the work first.
        configurations: what the memory plan decided; where that is several, which differ in what the draft runs on,
            the one whose draft is faster is taken.
        threads: CPU threads.
        exactness: what is owed.
        calibration: what calls cost here, if it is known.
        progress: told what is being measured.
        device_taken: tells the bytes that are taken of a GPU's own memory.
        arenas: most bytes of the arenas of ``"target"`` and ``"draft"`` on a GPU; no limit where one is not named.

    Raises:
        BundleError: ONNX Runtime refuses a graph, or the bundle was made for another processor.
        ProviderError: the wanted exactness cannot be had.
    """
    manifest = bundle.manifest
    first = configurations[0]
    _require_exact_integers(bundle, any(choice.draft_device == "cpu" for choice in configurations))
    for lack in settings_for(providers).lacks:
        _LOG.warning("not on this device: %s", lack)
    notes = MemoryNotes()
    # First, since reading it takes several times its size for a moment, and weights need that room later.
    with notes.of("tokenizer"):
        tokenizer = TextTokenizer(bundle.tokenizer_path)
        give_back()
    draft_tokenizer, draft_vocabulary = None, WHOLE
    if first.draft:
        draft_vocabulary = read_draft_vocabulary(bundle)
        if manifest.draft_vocabulary is not None and manifest.draft_vocabulary.reads == "own tokens":
            draft_tokenizer = TextTokenizer(bundle.path / DRAFT_TOKENIZER)
            give_back()

    head = manifest.head if first.head else None
    if head is not None:
        draft_vocabulary = read_head_vocabulary(bundle)
    taps = () if head is None else head.taps
    opener = PairOpener(bundle, providers, threads, notes, device_taken, arenas or {})

    def target_of(fixed_rows: int | None) -> Model:
        return opener.model(manifest.target, first.context, first.target_kv, True, fixed_rows, taps)

    target, level = load_at_level(target_of, exactness, manifest.vocab_size)
    drafts = _Drafts(manifest, opener.model)
    load_head = None if head is None else partial(opener.head, head, first.context)
    loaded_head, head_seconds = None, 0.0
    if load_head is not None:
        started = perf_counter()
        loaded_head = load_head()
        head_seconds = perf_counter() - started
    if isinstance(calibration, Calibration):
        configuration = first
        calibration = Calibration.from_dict(calibration.to_dict())  # costs learn, and belong to one engine
    else:
        text = tokenizer.encode(TEXT)
        draft_text = None if draft_tokenizer is None else _known(draft_tokenizer.encode(TEXT), manifest)

        def measured(choice: Configuration) -> Calibration:
            return calibrate(
                target,
                drafts.load(choice),
                text,
                progress,
                most_rows=1 + choice.widest,
                vocabulary=draft_vocabulary,
                draft_tokens=draft_text,
                head=loaded_head,
            )

        calibrations = [
            load_or_calibrate(
                _conditions(bundle, providers, threads, target, choice),
                partial(measured, choice),
                default_folder(),
                fresh=calibration == "fresh",
            )
            for choice in configurations
        ]
        chosen = _faster(calibrations)
        configuration, calibration = configurations[chosen], calibrations[chosen]
    draft = drafts.load(configuration)
    write_profile(manifest, notes.profile())
    # What was measured with is not the size of what comes.
    for loaded in (target, draft, loaded_head):
        if loaded is not None and not isinstance(loaded, MedusaHeads):
            loaded.shrink(loaded.cache)
    give_back()
    return LoadedPair(
        configuration,
        target,
        draft,
        loaded_head,
        drafts.loader(configuration),
        load_head,
        drafts.seconds + head_seconds,
        tokenizer,
        draft_tokenizer,
        draft_vocabulary,
        level,
        calibration,
    )


class _Drafts:
    """Loads the draft for one device or another, one at a time: both might not fit the memory."""

    def __init__(self, manifest: Manifest, model: Callable[[ModelRecord, int, CacheType, bool], Model]) -> None:
        self._manifest = manifest
        self._model = model
        self._loaded: dict[Device, Model] = {}
        self.seconds = 0.0

    def loader(self, choice: Configuration) -> Callable[[], Model] | None:
        """What loads the draft of a configuration; ``None`` if that has none."""
        if choice.draft_device is None:
            return None
        record = self._manifest.drafts[choice.draft_device]
        return partial(self._model, record, choice.draft_window, choice.draft_kv, False)

    def load(self, choice: Configuration) -> Model | None:
        """The draft of a configuration, loaded unless it is there; ``seconds`` then tells how long that took."""
        device, load = choice.draft_device, self.loader(choice)
        if device is None or load is None:
            return None
        if device not in self._loaded:
            self._loaded.clear()
            give_back()
            started = perf_counter()
            self._loaded[device] = load()
            self.seconds = perf_counter() - started
        return self._loaded[device]


def _conditions(
    bundle: Bundle, providers: Sequence[str], threads: int | None, target: Model, choice: Configuration
) -> dict[str, Any]:
    """What costs belong to: where one of these is different, they are measured anew."""
    return {
        "bundle": bundle.manifest.digest,
        "machine": machine(on_gpu=providers[0] != CPU_PROVIDER),
        "provider": providers[0],
        "threads": threads,
        "context": target.context,
        "widest": choice.widest,
        "draft": choice.draft_device,
        "head": choice.head,
        "draft_window": choice.draft_window,
        "target_kv": choice.target_kv,
        "draft_kv": choice.draft_kv,
        "fixed_rows": target.fixed_rows,
        "onnxruntime": import_onnxruntime().__version__,
    }


def _faster(calibrations: Sequence[Calibration]) -> int:
    """Which calibration's draft takes less time for a token; the first where they are alike."""
    if len(calibrations) == 1:
        return 0
    seconds = [calibration.costs.draft(_USUAL_PAST, 1) for calibration in calibrations]
    return seconds.index(min(seconds))


def _known(tokens: Sequence[int], manifest: Manifest) -> list[int]:
    """The tokens that the draft's embedding has, whatever its tokenizer says."""
    speech = manifest.draft_vocabulary
    return [token for token in tokens if speech is not None and token < speech.size]


def _require_exact_integers(bundle: Bundle, cpu_draft: bool) -> None:
    """Refuse int8 weights of models for the CPU on a processor that would saturate their products."""
    manifest = bundle.manifest
    models = (*manifest.models, *([] if manifest.head is None else [manifest.head.model]))
    on_cpu = [record for record in models if manifest.device_of(record) == "cpu"]
    if not cpu_draft:
        on_cpu = [record for record in on_cpu if record is not manifest.cpu_draft]
    if all(record.integer_weights != "int8" for record in on_cpu):
        return
    if integer_products_saturate():
        raise BundleError(
            f"{bundle.path} holds int8 weights, whose products overflow on this processor (x86 without VNNI). "
            "Export it again on this machine, which stores them in a form that is exact here."
        )
