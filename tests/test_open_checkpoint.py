from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_spec.errors import CheckpointError
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.gguf_checkpoint import GgufCheckpoint
from gguf_files import write_model


def test_a_gguf_file_is_opened_whatever_it_is_called(tmp_path: Path) -> None:
    path = write_model(tmp_path / "weights.bin")
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    assert checkpoint.source == str(path)
    assert open_checkpoint(str(path)).architecture == checkpoint.architecture


def test_a_folder_with_a_single_gguf_file_stands_for_it(tmp_path: Path) -> None:
    write_model(tmp_path / "one.gguf")
    assert open_checkpoint(tmp_path).source.endswith("one.gguf")
    write_model(tmp_path / "two.gguf")
    with pytest.raises(CheckpointError, match="2 .gguf files"):
        open_checkpoint(tmp_path)


def test_a_folder_with_a_configuration_is_a_hugging_face_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="config.json lacks 'model_type'"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json .* no .gguf"):
        open_checkpoint(tmp_path)


def test_one_file_of_a_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="give its folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_some_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "source", ["", "nothing", "models/absent.gguf", "/no/such/folder", "./here", "a/b/c", "~/no", "~nobody-here/no"]
)
def test_what_is_neither_there_nor_a_hub_id_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint at|holds no config.json"):
        open_checkpoint(source)


@pytest.mark.parametrize("source", ["x" * 300, "folder/model.gguf"])
def test_what_cannot_be_looked_at_is_refused_by_name(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if self.parent.name == "folder":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(CheckpointError, match=f"cannot read '{source}': (File name too long|Permission denied); check"):
        open_checkpoint(source)


def test_a_loop_of_links_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="config.json"):
        open_checkpoint(tmp_path)
