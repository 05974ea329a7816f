"""The memory plan of a bundle for CUDA: two pools or one, and where the draft goes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory_plan import MIB, MOST, PAIR, model

from edge_spec.byte_size import parse_size
from edge_spec.errors import MemoryBudgetError
from edge_spec.manifest import CacheType, GraphRecord, Manifest
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_failure import loading_failure, ran_out_of_memory
from edge_spec.runtime.memory_law import memory_items
from edge_spec.runtime.memory_plan import MemoryPlan, Pools
from edge_spec.runtime.memory_profile import MemoryProfile

FLOAT16 = (GraphRecord("draft/model.onnx", tree=False, kv="float16"),)
TARGET = replace(model(28, 1536, 8960, 12, 128, "int4", 32), graphs=FLOAT16)
DRAFT = replace(model(24, 896, 4864, 14, 64, "int4", 32), graphs=FLOAT16)
CPU_DRAFT = model(24, 896, 4864, 14, 64, "int4", 128)
CUDA = replace(PAIR, device="cuda", target=TARGET, draft=DRAFT, cpu_draft=CPU_DRAFT)
KV: dict[str, tuple[CacheType, ...]] = {
    "target": ("float16",),
    "draft": ("float16",),
    "cpu_draft": ("float32", "int8"),
}
ORDER = ("context", "target_kv", "draft", "draft_device", "draft_kv", "draft_window", "widest", "conversations")
WORTH = {"float32": 3, "float16": 3, "int8": 1, "cuda": 2, "cpu": 1, None: 0}


def plan(
    budget: int | None, pools: Pools = "discrete", host: int | None = None, manifest: Manifest = CUDA, **wishes: Any
) -> MemoryPlan:
    return plan_memory(manifest, budget, kv_types=KV, pools=pools, host_budget=host, **wishes)


def worth(configuration: Configuration) -> tuple[float, ...]:
    """A configuration as numbers, more being better, the most valuable part first."""
    values = [getattr(configuration, part) for part in ORDER]
    numbers = [WORTH[value] if value is None or isinstance(value, str) else value for value in values]
    return tuple(
        0 if part.startswith("draft_") and not configuration.draft else n
        for part, n in zip(ORDER, numbers, strict=True)
    )


def sizes(found: MemoryPlan, place: str) -> int:
    return sum(item.bytes for item in found.items if item.place == place)


WHOLE = plan(None)
BUDGETS = st.integers(plan(1).total_bytes - 50 * MIB, WHOLE.total_bytes + 200 * MIB)
HOSTS = st.integers(plan(None, host=1).host_bytes - 50 * MIB, 2000 * MIB)


@pytest.mark.parametrize("pools", ["discrete", "unified"])
@settings(deadline=None, max_examples=60)
@given(BUDGETS, HOSTS)
def test_each_pool_is_held_to_its_own_limit_and_a_shared_one_counts_once(pools: Pools, budget: int, host: int) -> None:
    found = plan(budget, pools, host)
    assert found.items == memory_items(CUDA, found.configuration)
    if pools == "unified":
        assert found.total_bytes == sizes(found, "device") + sizes(found, "host")
        assert (found.host_bytes, found.host_budget_bytes) == (0, None)
        assert found.fits == (found.total_bytes <= budget)
    else:
        assert (found.total_bytes, found.host_bytes) == (sizes(found, "device"), sizes(found, "host"))
        assert found.fits == (found.total_bytes <= budget and found.host_bytes <= host)
    assert sum(item.bytes for item in found.budgeted) == found.total_bytes


@settings(deadline=None, max_examples=60)
@given(BUDGETS, BUDGETS, HOSTS, HOSTS)
def test_more_memory_of_either_kind_never_brings_a_worse_plan(one: int, other: int, host: int, more: int) -> None:
    less = plan(min(one, other), host=min(host, more))
    better = plan(max(one, other), host=max(host, more))
    if less.fits:
        assert better.fits
        assert worth(better.configuration) >= worth(less.configuration)


@pytest.mark.parametrize("pools", ["discrete", "unified"])
@settings(deadline=None, max_examples=60)
@given(BUDGETS, HOSTS)
def test_what_a_larger_budget_would_bring_comes_with_it_and_not_before(pools: Pools, budget: int, host: int) -> None:
    found = plan(budget, pools, host, conversations=3)
    if found.next_larger is None:
        if found.fits:
            assert worth(plan(1 << 50, pools, host, conversations=3).configuration) == worth(found.configuration)
        return
    needed = found.next_larger.budget_bytes
    assert worth(plan(needed - 1, pools, host, conversations=3).configuration) == worth(found.configuration)
    better = plan(needed, pools, host, conversations=3).configuration
    assert better == found.next_larger.configuration
    assert worth(better) > worth(found.configuration)


def test_a_draft_leaves_the_gpu_for_the_cpu_before_it_is_given_up() -> None:
    with_draft = plan(None).total_bytes
    devices = [plan(budget).configuration.draft_device for budget in range(with_draft, 0, -4 * MIB)]
    assert list(dict.fromkeys(devices)) == ["cuda", "cpu"]  # on the host there is room without limit
    devices = [plan(budget, host=500 * MIB).configuration.draft_device for budget in range(with_draft, 0, -4 * MIB)]
    assert list(dict.fromkeys(devices)) == ["cuda", None]
    budgets = range(with_draft, 0, -4 * MIB)
    tight = plan(next(size for size in budgets if plan(size).configuration.draft_device == "cpu"))
    assert tight.fits
    assert [loss.what for loss in tight.given_up][-1] == "draft_device"
    assert "draft model on the CPU" in str(tight)
    assert "draft model's device cuda -> cpu: the budget lacks" in str(tight)


def test_a_short_host_keeps_the_draft_on_the_gpu() -> None:
    found = plan(None, host=plan(None, manifest=replace(CUDA, cpu_draft=None)).host_bytes)
    assert found.configuration.draft_device == "cuda"
    assert found.on_cpu is None


def test_where_both_places_fit_measuring_is_left_to_decide_and_only_there() -> None:
    found = plan(None)
    assert (found.configuration.draft_device, found.possible) == ("cuda", (found, found.on_cpu))
    assert found.on_cpu is not None
    assert found.on_cpu.configuration.draft_device == "cpu"
    assert found.on_cpu.given_up == ()
    assert found.on_cpu.total_bytes < found.total_bytes
    assert found.on_cpu.host_bytes > found.host_bytes
    assert found.on_cpu.items == memory_items(CUDA, found.on_cpu.configuration)
    shared = ("context", "target_kv")
    assert all(getattr(found.configuration, part) == getattr(found.on_cpu.configuration, part) for part in shared)
    assert "taken if it is faster here" in str(found)
    for manifest in (replace(CUDA, draft=None), replace(CUDA, cpu_draft=None), PAIR):
        assert plan(None, manifest=manifest).possible == (plan(None, manifest=manifest),)


@pytest.mark.parametrize(("pools", "saved"), [("discrete", True), ("unified", False)])
def test_the_cpu_saves_a_discrete_gpu_a_draft_and_a_shared_memory_hardly_anything(pools: Pools, saved: bool) -> None:
    on_gpu = plan(None, pools, manifest=replace(CUDA, cpu_draft=None)).total_bytes
    on_cpu = plan(None, pools, manifest=replace(CUDA, draft=None)).total_bytes
    none = plan(None, pools, manifest=replace(CUDA, draft=None, cpu_draft=None)).total_bytes
    assert (on_cpu == none) == saved
    assert (on_cpu < 0.95 * on_gpu) == saved


def test_a_draft_for_the_cpu_alone_is_a_draft() -> None:
    found = plan(None, manifest=replace(CUDA, draft=None))
    assert (found.configuration.draft, found.configuration.draft_device) == (True, "cpu")
    assert found.configuration.draft_kv == "float32"
    assert {item.name: item.place for item in found.items}["draft weights"] == "host"


def test_what_computes_on_the_gpu_lies_there_and_the_rest_on_the_host() -> None:
    on_gpu = {"target weights", "target KV cache", "target workspace", "CUDA context"}
    with_draft = on_gpu | {"draft weights", "draft KV cache", "draft workspace"}
    assert {item.name for item in plan(None).items if item.place == "device"} == with_draft
    on_cpu = plan(None).on_cpu
    assert on_cpu is not None
    assert {item.name for item in on_cpu.items if item.place == "device"} == on_gpu


def test_a_gpu_holds_the_whole_embedding_and_every_rotary_table() -> None:
    """It reads no file page by page; int4 takes half a byte and a scale of two for each block of 32."""
    facts = TARGET.architecture
    matrices = facts.layers * (1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960) + 1536 * 151936
    embedding = 1536 * 151936
    vectors = facts.layers * (4 * 1536 + 2 * 8960) * 2
    rotary = (facts.context_length + 1) * 128 * 2
    expected = (matrices + embedding) * (0.5 + 2 / 32) + vectors + rotary
    found = {item.name: item.bytes for item in plan(None).items}["target weights"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found == {item.name: item.bytes for item in plan(None, context=256).items}["target weights"]


def test_what_a_load_has_measured_is_taken_for_the_model_that_it_was() -> None:
    profile = MemoryProfile(target_weights=1200 * MIB, draft_weights=350 * MIB, cpu_draft_weights=500 * MIB)
    for possible in plan(None, profile=profile).possible:
        found = {item.name: item for item in possible.items}
        assert found["target weights"].bytes == 1200 * MIB  # a session's own memory lies on the host
        assert found["draft weights"].basis == "measured"
        on_gpu = possible.configuration.draft_device == "cuda"
        assert (found["draft weights"].bytes == 350 * MIB) == on_gpu


def test_arenas_get_what_is_planned_and_share_what_is_left() -> None:
    assert plan(None).arena_bytes() == {}
    tight = plan(plan(None).total_bytes)
    planned = {item.name: item.bytes for item in tight.items}
    limits = tight.arena_bytes()
    assert limits["target"] == planned["target weights"] + planned["target workspace"]
    assert limits["draft"] == planned["draft weights"] + planned["draft workspace"]
    beside = tight.arena_bytes(weights=False)
    assert beside == {"target": planned["target workspace"], "draft": planned["draft workspace"]}
    wide = plan(tight.total_bytes + 1000 * MIB)
    more = wide.arena_bytes()
    assert more["target"] > limits["target"]
    assert more["draft"] > limits["draft"]
    assert sum(more.values()) - sum(limits.values()) == pytest.approx(1000 * MIB, abs=2)
    assert tight.on_cpu is not None
    assert set(tight.on_cpu.arena_bytes()) == {"target"}


def test_json_and_table_say_where_everything_is() -> None:
    found = plan(3000 * MIB, host=4000 * MIB)
    body = json.loads(json.dumps(found.to_json()))
    assert body["pools"] == "discrete"
    assert {item["place"] for item in body["items"]} == {"host", "device"}
    assert body["total_bytes"] == sum(item["bytes"] for item in body["items"] if item["place"] == "device")
    assert body["host_bytes"] == sum(item["bytes"] for item in body["items"] if item["place"] == "host")
    assert body["on_cpu"]["configuration"]["draft_device"] == "cpu"
    text = str(found)
    assert (
        text.index("CUDA context") < text.index("on the GPU") < text.index("libraries") < text.index("\n  on the host")
    )
    assert "of its own" in text
    shared = str(plan(3000 * MIB, "unified"))
    assert "counts once" in shared
    assert "target weights" in next(line for line in shared.splitlines() if " device " in line)


def test_a_refusal_names_the_pool_that_is_short() -> None:
    with pytest.raises(MemoryBudgetError, match=r"do not fit a budget of 100.0 MiB") as refusal:
        plan(100 * MIB, host=4000 * MIB).require_fit()
    assert "target weights" in str(refusal.value)
    with pytest.raises(MemoryBudgetError, match=r"on the host do not fit its 100.0 MiB"):
        plan(4000 * MIB, host=100 * MIB).require_fit()


def test_a_plan_for_the_cpu_says_nothing_of_gpus() -> None:
    """Its text and its JSON are what they were before there was anything else to plan for."""
    found = plan_memory(PAIR, MOST // 2)
    told = json.dumps(found.to_json()) + str(found)
    for word in ("pools", "place", "device", "host", "on_cpu", "GPU", "CUDA"):
        assert word not in told
    names = ["fits", "configuration", "items", "total_bytes", "budget_bytes", "given_up", "next_larger"]
    assert list(found.to_json()) == names
    parts = ["context", "conversations", "widest", "draft", "draft_window", "target_kv", "draft_kv"]
    assert list(found.to_json()["configuration"]) == parts
    assert list(found.to_json()["items"][0]) == ["name", "bytes", "basis"]


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4294967296", True),
        ("Available memory of 16 is smaller than requested bytes of 32", True),
        ("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);", True),
        ("CUDA error cudaErrorMemoryAllocation", True),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED", True),
        ("std::bad_alloc", True),
        ("CUDA failure 209: no kernel image is available for execution on the device", False),
        ("Load model from model.onnx failed: Protobuf parsing failed.", False),
    ],
)
def test_what_onnxruntime_says_without_memory_is_told_from_what_else_it_says(text: str, memory: bool) -> None:
    outer = ValueError("ONNX Runtime cannot load a graph")
    outer.__cause__ = RuntimeError(text)
    assert ran_out_of_memory(outer) == ran_out_of_memory(RuntimeError(text)) == memory


def test_a_load_without_memory_shows_the_plan_and_what_to_do() -> None:
    error = RuntimeError("CUDA failure 2:\nout of memory")
    message = str(loading_failure(WHOLE, error))
    assert "(CUDA failure 2: out of memory)" in message
    assert "target weights" in message
    assert "--memory-budget" in message


def test_sizes_that_are_shown_are_enough_when_they_are_typed() -> None:
    found = plan(1500 * MIB)
    assert found.next_larger is not None
    shown = str(found).partition("a budget of ")[2].partition("a budget of ")[2].partition(" would")[0]
    assert worth(plan(parse_size(shown, "budget", "")).configuration) >= worth(found.next_larger.configuration)
