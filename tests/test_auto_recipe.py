"""The recipe auto: what is chosen from cost and error, and an export that measures, chooses and leaves nothing over."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.errors import EdgeSpecError
from edge_spec.export import auto_recipe, export_pair
from edge_spec.export.auto_recipe import PAYS, Choice, choose_formats, paying
from edge_spec.export.matrix_cost import ClassCost, MatrixShape, class_matrices, measure_class
from edge_spec.export.pair_recipe import read_pair_recipe
from edge_spec.export.recipe import AUTO, FORMATS, RECIPES, find_recipe
from tiny_models import random_model, save_checkpoint

CLASSES = ("attention", "mlp_up", "mlp_down", "lm_head")
ALL_W8A8 = dict.fromkeys(CLASSES, "w8a8")


def costs(**ratios: float) -> dict[str, ClassCost]:
    """Costs of a second for every class in w8a8, and as many in int4 as are named, else two."""
    return {layer_class: ClassCost(1.0, ratios.get(layer_class, 2.0)) for layer_class in CLASSES}


# The choice


def test_where_w8a8_is_cheaper_everywhere_no_error_is_asked_for() -> None:
    assert paying(costs()) == ()
    assert choose_formats(costs(), {}, 0.03) == ALL_W8A8


def test_a_gain_within_the_noise_does_not_pay() -> None:
    assert paying(costs(mlp_up=PAYS + 0.01, mlp_down=PAYS - 0.01)) == ("mlp_down",)


def test_where_int4_is_cheaper_everywhere_and_loses_little_everything_is_int4() -> None:
    cheap = costs(**dict.fromkeys(CLASSES, 0.5))
    assert choose_formats(cheap, dict.fromkeys(CLASSES, 0.005), 0.03) == dict.fromkeys(CLASSES, "int4")


def test_under_a_binding_limit_what_saves_most_is_taken() -> None:
    # The first saves most for itself, but the two others save more together.
    cheap = costs(attention=0.4, mlp_up=0.6, lm_head=0.7)
    errors = {"attention": 0.02, "mlp_up": 0.01, "lm_head": 0.01}
    assert choose_formats(cheap, errors, 0.02) == {**ALL_W8A8, "mlp_up": "int4", "lm_head": "int4"}


def test_of_equal_costs_the_smaller_error_is_taken() -> None:
    cheap = costs(mlp_up=0.5, mlp_down=0.5)
    assert choose_formats(cheap, {"mlp_up": 0.02, "mlp_down": 0.015}, 0.025) == {**ALL_W8A8, "mlp_down": "int4"}


def test_an_error_below_zero_makes_no_room_for_another() -> None:
    cheap = costs(mlp_up=0.5, mlp_down=0.5)
    assert choose_formats(cheap, {"mlp_up": -0.02, "mlp_down": 0.03}, 0.02) == {**ALL_W8A8, "mlp_up": "int4"}


def test_where_w8a8_alone_is_beyond_the_limit_nothing_is_int4() -> None:
    assert choose_formats(costs(mlp_up=0.5), {"mlp_up": 0.0}, -0.001) == ALL_W8A8


@given(
    st.tuples(*[st.floats(0.1, 2.0)] * 4),
    st.tuples(*[st.floats(0.0, 0.05)] * 4),
    st.floats(0.0, 0.2),
    st.floats(0, 0.1),
)
def test_a_choice_keeps_to_its_limit_and_a_wider_one_costs_no_more(
    ratios: tuple[float, ...], lost: tuple[float, ...], limit: float, more: float
) -> None:
    given_costs = costs(**dict(zip(CLASSES, ratios, strict=True)))
    errors = dict(zip(CLASSES, lost, strict=True))

    def seconds(formats: dict[str, str]) -> float:
        return sum(getattr(given_costs[layer_class], stored) for layer_class, stored in formats.items())

    chosen = choose_formats(given_costs, errors, limit)
    int4 = [layer_class for layer_class, stored in chosen.items() if stored == "int4"]
    assert sum(errors[layer_class] for layer_class in int4) <= limit
    assert set(int4) <= set(paying(given_costs))
    assert seconds(choose_formats(given_costs, errors, limit + more)) <= seconds(chosen)


# The measurement


def test_a_class_is_timed_in_both_formats(tmp_path: Path) -> None:
    cost = measure_class((MatrixShape(64, 48, 3),), (2, 6), 32, tmp_path)
    assert cost.w8a8 > 0 and cost.int4 > 0


# The export


def patch_costs(monkeypatch: pytest.MonkeyPatch, measured: dict[str, ClassCost]) -> None:
    def measure(matrices: object, *_: object) -> ClassCost:
        assert matrices == "patched"
        return next(remaining)

    remaining = iter([*measured.values(), *measured.values()])
    monkeypatch.setattr(auto_recipe, "class_matrices", lambda facts: dict.fromkeys(class_matrices(facts), "patched"))
    monkeypatch.setattr(auto_recipe, "measure_class", measure)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    # Of a random model that is steep the errors would be beyond any limit.
    model = random_model(num_hidden_layers=1, tie_word_embeddings=False)
    model.lm_head.weight.data *= 0.1
    return save_checkpoint(tmp_path / "model", model)


def test_an_export_measures_chooses_and_leaves_nothing_over(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_costs(monkeypatch, costs(mlp_up=0.5, lm_head=0.6))
    stages: list[str] = []
    report = export_pair(
        checkpoint,
        checkpoint,
        tmp_path / "bundle",
        recipe="auto",
        draft_recipe="auto",
        progress=lambda stage, done, total: stages.append(stage),
    )
    plain = export_pair(checkpoint, None, tmp_path / "plain")

    target, draft = report.manifest.target, report.manifest.draft
    assert draft is not None
    expected = {**RECIPES["w8a8"].formats, "mlp_up": "int4", "lm_head": "int4"}
    for record, block_size in ((target, 32), (draft, 128)):
        name = "auto (w8a8, mlp_up int4, lm_head int4)"
        assert record.recipe == {"name": name, **expected, "block_size": block_size}
        assert record.quality is not None
    assert plain.manifest.target.quality is not None and target.quality is not None
    assert target.quality.mean_kl > plain.manifest.target.quality.mean_kl  # of the final graph, not of a trial in w8a8
    open_bundle(report.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "model", "plain"]
    files = {path.name for path in (report.path / "target").iterdir()}
    assert files == {path.name for path in (plain.path / "target").iterdir()}
    told = [note for note in report.notes if "auto:" in note]
    assert sum("mlp_up is stored as int4; int4 takes 0.50 of the time of w8a8 and adds" in note for note in told) == 2
    assert sum("attention is stored as w8a8; int4 takes 2.00" in note for note in told) == 2
    trials = {stage.partition(":")[0] for stage in stages if "trial" in stage}
    assert trials == {
        f"{role} trial, {what}" for role in ("target", "draft") for what in ("all w8a8", "mlp_up int4", "lm_head int4")
    }
    assert "measure target" in stages and "measure draft" in stages


def mixed(worst: str | None = "lm_head", predicted: float | None = 0.02) -> Choice:
    return Choice(RECIPES["w8a8"], (), "target", predicted, 0.03, worst)


@pytest.mark.parametrize("measured", [0.001, 0.02, 0.03, 0.0249])
def test_an_error_about_as_predicted_is_no_warning(measured: float) -> None:
    assert mixed().warnings(measured) == ()


@pytest.mark.parametrize(("measured", "predicted"), [(0.031, 0.02), (0.2, 0.02), (0.038, 0.03)])
def test_a_mix_that_strays_clearly_beyond_its_prediction_says_what_to_do(measured: float, predicted: float) -> None:
    (warning,) = mixed(predicted=predicted).warnings(measured)
    assert f"mean KL of {measured:.4f} nats, but {predicted:.4f} were predicted and at most 0.03 wanted" in warning
    assert "recipe w8a8, or with lm_head in w8a8" in warning and "[target.formats]" in warning


def test_without_int4_there_is_no_mix_to_warn_of() -> None:
    assert mixed(worst=None).warnings(1.0) == mixed(predicted=None).warnings(1.0) == ()


def test_an_export_warns_of_a_mix_whose_errors_do_not_add_up(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_costs(monkeypatch, costs(mlp_up=0.5, lm_head=0.6))
    monkeypatch.setattr(auto_recipe, "_trial", lambda *_: 1e-9)
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto")
    monkeypatch.setattr(auto_recipe, "_CLEARLY", 0.0)
    strict = export_pair(checkpoint, None, tmp_path / "strict", recipe="auto")
    assert not any("WARNING" in note for note in report.notes)
    assert sum("do not add up" in note for note in strict.notes) == 1


def test_where_int4_pays_nowhere_nothing_is_exported_on_trial(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_costs(monkeypatch, costs())
    monkeypatch.setattr(auto_recipe, "export_model", None)
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto")
    assert report.manifest.target.recipe == {"name": "auto (w8a8)", **RECIPES["w8a8"].formats}


def test_where_everything_is_int4_the_embedding_is_too(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_costs(monkeypatch, costs(**dict.fromkeys(CLASSES, 0.5)))
    monkeypatch.setattr(auto_recipe, "choose_formats", lambda *_: dict.fromkeys(CLASSES, "int4"))
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto")
    assert report.manifest.target.recipe == {"name": "auto (int4)", **dict.fromkeys(FORMATS, "int4"), "block_size": 32}


def test_a_failed_trial_leaves_nothing_behind(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_costs(monkeypatch, costs(mlp_up=0.5))

    def fail(stage: str, done: int, total: int) -> None:
        if "mlp_up int4: check" in stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto", progress=fail)
    assert list(tmp_path.iterdir()) == [checkpoint]


# Where there is no choice


@pytest.mark.parametrize("role", ["recipe", "draft_recipe"])
def test_without_the_check_there_is_nothing_to_choose_by(tmp_path: Path, checkpoint: Path, role: str) -> None:
    with pytest.raises(EdgeSpecError, match="chooses formats by their measured error"):
        export_pair(checkpoint, checkpoint, tmp_path / "bundle", check=False, **{role: "auto"})  # type: ignore[arg-type]


def test_on_cuda_auto_is_int4_and_says_so(tmp_path: Path, checkpoint: Path) -> None:
    assert find_recipe(AUTO, "cuda") == find_recipe("auto", "cuda") == RECIPES["int4"]
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto", device="cuda", check=False)
    assert report.manifest.target.recipe["name"] == "int4"
    assert any("auto is int4 on CUDA" in note for note in report.notes)


def test_by_way_of_optimum_it_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(EdgeSpecError, match="'auto' cannot be had by way of optimum; fp32, int4, int4-128 can"):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe="auto", via="optimum")


def test_pair_recipes_know_it_but_not_with_formats_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "pair.toml"
    file.write_text('[target]\nsource = "owner/big"\nrecipe = "auto"\n')
    assert read_pair_recipe(file).recipe == AUTO
    file.write_text('[target]\nsource = "owner/big"\nrecipe = "auto"\n[target.formats]\nlm_head = "int4"\n')
    with pytest.raises(EdgeSpecError, match="cannot be combined with recipe 'auto'"):
        read_pair_recipe(file)
