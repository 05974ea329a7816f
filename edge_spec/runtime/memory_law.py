"""What a loaded pair takes, item by item, from the manifest alone: the laws of docs/memory.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp
from typing import Literal

from edge_spec.manifest import DRAFT_TOKENIZER, TOKENIZER, CacheType, Manifest, ModelRecord
from edge_spec.runtime.calibration import COMPARED_ROWS
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.recycling import RecyclingDrafter
from edge_spec.runtime.memory_profile import MemoryProfile
from edge_spec.runtime.model import PREFILL_ROWS
from edge_spec.runtime.optimum_law import packed_bytes, session_bytes, uses_optimum, workspace_bytes

Basis = Literal["exact", "law", "measured"]

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
# CUDA's context, libraries and kernels, where the graphs run on a GPU.
_CUDA = 600 * _MIB

# Values of each row that live at once in one layer, for every column of the gate and up projections, and of the hidden
# state.
_MLP_COLUMNS, _HIDDEN_COLUMNS = 3.6, 8.0
# Copies that the w8a8 kernel makes of the logits besides the result itself.
_W8A8_LOGITS = 2.05
# Rows as the target leaves them, as a request's penalties and masks do, and as the laws that tokens are sampled from.
_TARGET_LOGITS = 3

# Bytes of the suffix drafter for each token of the text, with 3 states for 2 tokens; lists of tokens are in there.
_SUFFIX_TOKEN = 560

# Different tokens in a text of n: HEAPS * n ** EXPONENT, measured on chats, prose and code. Their rows of the embedding
# are read from the file, page by page.
_HEAPS, _EXPONENT = 6.5, 0.63
_PAGE = 1 << 12


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind.

    Attributes:
        name: what takes them.
        bytes: how many.
        basis: ``"exact"`` follows from sizes; ``"law"`` from constants measured elsewhere; ``"measured"`` here, at an
            earlier load.
    """

    name: str
    bytes: int
    basis: Basis


@dataclass(frozen=True)
class _Matrix:
    """So many matrices of a model are stored alike."""

    count: int
    inputs: int
    outputs: int
    storage: str


@dataclass(frozen=True)
class _Weights:
    """Bytes of a model's weights.

    Attributes:
        packed: the matrices, once loaded.
        touched: what generating reads of the mapped file besides.
        transient: the largest matrix, which lies there twice while it is packed.
    """

    packed: int = 0
    touched: int = 0
    transient: int = 0

    @property
    def resident(self) -> int:
        return self.packed + self.touched


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
    target, draft = manifest.target, manifest.draft if configuration.draft else None
    measured = _plausible(profile or MemoryProfile(), manifest)
    on_gpu = manifest.device == "cuda"

    def weights(model: ModelRecord, tokens: int, known: int | None) -> _Weights:
        by_law = _weights(model, manifest, tokens)
        session = _SESSION + session_bytes(model, manifest)
        return by_law if known is None else replace(by_law, packed=max(0, known - session))

    reading = manifest.files[TOKENIZER].bytes
    draft_reading = manifest.files[DRAFT_TOKENIZER].bytes if draft and DRAFT_TOKENIZER in manifest.files else 0
    target_weights = weights(target, configuration.context, measured.target_weights)
    libraries = MemoryItem("libraries", _LIBRARIES, "law")
    tokenizer = MemoryItem("tokenizer", *_known(measured.tokenizer, _tokenizer(manifest)))
    items = [
        libraries,
        tokenizer,
        MemoryItem("target weights", target_weights.resident, _basis(measured.target_weights)),
        MemoryItem("target KV cache", target_kv_bytes(manifest, configuration), "exact"),
    ]
    if draft_reading:
        items.append(MemoryItem("draft tokenizer", int(_EMPTY_TOKENIZER + _TOKENIZER * draft_reading), "law"))
    draft_weights = _Weights()
    logits = _TARGET_LOGITS * (configuration.widest + 1) * target.architecture.logits_size * 4
    workspace = _workspace(target, configuration.context, configuration.widest + 1, on_gpu)
    if draft is not None:
        draft_weights = weights(draft, configuration.draft_window, measured.draft_weights)
        items += [
            MemoryItem("draft weights", draft_weights.resident, _basis(measured.draft_weights)),
            MemoryItem("draft KV cache", draft_kv_bytes(manifest, configuration), "exact"),
        ]
        logits += COMPARED_ROWS * draft.architecture.logits_size * 4
        workspace += _workspace(draft, configuration.draft_window, 1, on_gpu)
    sessions = 1 if draft is None else 2
    nodes = sum(session_bytes(model, manifest) for model in (target, draft) if model is not None)
    provider = MemoryItem("provider", sessions * _SESSION + nodes + (_CUDA if on_gpu else 0), "law")
    items += [
        MemoryItem("logits and laws", logits, "exact"),
        MemoryItem("drafters' tables", _tables(configuration.context), "law"),
        MemoryItem("workspace", workspace, "law"),
        provider,
    ]
    running = sum(item.bytes for item in items)
    loaded = libraries.bytes + provider.bytes + tokenizer.bytes + target_weights.packed
    loading = max(
        libraries.bytes + int(_TOKENIZER_READING * reading),
        libraries.bytes + tokenizer.bytes + int(_TOKENIZER_READING * draft_reading),
        loaded + target_weights.transient + _LOADING_SLACK,
        loaded + draft_weights.packed + draft_weights.transient + _LOADING_SLACK,
    )
    return (*items, MemoryItem("loading", max(0, loading - running), "law"))


def target_kv_bytes(manifest: Manifest, configuration: Configuration) -> int:
    """Bytes of all caches of the target, when full."""
    slots = configuration.conversations * configuration.context
    return _kv(manifest.target, slots, configuration.target_kv)


def draft_kv_bytes(manifest: Manifest, configuration: Configuration) -> int:
    """Bytes of the draft's cache, when full; 0 without a draft."""
    if manifest.draft is None or not configuration.draft:
        return 0
    return _kv(manifest.draft, configuration.draft_window, configuration.draft_kv)


def _kv(model: ModelRecord, slots: int, kind: CacheType) -> int:
    """A padding row has its slot behind the text; and one layer's keys or values lie twice where they move."""
    facts = model.architecture
    buffer = facts.kv_heads * facts.head_size * _KV_BYTES[kind] * (slots + 1)
    return buffer * (2 * facts.layers + 1)


def _plausible(profile: MemoryProfile, manifest: Manifest) -> MemoryProfile:
    """The profile without sizes that cannot be the bundle's."""

    def plausible(known: int | None, law: float) -> int | None:
        return known if known is not None and _LEAST_SHARE * law <= known <= _MOST_SHARE * law else None

    def model(known: int | None, record: ModelRecord | None) -> int | None:
        if record is None:
            return None
        by_law = _weights(record, manifest, 0).packed + _SESSION + session_bytes(record, manifest)
        return plausible(known, by_law)

    return replace(
        profile,
        tokenizer=plausible(profile.tokenizer, _tokenizer(manifest)),
        target_weights=model(profile.target_weights, manifest.target),
        draft_weights=model(profile.draft_weights, manifest.draft),
    )


def _tokenizer(manifest: Manifest) -> float:
    return _EMPTY_TOKENIZER + _TOKENIZER * manifest.files[TOKENIZER].bytes


def _known(measured: int | None, law: float) -> tuple[int, Basis]:
    return (int(law), "law") if measured is None else (measured, "measured")


def _basis(measured: int | None) -> Basis:
    return "law" if measured is None else "measured"


def _matrices(model: ModelRecord) -> Iterator[_Matrix]:
    facts, recipe = model.architecture, model.recipe
    attended = facts.heads * facts.head_size
    layers = facts.layers
    yield _Matrix(layers, facts.hidden_size, attended + 2 * facts.kv_heads * facts.head_size, str(recipe["attention"]))
    yield _Matrix(layers, attended, facts.hidden_size, str(recipe["attention"]))
    yield _Matrix(layers, facts.hidden_size, 2 * facts.intermediate_size, str(recipe["mlp_up"]))
    yield _Matrix(layers, facts.intermediate_size, facts.hidden_size, str(recipe["mlp_down"]))
    yield _Matrix(1, facts.hidden_size, facts.logits_size, str(recipe["lm_head"]))


def _weights(model: ModelRecord, manifest: Manifest, tokens: int) -> _Weights:
    """Matrices as the kernels have packed them, and what is read of the mapped file besides."""
    block = int(model.recipe.get("block_size", 32))
    facts = model.architecture
    if uses_optimum(model):
        packed, largest = packed_bytes(model, manifest)
        return _Weights(packed, _embedding(model, tokens, block), largest)
    on_gpu = manifest.device == "cuda"
    total, largest = 0, 0
    for matrix in _matrices(model):
        packed, original = _packed(matrix, block, on_gpu)
        total += matrix.count * packed
        largest = max(largest, original)
    vectors = facts.layers * (4 * facts.hidden_size + 2 * facts.intermediate_size) * 4
    rotary = tokens * sum(rope.size for rope in facts.ropes) * 4
    return _Weights(total, vectors + rotary + _embedding(model, tokens, block), largest)


def _packed(matrix: _Matrix, block: int, on_gpu: bool) -> tuple[int, int]:
    """Bytes of a matrix in its kernel's own order, and of the original that lies beside it meanwhile."""
    count = matrix.inputs * matrix.outputs
    if matrix.storage == "w8a8":
        return count + 8 * matrix.outputs, count
    if matrix.storage == "int4":
        blocks = ceil(matrix.inputs / block)
        integers, scales = matrix.outputs * blocks * block // 2, 4 * matrix.outputs * blocks
        if on_gpu:
            return integers + scales // 2, integers
        # Scales and sums of each block are packed with the integers, and what those were made of stays mapped.
        zero_points = matrix.outputs * ceil(blocks / 2)
        return integers + 3 * scales + zero_points, integers
    if on_gpu and matrix.storage == "fp16":
        return 2 * count, 2 * count
    return 4 * count, 4 * count  # on CPU fp16 is widened


def _embedding(model: ModelRecord, tokens: int, block: int) -> int:
    """Bytes that a text of so many tokens reads of the mapped embedding."""
    facts = model.architecture
    storage = str(model.recipe["embedding"])
    parts = {
        "fp32": (4.0,),
        "fp16": (2.0,),
        "int8": (1.0, 4 / 32),
        "int4": (0.5, 4 / block, 0.5 / block),
    }[storage]
    rows = facts.readable_ids
    distinct = min(_HEAPS * tokens**_EXPONENT, rows)
    touched = 0.0
    for width in parts:
        row = facts.hidden_size * width
        pages = rows * row / _PAGE
        # A row that does not begin with a page reaches into one more.
        touched += pages * _PAGE * (1 - exp(-distinct * (row / _PAGE + 1) / pages))
    return int(touched)


def _workspace(model: ModelRecord, context: int, logits_rows: int, on_gpu: bool) -> int:
    """What the session's arena grows to: a prefill chunk's values, or the copies of a round's logits."""
    facts = model.architecture
    item = 2 if on_gpu else 4
    values = _MLP_COLUMNS * 2 * facts.intermediate_size + _HIDDEN_COLUMNS * facts.hidden_size
    chunk = PREFILL_ROWS * item * (values + 2 * context)
    copies = _W8A8_LOGITS if model.recipe["lm_head"] == "w8a8" else 0.0
    if uses_optimum(model):
        chunk += workspace_bytes(model, context)
    return int(max(chunk, copies * logits_rows * facts.logits_size * 4))


def _tables(context: int) -> int:
    return _fixed_tables() + _SUFFIX_TOKEN * context


@lru_cache(maxsize=1)
def _fixed_tables() -> int:
    return NgramTable("", 1).memory_bytes + RecyclingDrafter().memory_bytes
