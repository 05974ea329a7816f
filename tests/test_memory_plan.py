"""The memory plan: laws, order of giving up, refusals. The manifest is that of a real pair, written down."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.byte_size import parse_size
from edge_spec.errors import MemoryBudgetError, RequestError
from edge_spec.manifest import ArchitectureRecord, CacheType, FileRecord, GraphRecord, Manifest, ModelRecord, RopeRecord
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_law import memory_items
from edge_spec.runtime.memory_plan import MemoryPlan
from edge_spec.runtime.memory_profile import MemoryNotes, MemoryProfile, read_profile, write_profile

MIB = 1 << 20
INT8_KV: dict[str, tuple[CacheType, ...]] = {"target": ("float32", "int8"), "draft": ("float32", "int8")}
WORTH = ("context", "target_kv", "draft", "draft_kv", "draft_window", "widest", "conversations")


def model(layers: int, hidden: int, inner: int, heads: int, head_size: int, storage: str, block: int) -> ModelRecord:
    facts = ArchitectureRecord(
        "qwen2",
        layers,
        hidden,
        inner,
        heads,
        2,
        head_size,
        151936,
        32768,
        (RopeRecord(1e6, False, head_size, layers),),
        sliding_window=None,
        sliding_layers=0,
        tied_embeddings=False,
    )
    embedding = "int8" if storage == "w8a8" else storage
    layer_classes = dict.fromkeys(("attention", "mlp_up", "mlp_down", "lm_head"), storage)
    recipe = {"name": storage, "embedding": embedding, **layer_classes, "block_size": block}
    return ModelRecord("", "", facts, recipe, None, (GraphRecord("model.onnx", tree=True, kv="float32"),), None)


PAIR = Manifest(
    created_by="edge-spec",
    device="cpu",
    vocab_size=151665,
    context_length=32768,
    eos_token_ids=(1,),
    bos_token_id=None,
    special_token_ids=(),
    named_tokens={},
    default_sampling={},
    target=model(28, 1536, 8960, 12, 128, "w8a8", 32),
    draft=model(24, 896, 4864, 14, 64, "int4", 128),
    files={"tokenizer.json": FileRecord(11422473, "")},
)
SMALL_VOCABULARY = replace(PAIR.target.architecture, logits_size=4096)
LEAST = plan_memory(PAIR, 1, kv_types=INT8_KV).total_bytes
MOST = plan_memory(PAIR, None, conversations=4).total_bytes
BUDGETS = st.integers(LEAST, MOST + 200 * MIB)


def worth(configuration: Configuration) -> tuple[float, ...]:
    """A configuration as numbers, more being better, the most valuable part first."""
    sizes = {"float32": 4, "float16": 2, "int8": 1}
    values = (getattr(configuration, part) for part in WORTH)
    return tuple(sizes[value] if isinstance(value, str) else value for value in values)


def items(plan: MemoryPlan) -> dict[str, int]:
    return {item.name: item.bytes for item in plan.items}


@given(BUDGETS)
def test_a_plan_stays_within_its_budget_and_adds_up(budget: int) -> None:
    plan = plan_memory(PAIR, budget, conversations=4, kv_types=INT8_KV)
    assert plan.fits
    assert plan.total_bytes == sum(item.bytes for item in plan.items) <= budget


@given(BUDGETS, BUDGETS)
def test_a_larger_budget_never_brings_a_worse_plan(one: int, other: int) -> None:
    small, large = (
        plan_memory(PAIR, budget, conversations=4, kv_types=INT8_KV).configuration for budget in sorted((one, other))
    )
    assert worth(small) <= worth(large)


@given(BUDGETS)
def test_what_a_larger_budget_would_bring_comes_with_it_and_not_before(budget: int) -> None:
    plan = plan_memory(PAIR, budget, conversations=4, kv_types=INT8_KV)
    if plan.next_larger is None:
        assert not plan.given_up
        return
    needed = plan.next_larger.budget_bytes
    assert needed > budget
    assert plan_memory(PAIR, needed - 1, conversations=4, kv_types=INT8_KV).configuration == plan.configuration
    better = plan_memory(PAIR, needed, conversations=4, kv_types=INT8_KV).configuration
    assert better == plan.next_larger.configuration
    assert worth(better) > worth(plan.configuration)


@given(BUDGETS)
def test_the_larger_budget_that_is_shown_is_enough_when_it_is_typed(budget: int) -> None:
    plan = plan_memory(PAIR, budget, conversations=4, kv_types=INT8_KV)
    shown = re.search(r"a budget of (.*) would bring", str(plan))
    assert (shown is None) == (plan.next_larger is None)
    if shown is not None:
        typed = plan_memory(PAIR, parse_size(shown[1]), conversations=4, kv_types=INT8_KV)
        assert worth(typed.configuration) > worth(plan.configuration)


@given(BUDGETS)
def test_nothing_is_given_up_while_something_missed_less_is_left_and_would_do(budget: int) -> None:
    plan = plan_memory(PAIR, budget, conversations=4, kv_types=INT8_KV)
    for lost in plan.given_up:
        assert lost.missing_bytes > 0, f"{lost.what} would have fitted"


def test_things_go_in_the_order_of_their_worth() -> None:
    """Going down from plenty, each part is first touched after those that are missed less."""
    longest = replace(PAIR, target=replace(PAIR.target, architecture=SMALL_VOCABULARY))
    assert first_missed(PAIR, INT8_KV) == [*reversed(WORTH[1:])]
    # Here loading takes no more for a moment than what is left at the end, so that the context has to go as well.
    assert first_missed(longest, INT8_KV)[-2:] == ["target_kv", "context"]


def first_missed(manifest: Manifest, kv_types: dict[str, tuple[CacheType, ...]]) -> list[str]:
    missed: list[str] = []
    for budget in range(MOST, 0, -4 * MIB):
        plan = plan_memory(manifest, budget, conversations=3, kv_types=kv_types)
        missed += [lost.what for lost in plan.given_up if lost.what not in missed]
        if not plan.fits:
            break
    return missed


def test_what_a_lost_draft_leaves_is_spent_again() -> None:
    without = next(
        plan
        for plan in (plan_memory(PAIR, budget, conversations=2) for budget in range(MOST, LEAST, -MIB))
        if not plan.configuration.draft
    )
    assert without.configuration.widest == 63
    assert without.configuration.draft_window == 0
    assert "draft weights" not in items(without)


def test_a_context_that_is_insisted_on_is_kept_or_refused() -> None:
    least = plan_memory(PAIR, 1, context=8192).total_bytes
    plan = plan_memory(PAIR, least, context=8192)
    assert plan.configuration.context == 8192
    assert not plan.configuration.draft
    with pytest.raises(MemoryBudgetError, match="smaller context"):
        plan_memory(PAIR, least - 1, context=8192).require_fit()


def test_a_refusal_holds_the_table_and_the_least_that_is_needed() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        plan_memory(PAIR, LEAST // 2).require_fit()
    for text in ("target weights", "1.4", "do not fit a budget", "--recipe int4"):
        assert text in str(refused.value)
    plan = plan_memory(PAIR, LEAST // 2, kv_types=INT8_KV)
    assert not plan.fits
    assert plan.total_bytes == LEAST
    assert plan_memory(PAIR, LEAST, kv_types=INT8_KV).fits


@pytest.mark.parametrize(("wish", "value"), [("context", 1), ("context", 40000), ("conversations", 0)])
def test_wishes_out_of_range_are_refused(wish: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"{wish} is {value}"):
        plan_memory(PAIR, MOST, **{wish: value})  # type: ignore[arg-type]


def test_int8_for_the_target_is_named_for_changing_the_text() -> None:
    least = plan_memory(PAIR, 1, context=8192, kv_types=INT8_KV).total_bytes
    plan = plan_memory(PAIR, least, context=8192, kv_types=INT8_KV)
    assert plan.configuration.target_kv == "int8"
    assert "CHANGES THE TEXT" in str(plan)
    assert "CHANGES THE TEXT" not in str(plan_memory(PAIR, MOST, context=4096, kv_types=INT8_KV))


def test_the_cache_is_two_numbers_for_every_layer_head_and_token() -> None:
    plan = plan_memory(PAIR, None, context=4096, conversations=2)
    tokens = 2 * 4096
    exact = 2 * 28 * 2 * 128 * 4 * tokens
    assert exact <= items(plan)["target KV cache"] < 1.03 * exact


def test_weights_follow_the_recipe() -> None:
    def weights(storage: str) -> int:
        manifest = replace(PAIR, target=model(28, 1536, 8960, 12, 128, storage, 32), draft=None)
        return items(plan_memory(manifest, None, context=256))["target weights"]

    # What ONNX Runtime 1.32 was measured to take on x86, in MiB, within 3 %.
    assert weights("w8a8") / MIB == pytest.approx(1485, rel=0.03)
    assert weights("int4") / MIB == pytest.approx(1321, rel=0.03)
    assert weights("fp32") == pytest.approx(4 * weights("w8a8"), rel=0.03)
    assert weights("fp16") == pytest.approx(weights("fp32"), rel=0.05)  # widened on CPU


def test_a_measured_profile_replaces_the_law_and_says_so() -> None:
    plan = plan_memory(PAIR, None, profile=MemoryProfile(target_weights=1600 * MIB, tokenizer=50 * MIB))
    by_name = {item.name: item for item in plan.items}
    assert by_name["tokenizer"].bytes == 50 * MIB
    assert by_name["target weights"].bytes == pytest.approx(1600 * MIB, rel=0.05)
    assert by_name["target weights"].basis == by_name["tokenizer"].basis == "measured"
    assert by_name["draft weights"].basis == "law"


@pytest.mark.parametrize("size", [1 << 20, 1 << 36])
def test_a_profile_that_cannot_be_the_bundles_is_left_aside(size: int) -> None:
    plan = plan_memory(PAIR, None, profile=MemoryProfile(tokenizer=size, target_weights=size, draft_weights=size))
    assert items(plan) == items(plan_memory(PAIR, None))


@pytest.fixture
def no_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnnxRuntime:
        __version__ = "1.99"

    monkeypatch.setattr("edge_spec.runtime.memory_profile.import_onnxruntime", OnnxRuntime)


@pytest.mark.usefixtures("no_onnxruntime")
def test_a_profile_is_found_again_and_keeps_what_a_later_load_left_out(tmp_path: Path) -> None:
    assert read_profile(PAIR, tmp_path) is None
    write_profile(PAIR, MemoryProfile(1, 2, 3), tmp_path)
    write_profile(PAIR, MemoryProfile(tokenizer=4, target_weights=5), tmp_path)
    assert read_profile(PAIR, tmp_path) == MemoryProfile(4, 5, 3)
    assert read_profile(replace(PAIR, context_length=9), tmp_path) is None


@pytest.mark.usefixtures("no_onnxruntime")
@pytest.mark.parametrize("content", ["", "[]", "{", '{"key": 1}', "[" * 5000])
def test_a_damaged_profile_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    write_profile(PAIR, MemoryProfile(1, 2, 3), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert read_profile(PAIR, tmp_path) is None


@pytest.mark.usefixtures("no_onnxruntime")
def test_sizes_that_are_none_are_not_believed(tmp_path: Path) -> None:
    write_profile(PAIR, MemoryProfile(1, 2, 3), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer": -1}))
    assert read_profile(PAIR, tmp_path) is None


def test_what_becomes_resident_is_noted() -> None:
    notes = MemoryNotes()
    with notes.of("tokenizer"):
        block = np.full(64 * MIB, 1, np.uint8)  # in one piece: a copy of something might stay in the heap
    noted = notes.profile().tokenizer
    if noted is None:
        pytest.skip("this system does not tell")
    assert noted == pytest.approx(len(block), rel=0.2)


def test_what_was_freed_before_does_not_hide_what_a_part_takes() -> None:
    """A second load in one process would else seem to take next to nothing, and the next plan promise too much."""
    pieces = [bytes(1000) for _ in range(65_000)]
    top = bytes(1000)  # keeps the C library from giving back what lies below
    del pieces
    notes = MemoryNotes()
    with notes.of("tokenizer"):
        pieces = [bytes(1000) for _ in range(65_000)]
    noted = notes.profile().tokenizer
    if noted is None:
        pytest.skip("this system does not tell")
    assert noted >= 50 * MIB
    assert len(top) == len(pieces[0])


def test_a_gpu_holds_weights_as_stored_and_caches_in_half() -> None:
    cuda = replace(PAIR, device="cuda", target=model(28, 1536, 8960, 12, 128, "int4", 32), draft=None)
    plan = plan_memory(cuda, None, context=4096)
    assert plan.configuration.target_kv == "float16"
    on_cpu = items(plan_memory(replace(cuda, device="cpu"), None, context=4096))
    assert items(plan)["target weights"] < on_cpu["target weights"]
    assert items(plan)["target KV cache"] == pytest.approx(on_cpu["target KV cache"] / 2, rel=0.01)


def test_items_are_those_of_the_plan() -> None:
    plan = plan_memory(PAIR, MOST)
    assert memory_items(PAIR, plan.configuration) == plan.items
