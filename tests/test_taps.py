"""The target's hidden states: what ``hidden.i`` means, and how long the runtime keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, EdgeSpecError
from edge_spec.export import export_pair
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.decoder import read_layer
from edge_spec.export.reference import Float32Reference
from edge_spec.runtime.model import Model
from edge_spec.runtime.tap_rows import TapRows
from tiny_models import TOKENS, random_model, save_checkpoint

FAMILIES = {"llama": {}, "qwen2": {"hidden_size": 96, "num_attention_heads": 6}, "gemma3": {}}
LAYERS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taps")
    sizes = {"num_hidden_layers": LAYERS, **FAMILIES[request.param]}
    save_checkpoint(folder, random_model(request.param, seed=5, **sizes))
    return folder


def streams(checkpoint: Path, tokens: list[int]) -> dict[int, np.ndarray]:
    """The residual stream behind each number of layers, by the float32 reference."""
    opened = open_checkpoint(checkpoint)
    embedded = np.concatenate([opened.rows("embed_tokens.weight", token, token + 1) for token in tokens])
    reference = Float32Reference(opened.architecture, embedded)
    found = {}
    for layer in range(LAYERS):
        reference.run_layer(read_layer(opened, layer))
        found[layer + 1] = reference._hidden.copy()
    return found


def loaded(checkpoint: Path, folder: Path, recipe: str, taps: tuple[int, ...], kept: tuple[int, ...]) -> Model:
    export_pair(checkpoint, None, folder, recipe=recipe, taps=taps, check=False)
    bundle = open_bundle(folder)
    return Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 64, True, threads=1, taps=kept)


@pytest.mark.parametrize(("recipe", "error"), [("fp32", 1e-4), ("w8a8", 0.1), ("int4", 0.5)])
def test_taps_are_the_checkpoints_own_hidden_states(
    checkpoint: Path, tmp_path: Path, recipe: str, error: float
) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, TOKENS, 20)]
    expected = streams(checkpoint, tokens)
    model = loaded(checkpoint, tmp_path / "bundle", recipe, (1, 2, 3), (1, 3))
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        model.forward(tokens[start:stop], (0,))
    taps = model.cache.taps
    assert taps is not None and (taps.start, taps.stop) == (0, 20)
    found = np.split(taps.read(0, 20), 2, axis=1)
    for tap, rows in zip((1, 3), found, strict=True):
        scale = np.abs(expected[tap]).mean()
        assert np.abs(rows - expected[tap]).mean() < error * scale
        assert np.abs(rows - expected[2]).mean() > error * scale  # the layer beside it is another


@pytest.mark.parametrize("recipe", ["w8a8", "int4"])
def test_taps_change_no_bit_of_the_logits(checkpoint: Path, tmp_path: Path, recipe: str) -> None:
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, TOKENS, 20)]
    plain = loaded(checkpoint, tmp_path / "plain", recipe, (), ())
    tapped = loaded(checkpoint, tmp_path / "tapped", recipe, (1, 3), (1, 3))
    for width in (8, 1, 3, 8):
        rows, tokens = tokens[:width], tokens[width:]
        assert np.array_equal(plain.forward(rows, range(width)), tapped.forward(rows, range(width)))


def test_taps_that_are_no_layers_are_refused_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    for taps in ((0,), (LAYERS + 1,), (2, 1), (1, 1)):
        with pytest.raises(EdgeSpecError, match="expected ascending numbers from 1 to 3"):
            export_pair(checkpoint, None, tmp_path / "bundle", recipe="fp32", taps=taps, check=False)
    assert not (tmp_path / "bundle").exists()


def test_a_model_cannot_keep_what_its_graph_does_not_tell(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle(recipe="fp32"))
    with pytest.raises(BundleError, match=r"does not tell the hidden states behind \[1\] layers"):
        Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 64, True, threads=1, taps=(1,))


LIMIT = 10
steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 25)),
    st.tuples(st.just("release"), st.integers(0, 40)),
    st.tuples(st.just("rollback"), st.integers(0, 40)),
    st.tuples(st.just("keep"), st.lists(st.integers(0, 3), max_size=3, unique=True).map(sorted)),
    st.tuples(st.just("pause"), st.integers(1, 40)),
    st.tuples(st.just("copy"), st.integers(0, 40)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=12))
def test_rows_follow_the_text(done: list[tuple[str, object]]) -> None:
    """Against a plain list of all tokens' rows: what is held is right, and the latest are held unless released."""
    taps, text, released, number = TapRows(2, LIMIT), [], 0, 0
    for kind, value in done:
        if kind == "append":
            new = [float(number + index) for index in range(value)]
            number += len(new)
            rows = np.array(new, np.float32)[:, None]
            taps.append(len(text), [rows, -rows])
            text += new
        elif kind == "release":
            taps.release(value)
            released = max(released, min(value, len(text)))
        elif kind == "rollback":
            length = min(value, len(text))
            taps.rollback(length)
            del text[length:]
            released = min(released, length)
        elif kind == "keep":
            length = max(0, len(text) - 4)
            slots = [length + slot for slot in value if length + slot < len(text)]
            whole = taps.start <= length and taps.stop == len(text)
            taps.keep(length, slots)
            text = text[:length] + [text[slot] for slot in slots]
            released = released if whole else len(text)
        elif kind == "pause":  # nobody wants hidden states, as while a head is given up
            taps.give_back()
            text += [float(number + index) for index in range(value)]
            number += value
            released = len(text)
        else:
            other = TapRows(2, LIMIT)
            other.copy(taps, min(value, len(text)))
            taps, text = other, text[: min(value, len(text))]
            released = min(released, len(text))
        assert taps.start <= taps.stop <= len(text) and taps.stop - taps.start <= LIMIT
        held = taps.read(taps.start, taps.stop)
        assert held.tolist() == [[row, -row] for row in text[taps.start : taps.stop]]
        assert taps.start == taps.stop or taps.stop == len(text)
    if done and done[-1][0] == "append":
        count = int(str(done[-1][1]))
        assert taps.stop == len(text) and taps.stop - taps.start >= min(count, LIMIT)
