"""Which shapes calls are snapped to, and which CUDA graph is replayed for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.errors import DeviceMemoryError, ProviderError
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.captured_calls import CapturedCalls
from edge_spec.runtime.capturing import capture
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.model import Model
from edge_spec.runtime.shape_grid import ShapeGrid

SETTINGS = DeviceSettings(resident=True, captures=True, tree_graph=True, options={"enable_cuda_graph": "1"})


@given(slots=st.integers(2, 20000), data=st.data())
def test_a_snapped_call_holds_what_it_was_made_for(slots: int, data: st.DataObject) -> None:
    grid = ShapeGrid.of_context(slots)
    past = data.draw(st.integers(0, slots - 1))
    rows = data.draw(st.integers(1, slots - past))
    wanted = data.draw(st.integers(0, rows))
    shape = grid.snap(rows, wanted, past)
    if shape is None:
        assert rows > grid.widths[-1] or past + next(width for width in grid.widths if width >= rows) > slots
        return
    assert shape.rows in grid.widths
    assert shape.total in grid.buckets
    assert rows <= shape.rows <= max(rows, rows * 4 // 3 + 1)
    assert wanted <= shape.logit_rows <= shape.rows
    assert (shape.logit_rows == 0) == (wanted == 0)
    assert past + shape.rows <= shape.total <= slots
    assert shape.total <= max(256, 2 * (past + shape.rows)) or shape.total == slots


@given(slots=st.integers(1, 20000), last_row=st.booleans())
def test_all_shapes_are_reached_by_calls_and_none_comes_twice(slots: int, last_row: bool) -> None:
    shapes = list(ShapeGrid.of_context(slots).shapes(last_row))
    assert len(shapes) == len(set(shapes)) > 0
    totals = [shape.total for shape in shapes]
    assert totals == sorted(totals)  # a text begins in the first bucket


def test_the_grid_of_one_shape_has_one() -> None:
    grid = ShapeGrid.of_one_shape(8, 100)
    for rows, wanted, past in ((1, 1, 0), (8, 8, 92), (3, 2, 50)):
        assert grid.snap(rows, wanted, past) == CallShape(8, 8, 100)
    assert grid.snap(8, 0, 5) == CallShape(8, 0, 100)


def test_a_number_is_never_used_twice_and_there_is_an_end() -> None:
    captured = CapturedCalls(most=2)
    shape = CallShape(1, 1, 256)
    assert captured.number(CallShape(1, 1)) is None  # as it comes
    assert captured.number(CallShape(64, 0, 256)) is None  # prefill
    assert [captured.number(shape) for _ in range(3)] == [1, 2, None]
    assert captured.reason is not None
    assert "2 CUDA graphs" in captured.reason


# Models


class Recorder:
    """A session that notes the graph of each run, and fails where it is told to."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.graphs: list[str | None] = []
        self.fails: Callable[[str | None], str | None] = lambda graph: None

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        graph = None if options is None else options.get_run_config_entry("gpu_graph_id")
        self.graphs.append(graph)
        failure = self.fails(graph)
        if failure is not None:
            raise RuntimeError(failure)
        self._session.run_with_iobinding(binding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture(scope="module")
def path(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle(recipe="fp16", device="cuda", eos=None, max_position_embeddings=2048)


def load(path: Path, settings: DeviceSettings = SETTINGS, context: int = 700) -> tuple[Model, Recorder]:
    bundle = open_bundle(path)
    model = Model(
        bundle, bundle.manifest.target, ["CPUExecutionProvider"], context, False, threads=1, settings=settings
    )
    assert model._session is not None
    recorder = Recorder(model._session.session)
    model._session.session = recorder
    return model, recorder


def test_calls_of_one_shape_replay_one_graph_and_others_have_their_own(path: Path) -> None:
    model, recorder = load(path)
    model.prefill([1] * 40)
    assert recorder.graphs == ["-1"]
    del recorder.graphs[:]
    for _ in range(3):
        model.forward([5], [0])
    model.forward([5] * 7, range(7))  # as wide as 8
    model.forward([5] * 8, range(8))
    model.forward([5] * 2, [1])
    model.forward([5] * 17, range(17))
    assert recorder.graphs == ["1", "1", "1", "2", "2", "3", "-1"]


def test_graphs_are_captured_when_a_model_is_loaded(path: Path) -> None:
    model, recorder = load(path)
    capture(model, last_row=False)
    assert recorder.graphs == [str(number) for number in range(1, 19)]  # nine widths in two buckets
    assert model.cache.length == 0
    del recorder.graphs[:]
    for past in (0, 10, 300, 650):
        model.cache.rollback(0)
        model.cache.fill(past)
        for rows in (1, 2, 4, 5, 8, 12, 16):
            model.forward([3] * rows, range(rows))
    assert model._captured is not None
    assert model._captured.count == 18
    assert set(recorder.graphs) <= {str(number) for number in range(1, 19)}


def test_capturing_ends_after_some_seconds(path: Path) -> None:
    model, recorder = load(path)
    times = iter(range(0, 1000, 4))
    capture(model, last_row=True, clock=lambda: float(next(times)))
    assert recorder.graphs == ["1", "2"]


def test_a_drafts_calls_are_captured_with_those_that_draft_several_tokens(tiny_bundle: Callable[..., Path]) -> None:
    path = tiny_bundle(recipe="fp16", device="cuda", draft="close", eos=None, max_position_embeddings=2048)
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    model = Model(bundle, bundle.manifest.draft, ["CPUExecutionProvider"], 700, False, threads=1, settings=SETTINGS)
    capture(model, last_row=True)
    assert model._captured is not None
    graphs = model._captured.count
    assert graphs == 2 * (9 + len(model.chain_lengths))
    model.prefill([1] * 100)
    for steps in model.chain_lengths:
        model.draft([3], steps)
    model.forward([5], [0])
    assert model._captured.count == graphs


def test_a_new_text_begins_in_the_buffers_of_an_old_one_and_replays_its_graphs(path: Path) -> None:
    model, recorder = load(path)
    model.forward([1, 2], [0, 1])
    addresses = {name: value.data_ptr() for name, value in model.cache._buffers.items()}
    model.shrink(model.cache)
    model.use(model.new_cache())
    model.forward([3, 4], [0, 1])
    assert {name: value.data_ptr() for name, value in model.cache._buffers.items()} == addresses
    # Two texts at once have buffers, and so graphs, of their own.
    first = model.cache
    model.use(model.new_cache())
    model.forward([3, 4], [0, 1])
    second = np.array(model.forward([5], [0]))
    model.use(first)
    np.testing.assert_array_equal(model.forward([5], [0]), second)
    assert recorder.graphs == ["1", "1", "2", "3", "4"]


def test_a_call_that_fails_with_a_graph_runs_without_from_then_on(path: Path) -> None:
    model, recorder = load(path)
    other, _ = load(path)
    model.forward([1, 2], [1])
    for model_ in (model, other):
        model_.cache.rollback(0)
        model_.forward([1, 2], [1])
    recorder.fails = lambda graph: None if graph == "-1" else "CUDA error 900:\n operation not permitted"
    np.testing.assert_array_equal(model.forward([3], [0]), other.forward([3], [0]))
    np.testing.assert_array_equal(model.forward([4], [0]), other.forward([4], [0]))
    assert recorder.graphs[-3:] == ["2", "-1", "-1"]
    assert model.eager_reason == "a call failed with a CUDA graph: CUDA error 900: operation not permitted"


def test_a_call_that_fails_without_a_graph_too_is_an_error_and_counts_nothing(path: Path) -> None:
    model, recorder = load(path)
    model.prefill([1, 2])
    recorder.fails = lambda graph: "CUDA failure 700: illegal address"
    with pytest.raises(ProviderError, match="1 rows behind 2 cached tokens: CUDA failure 700"):
        model.forward([3], [0])
    assert model.cache.length == 2


@pytest.mark.parametrize(
    "said", ["Failed to allocate memory for requested buffer of size 7", "CUDA failure 2: out of memory"]
)
def test_a_device_without_memory_is_the_planners_affair(path: Path, said: str) -> None:
    model, recorder = load(path)
    model.prefill([1, 2])
    recorder.fails = lambda graph: said
    with pytest.raises(DeviceMemoryError, match="no memory for a call with 1 rows.*smaller budget"):
        model.forward([3], [0])


def test_want_of_memory_says_nothing_against_graphs(path: Path) -> None:
    model, recorder = load(path)
    model.prefill([1, 2])
    model.forward([3], [0])
    graph = recorder.graphs[-1]
    recorder.fails = lambda graph: None if graph == "-1" else "CUDA failure 2: out of memory"
    model.forward([4], [0])
    recorder.fails = lambda graph: None
    model.forward([5], [0])
    assert recorder.graphs[-3:] == [graph, "-1", graph] != ["-1"] * 3
    assert model.eager_reason is None


def test_a_graph_that_cannot_be_captured_is_opened_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    opened = onnxruntime.InferenceSession
    given = []

    def refusing(path: str, options: Any, providers: list[Any]) -> Any:
        cuda = providers[0][1]
        given.append(cuda["enable_cuda_graph"])
        if cuda["enable_cuda_graph"] == "1":
            raise RuntimeError("This session cannot use the graph capture feature")
        return opened(path, options, providers=["CPUExecutionProvider"])

    bundle = open_bundle(path)
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", refusing)
        patch.setattr("edge_spec.runtime.device_calls.RowFetcher", lambda *arguments: None)
        model = Model(
            bundle,
            bundle.manifest.target,
            ["CUDAExecutionProvider"],
            100,
            False,
            settings=replace(SETTINGS, tree_graph=False),
        )
    assert given == ["1", "0"]
    assert model.eager_reason == "CUDA graphs: This session cannot use the graph capture feature"
    assert model.forward([1, 2], [0, 1]).shape[0] == 2


def test_memory_that_is_short_when_a_graph_is_opened_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    def refusing(path: str, options: Any, providers: list[Any]) -> Any:
        raise RuntimeError("Available memory of 5 is smaller than requested bytes of 7")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refusing)
    bundle = open_bundle(path)
    with pytest.raises(DeviceMemoryError, match="no memory on the device.*Available memory of 5"):
        Model(bundle, bundle.manifest.target, ["CUDAExecutionProvider"], 100, False, settings=SETTINGS)
