"""Without a usable ONNX Runtime, the error says what to install."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType

import pytest

from edge_spec.errors import MissingDependencyError
from edge_spec.onnx_runtime import import_onnxruntime


def test_missing_onnxruntime_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_onnxruntime(name: str, *args: object, **kwargs: object) -> ModuleType:
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name=name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_onnxruntime)
    with pytest.raises(MissingDependencyError, match=r"edge-spec\[cpu\].*edge-spec\[gpu\]"):
        import_onnxruntime()


def test_ctrl_c_while_onnxruntime_is_imported_is_no_broken_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its extension module turns the exception into an ImportError."""
    real_import = builtins.__import__

    def interrupted(name: str, *args: object, **kwargs: object) -> ModuleType:
        if name == "onnxruntime":
            raise ImportError("initialization failed") from KeyboardInterrupt()
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_onnxruntime()


def test_gutted_onnxruntime_says_how_to_repair_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(MissingDependencyError, match="Uninstall both"):
        import_onnxruntime()
