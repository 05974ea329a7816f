"""The pair recipes that come with edge-spec: what they say, whether that is so, and how they are found by name."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec import cli
from edge_spec.export import shipped_recipes
from edge_spec.export.family import FAMILIES
from edge_spec.export.pair_recipe import PairRecipe, read_pair_recipe
from edge_spec.export.planned_bundle import parameters, planned_manifest, read_sizes
from edge_spec.export.recipe import DEFAULT_RECIPES, RECIPES, find_recipe
from gguf_files import METADATA, write_model

ROOT = Path(__file__).parent.parent
SHIPPED = dict(sorted((path.stem, path) for path in (ROOT / "models").glob("*.toml")))
RUN = {"qwen2.5-coder-1.5b": "both models", "smollm2-135m": "both", "smollm2-1.7b": "the draft"}
SPDX = {"Apache-2.0", "MIT"}


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEMORY = load_benchmark("recipe_memory")
SIZES, _ = read_sizes()


@pytest.fixture(params=list(SHIPPED))
def pair(request: pytest.FixtureRequest) -> PairRecipe:
    return read_pair_recipe(SHIPPED[request.param])


@pytest.fixture
def two_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes of two tiny models, shipped in the place of the others."""
    write_model(tmp_path / "tiny.gguf", metadata=METADATA)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny-pair.toml").write_text(
        "[target]\nsource = '../tiny.gguf'\nrecipe = 'fp32'\n[draft]\nsource = '../tiny.gguf'\nrecipe = 'fp16'\n"
    )
    (folder / "tiny-alone.toml").write_text("[target]\nsource = '../tiny.gguf'\n")
    monkeypatch.setattr(shipped_recipes, "_FOLDERS", (tmp_path / "nowhere", folder))
    return tmp_path


def test_every_recipe_says_what_a_person_has_to_know(pair: PairRecipe) -> None:
    assert pair.about is not None and pair.memory is not None
    assert pair.memory.context == 4096
    assert pair.memory.peak_mib > 0
    assert pair.memory.devices
    licences = [pair.licence] if pair.draft is None else [pair.licence, pair.draft_licence]
    licences += [] if pair.head is None else [pair.head_licence]
    for licence in licences:
        assert licence.name is not None
        assert licence.name in SPDX or (licence.url or "").startswith("https://")


def test_every_recipe_stores_the_models_in_a_way_that_exists(pair: PairRecipe) -> None:
    for recipe in (pair.recipe, pair.draft_recipe, pair.head_recipe):
        assert recipe is None or recipe == find_recipe(recipe, "cpu") == RECIPES[recipe.name]


def test_every_draft_is_much_smaller_and_has_the_tokens_of_its_target(pair: PairRecipe) -> None:
    target = SIZES[pair.target]
    if pair.draft is not None:
        draft = SIZES[pair.draft]
        assert 2.5 * parameters(draft) < parameters(target)
        assert (draft["family"], draft["tokenizer"]) == (target["family"], target["tokenizer"])


def test_only_what_was_run_says_so() -> None:
    for name, path in SHIPPED.items():
        about = read_pair_recipe(path).about
        assert about is not None
        assert (about.run or "").startswith(RUN.get(name, "")) and bool(about.run) == (name in RUN), name


@pytest.mark.parametrize("name", [name for name, facts in SIZES.items()])
def test_the_sizes_add_up_to_the_published_number_of_parameters(name: str) -> None:
    assert parameters(SIZES[name]) == SIZES[name]["parameters"]


def test_expected_memory_is_what_the_laws_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this fails, the laws have changed: run benchmarks/recipe_memory.py, which writes the recipes anew."""
    monkeypatch.setattr(sys, "argv", ["recipe_memory.py", "--check"])
    assert MEMORY.main() == 0, capsys.readouterr().out


def test_a_recipe_whose_memory_was_edited_is_noticed_and_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SHIPPED["smollm2-135m"].read_text("utf-8")
    path = tmp_path / "smollm2-135m.toml"
    path.write_text(original.replace("peak_mib = ", "peak_mib = 1", 1))
    monkeypatch.setattr(MEMORY, "MODELS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipe_memory.py", "--check"])
    assert MEMORY.main() == 1
    monkeypatch.setattr(sys, "argv", ["recipe_memory.py"])
    assert MEMORY.main() == 0
    assert path.read_text("utf-8") == original


def test_memory_of_a_recipe_is_that_of_a_bundle_of_its_models() -> None:
    """The sizes in the table, put into a manifest, are those that an export writes."""
    manifest = planned_manifest(read_pair_recipe(SHIPPED["smollm2-135m"]))
    facts = manifest.target.architecture
    assert (facts.layers, facts.hidden_size, facts.kv_heads, facts.logits_size) == (30, 576, 3, 49152)
    assert manifest.target.recipe == RECIPES[DEFAULT_RECIPES["cpu"][0]].to_dict()
    assert manifest.draft is None


def test_recipes_are_found_by_name() -> None:
    assert dict(shipped_recipes.shipped_recipes()) == SHIPPED
    assert shipped_recipes.find_pair_recipe("qwen2.5-3b") == read_pair_recipe(SHIPPED["qwen2.5-3b"])


def test_a_file_in_the_working_folder_wins_over_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen2.5-3b").write_text("[target]\nsource = 'my/own'")
    monkeypatch.chdir(tmp_path)
    assert shipped_recipes.find_pair_recipe("qwen2.5-3b").target == "my/own"


def test_a_pair_is_exported_by_name(two_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = ["export", "--no-check", "--json", "--overwrite", "--output", str(two_recipes / "out.pair")]

    def exported(*options: str) -> tuple[str, str | None]:
        assert cli.main([*export, *options]) == 0
        manifest = json.loads(capsys.readouterr().out)
        draft = manifest["draft"]
        return manifest["target"]["recipe"]["name"], None if draft is None else draft["recipe"]["name"]

    assert exported("--recipe", "tiny-pair") == ("fp32", "fp16")
    assert exported("--pair", "tiny-pair") == ("fp32", "fp16")
    assert exported("--pair", "tiny-pair", "--recipe", "w8a8", "--draft-recipe", "int4") == ("w8a8", "int4")
    assert exported("--recipe", "tiny-alone", "--draft", str(two_recipes / "tiny.gguf")) == ("w8a8", "int4-128")
    assert exported("--recipe", "tiny-alone") == ("w8a8", None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--recipe", "tiny-par"],
            "no recipe 'tiny-par' (did you mean 'tiny-pair'?); expected a pair, one of tiny-alone",
        ),
        (
            ["--recipe", "int5"],
            "no recipe 'int5' (did you mean 'int4'?); expected a pair, one of tiny-alone, tiny-pair, or",
        ),
        (
            ["--pair", "tiny-par"],
            "no pair recipe 'tiny-par', neither as a file nor by name (did you mean 'tiny-pair'?)",
        ),
        (["--pair", "none.toml"], "none.toml cannot be read: No such file"),
        (
            ["--target", "x.gguf", "--recipe", "tiny-pair"],
            "'tiny-pair' is a pair recipe, which names its models itself",
        ),
        (["--target", "x.gguf", "--recipe", "w8a9"], "no recipe 'w8a9' to store a model (did you mean 'w8a8'?)"),
        (["--pair", "tiny-pair", "--recipe", "tiny-alone"], "'tiny-alone' is a pair recipe"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_closest_of_both_kinds(
    options: list[str], complaint: str, two_recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "--output", str(two_recipes / "out.pair"), *options]) == 2
    assert complaint in capsys.readouterr().err
    assert not (two_recipes / "out.pair").exists()


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--output", "x"], "one of --target and --pair is required, or the name of a pair"),
        (["--output", "x", "--recipe", "w8a8"], "one of --target and --pair is required, or the name of a pair"),
        (["--target", "x.gguf"], "required: --output"),
    ],
)
def test_what_is_missing_is_named(options: list[str], missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *options])
    assert ended.value.code == 2
    assert missing in capsys.readouterr().err


def test_the_list_shows_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert set(SHIPPED) <= set(lines)
    for name, path in SHIPPED.items():
        pair = read_pair_recipe(path)
        assert pair.about is not None and pair.memory is not None
        for shown in (
            pair.about.title,
            pair.licence.name,
            pair.about.run or "no",
            f"{pair.memory.peak_mib / 1024:.1f}",
        ):
            assert str(shown) in lines[name]


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--list", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(listed) == list(SHIPPED)
    coder = listed["qwen2.5-coder-1.5b"]
    assert coder["target"]["source"] == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert coder["target"]["recipe"]["name"] == "w8a8"
    assert coder["draft"]["licence"] == {"name": "Apache-2.0", "url": None, "gated": False}
    assert coder["about"]["run"].startswith("both models")
    assert coder["device_gb"] == 4
    assert coder["memory"]["devices"]["8"]["peak_mib"] == coder["memory"]["peak_mib"]
    assert listed["smollm2-135m"]["draft"] is None


@pytest.mark.parametrize("family", sorted({facts["family"] for facts in SIZES.values()}))
def test_every_recipe_is_of_a_family_that_can_be_exported(family: str) -> None:
    known = {name for entry in FAMILIES for name in (entry.name, *entry.hf_model_types)}
    assert family in known
