"""The pair bundle on disk: the one contract between the export stage and the runtime.

A bundle is a folder with a ``manifest.json`` that names every other file in it. It is written into a temporary
folder and renamed when complete, and refused on load when it is cut short, edited, or not for this reader.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edge_spec.atomic_folder import new_folder, recover
from edge_spec.errors import BundleError
from edge_spec.manifest import CHAT_TEMPLATE, DRAFT_IDS, FORMAT, HEAD_IDS, TOKENIZER, FileRecord, Manifest
from edge_spec.manifest_check import LARGEST_MANIFEST, LARGEST_TEXT, check_manifest
from edge_spec.plain_file import NotPlainError, file_sha256, file_size, open_plain, sha256_of

MANIFEST = "manifest.json"

# What lies in a bundle. An exporter that finds anything else does not take the folder for its own.
_ENTRIES = frozenset({MANIFEST, TOKENIZER, CHAT_TEMPLATE, "target", "draft", "draft-cpu"})


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

    def head_ids(self) -> bytes:
        """Return the contents of ``target/head.ids.bin``. Raises BundleError if it cannot be read."""
        return _read_small(self.path, HEAD_IDS, self.manifest.files[HEAD_IDS].bytes)

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
    manifest = Manifest.from_json(text, file)
    try:
        check_manifest(manifest)
    except ValueError as error:
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
    given: object = path
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise BundleError(f"the bundle's path is {path!r}, expected the folder that 'edge-spec export' wrote.")
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

    The function takes the manifest, hashes every file that is not among its ``files`` yet, and writes
    ``manifest.json``. What is among them already was taken over, as it was, from a bundle that is there.

    Raises:
        BundleError: ``output`` exists and is in the way, the disk is full, or the folder is not writable.
    """
    final = Path(output)

    def may_go(path: Path) -> None:
        _refuse_occupied(path, final, overwrite)

    try:
        with new_folder(final, may_go, _ENTRIES) as (staging, finish):

            def seal(manifest: Manifest) -> None:
                _seal(staging, manifest)
                finish()

            yield staging, seal
    except OSError as error:
        raise _write_error(final, error) from error


def require_replaceable(output: Path, overwrite: bool) -> None:
    """Raise BundleError if a new bundle could not take the place ``output``, as :func:`new_bundle` does."""
    try:
        _refuse_occupied(output, output, overwrite)
    except OSError as error:
        raise _read_error(output, error) from error


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
    names = (file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file())
    files = {name: manifest.files.get(name) or _describe_file(folder / name) for name in names}
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


def _describe_file(file: Path) -> FileRecord:
    return FileRecord(file.stat().st_size, file_sha256(file))


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
            return FORMAT.encode() in file.read(100)
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
