"""What CUDA can do here is found out by running it, on probes that are right wherever they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import probe_graphs
import pytest

from edge_spec.errors import ProviderError
from edge_spec.runtime import probe_models
from edge_spec.runtime.cuda_features import CudaFeatures, probe_features, settings_for
from edge_spec.runtime.cuda_options import cuda_options
from edge_spec.runtime.provider import CPU_PROVIDER, CUDA_PROVIDER, repair_advice

ALL = CudaFeatures(None, None, None, None, None, None, "dlpack", 1.2)


def test_the_probes_are_what_onnx_builds() -> None:
    built = {
        "ROW": probe_graphs.row(),
        "HALF_PRODUCT": probe_graphs.half_product(),
        "WEIGHTED_SUM": probe_graphs.weighted_sum(),
        "INT4_PRODUCT": probe_graphs.int4_product(),
        "ATTENTION": probe_graphs.attention(tree=False),
        "TREE_ATTENTION": probe_graphs.attention(tree=True),
    }
    for name, model in built.items():
        assert getattr(probe_models, f"{name}_MODEL") == model, name


def test_a_provider_that_can_do_it_all_passes_every_probe() -> None:
    """The CPU's takes the same graphs; it captures nothing, and computes what a replay would."""
    features = probe_features(onnxruntime, CPU_PROVIDER, "cpu")
    assert replace(features, int4_rows_cost=1.2) == ALL
    assert features.int4_rows_cost is not None
    assert features.int4_rows_cost > 0


class Faulty:
    """ONNX Runtime, but for sessions over some graphs."""

    def __init__(self, *, refuses: Any = None, spoils: Any = None) -> None:
        self._refuses, self._spoils = refuses, spoils

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def InferenceSession(self, model: bytes, options: Any, providers: Any) -> Any:
        if model == self._refuses:
            raise RuntimeError("NOT_IMPLEMENTED:\n no kernel takes it")
        session = onnxruntime.InferenceSession(model, options, providers=providers)
        return Stale(session) if model == self._spoils else session


class Stale:
    """A session that runs once, as a captured graph that does not read its inputs again."""

    def __init__(self, session: Any) -> None:
        self._session, self._ran = session, False

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        if not self._ran:
            self._session.run_with_iobinding(binding)
        self._ran = True


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("HALF_PRODUCT", ["half"]),
        ("ATTENTION", ["attention"]),
        ("TREE_ATTENTION", ["trees"]),
        ("INT4_PRODUCT", ["int4"]),
        ("WEIGHTED_SUM", ["graphs", "shared_weights"]),
    ],
)
def test_what_a_build_lacks_is_named_with_what_it_said(model: str, names: list[str]) -> None:
    faulty = Faulty(refuses=getattr(probe_models, f"{model}_MODEL"))
    features = probe_features(faulty, CPU_PROVIDER, "cpu")
    failed = {
        name for name in vars(ALL) if name not in ("lending", "int4_rows_cost") and getattr(features, name) is not None
    }
    assert failed == set(names)
    assert getattr(features, names[0]) == "NOT_IMPLEMENTED: no kernel takes it"


def test_a_replay_of_old_numbers_is_noticed() -> None:
    features = probe_features(Faulty(spoils=probe_models.WEIGHTED_SUM_MODEL), CPU_PROVIDER, "cpu")
    assert features.graphs == "it computes wrong results."
    assert features.shared_weights == "sessions make copies of the weights that they are given"


def test_a_bias_that_is_not_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import edge_spec.runtime.cuda_features as module

    attend = module._attend
    monkeypatch.setattr(
        module,
        "_attend",
        lambda prober, model, bias: attend(prober, model, None if bias is None else np.zeros_like(bias)),
    )
    assert probe_features(onnxruntime, CPU_PROVIDER, "cpu").trees is not None


def test_a_build_without_dlpack_lends_its_weights_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import edge_spec.runtime.cuda_features as module

    lent_value = module.lent_value

    def without(ort: Any, array: Any, device: str, lending: str) -> Any:
        if lending == "dlpack":
            raise AttributeError("'OrtValue' object has no attribute 'to_dlpack'")
        return lent_value(ort, array, device, "binding")

    monkeypatch.setattr(module, "lent_value", without)
    features = probe_features(onnxruntime, CPU_PROVIDER, "cpu")
    assert features.shared_weights is None
    assert features.lending == "binding"
    assert settings_for([CUDA_PROVIDER], None, features).lending == "binding"


# What is made of it


def test_a_build_that_has_it_all_uses_it() -> None:
    settings = settings_for([CUDA_PROVIDER, CPU_PROVIDER], 1 << 30, ALL)
    assert settings.name == "cuda"
    assert settings.resident
    assert settings.captures
    assert settings.tree_graph
    assert settings.shares_weights
    assert settings.lacks == ()
    assert settings.options == cuda_options(1 << 30, True)


def test_without_the_bias_only_the_graph_for_chains_is_opened() -> None:
    """Builds for JetPack 6."""
    features = replace(ALL, trees="no such kernel", int4="no such kernel either")
    settings = settings_for([CUDA_PROVIDER, CPU_PROVIDER], None, features)
    assert not settings.tree_graph
    assert settings.captures
    assert settings.lacks == ("trees: no such kernel", "4-bit weights: no such kernel either")


def test_weights_are_never_held_twice() -> None:
    settings = settings_for([CUDA_PROVIDER, CPU_PROVIDER], None, replace(ALL, shared_weights="copies"))
    assert not settings.tree_graph


def test_without_cuda_graphs_calls_run_one_by_one() -> None:
    settings = settings_for([CUDA_PROVIDER, CPU_PROVIDER], None, replace(ALL, graphs="not captured"))
    assert not settings.captures
    assert settings.options["enable_cuda_graph"] == "0"
    assert settings.lacks == ("CUDA graphs: not captured",)


@pytest.mark.parametrize("name", ["half", "attention"])
def test_where_not_even_chains_run_it_says_so(name: str) -> None:
    with pytest.raises(
        ProviderError, match=r"CUDA runs here, but not .*float16.*no kernel image.*no code for this GPU"
    ):
        settings_for([CUDA_PROVIDER], None, replace(ALL, **{name: "no kernel image is available"}))


def test_the_cpu_is_probed_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_spec.runtime.cuda_features.cuda_features", lambda: pytest.fail("probed"))
    assert not settings_for([CPU_PROVIDER]).resident


@pytest.mark.parametrize(
    ("machine", "reason", "expected"),
    [
        (
            "aarch64",
            "CUDA failure 209: no kernel image is available",
            "has no code for this GPU.*JetPack.*jetson-ai-lab",
        ),
        ("aarch64", "its provider cannot be loaded", "may be built for another GPU.*JetPack"),
        ("x86_64", "cudaErrorNoKernelImageForDevice", "has no code for this GPU: upgrade"),
        ("x86_64", "libcudnn.so.9 is missing", "driver.*cuDNN"),
    ],
)
def test_the_advice_fits_the_machine(machine: str, reason: str, expected: str) -> None:
    import re

    assert re.search(expected, repair_advice(reason, machine))


def test_options_of_the_provider() -> None:
    assert cuda_options(None, False) == {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "0"}
    assert cuda_options(5 << 20, True)["gpu_mem_limit"] == str(5 << 20)
    with pytest.raises(ValueError, match="memory_limit is 0"):
        cuda_options(0, True)
