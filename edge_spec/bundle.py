"""The pair bundle on disk: the one contract between the export stage and the runtime.

A bundle is a folder with a ``manifest.json`` that names every other file in it. It is written into a temporary
folder and renamed when complete, and refused on load when it is cut short, edited, or not for this reader.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edge_spec.atomic_folder import new_folder, recover
from edge_spec.errors import BundleError
from edge_spec.manifest_check import LARGEST_MANIFEST, LARGEST_TEXT, check_manifest
from edge_spec.plain_file import NotPlainError, file_size, open_plain, sha256_of
from edge_spec.record_json import decode, parse_json, shown

# Raised whenever the manifest or the contract of the graphs changes; a bundle of another version is refused.
SCHEMA_VERSION = 4
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
DRAFT_TOKENIZER = "draft/tokenizer.json"
DRAFT_IDS = "draft/ids.bin"

# What lies in a bundle. An exporter that finds anything else does not take the folder for its own.
_ENTRIES = frozenset({MANIFEST, TOKENIZER, CHAT_TEMPLATE, "target", "draft"})

_FORMAT = "edge-spec pair bundle"


# What keys and values are stored as. int8 has fixed scales for each channel (docs/quantization.md).
CacheType = Literal["float32", "float16", "int8"]

# Who wrote a graph: the exporter itself, or optimum-onnx. The two have contracts of their own (docs/graph-contract.md).
Via = Literal["native", "optimum"]


@dataclass(frozen=True)
class GraphRecord:
    """One ONNX graph of a model and what it can do.

    Attributes:
        path: file relative to the bundle, with forward slashes.
        tree: whether it takes positions and an attention bias, as proposal trees need.
        kv: type of its KV cache.
        hidden_taps: names of the hidden-state outputs it offers.
        via: who wrote it. One by way of optimum only reads the cache, and gives the keys and values of a call's own
            rows.
    """

    path: str
    tree: bool
    kv: CacheType
    hidden_taps: tuple[str, ...] = ()
    via: Via = "native"


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
        draft_vocabulary: ``None`` where the draft reads and proposes the target's ids, all of them.
    """

    created_by: str
    device: Literal["cpu", "cuda"]
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

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as written to disk, digest included."""
        body = {"format": _FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}
        return {**body, "digest": _digest(body)}

    def usable_columns(self, model: ModelRecord) -> int:
        """Columns of a model's logits that stand for ids."""
        speech = self.draft_vocabulary
        if model is not self.draft or speech is None:
            return self.vocab_size
        return model.architecture.logits_size if speech.names_columns else speech.size


@dataclass(frozen=True)
class Bundle:
    """A validated bundle on disk."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer."""
        return self.path / TOKENIZER

    def draft_ids(self) -> bytes:
        """Return the contents of ``draft/ids.bin``. Raises BundleError if it cannot be read."""
        return _read_small(self.path, DRAFT_IDS, self.manifest.files[DRAFT_IDS].bytes)

    def chat_template(self) -> str | None:
        """Return the chat template's source, or ``None`` if the model has none.

        Raises:
            BundleError: it cannot be read, or is no text.
        """
        if CHAT_TEMPLATE not in self.manifest.files:
            return None
        try:
            return _read_small(self.path, CHAT_TEMPLATE, LARGEST_TEXT).decode()
        except UnicodeDecodeError as error:
            raise BundleError(f"{self.path / CHAT_TEMPLATE} is not UTF-8 ({error.reason}); export it again.") from None


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest of the bundle at ``path``, without touching the other files.

    Raises:
        BundleError: there is no bundle, the manifest is damaged or edited, or it is for a newer or older edge-spec.
    """
    file = path / MANIFEST
    recover(path)
    try:
        if not file.exists() and not file.is_symlink():
            what = "is not a folder" if path.exists() and not path.is_dir() else f"has no {MANIFEST}"
            what = what if path.exists() else "does not exist"
            raise BundleError(f"{path} {what}; expected a pair bundle as written by 'edge-spec export'.")
    except OSError as error:
        raise _read_error(file, error) from error
    text = _read_small(path, MANIFEST, LARGEST_MANIFEST)
    try:
        body = parse_json(text)
    except ValueError as error:
        raise BundleError(f"{file} is not valid JSON ({error}); export the bundle again.") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise BundleError(f"{file} is not the manifest of an edge-spec pair bundle.")
    version = body.get("schema_version")
    if type(version) is int and 1 <= version < SCHEMA_VERSION:
        raise BundleError(
            f"{file} has schema version {version}, written by an older edge-spec, but this one reads {SCHEMA_VERSION}; "
            "export the bundle again."
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
        manifest = decode(Manifest, body, "manifest")
        check_manifest(manifest)
    except (ValueError, OverflowError) as error:
        raise BundleError(f"{file} is invalid: {error}; export the bundle again.") from None
    return manifest


def open_bundle(path: str | os.PathLike[str], verify: bool = True) -> Bundle:
    """Open the bundle at ``path`` and check that its files are the ones its manifest names.

    Args:
        path: the bundle's folder.
        verify: also compare SHA-256 hashes, which reads every byte once; sizes are always compared.

    Raises:
        BundleError: as :func:`read_manifest`, or a file is missing, unreadable, cut short or edited.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for hashes in (False, True) if verify else (False,):  # what is cheap first
        for name, record in manifest.files.items():
            _check_file(folder, name, record, hashes)
    return Bundle(folder, manifest)


@contextmanager
def new_bundle(
    output: str | os.PathLike[str], overwrite: bool = False
) -> Iterator[tuple[Path, Callable[[Manifest], None]]]:
    """Give a temporary folder to fill and a function that seals it, so that ``output`` appears whole or not at all.

    The function takes the manifest with ``files`` still empty, hashes every file and writes ``manifest.json``.

    Raises:
        BundleError: ``output`` exists and is in the way, the disk is full, or the folder is not writable.
    """
    final = Path(output)

    def require_replaceable(path: Path) -> None:
        _refuse_occupied(path, final, overwrite)

    try:
        with new_folder(final, require_replaceable, _ENTRIES) as (staging, finish):

            def seal(manifest: Manifest) -> None:
                _seal(staging, manifest)
                finish()

            yield staging, seal
    except OSError as error:
        raise _write_error(final, error) from error


def file_sha256(*paths: Path) -> str:
    """Return the SHA-256 of the files' contents, one after the other, in hexadecimal."""
    with ExitStack() as stack:
        return sha256_of(*(stack.enter_context(path.open("rb")) for path in paths))


def _check_file(folder: Path, name: str, record: FileRecord, verify: bool) -> None:
    """Raise BundleError unless a file of the bundle is the one its record describes."""
    file = folder / name
    try:
        with open_plain(folder, name) as opened:
            size = file_size(opened)
            if size != record.bytes:
                raise BundleError(
                    f"{file} has {size:,} bytes, but the manifest says {record.bytes:,}: it was cut short or replaced; "
                    "copy the whole folder again or export it again."
                )
            if verify and sha256_of(opened) != record.sha256:
                raise BundleError(
                    f"{file} does not have the SHA-256 its manifest names: it was edited or damaged; "
                    "copy the whole folder again or export it again."
                )
    except FileNotFoundError:
        raise BundleError(f"Bundle {folder} lacks its file {name}; copy the whole folder or export it again.") from None
    except NotPlainError as error:
        raise _not_plain(error) from None
    except OSError as error:
        raise _read_error(file, error) from error


def _read_small(folder: Path, name: str, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes. Raises BundleError if it is longer, or no file that can be read."""
    try:
        with open_plain(folder, name) as file:
            content = file.read(limit + 1)
    except NotPlainError as error:
        raise _not_plain(error) from None
    except OSError as error:
        raise _read_error(folder / name, error) from error
    if len(content) > limit:
        raise BundleError(f"{folder / name} is longer than {limit:,} bytes; no bundle needs that. Export it again.")
    return content


def _seal(folder: Path, manifest: Manifest) -> None:
    files = {
        file.relative_to(folder).as_posix(): FileRecord(file.stat().st_size, file_sha256(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    complete = replace(manifest, files=files)
    try:
        check_manifest(complete)
    except ValueError as error:
        raise BundleError(f"This cannot be a bundle: {error}; nothing was written.") from None
    for name in files:  # the manifest must not reach the disk before what it speaks of
        with (folder / name).open("rb") as written:
            os.fsync(written.fileno())
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(complete.to_json(), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    folder.chmod(0o755)


def _refuse_occupied(path: Path, final: Path, overwrite: bool) -> None:
    """Raise BundleError if what is at ``path`` must not give its place ``final`` to a new bundle."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise BundleError(f"{final} already exists; choose another output, or ask to overwrite it.")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else None
    if entries is None or (entries and not _has_bundle_manifest(path)):
        raise BundleError(f"{final} is not a pair bundle, so it is not overwritten; choose another output.")
    if foreign := sorted(entries - _ENTRIES):
        raise BundleError(
            f"{final} holds {foreign[0]!r}, which is no part of a bundle, so it is not overwritten; "
            "move it away, or choose another output."
        )


def _has_bundle_manifest(folder: Path) -> bool:
    """Tell whether a folder's manifest begins like a bundle's; a damaged bundle can be overwritten too."""
    try:
        with open_plain(folder, MANIFEST) as file:
            return _FORMAT.encode() in file.read(100)
    except (OSError, NotPlainError):
        return False


def _not_plain(error: NotPlainError) -> BundleError:
    return BundleError(f"{error}; a bundle holds nothing else. Copy it with its links followed (cp -rL).")


def _read_error(file: Path, error: OSError) -> BundleError:
    return BundleError(f"{file} cannot be read ({error.strerror or error}); check the path and its permissions.")


def _write_error(final: Path, error: OSError) -> BundleError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BundleError(
            f"The disk is full: {final} could not be written and nothing was left behind; free some space."
        )
    return BundleError(f"{final} could not be written ({error.strerror or error}); nothing was left behind.")


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()
