"""Every family, quantized, checked and drafted for, beyond what parity with transformers shows of float32 graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.export import export_pair
from edge_spec.export.graph_run import run_graph
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.manifest import CacheType, Manifest
from edge_spec.runtime.int8_cache import takes_int8_cache
from edge_spec.runtime.model import Model
from row_independence import require_bitwise_kernels
from tiny_models import TOKENS, VARIANTS, random_model, save_checkpoint

Bundles = Callable[..., Path]

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, TOKENS - 3, 30)]


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp(request.param) / "checkpoint", random_model(**VARIANTS[request.param])
    )


@pytest.mark.parametrize("recipe", ["fp32", "w8a8", "int4"])
def test_the_written_graphs_agree_with_the_float32_reference(checkpoint: Path, recipe: str, tmp_path: Path) -> None:
    """In float32 the check allows 1e-4 nats, so that here the reference proves itself as well."""
    # Four bits of random weights are too few.
    manifest = export_pair(checkpoint, None, tmp_path / "bundle", recipe=recipe, check=recipe != "int4").manifest
    quality = manifest.target.quality
    assert recipe == "int4" or (quality is not None and quality.tokens > 100)
    opened = open_bundle(tmp_path / "bundle")
    for graph in manifest.target.graphs:
        check_graph(opened, manifest.target, graph)


def test_on_cuda_the_graph_for_chains_computes_what_the_one_for_trees_does(checkpoint: Path, tmp_path: Path) -> None:
    """Run on CPU, which takes the same graphs: windows are an attribute in the one and a bias in the other."""
    manifest = export_pair(checkpoint, None, tmp_path / "bundle", recipe="fp16", device="cuda", check=False).manifest
    opened = open_bundle(tmp_path / "bundle")
    ids = np.array(PROMPT + PROMPT[::-1], np.int64)
    runs = []
    for graph in manifest.target.graphs:
        check_graph(opened, manifest.target, graph)
        runs.append(run_graph(tmp_path / "bundle" / graph.path, ids, range(len(ids))))
    chain, tree = runs
    assert np.ptp(chain) > 2
    np.testing.assert_allclose(chain, tree, rtol=0, atol=2e-2)


@pytest.mark.parametrize("family", VARIANTS)
def test_drafting_changes_no_token(family: str, tiny_bundle: Bundles) -> None:
    bundle = tiny_bundle(recipe="w8a8", draft="close", eos=None, **VARIANTS[family])
    engine = edge_spec.load(bundle, threads=1, context=120)
    require_bitwise_kernels()
    assert engine.exactness == "bitwise"
    for temperature in (0.0, 0.8):
        plain = engine.generate(PROMPT, max_new_tokens=60, temperature=temperature, seed=5, speculation="off")
        for speculation in ("model", "recycling", "composite"):
            drafted = engine.generate(
                PROMPT, max_new_tokens=60, temperature=temperature, seed=5, speculation=speculation
            )
            assert drafted.token_ids == plain.token_ids, (speculation, temperature)


@pytest.mark.parametrize("family", VARIANTS)
def test_an_int8_cache_strays_little(family: str, tiny_bundle: Bundles) -> None:
    if not takes_int8_cache():
        pytest.skip("THIS ONNX RUNTIME TAKES NO INT8 KV CACHE")
    bundle = open_bundle(tiny_bundle(recipe="fp32", eos=None, **VARIANTS[family]))
    ids = PROMPT + PROMPT[::-1]
    kinds: tuple[CacheType, ...] = ("float32", "int8")
    plain, rounded = (
        Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 100, exact_rows=True, kv=kv)
        .forward(ids, range(len(ids)))
        .copy()
        for kv in kinds
    )
    assert np.mean(plain.argmax(axis=1) == rounded.argmax(axis=1)) > 0.8


def manifest_of(bundle: Path) -> Manifest:
    return open_bundle(bundle).manifest


@pytest.mark.parametrize(
    ("family", "expected"), [("gemma3", (24, 4, 2)), ("phi3", (20, 2, 1)), ("smollm3", (None, 0, 1))]
)
def test_the_manifest_describes_windows_and_rotary_embeddings(family: str, expected: Any, tiny_bundle: Bundles) -> None:
    facts = manifest_of(tiny_bundle(recipe="fp32", eos=None, **VARIANTS[family])).target.architecture
    assert (facts.sliding_window, facts.sliding_layers, len(facts.ropes)) == expected
    assert sum(rope.layers for rope in facts.ropes) == (3 if family == "smollm3" else facts.layers)
