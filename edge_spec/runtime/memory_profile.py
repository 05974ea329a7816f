"""What loading a bundle really took here, kept on disk so that the next plan need not estimate it.

Laws say what weights take once ONNX Runtime has packed them for a processor's kernels; another processor or version may
pack them otherwise. So a load notes it, beside the calibrations.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edge_spec.heap import give_back
from edge_spec.manifest import Manifest
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.calibration_cache import default_folder, keep, machine

_LOG = logging.getLogger(__name__)

FORMAT = 1
_MOST_BYTES = 1 << 14
_KIB = 1024
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes that each part took while it was loaded, a model's session included; ``None``: not measured.

    Of a model on a GPU with memory of its own, these are the bytes that it took there.
    """

    tokenizer: int | None = None
    target_weights: int | None = None
    draft_weights: int | None = None
    cpu_draft_weights: int | None = None
    head_weights: int | None = None


class MemoryNotes:
    """Notes what becomes resident while parts are loaded, one after the other."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    @contextmanager
    def of(self, part: str, taken: Callable[[], int | None] | None = None) -> Iterator[None]:
        """Note what is taken afterwards and was not before as a field of the profile.

        Args:
            part: that field.
            taken: tells the bytes that are; by default those that this process has resident.
        """
        taken = taken or resident_memory
        give_back()  # or the part might move into what an earlier one has left, and seem to take nothing
        before = taken()
        yield
        after = taken()
        if before is not None and after is not None and after > before:
            self._sizes[part] = after - before

    def profile(self) -> MemoryProfile:
        """What was noted."""
        return MemoryProfile(**self._sizes)


def resident_memory() -> int | None:
    """Return the bytes this process has resident; ``None`` where the system does not tell."""
    try:
        lines = _STATUS.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines if line.startswith("VmRSS:"))
    return next((int(words[1]) * _KIB for words in sizes if len(words) > 1 and words[1].isdigit()), None)


def read_profile(manifest: Manifest, folder: Path | None = None) -> MemoryProfile | None:
    """Return what an earlier load of this bundle noted on this machine; ``None`` if there is nothing to be trusted.

    Args:
        manifest: of the bundle.
        folder: where profiles lie; by default beside the calibrations.
    """
    key = _key(manifest)
    if (file := _file(key, folder)) is None:
        return None
    try:
        with file.open("rb") as opened:
            body = json.loads(opened.read(_MOST_BYTES))
        if not isinstance(body, dict) or body.get("key") != key:
            raise ValueError("it belongs to something else")
        known = {field.name: body.get(field.name) for field in fields(MemoryProfile)}
        if not all(size is None or (type(size) is int and 0 < size < 1 << 50) for size in known.values()):
            raise ValueError("it holds something other than sizes")
        return MemoryProfile(**known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _LOG.debug("memory profile %s cannot be used (%s)", file, error)
        return None


def write_profile(manifest: Manifest, profile: MemoryProfile, folder: Path | None = None) -> None:
    """Keep what a load took. What it did not load is kept from the profile there was; failing to write does no harm."""
    key = _key(manifest)
    if (file := _file(key, folder)) is None:
        return
    known = asdict(read_profile(manifest, folder) or MemoryProfile())
    known.update({name: size for name, size in asdict(profile).items() if size is not None})
    keep(file, {"key": key, **known})


def _key(manifest: Manifest) -> dict[str, Any]:
    facts = machine()
    return {
        "format": FORMAT,
        "bundle": manifest.digest,
        "machine": {name: facts[name] for name in ("architecture", "processor", "gpus")},
        "onnxruntime": import_onnxruntime().__version__,
    }


def _file(key: dict[str, Any], folder: Path | None) -> Path | None:
    folder = default_folder() if folder is None else folder
    canonical = json.dumps(key, sort_keys=True, separators=(",", ":")).encode()
    return None if folder is None else folder / f"memory-{hashlib.sha256(canonical).hexdigest()[:32]}.json"
