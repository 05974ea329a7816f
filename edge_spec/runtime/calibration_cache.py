"""Keeps calibrations on disk, so that a pair is measured once on a machine and not at every load."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_spec.device_facts import board, governor, power_mode
from edge_spec.manifest import Manifest
from edge_spec.nvml import Library, find_library, read_gpus
from edge_spec.runtime.calibration import Calibration
from edge_spec.user_cache import named_cache, user_cache

_LOG = logging.getLogger(__name__)

FORMAT = 2
_MOST_BYTES = 1 << 18

_ROOT = Path("/")
_CPU_INFO = "proc/cpuinfo"
_GPU_FOLDER = "proc/driver/nvidia/gpus"


def load_or_calibrate(
    key: dict[str, Any], measure: Callable[[], Calibration], folder: Path | None, fresh: bool = False
) -> Calibration:
    """Return the calibration kept under ``key``, or measure and keep it.

    A cache that is damaged or cannot be written is as good as none.

    Args:
        key: all that the costs depend on, ready for JSON.
        measure: measures.
        folder: where calibrations lie; ``None`` keeps none.
        fresh: measure in any case.
    """
    if folder is None:
        return measure()
    key = {"format": FORMAT, **key}
    canonical = json.dumps(key, sort_keys=True, separators=(",", ":")).encode()
    file = folder / f"{hashlib.sha256(canonical).hexdigest()[:32]}.json"
    if not fresh and (kept := _read(file, key)) is not None:
        return kept
    calibration = measure()
    keep(file, {"key": key, **calibration.to_dict()})
    return calibration


@dataclass(frozen=True)
class KeptCalibration:
    """A calibration that an earlier load has kept.

    Attributes:
        drafter: which drafter's calls it knows besides the target's; ``None`` for none.
        calibration: what was measured.
    """

    drafter: Literal["head", "model"] | None
    calibration: Calibration


def kept_calibrations(manifest: Manifest, folder: Path | None = None) -> list[KeptCalibration]:
    """What earlier loads have measured of a bundle on this machine, however it was loaded then; the latest first.

    Args:
        manifest: of the bundle.
        folder: where calibrations lie; by default the user's.
    """
    folder = default_folder() if folder is None else folder
    if folder is None:
        return []
    wanted = {"format": FORMAT, "bundle": manifest.digest, "machine": machine(on_gpu=manifest.device == "cuda")}
    found = []
    with suppress(OSError):
        for file in folder.glob("*.json"):
            with suppress(OSError, ValueError, RecursionError):
                body = _body(file)
                key = body.get("key")
                if isinstance(key, dict) and all(key.get(name) == value for name, value in wanted.items()):
                    drafter: Literal["head", "model"] | None = "model" if key.get("draft") else None
                    kept = KeptCalibration("head" if key.get("head") else drafter, Calibration.from_dict(body))
                    found.append((file.stat().st_mtime_ns, kept))
    return [kept for _, kept in sorted(found, key=lambda pair: -pair[0])]


def default_folder() -> Path | None:
    """Where calibrations lie: ``EDGE_SPEC_CACHE``, or a place in the user's cache; ``None`` for a homeless user."""
    cache = user_cache()
    return named_cache() or (None if cache is None else cache / "calibration")


def machine(
    on_gpu: bool = False, root: Path = _ROOT, find: Callable[[], Library | None] = find_library
) -> dict[str, Any]:
    """What this machine is and how it is set, as far as the system tells without being asked for rights.

    Clocks of the moment do not belong to it: they come and go, and costs are corrected as calls are made.

    Args:
        on_gpu: whether calls run on a GPU, so that its own limits count.
        root: where ``proc``, ``sys``, ``etc`` and ``var`` lie.
        find: finds NVIDIA's management library.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "architecture": platform.machine(),
        "processor": _processor(root),
        "cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "board": board(root),
        "governor": governor(root),
        "power_mode": power_mode(root),
        "gpus": [],
    }
    with suppress(OSError):
        facts["gpus"] = sorted(_first_line(gpu / "information") for gpu in (root / _GPU_FOLDER).iterdir())
    if on_gpu:
        facts["gpu_limits"] = [[gpu.name, gpu.power_limit_watts] for gpu in read_gpus(find).gpus]
    return facts


def _processor(root: Path) -> str:
    """The processor's name: on x86 one line says it, on ARM several."""
    wanted = ("model name", "cpu implementer", "cpu part", "hardware")
    lines: set[str] = set()
    with suppress(OSError, UnicodeDecodeError):
        lines = {line for line in (root / _CPU_INFO).read_text("utf-8").splitlines() if line.lower().startswith(wanted)}
    return "; ".join(sorted(" ".join(line.split()) for line in lines)) or platform.processor()


def _first_line(file: Path) -> str:
    """The first line of a small file of the system, nothing where there is none to read."""
    try:
        with file.open("rb") as opened:
            lines = opened.read(1000).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return lines[0].strip() if lines else ""


def _body(file: Path) -> dict[str, Any]:
    """What a file of this folder holds. Raises OSError, ValueError or RecursionError if it is nothing of the kind."""
    with file.open("rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("it is too long")
    body = json.loads(content)
    if not isinstance(body, dict):
        raise ValueError("it is no object")
    return body


def _read(file: Path, key: dict[str, Any]) -> Calibration | None:
    try:
        body = _body(file)
        if body.get("key") != key:
            raise ValueError("it belongs to something else")
        return Calibration.from_dict(body)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _LOG.debug("calibration %s cannot be used (%s); measuring anew", file, error)
        return None


def keep(file: Path, body: dict[str, Any]) -> None:
    """Write a file of this folder, whole or not at all; one that cannot be written does no harm."""
    staging = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, staging = tempfile.mkstemp(prefix=f".{file.stem}-", dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            json.dump(body, opened, indent=1)
        Path(staging).replace(file)
    except OSError as error:
        _LOG.debug("%s cannot be kept (%s)", file, error)
        if staging is not None:
            with suppress(OSError):
                Path(staging).unlink()
