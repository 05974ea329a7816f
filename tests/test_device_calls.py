"""Inputs and logits that stay on the device, calls in shapes of captured graphs, and trees in a graph of their own.

The device is the CPU here: what runs is the same but for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.errors import RequestError
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.device_buffers import RowFetcher
from edge_spec.runtime.device_calls import DeviceCalls
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.exactness import load_at_level, measure_exactness
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Proposal
from tiny_models import TOKENS

CONTEXT = 700
RESIDENT = DeviceSettings(resident=True, tree_graph=True, shares_weights=True)
CAPTURING = replace(RESIDENT, captures=True)

quick = hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def path(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle(recipe="fp16", device="cuda", eos=None, max_position_embeddings=2048)


def load(path: Path, settings: DeviceSettings | None, context: int = CONTEXT, **options: Any) -> Model:
    bundle = open_bundle(path)
    options = {"exact_rows": False, "threads": 1, **options}
    return Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], context, settings=settings, **options)


@pytest.fixture(scope="module")
def host(path: Path) -> Model:
    return load(path, None)


@pytest.fixture(scope="module")
def resident(path: Path) -> Model:
    return load(path, RESIDENT)


@pytest.fixture(scope="module")
def capturing(path: Path) -> Model:
    return load(path, CAPTURING)


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, count)]


def feed(model: Model, tokens: Sequence[int], widths: Sequence[int]) -> Logits:
    model.cache.rollback(0)
    chunks, start = [], 0
    for width in widths:
        chunks.append(np.array(model.forward(tokens[start : start + width], range(width))))
        start += width
    return np.concatenate(chunks)


widths = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@given(widths=widths, seed=st.integers(0, 2**32 - 1))
@quick
def test_a_resident_model_gives_the_bits_of_one_in_cpu_memory(
    host: Model, resident: Model, widths: list[int], seed: int
) -> None:
    tokens = random_tokens(seed, sum(widths))
    np.testing.assert_array_equal(feed(resident, tokens, widths), feed(host, tokens, widths))


@given(widths=widths, past=st.integers(0, 600), seed=st.integers(0, 2**32 - 1))
@quick
def test_padded_calls_in_a_bucket_give_the_logits_of_calls_as_they_come(
    host: Model, capturing: Model, widths: list[int], past: int, seed: int
) -> None:
    tokens = random_tokens(seed, past + sum(widths))
    widths = widths if not past else [past, *widths]
    np.testing.assert_allclose(feed(capturing, tokens, widths), feed(host, tokens, widths), rtol=0, atol=2e-2)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("past", [0, 3, 250, 600])
def test_attention_that_is_told_a_longer_total_gives_the_same_bits(
    host: Model, capturing: Model, width: int, past: int
) -> None:
    """What counts of the cache is in ``seqlens_k``."""
    tokens = random_tokens(width, past + width)
    expected, found = (feed(model, tokens, [past, width] if past else [width])[past:] for model in (host, capturing))
    np.testing.assert_array_equal(found, expected)


# Trees


def tree_of(seed: int, nodes: int) -> Proposal:
    generator = np.random.default_rng(seed)
    parents = [int(generator.integers(-1, node)) if node else -1 for node in range(nodes)]
    return Proposal(tuple(random_tokens(seed, nodes)), parents=tuple(parents))


def verify(model: Model, tokens: Sequence[int], tree: Proposal) -> Logits:
    """Logits behind the last of the tokens and behind each node."""
    model.cache.rollback(0)
    model.prefill(tokens[:-1])
    past = len(tokens) - 1
    positions = [past, *(past + depth for depth in tree.depths)]
    call = [tokens[-1], *tree.tokens]
    return np.array(model.forward(call, range(len(call)), positions, tree.ancestry()))


def paths(tree: Proposal) -> list[list[int]]:
    """The tokens on the way to each node."""
    parents = tree.parents
    assert parents is not None
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@given(seed=st.integers(0, 2**32 - 1), past=st.integers(2, 600), nodes=st.integers(1, 14))
@quick
def test_a_tree_gives_each_node_the_logits_of_its_own_path(
    host: Model, resident: Model, capturing: Model, seed: int, past: int, nodes: int
) -> None:
    """The graph for trees reads and writes the cache of the graph for chains, also where attention is told more."""
    tokens, tree = random_tokens(seed + 1, past), tree_of(seed, nodes)
    expected = []
    for path in [[], *paths(tree)]:
        host.cache.rollback(0)
        host.prefill(tokens[:-1])
        expected.append(host.forward([tokens[-1], *path], [len(path)])[0].copy())
    for model in (resident, capturing):
        np.testing.assert_allclose(verify(model, tokens, tree), expected, rtol=0, atol=3e-2)


def test_what_a_tree_left_is_read_by_the_next_chain(host: Model, capturing: Model) -> None:
    tokens = random_tokens(5, 40)
    tree = Proposal((*tokens[31:33], 7, 8), parents=(-1, 0, 0, -1))
    verify(capturing, tokens[:31], tree)
    capturing.cache.rollback(33)
    found = capturing.forward(tokens[33:], range(7))
    np.testing.assert_allclose(found, feed(host, tokens, [33, 7])[33:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_windows_in_a_tree_are_counted_from_the_true_length(tiny_bundle: Callable[..., Path], family: str) -> None:
    from tiny_models import VARIANTS

    path = tiny_bundle(recipe="fp16", device="cuda", eos=None, **VARIANTS[family])
    host, capturing = load(path, None, 120), load(path, CAPTURING, 120)
    assert host._architecture.sliding_window is not None
    tokens, tree = random_tokens(3, 60), tree_of(4, 6)
    for node, way in enumerate(paths(tree)):
        host.cache.rollback(0)
        host.prefill(tokens[:-1])
        expected = host.forward([tokens[-1], *way], [len(way)])[0]
        np.testing.assert_allclose(verify(capturing, tokens, tree)[node + 1], expected, rtol=0, atol=5e-2)
    np.testing.assert_allclose(feed(capturing, tokens, [50, 7, 3]), feed(host, tokens, [50, 7, 3]), rtol=0, atol=5e-2)


def test_without_the_graph_for_trees_proposals_are_chains(path: Path) -> None:
    model = load(path, replace(RESIDENT, tree_graph=False))
    assert not model.takes_trees
    model.prefill([1, 2])
    with pytest.raises(RequestError, match="chains only"):
        model.forward([3, 4], [0], [2, 2], np.eye(2, dtype=bool))


# Exactness


def test_a_graph_for_trees_that_moves_the_trunk_is_closed_where_chains_keep_the_bits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Model.forward

    def moved(self: Model, token_ids: Sequence[int], *arguments: Any, **options: Any) -> Logits:
        """Chains give the same rows at any width here, trees others."""
        logits = np.concatenate([np.zeros((1, TOKENS), np.float32)] * max(1, len(arguments[0])))
        logits += np.asarray(token_ids, np.float32)[list(arguments[0])][:, None] if len(arguments[0]) else 0
        forward(self, token_ids, *arguments, **options)
        return logits + (1 if len(arguments) > 1 else 0)

    monkeypatch.setattr(Model, "forward", moved)
    target, level = load_at_level(lambda fixed: load(path, CAPTURING, fixed_rows=fixed), None, TOKENS)
    assert level == "bitwise"
    assert not target.takes_trees


@pytest.mark.parametrize("settings", [RESIDENT, CAPTURING])
def test_a_fixed_width_keeps_the_bits_of_any_division_into_calls(path: Path, settings: DeviceSettings) -> None:
    model = load(path, settings, fixed_rows=8)
    tokens = random_tokens(11, 300)
    expected = feed(model, tokens, [300])
    for widths in ([1] * 20 + [280], [250, 3, 7, 16, 24], [8, 5, 287]):
        np.testing.assert_array_equal(feed(model, tokens, widths), expected)
    assert measure_exactness(model, TOKENS) == "bitwise"
    assert model.cache.length == 0


def test_every_call_of_a_fixed_width_has_one_shape(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(path, RESIDENT, context=90, fixed_rows=8)
    shapes = set()
    call = DeviceCalls.call

    def watched(self: DeviceCalls, session: GraphSession, shape: CallShape, cache: Any) -> Any:
        shapes.add(shape)
        return call(self, session, shape, cache)

    monkeypatch.setattr(DeviceCalls, "call", watched)
    feed(model, random_tokens(0, 90), [1, 8, 20, 60, 1])
    model.cache.rollback(0)
    model.prefill(random_tokens(0, 50))
    # Where the graph selects, it does so for a row at least.
    assert shapes == {CallShape(8, 8, 98), CallShape(8, 1, 98)}


# Several drafted tokens in one call


def draft_of(tiny_bundle: Callable[..., Path], settings: DeviceSettings | None) -> Model:
    path = tiny_bundle(recipe="fp16", device="cuda", draft="close", eos=None, max_position_embeddings=2048)
    bundle = open_bundle(path)
    record = bundle.manifest.draft
    assert record is not None
    return Model(bundle, record, ["CPUExecutionProvider"], CONTEXT, False, threads=1, settings=settings)


@pytest.fixture(scope="module")
def drafts(tiny_bundle: Callable[..., Path]) -> dict[str, Model]:
    """Drafts of a pair for CUDA: in CPU memory, resident, and with shapes for CUDA graphs."""
    kinds = {"host": None, "resident": RESIDENT, "capturing": CAPTURING}
    return {name: draft_of(tiny_bundle, settings) for name, settings in kinds.items()}


@pytest.mark.parametrize("past", [1, 200, 253, 600])
@pytest.mark.parametrize("noisy", [False, True])
def test_tokens_drafted_in_one_call_on_the_device_are_those_drafted_in_cpu_memory(
    drafts: dict[str, Model], past: int, noisy: bool
) -> None:
    lengths = drafts["host"].chain_lengths
    assert lengths
    noise = np.random.default_rng(past).gumbel(size=(max(lengths), drafts["host"].columns)).astype(np.float32)
    tokens = random_tokens(past, past)
    for steps in lengths:
        found = []
        for model in drafts.values():
            assert model.chain_lengths == lengths
            model.cache.rollback(0)
            model.prefill(tokens)
            for pending in ([5], [6, 7], [8]):
                drafted = model.draft(pending, steps, list(noise[:steps]) if noisy else None, 1.3)
                found.append(drafted.tokens)
                model.cache.rollback(model.cache.length - steps + 1)
        assert found[:3] == found[3:6] == found[6:]


def test_a_drafting_call_that_fails_with_a_graph_runs_without_and_so_do_others(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draft_of(tiny_bundle, CAPTURING)
    run, graphs = GraphSession.run, []

    def failing(self: GraphSession, binding: Any, graph: int | None = None) -> None:
        graphs.append(graph)
        if graph is not None:
            raise RuntimeError("CUDA error 900")
        run(self, binding)

    steps = model.chain_lengths[0]
    model.prefill([1, 2, 3])
    model.forward([4], [0])
    model.cache.rollback(3)
    expected = model.draft([4], steps)
    model.cache.rollback(3)
    monkeypatch.setattr(GraphSession, "run", failing)
    assert model.draft([4], steps) == expected
    assert model.eager_reason is not None
    assert "CUDA error 900" in model.eager_reason
    model.cache.rollback(3)
    model.forward([4], [0])
    model.cache.rollback(3)
    assert model.draft([4], steps) == expected
    assert graphs[0] is not None
    assert graphs[1:] == [None, None, None]


# Rows


def test_one_row_is_fetched_of_all_that_lie_on_the_device() -> None:
    fetcher = RowFetcher(onnxruntime, ["CPUExecutionProvider"], "cpu")
    lying = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1, 9, 300], np.float32)
    rows = np.random.default_rng(0).normal(size=(1, 9, 300)).astype(np.float32)
    lying.update_inplace(rows)
    for row in (0, 4, 8):
        fetched = fetcher.fetch(lying, row)
        np.testing.assert_array_equal(fetched, rows[0, row])
        assert not np.shares_memory(fetched, lying.numpy())


def test_a_resident_model_gives_whole_rows_and_the_likeliest_tokens_of_each(
    host: Model, resident: Model, capturing: Model
) -> None:
    tokens = random_tokens(9, 25)
    expected = feed(host, tokens, [20, 5])[20:]
    for model in (resident, capturing):
        model.cache.rollback(0)
        model.prefill(tokens[:20])
        rows = model.forward(tokens[20:], range(5))
        for row in (3, 0, 4):
            np.testing.assert_allclose(rows[row], expected[row], rtol=0, atol=2e-2)
            assert rows.likeliest(row) == int(np.argmax(rows[row]))  # type: ignore[attr-defined]
