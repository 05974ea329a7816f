"""Checkpoints on the hub, with the hub's real client against a hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import CheckpointError, MissingDependencyError, UnsupportedError
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.hub import HubCheckpoint, fetch
from edge_spec.export.hub_name import HubName, parse_hub_name
from fake_hub import TOKEN, FakeHub, folder_files, running_hub

CHECKPOINT = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"generation": 1}',
    "tokenizer.json": b'{"tokenizer": 1}',
    "tokenizer_config.json": b'{"settings": 1}',
    "model.safetensors": b"weights" * 100,
}
# The same weights once more, and what only people read.
BALLAST = {
    ".gitattributes": b"*",
    "README.md": b"# A model",
    "LICENSE": b"free",
    "consolidated.safetensors": b"weights" * 100,
    "original/consolidated.00.pth": b"weights" * 100,
    "onnx/model.onnx": b"weights" * 100,
    "pytorch_model.bin": b"weights" * 100,
    "model.fp16.safetensors": b"weights" * 50,
    "vocab.json": b"{}",
}
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
SHARDED = {
    **{name: content for name, content in CHECKPOINT.items() if name != "model.safetensors"},
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[1], "b": SHARDS[0]}}).encode(),
    **{name: name.encode() * 50 for name in SHARDS},
}
QUANTIZED = {
    "README.md": b"# GGUF",
    "config.json": b"{}",
    "model-Q8_0.gguf": b"GGUF8" * 100,
    "model-Q4_K_M.gguf": b"GGUF4" * 100,
    "model-UD-Q4_K_XL.gguf": b"GGUFX" * 100,
    "model.q5_1.gguf": b"GGUF5" * 100,
    "mmproj-model-f16.gguf": b"eyes",
    "BF16/model-BF16-00001-of-00002.gguf": b"half",
    "BF16/model-BF16-00002-of-00002.gguf": b"other half",
}


@pytest.fixture(scope="module")
def running() -> Iterator[FakeHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty hub that the client in this process talks to, with an empty cache and nobody logged in."""
    from huggingface_hub import constants

    running.clear()
    for name, value in {
        "ENDPOINT": running.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": running.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client waits before it tries again
    return running


def get(text: str, offline: bool = False) -> HubCheckpoint:
    name = parse_hub_name(text)
    assert name is not None
    return fetch(name, offline)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name")),
        ("o-w/n.2-B_x@v1.0", HubName("o-w/n.2-B_x", revision="v1.0")),
        ("owner/name@refs/pr/7", HubName("owner/name", revision="refs/pr/7")),
        ("owner/name/a.gguf", HubName("owner/name", file="a.gguf")),
        ("owner/name/deep/a-Q4.gguf@abc", HubName("owner/name", file="deep/a-Q4.gguf", revision="abc")),
        ("owner/name:Q4_K_M", HubName("owner/name", quantization="Q4_K_M")),
        ("owner/name:q8_0@main", HubName("owner/name", quantization="q8_0", revision="main")),
        ("name", None),
        ("owner/name.gguf", None),
        ("owner/name/folder", None),
        ("/owner/name", None),
        ("./owner", None),
        ("owner/name@", None),
        ("owner/name:", None),
        ("owner/name@a b", None),
        ("https://huggingface.co/owner/name", None),
    ],
)
def test_names_on_the_hub(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name
    assert name is None or str(name) == text


def test_only_what_is_read_is_fetched(hub: FakeHub) -> None:
    commit = hub.add("owner/name", {**CHECKPOINT, **BALLAST})
    found = get("owner/name")
    assert sorted(path.name for path in found.path.iterdir()) == sorted(CHECKPOINT)
    assert all((found.path / name).read_bytes() == content for name, content in CHECKPOINT.items())
    assert found.source == f"owner/name@{commit}"
    assert sorted(hub.fetched()) == sorted(CHECKPOINT)


def test_medusa_heads_are_fetched_by_the_name_they_have(hub: FakeHub) -> None:
    hub.add("owner/name", {"config.json": b"{}", "medusa_lm_head.safetensors": b"x", "medusa_lm_head.pt": b"y"})
    assert sorted(path.name for path in get("owner/name").path.iterdir()) == [
        "config.json",
        "medusa_lm_head.safetensors",
    ]


def test_of_shards_only_those_that_the_index_names_are_fetched(hub: FakeHub) -> None:
    hub.add("owner/name", {**SHARDED, **BALLAST, "model.safetensors": b"an older copy"})
    found = get("owner/name")
    assert sorted(path.name for path in found.path.glob("*.safetensors")) == SHARDS[:2]


def test_a_second_fetch_sends_nothing(hub: FakeHub) -> None:
    hub.add("owner/name", CHECKPOINT)
    first = get("owner/name")
    hub.requests.clear()
    assert get("owner/name") == first
    assert hub.fetched() == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub) -> None:
    old = hub.add("owner/name", CHECKPOINT, "v1", "main")
    new = hub.add("owner/name", {**CHECKPOINT, "config.json": b'{"new": 1}'})
    request = hub.add("owner/name", {**CHECKPOINT, "config.json": b'{"proposed": 1}'}, "refs/pr/7")
    assert old != new
    for revision, commit in [("v1", old), ("main", new), (old, old), ("refs/pr/7", request)]:
        found = get(f"owner/name@{revision}")
        assert found.source == f"owner/name@{commit}"
        assert found.path.name == commit
        assert get(found.source, offline=True) == found


def test_a_commit_that_is_in_the_cache_is_not_asked_for(hub: FakeHub) -> None:
    hub.add("owner/name", CHECKPOINT)
    found = get("owner/name")
    hub.requests.clear()
    assert get(found.source) == found
    assert hub.requests == []


def test_offline_takes_what_is_in_the_cache_and_asks_nobody(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", CHECKPOINT)
    found = get("owner/name")
    hub.add("owner/name", {**CHECKPOINT, "config.json": b'{"new": 1}'})
    hub.requests.clear()
    assert get("owner/name", offline=True) == found
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get("owner/name") == found
    assert hub.requests == []


@pytest.mark.parametrize("name", ["owner/name", "owner/name:Q4_K_M", "owner/name/a.gguf", f"owner/name@{'1' * 40}"])
def test_offline_what_is_not_in_the_cache_is_explained(name: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="neither a local path nor in the local cache.*--offline.*with a network"):
        get(name, offline=True)
    assert hub.requests == []


def test_offline_a_cached_copy_that_is_not_whole_is_explained(hub: FakeHub) -> None:
    commit = hub.add("owner/name", SHARDED)
    found = get("owner/name")
    (found.path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"in the local cache, 'owner/name' lacks the file '{SHARDS[1]}'.*"):
        get("owner/name", offline=True)
    assert get(f"owner/name@{commit}") == found  # with a network, the rest is fetched
    assert (found.path / SHARDS[1]).is_file()


def test_offline_a_quantization_is_found_among_the_cached_files(hub: FakeHub) -> None:
    commit = hub.add("owner/name", QUANTIZED)
    found = get("owner/name:q4_k_m")
    assert found.source == f"owner/name/model-Q4_K_M.gguf@{commit}"
    assert get("owner/name:Q4_K_M", offline=True) == get("owner/name/model-Q4_K_M.gguf", offline=True) == found
    with pytest.raises(CheckpointError, match="in the local cache, no GGUF file of quantization 'Q8_0'.*has Q4_K_M;"):
        get("owner/name:Q8_0", offline=True)


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        (":Q4_K_M", "model-Q4_K_M.gguf"),
        (":q8_0", "model-Q8_0.gguf"),
        (":UD-Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        (":Q5_1", "model.q5_1.gguf"),
        ("/model-Q8_0.gguf", "model-Q8_0.gguf"),
    ],
)
def test_one_gguf_file_is_fetched_by_its_name_or_quantization(asked: str, file: str, hub: FakeHub) -> None:
    commit = hub.add("owner/name", QUANTIZED)
    found = get(f"owner/name{asked}")
    assert found.path.read_bytes() == QUANTIZED[file]
    assert found.source == f"owner/name/{file}@{commit}"
    assert hub.fetched() == [file]
    assert get(found.source) == found


@pytest.mark.parametrize(
    ("asked", "kind", "complaint"),
    [
        (":Q4_K_L", CheckpointError, "no GGUF file of quantization 'Q4_K_L'.*did you mean .*Q4_K_.*it has .*Q8_0"),
        (":Q4_K", CheckpointError, "no GGUF file of quantization 'Q4_K'"),
        (":F16", CheckpointError, "no GGUF file of quantization 'F16'"),  # that of the image encoder
        (":BF16", UnsupportedError, "one of 2 parts.*llama-gguf-split --merge"),
        ("/BF16/model-BF16-00001-of-00002.gguf", UnsupportedError, "one of 2 parts"),
        ("/model-Q4_K_N.gguf", CheckpointError, "no file 'model-Q4_K_N.gguf' .*closest is model-Q4_K_M.gguf"),
        ("", CheckpointError, "holds GGUF files; name one of them, as in owner/name:BF16: it has BF16, Q4_K_M"),
    ],
)
def test_a_gguf_file_that_is_not_there_or_not_one_is_explained(
    asked: str, kind: type[CheckpointError], complaint: str, hub: FakeHub
) -> None:
    hub.add("owner/name", QUANTIZED)
    with pytest.raises(kind, match=complaint):
        get(f"owner/name{asked}")
    assert hub.fetched() == []


def test_two_files_of_one_quantization_are_not_guessed_between(hub: FakeHub) -> None:
    hub.add("owner/name", {"a-Q4_0.gguf": b"GGUF", "b-Q4_0.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match="2 GGUF files .* as in owner/name/a-Q4_0.gguf; the others: b-Q4_0.gguf"):
        get("owner/name:Q4_0")


@pytest.mark.parametrize(
    ("files", "kind", "complaint"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, UnsupportedError, r"PyTorch .bin weights"),
        ({"config.json": b"{}", "medusa_lm_head.pt": b"x"}, UnsupportedError, "a pickle, which could run anything"),
        ({"README.md": b"x"}, CheckpointError, "holds no checkpoint that can be exported"),
        ({"model.safetensors": b"x"}, CheckpointError, "expected config.json with model.safetensors"),
        ({"a.gguf": b"x"}, CheckpointError, "name one of them, as in owner/name/a.gguf"),
        ({"config.json": b"{}"}, CheckpointError, "expected config.json with model.safetensors"),
        (
            {name: content for name, content in SHARDED.items() if name != SHARDS[0]},
            CheckpointError,
            f"'owner/name' lacks the file '{SHARDS[0]}'",
        ),
    ],
)
def test_a_repository_without_a_whole_checkpoint_is_explained(
    files: dict[str, bytes], kind: type[CheckpointError], complaint: str, hub: FakeHub
) -> None:
    hub.add("owner/name", files)
    with pytest.raises(kind, match=complaint):
        get("owner/name")


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 1, "b": "../x"}}'])
def test_a_damaged_index_is_left_to_its_reader(index: bytes, hub: FakeHub) -> None:
    hub.add("owner/name", {"config.json": b"{}", "model.safetensors.index.json": index})
    assert (get("owner/name").path / "model.safetensors.index.json").read_bytes() == index


def test_an_unknown_name_or_revision_is_explained(hub: FakeHub) -> None:
    hub.add("owner/name", CHECKPOINT)
    with pytest.raises(CheckpointError, match="'owner/nme': it is neither a local path nor a public model.*spelling"):
        get("owner/nme")
    with pytest.raises(CheckpointError, match="'owner/name' has no revision 'v9'; its branches and tags are listed on"):
        get("owner/name@v9")
    with pytest.raises(CheckpointError, match="'owner/na--me' is no name on the hub"):
        get("owner/na--me")


def test_a_token_opens_private_and_gated_repositories(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/private", CHECKPOINT, access="private")
    hub.add("owner/gated", CHECKPOINT, access="gated")
    with pytest.raises(CheckpointError, match="'owner/private'.*hf auth login.*private"):
        get("owner/private")
    with pytest.raises(CheckpointError, match=f"'owner/gated' is gated: accept .* on {hub.endpoint}/owner/gated"):
        get("owner/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("owner/private", "owner/gated"):
        assert (get(name).path / "model.safetensors").is_file()


def test_the_login_of_the_hub_is_used(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("owner/private", CHECKPOINT, access="private")
    (tmp_path / "token").write_text(TOKEN)
    assert (get("owner/private").path / "config.json").is_file()


def test_a_token_that_is_refused_is_explained(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", CHECKPOINT)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(CheckpointError, match="refuses the token.*unset HF_TOKEN"):
        get("owner/name")


@pytest.mark.parametrize(
    ("status", "complaint"), [(403, "token may not read it"), (429, "too many requests"), (503, "HTTP 503.*later")]
)
def test_a_hub_that_refuses_is_explained(status: int, complaint: str, hub: FakeHub) -> None:
    hub.add("owner/name", CHECKPOINT)
    hub.status = status
    with pytest.raises(CheckpointError, match=f"does not give out 'owner/name'.*{complaint}|{complaint}"):
        get("owner/name")


def test_no_network_is_explained(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="'owner/name' is at a local path, and .* cannot be reached.*--offline"):
        get("owner/name")


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: FakeHub) -> None:
    weights = os.urandom(25 << 20)  # the client keeps what it has got in steps of 10 MB
    hub.add("owner/name", {**CHECKPOINT, "model.safetensors": weights})
    hub.cut_after = [11 << 20, 11 << 20]
    assert (get("owner/name").path / "model.safetensors").read_bytes() == weights
    assert hub.cut_after == []
    ranges = [asked for method, path, asked in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    starts = [0 if asked is None else int(asked.removeprefix("bytes=").removesuffix("-")) for asked in ranges]
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2] < len(weights)


def test_a_connection_that_stays_broken_is_explained_and_what_is_whole_is_kept(hub: FakeHub) -> None:
    hub.add("owner/name", {**SHARDED, SHARDS[1]: os.urandom(1 << 20)})
    hub.cut_after = [100_000] + [0] * 20  # after the first, nothing more arrives
    with pytest.raises(CheckpointError, match="cannot be reached.*run the command again; files that are complete"):
        get("owner/name")
    with pytest.raises(CheckpointError, match="nor in the local cache"):
        get("owner/name", offline=True)
    hub.cut_after = []
    hub.requests.clear()
    found = get("owner/name")
    assert set(hub.fetched()) == {SHARDS[1]}
    assert get("owner/name", offline=True) == found


def test_a_full_disk_is_explained(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", SHARDED)
    usage = type("usage", (), {"free": 3000, "total": 1 << 40, "used": 0})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="of 'owner/name' are to be fetched, but only .* are free.*HF_HOME"):
        get("owner/name")
    assert not any(file.endswith(".safetensors") for file in hub.fetched())  # before any of the weights

    usage.free = 1 << 40

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(CheckpointError, match="disk is full.*HF_HOME, and run the command again"):
        get("owner/name")


def test_an_interrupted_fetch_says_how_to_go_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/name", CHECKPOINT)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.file_download.http_get", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Fetching 'owner/name' was interrupted; to go on, run"):
        get("owner/name")


def test_a_cache_that_may_not_be_written_is_explained(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/name", CHECKPOINT)
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="Not a directory; the hub's cache has to be writable, or elsewhere"):
        get("owner/name")


def test_the_client_is_only_needed_for_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"edge-spec\[export\]"):
        get("owner/name")
    with pytest.raises(CheckpointError, match="no checkpoint at 'nowhere.gguf'"):
        open_checkpoint("nowhere.gguf")


def test_a_checkpoint_from_the_hub_is_opened_under_its_name_and_commit(hub: FakeHub, tmp_path: Path) -> None:
    from gguf_files import METADATA, write_model

    path = write_model(tmp_path / "tiny-Q8_0.gguf", metadata=METADATA)
    commit = hub.add("owner/name", {"tiny-Q8_0.gguf": path.read_bytes()})
    checkpoint = open_checkpoint("owner/name:Q8_0")
    assert checkpoint.source == f"owner/name/tiny-Q8_0.gguf@{commit}"
    assert checkpoint.sha256() == open_checkpoint(path).sha256()
    assert open_checkpoint("owner/name:Q8_0", offline=True).source == checkpoint.source


def test_export_from_the_hub_by_the_command_line(hub: FakeHub, tmp_path: Path) -> None:
    """As a user does it: by the environment alone, in a process of its own; then once more without the hub."""
    from tiny_models import random_model, save_checkpoint

    save_checkpoint(tmp_path / "saved", random_model())
    commit = hub.add("owner/name", {**folder_files(tmp_path / "saved"), **BALLAST}, access="private")
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    program = "import sys; from edge_spec import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "export", "--target", "owner/name", "--json", "--no-check"]

    def export(output: str, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **settings, **more}
        arguments = [*command, "--output", str(tmp_path / output), *options]
        return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)

    first = export("first.pair")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["target"]["source"] == f"owner/name@{commit}"
    hub.requests.clear()
    again = export("second.pair", "--offline")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["target"] == json.loads(first.stdout)["target"]
    assert hub.requests == []
    refused = export("third.pair", HF_TOKEN="hf_expired")
    assert refused.returncode == 2
    assert "refuses the token" in refused.stderr
    assert not (tmp_path / "third.pair").exists()
