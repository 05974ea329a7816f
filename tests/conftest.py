"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_REAL_WEIGHTS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "qwen-draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen-target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}


def _weights_folder() -> Path:
    return Path(os.environ.get("EDGE_SPEC_WEIGHTS") or Path.home() / ".cache" / "edge-spec" / "weights")


def pytest_report_header() -> str:
    folder = _weights_folder()
    missing = [file for file in _REAL_WEIGHTS.values() if not (folder / file).is_file()]
    if not missing:
        return f"real weights: all in {folder}"
    return (
        f"real weights: tests are SKIPPED, since {folder} lacks {', '.join(missing)} (EDGE_SPEC_WEIGHTS names a folder)"
    )


@pytest.fixture(scope="session", autouse=True)
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place of this session's own for what loading measures."""
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_SPEC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def real_weights() -> Callable[[str], Path]:
    """Return a function from a model's short name to its GGUF file, which skips the test where the file is absent."""

    def find(name: str) -> Path:
        path = _weights_folder() / _REAL_WEIGHTS[name]
        if not path.is_file():
            pytest.skip(f"no real weights of {name}: {path} is absent (EDGE_SPEC_WEIGHTS names another folder)")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that exports a tiny random pair (see ``tiny_models.export_tiny``), each kind once a session."""
    from tiny_models import export_tiny  # imports torch

    bundles: dict[str, Path] = {}

    def find(**kind: Any) -> Path:
        key = repr(sorted(kind.items()))
        if key not in bundles:
            bundles[key] = export_tiny(tmp_path_factory.mktemp("tiny"), **kind)
        return bundles[key]

    return find
