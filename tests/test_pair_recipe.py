"""Pair recipes: what a file may say, what is refused, and how the command line's options win over it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edge_spec import cli
from edge_spec.errors import EdgeSpecError
from edge_spec.export.pair_recipe import About, DevicePlan, ExpectedMemory, Licence, PairRecipe, read_pair_recipe
from edge_spec.export.recipe import FORMATS, RECIPES, find_recipe, with_formats
from gguf_files import METADATA, write_model


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "pair.toml"
    path.write_text(text, "utf-8")
    return path


def test_models_and_recipes_are_read(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        """
        [target]
        source = "owner/big"
        recipe = "w8a8"
        [draft]
        source = "owner/small"
        recipe = "int4-128"
        """,
    )
    assert read_pair_recipe(path) == PairRecipe("owner/big", "owner/small", RECIPES["w8a8"], RECIPES["int4-128"])


def test_draft_and_recipe_can_be_left_out(tmp_path: Path) -> None:
    assert read_pair_recipe(write_recipe(tmp_path, "[target]\nsource = 'owner/big'")) == PairRecipe(
        "owner/big", None, None, None
    )


def test_what_is_known_of_the_models_is_read(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        """
        [about]
        title = "Big, drafted by small"
        run = "both, from safetensors"
        [target]
        source = "owner/big"
        licence = "Apache-2.0"
        [draft]
        source = "owner/small"
        licence = "Small Licence"
        licence_url = "https://example.org/small"
        gated = true
        [memory]
        context = 4096
        peak_mib = 3000
        [memory.devices]
        4 = { context = 1024, draft = false, kv = "int8", peak_mib = 2000 }
        8 = { context = 4096, draft = true, kv = "int8", peak_mib = 2500 }
        16 = { context = 4096, draft = true, kv = "float32", peak_mib = 3000 }
        """,
    )
    pair = read_pair_recipe(path)
    assert pair.about == About("Big, drafted by small", "both, from safetensors")
    assert pair.licence == Licence("Apache-2.0")
    assert pair.draft_licence == Licence("Small Licence", "https://example.org/small", gated=True)
    plans = {
        4: DevicePlan(1024, False, "int8", 2000),
        8: DevicePlan(4096, True, "int8", 2500),
        16: DevicePlan(4096, True, "float32", 3000),
    }
    assert pair.memory == ExpectedMemory(4096, 3000, plans)
    assert pair.memory.device_gb(draft=True) == 16
    assert pair.memory.device_gb(draft=False) is None
    assert pair.models() == {"target": "owner/big", "draft": "owner/small", "recipe": None, "draft_recipe": None}


def test_on_another_device_its_defaults_replace_what_does_not_run_there(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        """
        [target]
        source = "owner/big"
        recipe = "w8a8"
        [draft]
        source = "owner/small"
        recipe = "fp16"
        """,
    )
    pair = read_pair_recipe(path)
    assert pair.models("cpu") == {
        "target": "owner/big",
        "draft": "owner/small",
        "recipe": RECIPES["w8a8"],
        "draft_recipe": RECIPES["fp16"],
    }
    assert pair.models("cuda") == {**pair.models("cpu"), "recipe": None}


def test_a_draft_keeps_the_recipe_that_runs_where_the_draft_does(tmp_path: Path) -> None:
    text = '[target]\nsource = "a/b"\nrecipe = "int4"\n[draft]\nsource = "a/c"\nrecipe = "w8a8"\n'
    pair = read_pair_recipe(write_recipe(tmp_path, text))
    kept = {
        places: (models["recipe"], models["draft_recipe"])
        for places in (("cuda",), ("cpu",), ("cuda", "cpu"))
        if (models := pair.models("cuda", places))
    }
    assert kept == {
        ("cuda",): (RECIPES["int4"], None),
        ("cpu",): (RECIPES["int4"], RECIPES["w8a8"]),
        ("cuda", "cpu"): (RECIPES["int4"], None),
    }


def test_formats_replace_those_of_the_named_recipe(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        """
        [target]
        source = "owner/big"
        recipe = "w8a8"
        formats = { embedding = "fp16", lm_head = "int4" }
        """,
    )
    recipe = read_pair_recipe(path).recipe
    assert recipe is not None
    assert recipe.to_dict() == {
        "name": "w8a8 (embedding fp16, lm_head int4)",
        "embedding": "fp16",
        "attention": "w8a8",
        "mlp_up": "w8a8",
        "mlp_down": "w8a8",
        "lm_head": "int4",
        "block_size": 32,
    }


def test_formats_keep_the_block_size_of_the_named_recipe() -> None:
    mixed = with_formats(RECIPES["int4-128"], {"lm_head": "fp16"})
    assert mixed.to_dict()["block_size"] == mixed.block_size == 128
    assert with_formats(RECIPES["w8a8"], {"lm_head": "int4"}).to_dict()["block_size"] == 32
    assert "block_size" not in with_formats(RECIPES["w8a8"], {"lm_head": "fp16"}).to_dict()


def test_coarsest_format_decides_how_far_a_mixed_recipe_may_stray() -> None:
    assert with_formats(RECIPES["w8a8"], {"lm_head": "int4"}).max_mean_kl == RECIPES["int4"].max_mean_kl
    assert with_formats(RECIPES["fp16"], {"embedding": "int8"}).max_mean_kl == RECIPES["w8a8"].max_mean_kl
    assert with_formats(RECIPES["w8a8"], {"mlp_down": "fp16"}).max_mean_kl == RECIPES["w8a8"].max_mean_kl


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target", "not a TOML file"),
        ("", r"no \[target\]"),
        ("[draft]\nsource = 'owner/small'", r"no \[target\]"),
        ("[target]\nrecipe = 'int4'", r"\[target\] needs a source"),
        ("[target]\nsource = 'a/b'\n[draft]", r"\[draft\] needs a source"),
        ("[target]\nsource = 7", r"needs a source.*not 7"),
        ("target = 'a/b'", r"\[target\] is to be a table, not 'a/b'"),
        (
            "device = 'cpu'\n[target]\nsource = 'a/b'",
            "unknown key 'device'; expected target, draft, head, about, memory",
        ),
        ("[target]\nsource = 'a/b'\nrecipie = 'int4'", r"\[target\] has the unknown key 'recipie'.*source, recipe"),
        ("[target]\nsource = 'a/b'\nrecipe = 'int3'", "unknown recipe 'int3'; expected one of fp32, fp16"),
        ("[target]\nsource = 'a/b'\nrecipe = ['int4']", r"unknown recipe \['int4'\]"),
        ("[target]\nsource = 'a/b'\n[target.formats]\nlm_head = 'int4'", r"changes a recipe, so \[target\] needs one"),
        (
            "[target]\nsource = 'a/b'\nrecipe = 'w8a8'\nformats = 'int4'",
            r"\[target.formats\] is to be a table, not 'int4'",
        ),
        (
            "[target]\nsource = 'a/b'\nrecipe = 'w8a8'\n[target.formats]\nmlp = 'int4'",
            r"\[target.formats\]: Unknown layer class 'mlp'; expected one of embedding, attention",
        ),
        (
            "[target]\nsource = 'a/b'\nrecipe = 'w8a8'\n[target.formats]\nlm_head = 'int8'",
            "Unknown format 'int8' of lm_head; expected one of fp32, fp16, w8a8, int4",
        ),
        (
            "[target]\nsource = 'a/b'\nrecipe = 'w8a8'\n[target.formats]\nembedding = 'w8a8'",
            "Unknown format 'w8a8' of embedding; expected one of fp32, fp16, int8, int4",
        ),
        (
            "[target]\nsource = 'a/b'\nrecipe = 'w8a8'\n[target.formats]\nlm_head = {}",
            "Unknown format {} of lm_head",
        ),
        ("[target]\nsource = 'a/b'\nlicence = 1", r"\[target\] has licence = 1; expected a text"),
        ("[target]\nsource = 'a/b'\ngated = 'yes'", r"\[target\] has gated = 'yes'; expected true or false"),
        ("[target]\nsource = 'a/b'\n[about]\nrun = 'all'", r"\[about\] lacks 'title'; expected a text"),
        ("[target]\nsource = 'a/b'\n[about]\ntitle = ''", r"\[about\] has title = ''; expected a text"),
        ("[target]\nsource = 'a/b'\n[about]\nname = 'A'", r"\[about\] has the unknown key 'name'"),
        ("about = 'A'\n[target]\nsource = 'a/b'", r"\[about\] is to be a table"),
        ("[target]\nsource = 'a/b'\n[memory]\ncontext = 1", r"\[memory\] lacks 'peak_mib'; expected a whole number"),
        (
            "[target]\nsource = 'a/b'\n[memory]\ncontext = 1\npeak_mib = -1",
            r"\[memory\] has peak_mib = -1; expected a whole number above zero",
        ),
        (
            "[target]\nsource = 'a/b'\n[memory]\ncontext = true\npeak_mib = 1",
            r"\[memory\] has context = True; expected a whole number above zero",
        ),
        ("[target]\nsource = 'a/b'\n[memory.devices]\n5 = {}", "unknown device '5'; expected GB of memory: 4, 8, 16"),
        (
            "[target]\nsource = 'a/b'\n[memory.devices]\n4 = { kv = 'int4' }",
            r"\[memory.devices.4\] has the unknown kv 'int4'; expected one of float32, int8",
        ),
        ("[target]\nsource = 'a/b'\n[memory.devices]\n4 = 3", r"\[memory.devices.4\] is to be a table, not 3"),
    ],
)
def test_faulty_recipe_is_refused_by_name_and_reason(text: str, message: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, text)
    with pytest.raises(EdgeSpecError, match=message) as refused:
        read_pair_recipe(path)
    assert str(path) in str(refused.value)


def test_missing_file_folder_and_binary_file_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "pair.gguf"
    binary.write_bytes(b"GGUF\x03\xff\xfe")
    for path, message in [
        (tmp_path / "none.toml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "not a TOML file"),
    ]:
        with pytest.raises(EdgeSpecError, match=message):
            read_pair_recipe(path)


def test_source_beside_the_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "big.gguf").touch()
    path = write_recipe(tmp_path, "[target]\nsource = 'weights/big.gguf'\n[draft]\nsource = 'weights/absent.gguf'")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pair = read_pair_recipe(path)
    assert pair.target == str(tmp_path / "weights" / "big.gguf")
    assert pair.draft == "weights/absent.gguf"


@pytest.mark.parametrize(
    ("layer_class", "stored", "reason"),
    [("attention", "w8a8", "no w8a8 kernel"), ("lm_head", "fp32", "float16"), ("embedding", "fp32", "float16")],
)
def test_cuda_refuses_a_single_layer_class_it_cannot_run(layer_class: str, stored: str, reason: str) -> None:
    mixed = with_formats(RECIPES["int4"], {layer_class: stored})
    assert find_recipe(mixed, "cpu") is mixed
    with pytest.raises(EdgeSpecError, match=f"does not run on CUDA.*{reason}.*{layer_class} as {stored}"):
        find_recipe(mixed, "cuda")


def test_cuda_refuses_blocks_its_kernel_does_not_take() -> None:
    message = (
        "'int4-128' does not run on CUDA.*blocks of 32, but it stores embedding in blocks of 128; use int4 or fp16"
    )
    with pytest.raises(EdgeSpecError, match=message):
        find_recipe("int4-128", "cuda")
    without = with_formats(RECIPES["int4-128"], dict.fromkeys(FORMATS, "fp16"))
    assert find_recipe(without, "cuda") is without


@pytest.mark.parametrize("size", [0, 8, 48, 512])
def test_a_block_size_that_no_kernel_takes_is_refused(size: int) -> None:
    with pytest.raises(EdgeSpecError, match=f"'int4' has int4 blocks of {size}; expected one of 16, 32, 64, 128, 256"):
        find_recipe(replace(RECIPES["int4"], block_size=size), "cpu")


def test_cuda_takes_mixed_recipes_it_can_run() -> None:
    mixed = with_formats(RECIPES["int4"], {"lm_head": "fp16", "embedding": "int8"})
    assert find_recipe(mixed, "cuda") is mixed


def test_export_takes_models_and_formats_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "target.gguf", metadata=METADATA)
    write_model(tmp_path / "draft.gguf", metadata=METADATA)
    path = write_recipe(
        tmp_path,
        """
        [target]
        source = "target.gguf"
        recipe = "fp32"
        [target.formats]
        embedding = "int8"
        mlp_up = "w8a8"
        mlp_down = "int4"
        lm_head = "fp16"
        [draft]
        source = "draft.gguf"
        recipe = "fp16"
        """,
    )
    output = tmp_path / "out.pair"
    assert cli.main(["export", "--pair", str(path), "--output", str(output), "--no-check", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["target"]["recipe"] == {
        "name": "fp32 (embedding int8, mlp_up w8a8, mlp_down int4, lm_head fp16)",
        "embedding": "int8",
        "attention": "fp32",
        "mlp_up": "w8a8",
        "mlp_down": "int4",
        "lm_head": "fp16",
        "block_size": 32,
    }
    assert manifest["target"]["integer_weights"] in ("int8", "uint8")
    assert manifest["draft"]["recipe"] == RECIPES["fp16"].to_dict()

    run = ["run", str(output), "one two one two", "--max-new-tokens", "16", "--json", "--speculation"]
    texts = []
    for speculation in ("off", "model", "lookup"):
        assert cli.main([*run, speculation]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] == texts[2]


def test_options_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = write_model(tmp_path / "here.gguf", metadata=METADATA)
    path = write_recipe(
        tmp_path,
        """
        [target]
        source = "owner/not-on-this-machine"
        recipe = "w8a8"
        [draft]
        source = "owner/neither"
        recipe = "fp32"
        """,
    )
    options = ["--target", str(here), "--draft", str(here), "--recipe", "fp16"]
    output = tmp_path / "out.pair"
    assert cli.main(["export", "--pair", str(path), "--output", str(output), "--no-check", "--json", *options]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["target"]["source"] == manifest["draft"]["source"] == str(here)
    assert manifest["target"]["recipe"]["name"] == "fp16"
    assert manifest["draft"]["recipe"]["name"] == "fp32"


def test_faulty_file_is_one_clear_line_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, "[target]\nsource = 'a/b'\nrecipe = 'int3'")
    assert cli.main(["export", "--pair", str(path), "--output", str(tmp_path / "out.pair")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"edge-spec: error: The pair recipe {path} is not valid: [target] has")
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_source_that_cannot_be_looked_for_is_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, f"[target]\nsource = '{'x' * 300}'")
    with pytest.raises(EdgeSpecError, match="pair.toml is not valid: .target. names .*: File name too long"):
        read_pair_recipe(path)


def test_a_source_of_an_unknown_user_is_left_to_the_exporter(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "[target]\nsource = '~nobody-here/model.gguf'")
    assert read_pair_recipe(path).target == "~nobody-here/model.gguf"


def test_a_head_is_part_of_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "pair.toml"
    file.write_text("[target]\nsource = 'a/b'\n[head]\nsource = 'a/b-eagle3'\nrecipe = 'w8a8'\n")
    models = read_pair_recipe(file).models()
    assert models["head"] == "a/b-eagle3" and models["head_recipe"] == RECIPES["w8a8"]
    # CUDA has no w8a8, so the device's own default is taken there.
    assert read_pair_recipe(file).models("cuda")["head_recipe"] is None
    file.write_text("[target]\nsource = 'a/b'\n[head]\nsource = 'c/d'\nrecipe = 'auto'\n")
    with pytest.raises(EdgeSpecError, match="'auto', which is for whole models"):
        read_pair_recipe(file)
