"""What a pair bundle says of itself: the records of its manifest, and their JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from edge_spec.errors import BundleError
from edge_spec.record_json import decode, parse_json, shown

# Raised whenever the manifest or the contract of the graphs changes; a bundle of another version is refused.
SCHEMA_VERSION = 6

# By this a manifest is known for one.
FORMAT = "edge-spec pair bundle"

# Names of files, as they stand in ``Manifest.files``.
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
DRAFT_TOKENIZER = "draft/tokenizer.json"
DRAFT_IDS = "draft/ids.bin"
HEAD_IDS = "target/head.ids.bin"
HEAD_MARKOV = "target/head.markov.bin"

# What graphs run on.
Device = Literal["cpu", "cuda"]

# What keys and values are stored as. int8 has fixed scales for each channel (docs/quantization.md).
CacheType = Literal["float32", "float16", "int8"]

# Who wrote a graph: the exporter itself, or optimum-onnx. The two have contracts of their own (docs/graph-contract.md).
Via = Literal["native", "optimum"]

# Small networks that draft from the target's hidden states (docs/heads.md).
HeadKind = Literal["eagle3", "mtp", "dflash", "dspark", "medusa"]

# Likeliest tokens of each row that a graph gives which selects; all of a smaller vocabulary.
SELECTED_TOKENS = 64


def tap_name(tap: int) -> str:
    """What graphs call the hidden states behind so many layers."""
    return f"hidden.{tap}"


@dataclass(frozen=True)
class GraphRecord:
    """One ONNX graph of a model and what it can do.

    Attributes:
        path: file relative to the bundle, with forward slashes.
        tree: whether it takes positions and an attention bias, as proposal trees need.
        kv: type of its KV cache.
        taps: after how many decoder layers its outputs ``hidden.i`` tell the residual stream, for heads that draft from
            it. It is told as the checkpoint has it, before the final norm for the last one.
        via: who wrote it. One by way of optimum only reads the cache, and gives the keys and values of a call's own
            rows.
        selects: whether it also gives the likeliest tokens of each row, so that whole rows of logits can stay on the
            device (docs/cuda.md).
        steps: tokens that one call drafts, each by a step of the model; 1 for a graph that only gives logits.
    """

    path: str
    tree: bool
    kv: CacheType
    taps: tuple[int, ...] = ()
    via: Via = "native"
    selects: bool = False
    steps: int = 1


@dataclass(frozen=True)
class RopeRecord:
    """One rotary embedding of a model.

    Attributes:
        theta: base of its frequencies, and ``scaled`` whether they are stretched.
        size: elements of each head that it rotates.
        layers: how many layers have it.
    """

    theta: float
    scaled: bool
    size: int
    layers: int


@dataclass(frozen=True)
class ArchitectureRecord:
    """Sizes of one model.

    Attributes:
        logits_size: every column of the logits, padding ids included.
        embedding_rows: ids that the model can read; ``None`` for as many as there are columns.
        ropes: its rotary embeddings; layers beyond theirs have none.
        sliding_window: tokens that some layers see, ``None`` where all see all; ``sliding_layers`` are how many.

    Of a model by way of optimum, ``intermediate_size`` is the width of its widest matrix, lm_head aside, and there are
    no ``ropes``: what it makes of positions is the graph's own affair.
    """

    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    logits_size: int
    context_length: int
    ropes: tuple[RopeRecord, ...]
    sliding_window: int | None
    sliding_layers: int
    tied_embeddings: bool
    embedding_rows: int | None = None

    @property
    def readable_ids(self) -> int:
        """Rows of the embedding."""
        return self.logits_size if self.embedding_rows is None else self.embedding_rows


@dataclass(frozen=True)
class QualityRecord:
    """How far a written graph is from the float32 reference on a fixed text; KL in nats."""

    tokens: int
    mean_kl: float
    p95_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class ModelRecord:
    """One model of the pair.

    Attributes:
        source: where its weights came from, and ``source_sha256`` which weights those were.
        recipe: its ``name``, the storage format by layer class, and the ``block_size`` of int4 layers.
        integer_weights: type of the w8a8 weights, ``None`` without any. ``int8`` ones are right only on
            processors whose u8 x s8 products do not saturate.
        quality: ``None`` when the check was skipped.
    """

    source: str
    source_sha256: str
    architecture: ArchitectureRecord
    recipe: dict[str, str | int]
    integer_weights: Literal["int8", "uint8"] | None
    graphs: tuple[GraphRecord, ...]
    quality: QualityRecord | None


@dataclass(frozen=True)
class DraftVocabularyRecord:
    """How a draft speaks whose tokens are not simply the target's (docs/drafts.md).

    Attributes:
        reads: ``"target ids"``, or ``"own tokens"``: the text as the tokenizer in ``draft/tokenizer.json`` splits it.
        size: ids that it reads.
        names_columns: whether ``draft/ids.bin`` holds the id of every column of its logits, ascending, as 32-bit
            integers without sign, little-endian; if not, column i is id i.
    """

    reads: Literal["target ids", "own tokens"]
    size: int
    names_columns: bool


@dataclass(frozen=True)
class HeadRecord:
    """A small network that drafts from the target's hidden states. Its graph lies beside the target's.

    Attributes:
        kind: which published design it follows.
        taps: which of the target's hidden states it reads, behind how many layers, in the order in which it reads them.
        model: its own sizes and graph. The embedding, and lm_head where the design shares it, are the target's.
        tokens: most tokens that one call proposes; 1 if each needs a call.
        names_columns: whether ``target/head.ids.bin`` holds the id of every column of its logits, as
            :class:`DraftVocabularyRecord` says; if not, column i is id i.
        markov_rank: of the bias on its logits by the token before; 0 without one. ``target/head.markov.bin`` then holds
            a row of so many numbers for each token before, then one for each column, then a last one, by which the
            token before speaks of confidence; all float16, little-endian.
        confidence: whether its graph also says how likely a token is to be accepted.
    """

    kind: HeadKind
    taps: tuple[int, ...]
    model: ModelRecord
    tokens: int
    names_columns: bool
    markov_rank: int = 0
    confidence: bool = False

    @property
    def block_size(self) -> int:
        """Rows of the block that a DFlash or DSpark head fills: DFlash's first, the anchor, predicts nothing."""
        return self.tokens + (self.kind == "dflash")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime must know before it opens a graph.

    Attributes:
        device: the flavour of the graphs.
        vocab_size: usable ids of the target; higher columns of its logits are padding.
        context_length: positions the target supports.
        named_tokens: texts of ``bos_token``, ``eos_token`` and the like, which chat templates refer to.
        default_sampling: the checkpoint's own suggestion, e.g. ``{"temperature": 0.7}``.
        files: every file of the bundle but the manifest, by relative path.
        draft: in the flavour of ``device``; ``None`` without.
        draft_vocabulary: ``None`` where the draft reads and proposes the target's ids, all of them.
        cpu_draft: the draft in the CPU's flavour, beside a target for CUDA, with or without ``draft`` beside it;
            ``None`` without.
        head: drafts from the target's hidden states; ``None`` without.
    """

    created_by: str
    device: Device
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    special_token_ids: tuple[int, ...]
    named_tokens: dict[str, str]
    default_sampling: dict[str, float]
    target: ModelRecord
    draft: ModelRecord | None
    files: dict[str, FileRecord]
    draft_vocabulary: DraftVocabularyRecord | None = None
    cpu_draft: ModelRecord | None = None
    head: HeadRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as written to disk, digest included."""
        return {**self._body(), "digest": self.digest}

    @property
    def digest(self) -> str:
        """SHA-256 of everything else, in hexadecimal, by which a bundle is known."""
        return _digest(self._body())

    @classmethod
    def from_json(cls, text: bytes, file: Path) -> Manifest:
        """Read a manifest as written to disk; whether what it says is possible is for ``check_manifest`` to tell.

        Args:
            text: its JSON, in UTF-8.
            file: where it was found, for messages.

        Raises:
            BundleError: it is none, or damaged, or edited, or for a newer or older edge-spec.
        """
        try:
            body = parse_json(text)
        except ValueError as error:
            raise BundleError(f"{file} is not valid JSON ({error}); export the bundle again.") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise BundleError(f"{file} is not the manifest of an edge-spec pair bundle.")
        version = body.get("schema_version")
        if type(version) is int and 1 <= version < SCHEMA_VERSION:
            raise BundleError(
                f"{file} has schema version {version}, written by an older edge-spec, but this one reads "
                f"{SCHEMA_VERSION}; export the bundle again."
            )
        if type(version) is not int or version != SCHEMA_VERSION:
            raise BundleError(
                f"{file} has schema version {shown(version)}, but this edge-spec reads {SCHEMA_VERSION}; "
                "upgrade edge-spec, or export the bundle again with this version."
            )
        digest = body.pop("digest", None)
        try:
            sound = digest == _digest(body)
        except RecursionError:
            sound = False
        if not sound:
            raise BundleError(f"{file} was changed after it was written (its digest does not match); export it again.")
        del body["format"], body["schema_version"]
        try:
            return decode(cls, body, "manifest")
        except (ValueError, OverflowError) as error:
            raise BundleError(f"{file} is invalid: {error}; export the bundle again.") from None

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}

    @property
    def models(self) -> tuple[ModelRecord, ...]:
        """All models, the target first."""
        return (self.target, *self.drafts.values())

    @property
    def drafts(self) -> dict[Device, ModelRecord]:
        """The draft by what it can run on, the target's own device first; empty without one."""
        found: dict[Device, ModelRecord] = {}
        if self.draft is not None:
            found[self.device] = self.draft
        if self.cpu_draft is not None:
            found["cpu"] = self.cpu_draft
        return found

    def device_of(self, model: ModelRecord) -> Device:
        """What the graphs of one of the models run on."""
        return "cpu" if model is self.cpu_draft else self.device

    def usable_columns(self, model: ModelRecord) -> int:
        """Columns of a model's logits that stand for ids."""
        speech = self.draft_vocabulary
        if model is self.target or speech is None:
            return self.vocab_size
        return model.architecture.logits_size if speech.names_columns else speech.size


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()
