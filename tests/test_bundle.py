"""A bundle appears whole or not at all, and is opened only if it is what was written."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_spec import atomic_folder
from edge_spec.bundle import MANIFEST, Bundle, new_bundle, open_bundle, read_manifest
from edge_spec.errors import BundleError, CheckpointError, QualityError
from edge_spec.export import export_pair
from edge_spec.export.recipe import RECIPES
from edge_spec.manifest import SCHEMA_VERSION
from tiny_models import CHAT_TEMPLATE, random_model, save_checkpoint

Bundles = Callable[..., Path]

every_case = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class StoppedError(Exception):
    """Whatever may go wrong during an export."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(num_hidden_layers=1, intermediate_size=1024)
    return save_checkpoint(tmp_path_factory.mktemp("bundle") / "checkpoint", model, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def whole(tiny_bundle: Bundles) -> Path:
    """A sound bundle with a draft. Tests must not touch it."""
    return tiny_bundle(recipe="int4", draft="far", draft_changes={"family": "qwen2"}, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def signed(body: dict[str, Any]) -> str:
    """A manifest whose digest is right, as somebody who knows the format can write it."""
    body = {name: value for name, value in body.items() if name != "digest"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "digest": hashlib.sha256(canonical).hexdigest()})


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and sign it anew."""
    body = json.loads((bundle / MANIFEST).read_text())
    change(body)
    (bundle / MANIFEST).write_text(signed(body))


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Writing


def test_what_was_exported_is_what_is_opened(whole: Path) -> None:
    opened = open_bundle(whole)
    assert opened == Bundle(whole, read_manifest(whole))
    assert set(opened.manifest.files) == set(content(whole)) - {MANIFEST}
    assert opened.chat_template() == CHAT_TEMPLATE
    assert opened.manifest.draft is not None and opened.manifest.draft.architecture.family == "qwen2"
    assert opened.tokenizer_path.is_file()
    assert open_bundle(str(whole), verify=False) == opened


def test_a_manifest_survives_writing_and_reading(whole: Path, tmp_path: Path) -> None:
    manifest = replace(
        read_manifest(whole),
        bos_token_id=None,
        default_sampling={"temperature": 0.7, "top_k": 20.0},
        created_by="“edge-spec” \u0000 😀",
    )
    with new_bundle(tmp_path / "again") as (folder, seal):
        shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        seal(manifest)
    assert open_bundle(tmp_path / "again").manifest == manifest


def test_a_bundle_can_be_moved_and_read_by_others(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "elsewhere")
    assert open_bundle(tmp_path / "elsewhere").manifest == read_manifest(whole)
    assert whole.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(("error", "parents"), [(StoppedError, True), (KeyboardInterrupt, False), (OSError, True)])
def test_nothing_is_left_of_an_export_that_stopped_anywhere(
    checkpoint: Path, tmp_path: Path, error: type[BaseException], parents: bool
) -> None:
    steps = []
    export_pair(checkpoint, None, tmp_path / "whole", progress=lambda *step: steps.append(step))
    shutil.rmtree(tmp_path / "whole")
    assert {stage for stage, _, _ in steps} == {"export target", "check target", "seal"}
    output = tmp_path / "new" / "folders" / "bundle" if parents else tmp_path / "bundle"
    for stop_at in range(len(steps)):
        seen = iter(range(len(steps)))

        def stop(stage: str, done: int, total: int, seen: Iterator[int] = seen, stop_at: int = stop_at) -> None:
            if next(seen) == stop_at:
                raise error(f"at step {stop_at}")

        # The last report comes when everything is written; it too must not leave a bundle nobody was told of.
        with pytest.raises(BundleError if error is OSError else error):
            export_pair(checkpoint, None, output, progress=stop)
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_an_export_that_strayed_too_far(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "int4", replace(RECIPES["int4"], max_mean_kl=1e-6))
    with pytest.raises(QualityError, match="'int4' strays too far from float32: mean KL .* Use a finer recipe"):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe="int4")
    assert list(tmp_path.iterdir()) == []


def test_an_export_whose_numbers_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = random_model(num_hidden_layers=1)
    model.model.norm.weight.data[3] = float("nan")
    source = save_checkpoint(tmp_path / "checkpoint", model)
    for check in (True, False):
        with pytest.raises(CheckpointError, match="tensor 'model.norm.weight' holds values that are infinite or not"):
            export_pair(source, None, tmp_path / "bundle", recipe="fp32", check=check)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of ``size`` mounted at ``folder``."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        failure = done.stderr.strip() if done.returncode else None
    except FileNotFoundError as error:
        failure = str(error)
    if failure is not None:
        pytest.skip(f"A REALLY FULL DISK IS NOT TESTED HERE: a small tmpfs cannot be mounted ({failure})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("room", ["tokenizer", "half", "all but one page"])
def test_nothing_is_left_on_a_disk_that_is_full(checkpoint: Path, tmp_path: Path, room: str) -> None:
    whole = export_pair(checkpoint, None, tmp_path / "whole", recipe="fp32", check=False).path
    pages = sum(-(-len(data) // 4096) for data in content(whole).values())
    kibibytes = 4 * {"tokenizer": 2, "half": pages // 2, "all but one page": pages - 1}[room]
    with small_disk(tmp_path / "disk", f"{kibibytes}k") as disk:
        with pytest.raises(BundleError, match="The disk is full: .*bundle could not be written"):
            export_pair(checkpoint, None, disk / "bundle", recipe="fp32", check=False)
        assert list(disk.iterdir()) == []


def test_a_full_disk_leaves_the_bundle_that_was_to_be_replaced(checkpoint: Path, whole: Path, tmp_path: Path) -> None:
    pages = sum(-(-len(data) // 4096) for data in content(whole).values())
    with small_disk(tmp_path / "disk", f"{4 * (pages + 40)}k") as disk:
        shutil.copytree(whole, disk / "bundle")
        with pytest.raises(BundleError, match="The disk is full"):
            export_pair(checkpoint, None, disk / "bundle", recipe="fp32", check=False, overwrite=True)
        assert content(disk / "bundle") == content(whole) and names(disk) == ["bundle"]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.onnx.data", "model.onnx", MANIFEST])
def test_nothing_is_left_if_a_file_cannot_be_written(
    checkpoint: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if isinstance(file, str | Path) and Path(file).name == name and "w" in mode:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            return real(file, mode, *arguments, **options)

        return refuse

    monkeypatch.setattr(Path, "open", full(Path.open))
    monkeypatch.setattr("builtins.open", full(open))
    with pytest.raises(BundleError, match="The disk is full"):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe="fp32", check=False)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept(checkpoint: Path, bundle: Path) -> None:
    before = content(bundle)
    with pytest.raises(BundleError, match="already exists; choose another output, or ask to overwrite"):
        export_pair(checkpoint, None, bundle)
    assert content(bundle) == before
    assert names(bundle.parent) == [bundle.name]


def test_something_that_is_no_bundle_is_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "file").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / MANIFEST).write_text('{"name": "a web app has a manifest too"}')
    for name in ("photos", "file", "dangling", "website"):
        with pytest.raises(BundleError, match="is not a pair bundle, so it is not overwritten"):
            export_pair(checkpoint, None, tmp_path / name, overwrite=True)
    assert names(tmp_path) == ["dangling", "file", "photos", "website"]
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"meow"
    assert names(tmp_path / "website") == [MANIFEST]


def test_a_bundle_is_not_overwritten_together_with_what_somebody_else_put_there(checkpoint: Path, bundle: Path) -> None:
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match="holds 'notes.txt', which is no part of a bundle"):
        export_pair(checkpoint, None, bundle, overwrite=True)
    assert (bundle / "notes.txt").read_text() == "mine"


def test_a_damaged_bundle_can_be_overwritten(checkpoint: Path, bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes((bundle / MANIFEST).read_bytes()[:200])
    export_pair(checkpoint, None, bundle, overwrite=True, check=False)
    assert open_bundle(bundle)


def test_of_two_exports_at_a_time_the_first_to_be_complete_stays(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"

    def overtake(stage: str, done: int, total: int) -> None:
        if stage == "seal" and done == 0:
            export_pair(checkpoint, None, output, recipe="fp16", check=False)

    with pytest.raises(BundleError, match="already exists"):
        export_pair(checkpoint, None, output, recipe="fp32", check=False, progress=overtake)
    assert open_bundle(output).manifest.target.recipe["name"] == "fp16"
    assert names(tmp_path) == ["bundle"]


def test_an_empty_folder_can_be_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    export_pair(checkpoint, None, tmp_path / "bundle", overwrite=True, check=False)
    assert open_bundle(tmp_path / "bundle")


def test_overwriting_keeps_the_old_bundle_until_the_new_one_is_complete(checkpoint: Path, bundle: Path) -> None:
    before = content(bundle)
    reports = []

    def watch(*step: object) -> None:
        reports.append(step)
        assert content(bundle) == before

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "seal" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pair(checkpoint, None, bundle, overwrite=True, check=False, progress=stop)
    assert content(bundle) == before
    export_pair(checkpoint, None, bundle, overwrite=True, check=False, progress=watch)
    assert reports and content(bundle) != before
    assert open_bundle(bundle).manifest.draft is None
    assert names(bundle.parent) == [bundle.name]


def test_the_old_bundle_comes_back_if_the_new_one_cannot_take_its_place(
    checkpoint: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(bundle)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(atomic_folder, "exchange", lambda first, second: False)  # as on an old system
    with pytest.raises(BundleError, match="could not be written .Operation not permitted."):
        export_pair(checkpoint, None, bundle, overwrite=True, check=False)
    assert content(bundle) == before
    assert names(bundle.parent) == [bundle.name]


def test_an_output_whose_name_is_too_long_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="could not be written .File name too long"):
        export_pair(checkpoint, None, tmp_path / ("x" * 300))
    assert names(tmp_path) == []


def test_an_output_below_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(BundleError, match="could not be written"):
        export_pair(checkpoint, None, tmp_path / "file" / "bundle")
    assert names(tmp_path) == ["file"]


# Reading


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for name, reason in (("nowhere", "does not exist"), ("file", "is not a folder"), ("empty", "has no manifest.json")):
        with pytest.raises(BundleError, match=f"{name} {reason}; expected a pair bundle"):
            open_bundle(tmp_path / name)


@pytest.mark.parametrize("path", ["", None, b"pair", 5])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(BundleError, match="expected the folder that 'edge-spec export' wrote"):
        open_bundle(path)


@pytest.mark.parametrize("name", [MANIFEST, "target/model.onnx.data"])
@pytest.mark.parametrize("method", ["open", "lstat"])
def test_a_file_that_may_not_be_read_is_named(
    bundle: Path, name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, method)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == bundle / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, method, refuse)
    with pytest.raises(BundleError, match=f"{name} cannot be read .Permission denied"):
        open_bundle(bundle)


def test_a_name_that_is_too_long_for_a_bundle_is_refused() -> None:
    with pytest.raises(BundleError, match="cannot be read .File name too long"):
        open_bundle("x" * 300)


@pytest.mark.parametrize(
    "text",
    ["", "{", "\x00\x01", "[" * 100_000, "{" * 10 + '"a":' * 10, '{"format": "edge-spec pair bundle",}', "1" * 5000],
    ids=["empty", "brace", "binary", "deep", "unbalanced", "comma", "long-number"],
)
def test_a_manifest_that_is_not_json_is_refused(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="not valid JSON"):
        open_bundle(bundle)


def test_a_manifest_that_is_not_text_is_refused(bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(b'{"format": "\xff\xfe"}')
    with pytest.raises(BundleError, match="not valid JSON"):
        open_bundle(bundle)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"edge-spec pair bundle"', "{}", '{"format": "zip"}'])
def test_other_json_is_refused(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="not the manifest of an edge-spec pair bundle"):
        open_bundle(bundle)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 10**30, 0, -1, None, "1", 1.0, True, [1]])
def test_a_manifest_of_another_version_is_refused(bundle: Path, version: object) -> None:
    # A newer manifest may look like anything, so the version is judged before the rest.
    edit(bundle, lambda body: body.update(schema_version=version, more={"than": "known"}))
    with pytest.raises(BundleError, match="schema version .*, but this edge-spec reads 6; upgrade"):
        open_bundle(bundle)


def test_a_bundle_of_an_older_version_is_to_be_exported_again(bundle: Path) -> None:
    edit(bundle, lambda body: body.update(schema_version=SCHEMA_VERSION - 1))
    with pytest.raises(BundleError, match="schema version 5, written by an older edge-spec, .*export the bundle again"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(vocab_size=body["vocab_size"] + 1),
        lambda body: body["target"].update(integer_weights="int8"),
        lambda body: body["files"].popitem(),
        lambda body: body.update(draft=None),
        lambda body: body.pop("digest"),
        lambda body: body.update(digest=None),
    ],
    ids=["number", "text", "file", "draft", "no-digest", "null-digest"],
)
def test_an_edited_manifest_is_refused(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((bundle / MANIFEST).read_text())
    change(body)
    (bundle / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(BundleError, match="changed after it was written"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(colour="red"), r"manifest has unknown entries \['colour'\]"),
        (lambda body: body["target"].update(colour="red"), r"manifest.target has unknown entries \['colour'\]"),
        (lambda body: body.pop("vocab_size"), r"manifest lacks \['vocab_size'\]"),
        (lambda body: body["target"]["architecture"].pop("layers"), r"target.architecture lacks \['layers'\]"),
        (lambda body: body.update(vocab_size="many"), "manifest.vocab_size is 'many', expected int"),
        (lambda body: body.update(vocab_size=True), "manifest.vocab_size is True, expected int"),
        (lambda body: body.update(device="tpu"), r"manifest.device is 'tpu', expected one of \('cpu', 'cuda'\)"),
        (lambda body: body.update(eos_token_ids=[1, None]), r"manifest.eos_token_ids\[1\] is None"),
        (lambda body: body.update(eos_token_ids="12"), "manifest.eos_token_ids is not a list"),
        (lambda body: body.update(files=[]), "manifest.files is not an object"),
        (lambda body: body.update(target=None), "manifest.target is not an object"),
        (lambda body: body["target"]["architecture"]["ropes"][0].update(theta=10**400), "int too large"),
        (lambda body: body["target"]["recipe"].update(block_size=1.5), "recipe.block_size is 1.5, expected str or int"),
        (lambda body: body["target"]["recipe"].update(name=True), "recipe.name is True, expected str or int"),
        (lambda body: body["target"]["recipe"].update(name=None), "recipe.name is None, expected str or int"),
        (lambda body: body["target"].update(graphs=[]), "a model has no graphs"),
        (lambda body: body["target"]["graphs"][0].update(kv="int2"), "target.graphs.*kv is 'int2'"),
        (lambda body: body["target"]["graphs"][0].update(path="target/other.onnx"), "files lacks .*target/other.onnx"),
        (lambda body: body["draft"]["graphs"][0].update(path="../x.onnx"), "files lacks .*../x.onnx"),
        (lambda body: body["target"]["graphs"][0].update(path="/etc/passwd"), "files lacks .*/etc/passwd"),
        (lambda body: body["files"].pop("tokenizer.json"), "files lacks .*tokenizer.json"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_with_the_reason(
    bundle: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=f"manifest.json is invalid: .*{reason}"):
        open_bundle(bundle)


def test_a_recipe_tells_its_block_size_or_does_not(bundle: Path) -> None:
    assert open_bundle(bundle).manifest.target.recipe["block_size"] == 32
    edit(bundle, lambda body: body["target"]["recipe"].pop("block_size"))
    assert "block_size" not in open_bundle(bundle).manifest.target.recipe


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "target/../../secret", "", ".", "..", "a//b", "./a", "a/", "C:\\x", "..\\x", "a\0b"],
)
def test_a_file_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_text("secret")
    record = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    edit(bundle, lambda body: body["files"].update({name: record}))
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        open_bundle(bundle)


def test_a_missing_file_is_named(whole: Path, tmp_path: Path) -> None:
    for index, name in enumerate(read_manifest(whole).files):
        copied = shutil.copytree(whole, tmp_path / str(index))
        (copied / name).unlink()
        with pytest.raises(BundleError, match=f"lacks its file {name}; copy the whole folder"):
            open_bundle(copied)


def test_a_folder_in_place_of_a_file_is_refused(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").mkdir()
    with pytest.raises(BundleError, match="tokenizer.json is a folder, expected a file"):
        open_bundle(bundle)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", [-1, 1, None], ids=["shorter", "longer", "empty"])
def test_a_file_of_another_size_is_refused_even_without_hashing(bundle: Path, verify: bool, change: int | None) -> None:
    for name, record in read_manifest(bundle).files.items():
        file = bundle / name
        original = file.read_bytes()
        os.truncate(file, 0 if change is None else record.bytes + change)
        with pytest.raises(BundleError, match=f"{name} has .* bytes, but the manifest says .* cut short or replaced"):
            open_bundle(bundle, verify=verify)
        file.write_bytes(original)
    open_bundle(bundle)


@given(data=st.data())
@every_case
def test_any_edited_byte_is_found(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    bundle = tmp_path / "edited"
    if not bundle.exists():
        shutil.copytree(whole, bundle)
    file = bundle / data.draw(st.sampled_from(sorted(read_manifest(whole).files)))
    original = file.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    edited = bytearray(original)
    edited[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(edited)
    with pytest.raises(BundleError, match=f"{file.name} does not have the SHA-256 its manifest names"):
        open_bundle(bundle)
    file.write_bytes(original)


@given(data=st.data())
@every_case
def test_no_damage_to_the_manifest_goes_unnoticed(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    bundle = tmp_path / "damaged"
    bundle.mkdir(exist_ok=True)
    original = (whole / MANIFEST).read_bytes()
    start = data.draw(st.integers(0, len(original) - 1))
    end = data.draw(st.integers(start, min(len(original), start + 40)) | st.just(len(original)))
    (bundle / MANIFEST).write_bytes(original[:start] + data.draw(st.binary(max_size=4)) + original[end:])
    try:
        manifest = read_manifest(bundle)
    except BundleError:
        return
    # White space may change, and what is inserted may equal what was there.
    assert manifest == read_manifest(whole)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), value=json_values)
@every_case
def test_whatever_a_signed_manifest_says_opening_it_ends_in_a_bundle_or_its_error(
    whole: Path, tmp_path: Path, data: st.DataObject, value: object
) -> None:
    bundle = tmp_path / "forged"
    bundle.mkdir(exist_ok=True)
    body = copy.deepcopy(json.loads((whole / MANIFEST).read_text()))
    place: Any = body
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    (bundle / MANIFEST).write_text(signed(body))
    with contextlib.suppress(BundleError):
        open_bundle(bundle)
