"""An engine whose head drafts: the text is the target's own, whoever proposes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_text import require_that_conversations_go_on, require_that_rules_hold, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Completion, Engine, cli
from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, RequestError
from edge_spec.export.add_head import add_head
from edge_spec.manifest_check import check_manifest
from edge_spec.runtime.calibration import calibrate
from edge_spec.runtime.draft_vocabulary import read_head_vocabulary
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.model import Model
from edge_spec.runtime.verification import RULES
from head_checkpoints import eagle3_tensors, llama_config, save_head
from tiny_models import SIZES

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
VOCABULARY, LAYERS, HIDDEN = 32, 3, SIZES["hidden_size"]
TAPS = (1, 2, 3)
IDS = [token for token in range(29) if token % 4 != 2]
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]
CPU = ["CPUExecutionProvider"]

drafting = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def path(tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose head speaks of some of the letters."""
    target = tiny_bundle(recipe="w8a8", letters=LETTERS, vocab_size=VOCABULARY, num_hidden_layers=LAYERS, eos=None)
    folder = tmp_path_factory.mktemp("head")
    tensors = eagle3_tensors(HIDDEN, IDS, VOCABULARY)
    config = llama_config(HIDDEN, len(IDS), VOCABULARY, eagle_aux_hidden_state_layer_ids=list(TAPS))
    head = save_head(folder / "checkpoint", config, tensors)
    return add_head(target, head, output=folder / "bundle", recipe="fp32").path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with edge_spec.load(path, threads=1, conversations=8) as loaded:
        yield loaded


def test_calibrate_calls_a_head_a_head(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(path), "--context", "64"]) == 0
    shown = capsys.readouterr().out
    assert "\nhead: milliseconds of a step: " in shown
    assert "draft model" not in shown


def head_of(path: Path, context: int = 64) -> HeadModel:
    bundle = open_bundle(path)
    assert bundle.manifest.head is not None
    return HeadModel(bundle, bundle.manifest.head, CPU, context, threads=1)


def target_of(path: Path) -> Model:
    bundle = open_bundle(path)
    return Model(bundle, bundle.manifest.target, CPU, 64, True, threads=1, taps=TAPS)


def test_a_pair_with_a_head_drafts_with_it(engine: Engine) -> None:
    assert "head" in engine.drafters and "model" not in engine.drafters
    assert engine.plan.configuration.head and not engine.plan.configuration.draft
    with pytest.raises(RequestError, match="This bundle has no draft model"):
        engine.generate(PROMPT, speculation="model")
    drafted = [engine.generate(PROMPT, max_new_tokens=60, speculation="head", max_draft=4).statistics]
    assert drafted[0].drafted > 60 and drafted[0].accepted_by_drafter.get("head", 0) > 0


@drafting
@given(
    prompt=st.lists(st.integers(0, 28), min_size=1, max_size=90),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
    max_draft=st.sampled_from([None, 1, 3, 6]),
    tree=st.booleans(),
    name=st.sampled_from(["head", "auto", "composite"]),
)
def test_the_text_is_that_of_plain_decoding(
    engine: Engine, prompt: list[int], temperature: float, seed: int, max_draft: int | None, tree: bool, name: str
) -> None:
    request: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": seed}
    plain = engine.generate(prompt, speculation="off", **request)
    assert same(engine.generate(prompt, speculation=name, max_draft=max_draft, tree=tree, **request), plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"presence_penalty": 0.7}, {"banned_token_ids": [1, 2, 3]}])
def test_every_rule_takes_what_a_head_proposes(engine: Engine, rule: str, options: dict[str, Any]) -> None:
    require_that_rules_hold(engine, PROMPT, rule, options)


def test_branches_that_are_committed_leave_hidden_states_that_fit(path: Path) -> None:
    with edge_spec.load(path, threads=1, exactness="distribution") as loaded:
        plain = loaded.generate(PROMPT, max_new_tokens=60, speculation="off")
        answer = loaded.generate(PROMPT, max_new_tokens=60, speculation="head", max_draft=8)
        assert same(answer, plain)
        assert answer.statistics.accepted_by_drafter.get("head", 0) > 0


def test_a_conversation_goes_on_with_a_head(engine: Engine) -> None:
    require_that_conversations_go_on(engine)


def test_texts_take_turns_with_one_head(engine: Engine) -> None:
    prompts = [[index, *PROMPT[index:]] for index in range(3)]
    expected = [engine.generate(prompt, max_new_tokens=20, speculation="off") for prompt in prompts]
    streams = [engine.stream(prompt, max_new_tokens=20, speculation="head", max_draft=3) for prompt in prompts]
    found: dict[int, Completion] = {}
    while len(found) < len(streams):
        for index, stream in enumerate(streams):
            chunk = next(stream, None)
            if chunk is not None and chunk.completion is not None:
                found[index] = chunk.completion
    assert all(same(found[index], expected[index]) for index in found)


def test_a_head_that_fails_costs_speed_and_not_the_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edge_spec.load(path, threads=1) as loaded:
        plain = loaded.generate(PROMPT, max_new_tokens=20, speculation="off")
        whole = HeadModel.forward

        def broken(self: HeadModel, *arguments: Any, **options: Any) -> Any:
            logits, features = whole(self, *arguments, **options)
            return np.full_like(logits, np.nan), features

        monkeypatch.setattr(HeadModel, "forward", broken)
        assert same(loaded.generate(PROMPT, max_new_tokens=20, speculation="head", max_draft=3), plain)


@drafting
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 9))
def test_calls_divide_a_text_as_they_like(path: Path, widths: Sequence[int], back: int) -> None:
    """Rows in several calls, some of them taken back and read again, say what rows in one call say."""
    head, whole = head_of(path), head_of(path)
    random = np.random.default_rng(sum(widths))
    count = sum(widths)
    ids = random.integers(0, VOCABULARY, count).tolist()
    taps = random.normal(size=(count, head.width)).astype(np.float32)
    expected = whole.forward(ids, range(count), taps=taps)[0].copy()
    features = random.normal(size=(1, HIDDEN)).astype(np.float32)
    last, _ = whole.forward([1], (0,), features=features)
    position = 0
    for width in widths:
        logits, _ = head.forward(ids[position : position + width], (width - 1,), taps=taps[position : position + width])
        position += width
        assert np.allclose(logits[0], expected[position - 1], atol=1e-5)
        taken = min(back, position - 1)
        for token in range(taken):  # drafted, and rejected
            head.forward([token], (0,), features=features)
        head.cache.rollback(position)
    logits, _ = head.forward([1], (0,), features=features)
    assert np.allclose(logits, last, atol=1e-5)


def test_rows_need_a_hidden_state_each_and_room(path: Path) -> None:
    head = head_of(path, context=8)
    with pytest.raises(RequestError, match="2 tokens came with 1 hidden states and 0 features, expected one each"):
        head.forward([1, 2], (0,), taps=np.zeros((1, head.width), np.float32))
    with pytest.raises(RequestError, match="9 rows do not fit: the head's cache holds 0 of 8"):
        head.forward([1] * 9, (0,), taps=np.zeros((9, head.width), np.float32))


def test_calibration_measures_the_head_and_how_often_it_is_right(path: Path) -> None:
    target, head = target_of(path), head_of(path)
    seen: list[str] = []
    vocabulary = read_head_vocabulary(open_bundle(path))
    measured = calibrate(target, None, PROMPT, lambda stage, done: seen.append(stage), vocabulary=vocabulary, head=head)
    assert measured.costs.draft_model is not None and "head" in seen
    assert len(measured.agreement) > 8 and all(0.0 < share <= 1.0 for share, _ in measured.agreement)
    assert target.cache.length == head.cache.length == 0


def test_the_target_tells_nothing_where_the_head_is_left_out(path: Path) -> None:
    with edge_spec.load(path, threads=1, drafter="none") as loaded:
        assert "head" not in loaded.drafters
        assert loaded._target.cache.taps is None
        with pytest.raises(RequestError, match="in this bundle, but not loaded; load with drafter='head'"):
            loaded.generate(PROMPT, speculation="head")


def test_a_head_that_proposes_blocks_is_not_taken_for_a_recurrent_one(path: Path) -> None:
    from dataclasses import replace

    bundle = open_bundle(path)
    assert bundle.manifest.head is not None
    with pytest.raises(BundleError, match="proposes 4 tokens a call, expected 1"):
        HeadModel(bundle, replace(bundle.manifest.head, tokens=4), CPU, 64)
    with pytest.raises(ValueError, match="propose 4 tokens a call, expected 1"):
        check_manifest(replace(bundle.manifest, head=replace(bundle.manifest.head, tokens=4)))


def test_a_head_is_a_name_to_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(path), "abc", "--speculation", "head", "--max-draft", "3", "--max-new-tokens", "8"]
    assert cli.main(command) == 0
    drafted = capsys.readouterr().out
    assert cli.main([*command[:3], "--speculation", "off", *command[5:]]) == 0
    assert drafted == capsys.readouterr().out
