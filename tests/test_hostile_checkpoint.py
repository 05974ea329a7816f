"""A checkpoint from a stranger: exported, or refused with an error of its own, in bounded time and memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import CheckpointError, EdgeSpecError, UnsupportedError
from edge_spec.export import export_pair
from edge_spec.export.checkpoint import open_checkpoint
from gguf_files import METADATA, write_model
from hostile_files import sources


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: dict[str, Path], tmp_path: Path) -> Path:
    """A Hugging Face checkpoint to be forged."""
    return Path(shutil.copytree(sound["huggingface"], tmp_path / "forged"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def export(source: Path, tmp_path: Path) -> None:
    export_pair(source, None, tmp_path / "bundle", recipe="fp32", check=False)


def gguf(path: Path, *pairs: bytes, tensors: int = 0) -> Path:
    """A GGUF file of given metadata pairs, as bytes."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs)) + b"".join(pairs))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


# Hugging Face


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_a_checkpoint_does_not_make_anybody_wait(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="is a pipe, expected a file"):
        export(folder, tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_link_does_not_carry_somebody_elses_file_into_the_bundle(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="secret, outside of its folder"):
        export(folder, tmp_path)


@pytest.mark.parametrize("shared", [False, True])
def test_links_inside_the_cache_of_the_hub_are_followed(folder: Path, tmp_path: Path, shared: bool) -> None:
    """Newer clients keep a blob beside all checkpoints, so that a link leads to a link."""
    cache = tmp_path / "models--owner--name"
    snapshot, blobs, store = cache / "snapshots" / "abcdef", cache / "blobs", tmp_path / "blobs" / "ab"
    for created in (snapshot, blobs, store):
        created.mkdir(parents=True)
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename((store if shared else blobs) / str(index))
        if shared:
            (blobs / str(index)).symlink_to(Path("../../blobs/ab") / str(index))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(index))
    export(snapshot, tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b"])
def test_an_index_cannot_name_files_elsewhere(folder: Path, shard: str) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    edit(folder / "model.safetensors.index.json", lambda body: body["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match="outside its folder|which is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["model.norm.weight"].update(data_offsets=[0, 1024]), "share bytes"),
        (lambda h: h["model.norm.weight"].update(shape=[1] * 10**6), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(shape=[-256]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(shape=[2**200]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[-4, 1020]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[2**63, 2**63 + 1024]), "ends at byte"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[1024, 0]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[True, False]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(dtype=["F32"]), "the entry of tensor"),
        (lambda h: h["model.norm.weight"].update(dtype={"a": 1}), "the entry of tensor"),
        (lambda h: h.update({"model.norm.weight": [[]]}), "the entry of tensor"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    edit_header(folder, change)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 1 << 27])
def test_a_safetensors_header_without_end_is_not_read(folder: Path, length: int) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 41)  # a file of holes
    with pytest.raises(CheckpointError, match="its header claims"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2**31 - 1), ("head_dim", 2**31 - 2), ("hidden_size", 2**31 - 1), ("vocab_size", 2**31),
        ("max_position_embeddings", 2**31 - 1), ("max_position_embeddings", 2**24), ("num_attention_heads", 2**31 - 1),
        ("num_hidden_layers", 10**400), ("head_dim", -2), ("rope_theta", float("inf")), ("rms_norm_eps", float("nan")),
        ("intermediate_size", 1.5), ("num_key_value_heads", True), ("model_type", ["llama"]), ("rope_scaling", [[]]),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e-320}), ("rope_scaling", {"rope_type": {"a": []}}),
        ("eos_token_id", [2**70]), ("eos_token_id", {"a": 1}), ("max_position_embeddings", 1 << 23),
    ],
)  # fmt: skip
def test_a_configuration_that_lies_is_refused(folder: Path, tmp_path: Path, name: str, value: object) -> None:
    if name == "max_position_embeddings":
        edit(folder / "config.json", lambda body: body.update(head_dim=64 if value == 1 << 23 else 128))
    edit(folder / "config.json", lambda body: body.update({name: value}))
    with pytest.raises(CheckpointError):
        export(folder, tmp_path)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "9" * 10**6, "\xff", ""])
def test_a_configuration_that_is_no_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        open_checkpoint(folder)


def test_a_configuration_without_end_is_not_read_to_the_end(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)
    with pytest.raises(CheckpointError, match="longer than 67,108,864 bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", lambda body: body.update(eos_token="\ud800")),
        ("tokenizer_config.json", lambda body: body.update(chat_template="\ud800")),
        ("tokenizer_config.json", lambda body: body.update(chat_template="x" * (1 << 21))),
        ("tokenizer_config.json", lambda body: body.update(bos_token="x" * 10_000)),
        ("tokenizer.json", lambda body: body.update(normalizer={"type": "Prepend", "prepend": "a" * 10**6})),
        ("tokenizer.json", lambda body: body.update(version="2")),
        ("tokenizer.json", lambda body: body["model"].update(vocab={"a": 2**32 - 1})),
        ("tokenizer.json", lambda body: body["model"].update(vocab={}, merges=[])),
    ],
)
def test_texts_that_are_none_are_refused(
    folder: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(folder / name, change)
    with pytest.raises(EdgeSpecError) as refused:
        export(folder, tmp_path)
    assert len(str(refused.value)) < 1000
    assert not (tmp_path / "bundle").exists()


# GGUF


def test_an_array_of_holes_is_not_read(tmp_path: Path) -> None:
    array = struct.pack("<IIQ", 9, 0, 1 << 36)  # as many bytes as a file without blocks can claim to have
    path = gguf(tmp_path / "model.gguf", text("general.architecture") + array)
    os.truncate(path, 1 << 37)
    with pytest.raises(CheckpointError, match="arrays have more than 8388608 elements"):
        open_checkpoint(path)


def test_strings_of_holes_are_not_read(tmp_path: Path) -> None:
    path = gguf(tmp_path / "model.gguf", struct.pack("<Q", 1 << 36))
    os.truncate(path, 1 << 37)
    with pytest.raises(CheckpointError, match="a string at byte .* claims 68719476736 bytes"):
        open_checkpoint(path)


@pytest.mark.parametrize(("tensors", "pairs"), [(2**64 - 1, 0), (2**63, 0), (0, 2**64 - 1), (0, 2**40)])
def test_counts_that_no_file_has_are_refused(tmp_path: Path, tensors: int, pairs: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + bytes(1000))
    with pytest.raises(CheckpointError, match="expected at most 65536"):
        open_checkpoint(path)


@pytest.mark.parametrize("depth", [1, 10_000])
def test_arrays_of_arrays_are_refused_however_deep(tmp_path: Path, depth: int) -> None:
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)
    with pytest.raises(UnsupportedError, match="nested arrays"):
        open_checkpoint(gguf(tmp_path / "model.gguf", text("a") + nested))


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", metadata=METADATA)
    data = bytearray(path.read_bytes())
    place = data.index(b"blk.0.attn_norm.weight") + len("blk.0.attn_norm.weight") + 4 + 8 + 4
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match="'token_embd.weight' and 'blk.0.attn_norm.weight' share bytes|share bytes"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "attention.head_count", "attention.key_length"]
)
@pytest.mark.parametrize("value", [2**31 - 1, 2**32 - 2, 0])
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, key: str, value: int) -> None:
    path = write_model(tmp_path / "model.gguf", metadata={**METADATA, f"llama.{key}": value})
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_a_pipe_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        open_checkpoint(tmp_path / name)
