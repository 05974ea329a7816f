"""Engines over bundles for CUDA, run on the CPU provider as if it were a device: what is drafted changes no law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec import Engine
from edge_spec.runtime.device_calls import DeviceCalls
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.exactness import FIXED_ROWS
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from tiny_models import TOKENS

SETTINGS = DeviceSettings(
    resident=True, captures=True, tree_graph=True, shares_weights=True, options={"enable_cuda_graph": "1"}
)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, TOKENS - 3, 30)] * 2


@pytest.fixture
def load(tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Return a function that loads a pair for CUDA with these settings of the device."""
    bundle = tiny_bundle(recipe="fp16", device="cuda", draft="close", eos=None, max_position_embeddings=512)

    def loaded(settings: DeviceSettings = SETTINGS, patch: Any = None, **options: Any) -> Engine:
        monkeypatch.setattr(
            "edge_spec.runtime.engine.select_provider", lambda device, bundle_device: ["CPUExecutionProvider"]
        )
        for module in ("engine", "loaded_pair", "pair_opener"):
            monkeypatch.setattr(
                f"edge_spec.runtime.{module}.settings_for", patch or (lambda providers, memory_limit=None: settings)
            )
        return edge_spec.load(bundle, **{"threads": 1, "context": 300, **options})

    return loaded


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, captures=False)])
def test_at_a_fixed_width_speculation_does_not_show(load: Callable[..., Engine], settings: DeviceSettings) -> None:
    with load(settings, exactness="bitwise") as engine:
        assert engine.exactness == "bitwise"
        for temperature in (0.0, 0.8):
            asked = {"max_new_tokens": 50, "temperature": temperature, "seed": 7}
            plain = engine.generate(PROMPT, speculation="off", **asked)
            for speculation in ("model", "lookup", "recycling", "composite"):
                drafted = engine.generate(PROMPT, speculation=speculation, **asked)
                assert drafted.token_ids == plain.token_ids, (speculation, temperature)


def test_a_target_that_needs_a_fixed_width_gets_it(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where attention is divided by rows."""
    forward = Model.forward

    def depends(self: Model, token_ids: Any, *arguments: Any, **options: Any) -> Any:
        logits = np.array(forward(self, token_ids, *arguments, **options))
        return np.nextafter(logits, np.float32(np.inf)) if self.fixed_rows is None and len(token_ids) > 2 else logits

    monkeypatch.setattr(Model, "forward", depends)
    with load(exactness="bitwise") as engine:
        assert engine._target.fixed_rows == FIXED_ROWS


def test_branches_are_proposed_again_where_the_cache_cannot_move_them(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "keep", lambda *arguments: pytest.fail("moved"))
    with load(exactness="distribution") as engine:
        assert engine._target.takes_trees
        assert len(engine.generate(PROMPT, max_new_tokens=60, speculation="recycling").token_ids) == 60
        for rule in ("coupled", "token", "block", "traversal"):
            completion = engine.generate(
                PROMPT, max_new_tokens=40, temperature=0.8, seed=1, speculation="composite", verification=rule
            )
            assert len(completion.token_ids) == 40


def test_trees_are_drafted_and_verified_in_their_own_graph(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = set()
    run = DeviceCalls.run

    def watched(self: DeviceCalls, session: Any, *arguments: Any) -> None:
        ran.add(session.takes_trees)
        run(self, session, *arguments)

    with load(exactness="distribution") as engine:
        monkeypatch.setattr(DeviceCalls, "run", watched)
        engine.generate(PROMPT, max_new_tokens=60, speculation="recycling", max_draft=8)
    assert ran == {True, False}


def test_without_trees_speculation_goes_on_in_chains(load: Callable[..., Engine]) -> None:
    with load(replace(SETTINGS, tree_graph=False), exactness="bitwise") as engine:
        assert not engine._target.takes_trees
        plain = engine.generate(PROMPT, max_new_tokens=50, speculation="off")
        assert engine.generate(PROMPT, max_new_tokens=50, speculation="recycling").token_ids == plain.token_ids


def test_conversations_take_turns_on_their_own_buffers(load: Callable[..., Engine]) -> None:
    with load(conversations=2) as engine:
        alone = [engine.generate(prompt, max_new_tokens=20).token_ids for prompt in (PROMPT, PROMPT[::-1])]
        streams = [engine.stream(prompt, max_new_tokens=20) for prompt in (PROMPT, PROMPT[::-1])]
        said: list[list[int]] = [[], []]
        going = list(zip(said, streams, strict=True))
        while going:
            for turn in list(going):
                chunk = next(turn[1], None)
                if chunk is None:
                    going.remove(turn)
                else:
                    turn[0].extend(chunk.token_ids)
    assert said == [list(tokens) for tokens in alone]


def test_arenas_get_what_the_plan_leaves_them(load: Callable[..., Engine]) -> None:
    """Weights that are shared lie beside the arenas."""
    limits: dict[bool, list[int | None]] = {}
    for shares in (True, False):
        settings = replace(SETTINGS, shares_weights=shares)
        seen = limits[shares] = []

        def noted(
            providers: list[str],
            limit: int | None = None,
            settings: DeviceSettings = settings,
            seen: list[int | None] = seen,
        ) -> DeviceSettings:
            seen.append(limit)
            return settings

        engine = load(settings, patch=noted, memory_budget="1GiB", exactness="distribution")
        engine.close()
    with_weights, beside = (next(limit for limit in limits[shares] if limit) for shares in (False, True))
    assert 0 < beside < with_weights <= 1 << 30
