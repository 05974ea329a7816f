"""The GPU that is checked, or the CPU in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import edge_spec
from edge_spec.bundle import Bundle
from edge_spec.manifest import ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.cuda_features import CudaFeatures, cuda_features, probe_features, settings_for
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.model import Model
from edge_spec.runtime.provider import CPU_PROVIDER, CUDA_PROVIDER

_CONTEXT = 2048
# On the CPU, everything that a GPU might be used for.
_REHEARSED = DeviceSettings(resident=True, captures=True, tree_graph=True, shares_weights=True)


@dataclass(frozen=True)
class Machine:
    """What models run on.

    Attributes:
        rehearses: whether the CPU stands in for the GPU.
    """

    rehearses: bool

    @property
    def provider(self) -> str:
        """The provider that does the work."""
        return CPU_PROVIDER if self.rehearses else CUDA_PROVIDER

    def features(self) -> CudaFeatures:
        """What works."""
        return probe_features(import_onnxruntime(), CPU_PROVIDER, "cpu") if self.rehearses else cuda_features()

    def settings(self) -> DeviceSettings:
        """How models use it."""
        return _REHEARSED if self.rehearses else settings_for([CUDA_PROVIDER, CPU_PROVIDER])

    def model(
        self,
        bundle: Bundle,
        record: ModelRecord,
        settings: DeviceSettings | None = None,
        fixed_rows: int | None = None,
    ) -> Model:
        """Open one model there."""
        providers = [CPU_PROVIDER] if self.rehearses else [CUDA_PROVIDER, CPU_PROVIDER]
        context = min(_CONTEXT, record.architecture.context_length - (fixed_rows or 0))
        chosen = settings or self.settings()
        return Model(bundle, record, providers, context, False, fixed_rows=fixed_rows, settings=chosen)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let engines load bundles for CUDA, also where the CPU stands in."""
        with ExitStack() as stack:
            if self.rehearses:
                stack.enter_context(patch("edge_spec.runtime.engine.select_provider", lambda *given: [CPU_PROVIDER]))
                for module in ("loaded_pair", "pair_opener"):
                    stack.enter_context(patch(f"edge_spec.runtime.{module}.settings_for", lambda *given: _REHEARSED))
            yield

    def engine(self, bundle: Bundle, **options: Any) -> Engine:
        """Load a pair there, measuring its costs anew."""
        with self.loading():
            return edge_spec.load(bundle.path, context=_CONTEXT, calibration="fresh", **options)


def on_cpu(bundle: Bundle) -> Model:
    """A bundle's target on the CPU, whatever it is for."""
    context = min(_CONTEXT, bundle.manifest.context_length)
    settings = DeviceSettings(resident=True, tree_graph=True) if bundle.manifest.device == "cuda" else DeviceSettings()
    return Model(bundle, bundle.manifest.target, [CPU_PROVIDER], context, False, settings=settings)
