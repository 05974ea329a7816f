"""A bundle that is there already, written anew with a part exchanged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edge_spec.bundle import Bundle, new_bundle
from edge_spec.manifest import FileRecord, Manifest


@dataclass(frozen=True)
class RebuiltBundle:
    """A bundle in the making.

    Attributes:
        folder: holds the files that stay, as links: they may be replaced, but not written into.
        path: where it will be.
    """

    folder: Path
    path: Path
    _known: dict[str, FileRecord]
    _seal: Callable[[Manifest], None]

    def seal(self, manifest: Manifest, replaced: Collection[str] = ()) -> None:
        """Finish it.

        Args:
            manifest: what it is to be.
            replaced: files that are no longer what was taken over. The hashes of the others are known.
        """
        known = {name: record for name, record in self._known.items() if name not in replaced}
        self._seal(replace(manifest, files=known))


@contextmanager
def rebuilt_bundle(
    bundle: Bundle, output: str | os.PathLike[str] | None, overwrite: bool, goes: Callable[[str], bool]
) -> Iterator[RebuiltBundle]:
    """Give the files of a bundle that stay, in a folder that takes its place, or another, when it is sealed.

    What stays is linked, so it takes neither time nor space where the file system can do that. On any error the bundle
    is as it was.

    Args:
        bundle: whose files those are.
        output: folder of the new bundle; ``None`` for the bundle's own.
        overwrite: replace another bundle that is already at ``output``.
        goes: whether a file, by its name in the manifest, is left out.

    Raises:
        BundleError: ``output`` is in the way or cannot be written.
    """
    # The folder itself, where a link or "." stands for it: those cannot be exchanged.
    final = Path(os.path.realpath(bundle.path)) if output is None else Path(output)
    kept = {name: record for name, record in bundle.manifest.files.items() if not goes(name)}
    with new_bundle(final, overwrite or output is None) as (folder, seal):
        for name in kept:
            _take_over(bundle.path / name, folder / name)
        yield RebuiltBundle(folder, final, kept, seal)


def _take_over(source: Path, copy: Path) -> None:
    """Put a file of a bundle into another one, without copying it if the file system allows."""
    copy.parent.mkdir(exist_ok=True)
    try:
        os.link(source, copy)
    except OSError:
        shutil.copyfile(source, copy)
