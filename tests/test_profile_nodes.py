"""Which nodes ran where, as ONNX Runtime's profile tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.bundle import open_bundle
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.model import Model
from edge_spec.runtime.profile_nodes import read_profile
from edge_spec.runtime.provider import CPU_PROVIDER, CUDA_PROVIDER


def node(name: str, kind: str, provider: str = CUDA_PROVIDER) -> dict[str, Any]:
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": 3, "args": {"op_name": kind, "provider": provider}}


def test_copies_and_nodes_on_another_provider_are_named(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    events = [
        {"cat": "Session", "name": "model_run", "dur": 9},
        node("layers.0.qkv", "MatMulNBits"),
        node("layers.0.qkv", "MatMulNBits"),  # the next call
        node("layers.1.qkv", "MatMulNBits"),
        node("embedding", "GatherBlockQuantized", CPU_PROVIDER),
        node("Memcpy_token_7", "MemcpyFromHost"),
        {"cat": "Node", "name": "layers.0.qkv_fence_before", "args": {"op_name": "MatMulNBits"}},
    ]
    file.write_text(json.dumps(events), "utf-8")
    found = read_profile(file, CUDA_PROVIDER)
    assert found.copies == ("Memcpy_token_7",)
    assert found.elsewhere == {"GatherBlockQuantized": 1}
    assert found.providers == {CUDA_PROVIDER: 2, CPU_PROVIDER: 1}


def test_a_model_on_one_provider_copies_nothing(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle(recipe="int4", device="cuda", eos=None))
    settings = DeviceSettings(resident=True, tree_graph=True, profile=str(tmp_path / "profile"))
    model = Model(bundle, bundle.manifest.target, [CPU_PROVIDER], 60, False, threads=1, settings=settings)
    model.prefill([1, 2])
    model.forward([3, 4], [1], [2, 2])
    profiles = [read_profile(file, CPU_PROVIDER) for file in model.end_profiles()]
    assert len(profiles) == 2
    for found in profiles:
        assert found.copies == ()
        assert found.elsewhere == {}
        assert found.providers[CPU_PROVIDER] > 10


@pytest.mark.parametrize("text", ["", '[{"cat": "Node"}]', '{"cat": 1}', "[1]"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="no profile of ONNX Runtime"):
        read_profile(file, CPU_PROVIDER)
