"""What a loaded pair takes, item by item, from the manifest alone: the laws of docs/memory.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from edge_spec.manifest import DRAFT_TOKENIZER, TOKENIZER, CacheType, HeadRecord, Manifest, ModelRecord
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.draft_measurement import COMPARED_ROWS
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.recycling import RecyclingDrafter
from edge_spec.runtime.head_law import head_slots, head_weights, kept_taps_bytes, tap_outputs_bytes
from edge_spec.runtime.memory_profile import MemoryProfile
from edge_spec.runtime.model import PREFILL_ROWS
from edge_spec.runtime.optimum_law import session_bytes, uses_optimum, workspace_bytes
from edge_spec.runtime.weight_law import Weights, weights_of

Basis = Literal["exact", "law", "measured"]

# Whose memory something lies in: the process's, or a GPU's.
Place = Literal["host", "device"]

_MIB = 1 << 20
_KV_BYTES: dict[CacheType, int] = {"float32": 4, "float16": 2, "int8": 1}

# Python with NumPy, jinja2, ONNX Runtime and the tokenizers' library, two thirds of it code. Where other processes
# have the same files mapped, this one's share of them (PSS) is less.
_LIBRARIES = 74 << 20
# What a tokenizer takes, and for every byte of tokenizer.json: once it is there, and while it is read.
_EMPTY_TOKENIZER = 2 * _MIB
_TOKENIZER, _TOKENIZER_READING = 3.95, 12.0
# A session without weights: the graph, its kernels, the arenas' first blocks.
_SESSION = 9 * _MIB
# Freed while loading, and not handed back before the end of it.
_LOADING_SLACK = 18 * _MIB
# A part that took less or more than these shares of what the law says was not alone: the app's other threads, or what
# was freed before, had a part in it.
_LEAST_SHARE, _MOST_SHARE = 0.5, 2.0
# Where the graphs run on a GPU: its libraries, which the process has open, and the context with the kernels on the
# device. Estimates.
_CUDA_LIBRARIES, _CUDA_CONTEXT = 300 * _MIB, 300 * _MIB

# Values of each row that live at once in one layer, for every column of the gate and up projections, and of the hidden
# state.
_MLP_COLUMNS, _HIDDEN_COLUMNS = 3.6, 8.0
# Copies that the w8a8 kernel makes of the logits besides the result itself.
_W8A8_LOGITS = 2.05
# Copies of logits and of attention's scores on a GPU, of 4 bytes each: in half precision and as they leave the graph.
_GPU_LOGITS, _GPU_SCORES = 1.5, 1.5
# Rows as the target leaves them, as a request's penalties and masks do, and as the laws that tokens are sampled from.
_TARGET_LOGITS = 3

# Bytes of the suffix drafter for each token of the text, with 3 states for 2 tokens; lists of tokens are in there.
_SUFFIX_TOKEN = 560


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind.

    Attributes:
        name: what takes them.
        bytes: how many.
        basis: ``"exact"`` follows from sizes; ``"law"`` from constants measured elsewhere; ``"measured"`` here, at an
            earlier load.
        place: ``"device"`` is a GPU's memory, which may be the machine's own.
    """

    name: str
    bytes: int
    basis: Basis
    place: Place = "host"


@dataclass(frozen=True)
class _Loaded:
    """A model of the pair, and what it takes.

    Attributes:
        role: by which items are named.
        weights: with ``basis`` telling what they are known from.
        session: bytes of its session beyond those of one with few nodes.
        workspace: what its session's arena grows to.
        place: where weights, keys and values, and workspace lie.
    """

    role: str
    weights: Weights
    basis: Basis
    kv_bytes: int
    session: int
    workspace: int
    place: Place

    @property
    def packed_on_host(self) -> int:
        return self.weights.packed if self.place == "host" else 0


def memory_items(
    manifest: Manifest, configuration: Configuration, profile: MemoryProfile | None = None
) -> tuple[MemoryItem, ...]:
    """What a pair takes at its peak.

    Args:
        manifest: what the bundle says of itself.
        configuration: how the pair is loaded.
        profile: what an earlier load measured here.

    Returns:
        The items, whose sum is the peak: while generating to the full context, or while loading if that takes more.
    """
    target, draft = manifest.target, _draft(manifest, configuration)
    measured = _plausible(profile or MemoryProfile(), manifest)
    models = [_load(manifest, target, configuration, "target", measured.target_weights)]
    if draft is not None:
        known = measured.draft_weights if draft is manifest.draft else measured.cpu_draft_weights
        models.append(_load(manifest, draft, configuration, "draft", known))
    head = manifest.head if configuration.head else None
    if head is not None:
        models.append(_load_head(manifest, head, configuration, measured.head_weights))
    reading = manifest.files[TOKENIZER].bytes
    draft_reading = manifest.files[DRAFT_TOKENIZER].bytes if draft and DRAFT_TOKENIZER in manifest.files else 0
    libraries = MemoryItem("libraries", _LIBRARIES, "law")
    tokenizer = MemoryItem("tokenizer", *_known(measured.tokenizer, _tokenizer(manifest)))
    items = [libraries, tokenizer]
    for model in models:
        if model.role == "draft" and draft_reading:
            items.append(MemoryItem("draft tokenizer", int(_EMPTY_TOKENIZER + _TOKENIZER * draft_reading), "law"))
        items.append(MemoryItem(f"{model.role} weights", model.weights.resident, model.basis, model.place))
        items.append(MemoryItem(f"{model.role} KV cache", model.kv_bytes, "exact", model.place))
    if head is not None:
        kept = kept_taps_bytes(head, manifest, configuration.context, configuration.conversations)
        items.append(MemoryItem("hidden states", kept, "law"))
    if told := tap_outputs_bytes(manifest, head is not None):
        items.append(MemoryItem("tap outputs", told, "law"))
    logits = _TARGET_LOGITS * (configuration.widest + 1) * target.architecture.logits_size * 4
    logits += 0 if draft is None else COMPARED_ROWS * draft.architecture.logits_size * 4
    logits += 0 if head is None else max(COMPARED_ROWS, head.tokens) * head.model.architecture.logits_size * 4
    items.append(MemoryItem("logits and laws", logits, "exact"))
    items.append(MemoryItem("drafters' tables", _tables(configuration.context), "law"))
    if manifest.device == "cpu":
        items.append(MemoryItem("workspace", sum(model.workspace for model in models), "law"))
    else:
        items += [MemoryItem(f"{model.role} workspace", model.workspace, "law", model.place) for model in models]
        items.append(MemoryItem("CUDA context", _CUDA_CONTEXT, "law", "device"))
    opened = sum(_opened(model, manifest) for model in (target, draft) if model is not None) + (head is not None)
    sessions = opened * _SESSION + sum(model.session for model in models)
    provider = MemoryItem("provider", sessions + (_CUDA_LIBRARIES if manifest.device == "cuda" else 0), "law")
    items.append(provider)
    # On the device, nothing is there while loading that does not stay.
    running = sum(item.bytes for item in items if item.place == "host")
    loaded = libraries.bytes + provider.bytes + tokenizer.bytes + models[0].packed_on_host
    peaks = [
        libraries.bytes + int(_TOKENIZER_READING * reading),
        libraries.bytes + tokenizer.bytes + int(_TOKENIZER_READING * draft_reading),
        loaded + models[0].weights.transient + _LOADING_SLACK,
    ]
    peaks += [loaded + model.packed_on_host + model.weights.transient + _LOADING_SLACK for model in models[1:]]
    return (*items, MemoryItem("loading", max(0, max(peaks) - running), "law"))


def _opened(model: ModelRecord, manifest: Manifest) -> int:
    """Sessions of a model: on CUDA trees have one of their own, of the target, and so has each call that drafts."""
    if manifest.device_of(model) == "cpu":
        return 1
    return sum(model is manifest.target or not graph.tree for graph in model.graphs)


def target_kv_bytes(manifest: Manifest, configuration: Configuration) -> int:
    """Bytes of all caches of the target, when full."""
    slots = configuration.conversations * configuration.context
    return _kv(manifest.target, slots, configuration.target_kv)


def draft_kv_bytes(manifest: Manifest, configuration: Configuration) -> int:
    """Bytes of the draft's cache, when full; 0 without a draft."""
    draft = _draft(manifest, configuration)
    return 0 if draft is None else _kv(draft, configuration.draft_window, configuration.draft_kv)


def _draft(manifest: Manifest, configuration: Configuration) -> ModelRecord | None:
    """The draft that a configuration loads."""
    return None if configuration.draft_device is None else manifest.drafts[configuration.draft_device]


def _load_head(manifest: Manifest, head: HeadRecord, configuration: Configuration, measured: int | None) -> _Loaded:
    on_gpu = manifest.device_of(head.model) == "cuda"
    weights = head_weights(head, manifest, configuration.context)
    if measured is not None:
        weights = replace(weights, packed=max(0, measured - (0 if on_gpu else _SESSION)))
    slots = head_slots(head, configuration.context)
    # Whole rows of logits, of a proposal of several tokens all at once and once more where they are joined.
    workspace = _workspace(head.model, slots, 1 if head.tokens == 1 else 2 * head.tokens, on_gpu)
    return _Loaded(
        "head",
        weights,
        "law" if measured is None else "measured",
        _kv(head.model, slots, head.model.graphs[0].kv) if slots else 0,
        0,
        workspace,
        "device" if on_gpu else "host",
    )


def _load(
    manifest: Manifest, model: ModelRecord, configuration: Configuration, role: str, measured: int | None
) -> _Loaded:
    is_target = role == "target"
    tokens = configuration.context if is_target else configuration.draft_window
    on_gpu = manifest.device_of(model) == "cuda"
    weights = weights_of(model, manifest, tokens)
    session = session_bytes(model, manifest)
    if measured is not None:
        weights = replace(weights, packed=max(0, measured - (0 if on_gpu else _SESSION + session)))
    return _Loaded(
        role,
        weights,
        "law" if measured is None else "measured",
        target_kv_bytes(manifest, configuration) if is_target else draft_kv_bytes(manifest, configuration),
        session,
        _workspace(model, tokens, configuration.widest + 1 if is_target else 1, on_gpu),
        "device" if on_gpu else "host",
    )


def _kv(model: ModelRecord, slots: int, kind: CacheType) -> int:
    """A padding row has its slot behind the text; and one layer's keys or values lie twice where they move."""
    facts = model.architecture
    buffer = facts.kv_heads * facts.head_size * _KV_BYTES[kind] * (slots + 1)
    return buffer * (2 * facts.layers + 1)


def _plausible(profile: MemoryProfile, manifest: Manifest) -> MemoryProfile:
    """The profile without sizes that cannot be the bundle's."""

    def plausible(known: int | None, law: float) -> int | None:
        return known if known is not None and _LEAST_SHARE * law <= known <= _MOST_SHARE * law else None

    def session(record: ModelRecord) -> int:
        return 0 if manifest.device_of(record) == "cuda" else _SESSION + session_bytes(record, manifest)

    def model(known: int | None, record: ModelRecord | None) -> int | None:
        if record is None:
            return None
        return plausible(known, weights_of(record, manifest, 0).packed + session(record))

    head = manifest.head
    known_head = profile.head_weights
    if head is not None:
        known_head = plausible(known_head, head_weights(head, manifest, 0).packed + session(head.model))

    return replace(
        profile,
        tokenizer=plausible(profile.tokenizer, _tokenizer(manifest)),
        target_weights=model(profile.target_weights, manifest.target),
        draft_weights=model(profile.draft_weights, manifest.draft),
        cpu_draft_weights=model(profile.cpu_draft_weights, manifest.cpu_draft),
        head_weights=known_head,
    )


def _tokenizer(manifest: Manifest) -> float:
    return _EMPTY_TOKENIZER + _TOKENIZER * manifest.files[TOKENIZER].bytes


def _known(measured: int | None, law: float) -> tuple[int, Basis]:
    return (int(law), "law") if measured is None else (measured, "measured")


def _workspace(model: ModelRecord, context: int, logits_rows: int, on_gpu: bool) -> int:
    """What the session's arena grows to: a prefill chunk's values, or the copies of a round's logits."""
    facts = model.architecture
    item = 2 if on_gpu else 4
    values = _MLP_COLUMNS * 2 * facts.intermediate_size + _HIDDEN_COLUMNS * facts.hidden_size
    chunk = PREFILL_ROWS * item * (values + 2 * context)
    copies = _W8A8_LOGITS if model.recipe["lm_head"] == "w8a8" else 0.0
    if on_gpu:
        # Twice, since trees, and drafting several tokens at once, have sessions of their own. With a bias, attention
        # makes scores of every row and token of the context.
        chunk = 2 * chunk + _GPU_SCORES * PREFILL_ROWS * facts.heads * context * 4
        copies = _GPU_LOGITS
    if uses_optimum(model):
        chunk += workspace_bytes(model, context)
    return int(max(chunk, copies * logits_rows * facts.logits_size * 4))


def _tables(context: int) -> int:
    return _fixed_tables() + _SUFFIX_TOKEN * context


@lru_cache(maxsize=1)
def _fixed_tables() -> int:
    return NgramTable("", 1).memory_bytes + RecyclingDrafter().memory_bytes
