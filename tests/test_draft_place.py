"""A draft beside a target for CUDA: on its device, on the CPU, or where it is faster.

There is no GPU here, so the CPU runs the graphs that are for one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from edge_spec.bundle import Bundle, open_bundle, read_manifest
from edge_spec.errors import BundleError, EdgeSpecError, MemoryBudgetError
from edge_spec.export import export_pair
from edge_spec.inspection import describe_bundle
from edge_spec.manifest import Device, Manifest, ModelRecord
from edge_spec.manifest_check import check_manifest
from edge_spec.runtime import calibration_cache, loaded_pair, pair_opener
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.device_memory import GpuMemory
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.model import Model
from tiny_models import letter_tokenizer, random_model, save_checkpoint

Bundles = Callable[..., Path]

GIB, MIB = 1 << 30, 1 << 20
PROMPT = list(range(20))
CUDA: dict[str, Any] = {"device": "cuda", "recipe": "fp16", "draft": "close", "draft_recipe": "fp16", "eos": None}
CARD = GpuMemory("card", False, 8 * GIB, lambda: 6 * GIB)


@pytest.fixture(autouse=True)
def cuda_graphs_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_spec.runtime.engine.select_provider", lambda device, flavour: ["CPUExecutionProvider"])


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "calibrations"))
    return tmp_path / "calibrations"


def engine(bundle: Path, gpu: GpuMemory | None = CARD, **options: Any) -> Engine:
    return Engine(open_bundle(bundle), context=120, threads=1, find_gpu=lambda: gpu, **options)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Device]]:
    """The models that are opened, each with what its graphs are for, as far as engines do that."""
    models: list[tuple[str, Device]] = []

    class Noted(Model):
        def __init__(self, bundle: Bundle, record: ModelRecord, providers: list[str], *arguments: Any) -> None:
            super().__init__(bundle, record, providers, *arguments)
            role = "target" if record is bundle.manifest.target else "draft"
            models.append((role, bundle.manifest.device_of(record)))

    monkeypatch.setattr(pair_opener, "Model", Noted)
    return models


# Export


@pytest.mark.parametrize(
    ("wanted", "drafts"), [(None, ["cuda"]), ("cuda", ["cuda"]), ("cpu", ["cpu"]), ("both", ["cuda", "cpu"])]
)
def test_a_draft_is_written_for_what_it_shall_run_on(wanted: Any, drafts: list[str], tiny_bundle: Bundles) -> None:
    path = tiny_bundle(**CUDA, draft_device=wanted)
    manifest = read_manifest(path)
    assert list(manifest.drafts) == drafts
    assert (manifest.draft is not None, manifest.cpu_draft is not None) == ("cuda" in drafts, "cpu" in drafts)
    folders = {"cuda": "draft", "cpu": "draft-cpu"}
    assert {file.parent.name for file in path.rglob("*.onnx")} == {"target", *(folders[name] for name in drafts)}
    for device, record in manifest.drafts.items():
        assert manifest.device_of(record) == device
        assert record.graphs[0].kv == ("float16" if device == "cuda" else "float32")
    assert ("draft on the CPU: " in describe_bundle(path, manifest)) == ("cpu" in drafts)


def test_each_draft_gets_the_recipe_of_its_device(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", random_model())
    manifest = export_pair(source, source, tmp_path / "b", device="cuda", draft_device="both", check=False).manifest
    assert {device: record.recipe["name"] for device, record in manifest.drafts.items()} == {
        "cuda": "int4",
        "cpu": "int4-128",
    }
    with pytest.raises(EdgeSpecError, match="does not run on CUDA"):
        export_pair(source, source, tmp_path / "c", device="cuda", draft_device="both", draft_recipe="w8a8")
    on_cpu = export_pair(
        source, source, tmp_path / "d", device="cuda", draft_device="cpu", draft_recipe="w8a8", check=False
    ).manifest
    assert [record.recipe["name"] for record in on_cpu.drafts.values()] == ["w8a8"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft_device": "tpu", "device": "cuda"}, "draft_device is 'tpu', expected"),
        ({"draft_device": "both"}, "the target is for the CPU"),
        ({"draft_device": "cuda"}, "the target is for the CPU"),
        ({"draft_device": "cpu", "device": "cuda", "draft": None}, "but there is none"),
    ],
)
def test_a_place_that_cannot_be_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", random_model())
    draft = options.pop("draft", source)
    with pytest.raises(EdgeSpecError, match=reason):
        export_pair(source, draft, tmp_path / "bundle", check=False, **options)


def test_a_manifest_with_a_second_draft_for_the_cpu_is_refused(tiny_bundle: Bundles) -> None:
    manifest = read_manifest(tiny_bundle(**CUDA, draft_device="both"))
    body = {**{name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}, "device": "cpu"}
    with pytest.raises(ValueError, match="cpu_draft is for a target on CUDA"):
        check_manifest(Manifest(**body))


@pytest.mark.parametrize("file", ["draft-cpu/model.onnx", "draft-cpu/model.onnx.data"])
def test_a_cut_file_of_the_cpu_draft_is_refused(file: str, tiny_bundle: Bundles, tmp_path: Path) -> None:
    path = Path(copytree(tiny_bundle(**CUDA, draft_device="cpu"), tmp_path / "bundle"))
    (path / file).write_bytes((path / file).read_bytes()[:-1])
    with pytest.raises(BundleError, match=file.replace(".", r"\.")):
        engine(path)


# The text


@pytest.mark.parametrize("wanted", ["cuda", "cpu", "both"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_wherever_the_draft_runs(
    wanted: str, temperature: float, tiny_bundle: Bundles, opened: list[tuple[str, Device]]
) -> None:
    with engine(tiny_bundle(**CUDA, draft_device=wanted)) as loaded:
        plain = loaded.generate(PROMPT, max_new_tokens=60, temperature=temperature, seed=3, speculation="off")
        drafted = loaded.generate(
            PROMPT, max_new_tokens=60, temperature=temperature, seed=3, speculation="model", max_draft=4
        )
        assert drafted.statistics.accepted > 10
        if loaded.exactness == "bitwise":
            assert drafted.token_ids == plain.token_ids
        runs_on = loaded.plan.configuration.draft_device
        assert opened[0] == ("target", "cuda")
        assert opened[-1] == ("draft", runs_on) or wanted == "both"  # which may have both measured already
        assert wanted in (runs_on, "both")


@pytest.mark.parametrize("wanted", ["cpu", "both"])
@pytest.mark.parametrize("kind", ["fewer ids", "own tokens"])
def test_a_draft_on_the_cpu_may_have_another_vocabulary(
    kind: str, wanted: Any, tmp_path: Path, fresh_cache: Path
) -> None:
    target = save_checkpoint(tmp_path / "target", random_model(), eos=None)
    options: dict[str, Any] = {"draft_vocab": 262}
    draft = target
    if kind == "own tokens":
        letters = letter_tokenizer("".join(map(chr, range(33, 127))))
        draft = save_checkpoint(tmp_path / "draft", random_model(seed=4), letters, eos=None)
        options = {}
    report = export_pair(
        target,
        draft,
        tmp_path / "bundle",
        recipe="fp16",
        draft_recipe="fp16",
        device="cuda",
        draft_device=wanted,
        check=False,
        **options,
    )
    speech = report.manifest.draft_vocabulary
    assert speech is not None
    assert speech.reads == ("own tokens" if kind == "own tokens" else "target ids")
    prompt = [*b"the letters"]
    with engine(report.path) as loaded:
        plain = loaded.generate(prompt, max_new_tokens=40, speculation="off")
        drafted = loaded.generate(prompt, max_new_tokens=40, speculation="model", max_draft=4)
        assert drafted.statistics.drafted > 0
        assert kind == "own tokens" or drafted.statistics.accepted > 10
        if loaded.exactness == "bitwise":
            assert drafted.token_ids == plain.token_ids


def test_the_cpus_draft_is_opened_on_the_cpu_and_the_rest_on_the_gpu(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers: dict[str, str] = {}

    class Noted(Model):
        def __init__(self, bundle: Bundle, record: ModelRecord, wanted: list[str], *arguments: Any) -> None:
            super().__init__(bundle, record, ["CPUExecutionProvider"], *arguments)
            providers[record.graphs[0].path.partition("/")[0]] = wanted[0]

    def settings_for(wanted: list[str], memory_limit: int | None = None) -> DeviceSettings:
        if memory_limit is not None:
            limits[wanted[0]] = memory_limit
        return DeviceSettings()

    limits: dict[str, int] = {}
    for module in (loaded_pair, pair_opener):
        monkeypatch.setattr(module, "settings_for", settings_for)
    monkeypatch.setattr(pair_opener, "Model", Noted)
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("edge_spec.runtime.engine.select_provider", lambda device, flavour: both)
    monkeypatch.setattr("edge_spec.runtime.engine.settings_for", settings_for)
    for wanted in ("cuda", "cpu"):
        engine(tiny_bundle(**CUDA, draft_device=wanted)).close()
    assert providers == {"target": both[0], "draft": both[0], "draft-cpu": both[1]}
    assert set(limits) == {both[0]}  # the arenas of sessions on the GPU
    assert GIB < limits[both[0]] < 6 * GIB


# Which place


def costs(seconds: float) -> Calibration:
    curve = CostCurve((1,), (seconds,), (0.0,))
    return Calibration(Costs(CallCosts(CostCurve((1,), (0.01,), (0.0,))), CallCosts(curve), 1e-5))


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "taken"), [(1e-3, 2e-3, "cuda"), (3e-3, 2e-3, "cpu"), (1e-3, 1e-3, "cuda")]
)
def test_where_both_fit_the_faster_is_taken_and_remembered(
    on_gpu: float,
    on_cpu: float,
    taken: str,
    tiny_bundle: Bundles,
    fresh_cache: Path,
    opened: list[tuple[str, Device]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[Device] = []

    def calibrate(target: Model, draft: Model | None, *arguments: Any, **options: Any) -> Calibration:
        measured.append(opened[-1][1])
        return costs({"cuda": on_gpu, "cpu": on_cpu}[measured[-1]])

    monkeypatch.setattr(loaded_pair, "calibrate", calibrate)
    path = tiny_bundle(**CUDA, draft_device="both")
    with engine(path) as loaded:
        assert measured == ["cuda", "cpu"]
        assert loaded.plan.configuration.draft_device == taken
        assert opened[-1] == ("draft", taken)
        assert loaded.calibration.costs.draft(0, 1) == min(on_gpu, on_cpu)
    opened.clear()
    with engine(path) as loaded:
        assert loaded.plan.configuration.draft_device == taken
        assert opened == [("target", "cuda"), ("draft", taken)]  # the other is not even opened
    assert measured == ["cuda", "cpu"]


def test_only_one_draft_is_held_while_both_are_measured(
    tiny_bundle: Bundles, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Model]] = []
    real = loaded_pair.calibrate

    def calibrate(target: Model, draft: Model | None, *arguments: Any, **options: Any) -> Calibration:
        assert draft is not None
        assert all(other() is None for other in alive)
        alive.append(weakref.ref(draft))
        return real(target, draft, *arguments, **options)

    monkeypatch.setattr(loaded_pair, "calibrate", calibrate)
    with engine(tiny_bundle(**CUDA, draft_device="both")):
        assert len(alive) == 2
    assert calibration_cache.default_folder() == fresh_cache


def test_a_plan_that_fits_one_place_only_decides_alone(tiny_bundle: Bundles, opened: list[tuple[str, Device]]) -> None:
    path = tiny_bundle(**CUDA, draft_device="both")
    elsewhere = replace(read_manifest(path), draft=None)
    with engine(path, memory_budget=plan_memory(elsewhere, None, 120, pools="discrete").total_bytes) as loaded:
        assert loaded.plan.possible == (loaded.plan,)
        assert loaded.plan.configuration.draft_device == "cpu"
        assert opened[-1] == ("draft", "cpu")
    with pytest.raises(MemoryBudgetError, match="on the host do not fit"):
        engine(path, available=lambda: 100 * MIB)


def test_what_a_model_takes_of_a_card_is_noted_and_planned_with(
    tiny_bundle: Bundles, fresh_cache: Path, opened: list[tuple[str, Device]]
) -> None:
    path = tiny_bundle(**CUDA)
    card = GpuMemory("card", False, 8 * GIB, lambda: 6 * GIB - 250_000 * len(opened))

    def weights() -> dict[str, tuple[int, str]]:
        with engine(path, card) as loaded:
            return {item.name: (item.bytes, item.basis) for item in loaded.plan.items if "weights" in item.name}

    assert {basis for _, basis in weights().values()} == {"law"}
    assert weights() == dict.fromkeys(("target weights", "draft weights"), (250_000, "measured"))


# Failures


def failing_session(monkeypatch: pytest.MonkeyPatch, folder: str, text: str) -> None:
    """Let ONNX Runtime fail on graphs in this folder."""
    import onnxruntime

    real = onnxruntime.InferenceSession

    def session(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str) and Path(path).parent.name == folder:
            raise RuntimeError(text)
        return real(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)


@pytest.mark.parametrize("folder", ["target", "draft"])
def test_a_load_that_finds_no_memory_shows_the_plan(
    folder: str, tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_bundle(**CUDA)
    failing_session(monkeypatch, folder, "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);")
    with pytest.raises(MemoryBudgetError, match="target weights") as failure:
        engine(path)
    assert "CUDA failure 2" in str(failure.value)
    assert "--memory-budget" in str(failure.value)


def test_a_load_that_fails_otherwise_says_so(tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_bundle(**CUDA)
    failing_session(monkeypatch, "target", "CUDA failure 209: no kernel image is available")
    with pytest.raises(BundleError, match="no kernel image"):
        engine(path)


def test_a_draft_that_finds_no_memory_in_a_call_is_given_up_and_the_text_goes_on(
    tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    class Session:
        """One of ONNX Runtime's, until there is no memory any more."""

        out_of_memory = False

        def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
            self._real = real(path, *arguments, **options)
            self._of_draft = isinstance(path, str) and Path(path).parent.name == "draft"

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def run_with_iobinding(self, *arguments: Any) -> None:
            if self._of_draft and Session.out_of_memory:
                failed.append(arguments)
                raise RuntimeError("Available memory of 16 is smaller than requested bytes of 4096")
            self._real.run_with_iobinding(*arguments)

    failed: list[Any] = []
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with engine(tiny_bundle(**CUDA)) as loaded:
        expected = loaded.generate(PROMPT, max_new_tokens=40, speculation="off").token_ids
        Session.out_of_memory = True
        found = loaded.generate(PROMPT, max_new_tokens=40, speculation="model", max_draft=4)
        assert len(failed) == 1  # it is not asked again
        assert loaded.exactness != "bitwise" or found.token_ids == expected


# Pressure


@pytest.fixture
def free() -> dict[str, int]:
    return {"device": 6 * GIB, "host": 6 * GIB}


@pytest.mark.parametrize(
    ("wanted", "short", "given_up"),
    [
        ("cuda", "device", {"draft model"}),
        ("cuda", "host", {"n-gram table"}),
        ("cpu", "device", set()),
        ("cpu", "host", {"n-gram table", "draft model"}),
    ],
)
def test_what_lies_where_memory_is_short_is_given_up_and_the_text_stays(
    wanted: Any, short: str, given_up: set[str], tiny_bundle: Bundles, free: dict[str, int]
) -> None:
    now = [0.0]
    card = GpuMemory("card", False, 8 * GIB, lambda: free["device"])
    options: dict[str, Any] = {"available": lambda: free["host"], "clock": lambda: now[0], "memory_reserve": 32 * MIB}
    with engine(tiny_bundle(**CUDA, draft_device=wanted), card, **options) as loaded:
        expected = loaded.generate(PROMPT, max_new_tokens=60, speculation="off").token_ids
        tokens: list[int] = []
        completion = None
        for chunk in loaded.stream(PROMPT, max_new_tokens=60, speculation="model", max_draft=2):
            now[0] += 1.0
            tokens += chunk.token_ids
            completion = chunk.completion
            if len(tokens) > 20:
                free[short] = 16 * MIB
        assert completion is not None
        events = completion.statistics.memory_events
        parts = {event.part for event in events if event.action == "shed"}
        assert parts - {"draft window", "caches of idle conversations"} == given_up
        assert loaded.exactness != "bitwise" or tuple(tokens) == expected


def test_on_a_shared_memory_all_is_one_pool(tiny_bundle: Bundles, free: dict[str, int]) -> None:
    now = [0.0]
    jetson = GpuMemory("Jetson", True, 8 * GIB, lambda: free["host"])
    options: dict[str, Any] = {"available": lambda: free["host"], "clock": lambda: now[0], "memory_reserve": 32 * MIB}
    with engine(tiny_bundle(**CUDA, draft_device="cpu"), jetson, **options) as loaded:
        assert (loaded.plan.pools, loaded.plan.host_bytes) == ("unified", 0)
        assert loaded.plan.budget_bytes == int(0.8 * 6 * GIB)
        completion = None
        for chunk in loaded.stream(PROMPT, max_new_tokens=30, speculation="model", max_draft=2):
            now[0] += 1.0
            completion = chunk.completion
            free["host"] = 16 * MIB
        assert completion is not None
        shed = {event.part for event in completion.statistics.memory_events}
        assert {"n-gram table", "draft model"} <= shed
