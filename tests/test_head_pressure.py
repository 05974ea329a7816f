"""A head is given up while memory is short, with the hidden states kept for it, and comes back; the text stays."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import ProviderError, RequestError
from edge_spec.export.add_head import add_head
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.loaded_pair import load_pair
from edge_spec.runtime.tap_rows import KEPT_TAP_ROWS, TapRows
from head_checkpoints import eagle3_tensors, llama_config, save_head
from tiny_models import SIZES

LETTERS, VOCABULARY, HIDDEN = "abcdefghijklmnopqrstuvwxyz .", 32, SIZES["hidden_size"]
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]


@pytest.fixture(scope="module")
def path(tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with both a draft model and a head."""
    pair = tiny_bundle(
        recipe="w8a8", draft="close", letters=LETTERS, vocab_size=VOCABULARY, num_hidden_layers=3, eos=None
    )
    folder = tmp_path_factory.mktemp("head")
    tensors = eagle3_tensors(HIDDEN, range(28), VOCABULARY)
    config = llama_config(HIDDEN, 28, VOCABULARY, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    return add_head(pair, save_head(folder / "checkpoint", config, tensors), output=folder / "bundle").path


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"speculation": "head"}])
def test_the_text_stays_while_the_head_is_away_and_when_it_is_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {**options, "max_draft": 3}
    # A head of this size saves no time, so it must not seem to take any to load.
    monkeypatch.setattr(
        "edge_spec.runtime.engine.load_pair",
        lambda *arguments: dataclasses.replace(load_pair(*arguments), draft_load_seconds=-1.0),
    )
    free, now = [1 << 40], [0.0]
    with Engine(
        open_bundle(path), drafter="head", available=lambda: free[0], memory_reserve=100 << 20, clock=lambda: now[0]
    ) as engine:
        with engine.session() as session:
            expected = session.generate(PROMPT, max_new_tokens=90, **options).token_ids
        network = weakref.ref(engine._drafters["head"]._read._model)  # type: ignore[attr-defined]
        tokens: list[int] = []
        kept: list[int] = []
        completion = None
        with engine.session() as session:
            for chunk in session.stream(PROMPT, max_new_tokens=90, **options):
                tokens += chunk.token_ids
                completion = chunk.completion
                free[0] = 0 if 15 <= len(tokens) < 35 else 1 << 40
                now[0] += 1.0
                if 25 <= len(tokens) < 35:
                    kept.append(engine._caches.tap_bytes)
        assert completion is not None
        assert tuple(tokens) == completion.token_ids == expected
        events = [(event.action, event.part) for event in completion.statistics.memory_events]
        assert ("shed", "head") in events and ("admitted", "head") in events
        assert network() is None, "somebody keeps the head that was given up"
        assert kept and not any(kept), "hidden states are kept for nobody"
        assert engine._caches.tap_bytes or engine._target.keeps_taps
        origins = completion.statistics.accepted_by_drafter
        assert origins.get("head", 0) > 0 or "speculation" not in options


def test_hidden_states_of_a_head_that_has_failed_are_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise ProviderError("the disk is on fire")

    free = [1 << 40]
    with (
        Engine(
            open_bundle(path),
            drafter="head",
            available=lambda: free[0],
            memory_reserve=100 << 20,
            clock=iter(range(10**6)).__next__,
        ) as engine,
        engine.session() as session,
    ):
        monkeypatch.setattr(HeadModel, "forward", fail)
        for chunk in session.stream(PROMPT, max_new_tokens=30, speculation="head", max_draft=3):
            completion = chunk.completion
            if not engine._drafters["head"].ready and free[0]:  # type: ignore[attr-defined]
                assert engine._caches.tap_bytes
                free[0] = 0
        assert completion is not None and not free[0]
        assert "head" in [event.part for event in completion.statistics.memory_events]
        assert not engine._caches.tap_bytes


def test_which_drafter_is_loaded_can_be_asked_for(path: Path) -> None:
    for drafter, other in (("head", "model"), ("model", "head")):
        with edge_spec.load(path, drafter=drafter) as engine:  # type: ignore[arg-type]
            assert drafter in engine.drafters and other not in engine.drafters
            with pytest.raises(RequestError, match=f"in this bundle, but not loaded; load with drafter='{other}'"):
                engine.generate(PROMPT, speculation=other)
    with edge_spec.load(path, drafter="none") as engine:
        assert not {"head", "model"} & {*engine.drafters}


def test_a_text_that_waits_for_its_turn_keeps_the_last_rows_in_memory_of_their_size() -> None:
    taps = TapRows(4, 512)
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    taps.append(0, [rows])
    taps.trim()
    assert (taps.start, taps.stop) == (100 - KEPT_TAP_ROWS, 100)
    assert taps.memory_bytes == KEPT_TAP_ROWS * 4 * 4
    assert np.array_equal(taps.read(taps.start, 100), rows[-KEPT_TAP_ROWS:])
    taps.append(100, [rows[:3]])
    assert np.array_equal(taps.read(99, 103), rows[[99, 0, 1, 2]])
