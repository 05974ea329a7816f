"""Rows of the embedding: asked for before a call reads them, and only where there are any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest

from edge_spec.onnx_file import External, Tensor
from edge_spec.runtime import mapped_weights
from edge_spec.runtime.mapped_weights import SparseRows

PAGE, ROW, ROWS = 4096, 576, 40


def table(folder: Path, name: str, offset: int, row: int) -> tuple[str, Tensor]:
    return name, Tensor(onnx.TensorProto.UINT8, (ROWS, row), b"", External("weights", offset, ROWS * row))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Place and size of what the system was asked for."""
    ranges: list[tuple[int, int]] = []

    def advise(descriptor: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            ranges.append((offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return ranges


def test_the_pages_of_a_token_are_asked_for_once_in_a_while(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    (tmp_path / "weights").write_bytes(bytes(2 * PAGE + ROWS * ROW))
    rows = SparseRows(tmp_path, dict([table(tmp_path, "embedding.weight", 2 * PAGE, ROW)]))
    rows.expect([0, 1, 7])  # the last of them ends in the next page
    assert asked == [(2 * PAGE, PAGE), (2 * PAGE, 2 * PAGE)]
    rows.expect([0, 6, 7, 8])
    assert len(asked) == 2
    rows.expect([ROWS - 1])
    last = 2 * PAGE + (ROWS - 1) * ROW
    assert asked[2] == (last // PAGE * PAGE, PAGE)


def test_pages_are_asked_for_again_as_the_system_may_have_dropped_them(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_weights, "_ASKED_SECONDS", -1.0)
    (tmp_path / "weights").write_bytes(bytes(ROWS * ROW))
    rows = SparseRows(tmp_path, dict([table(tmp_path, "embedding.weight", 0, ROW)]))
    rows.expect([1])
    rows.expect([1])
    assert asked == [(0, PAGE), (0, PAGE)]


def test_every_table_of_the_embedding_is_asked_and_nothing_else(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    (tmp_path / "weights").write_bytes(bytes(20 * PAGE))
    tensors: dict[str, Any] = dict(
        [
            table(tmp_path, "embedding.weight", 0, ROW),
            table(tmp_path, "embedding.scale", 10 * PAGE, 4),
            table(tmp_path, "lm_head.weight", 12 * PAGE, ROW),
        ]
    )
    tensors["embedding.zero"] = Tensor(onnx.TensorProto.UINT8, (1,), b"\0", None)
    SparseRows(tmp_path, tensors).expect([3])
    assert asked == [(0, PAGE), (10 * PAGE, PAGE)]


@pytest.mark.parametrize("token", [-1, ROWS, 1 << 40])
def test_tokens_that_there_are_not_are_left_to_the_call(
    tmp_path: Path, asked: list[tuple[int, int]], token: int
) -> None:
    (tmp_path / "weights").write_bytes(bytes(ROWS * ROW))
    SparseRows(tmp_path, dict([table(tmp_path, "embedding.weight", 0, ROW)])).expect([token])
    assert not asked


def test_without_a_file_nothing_is_asked(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    SparseRows(tmp_path, dict([table(tmp_path, "embedding.weight", 0, ROW)])).expect([1])
    assert not asked


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(ROWS * ROW))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - it is gone before it could be looked at
    rows = SparseRows(tmp_path, dict([table(tmp_path, "embedding.weight", 0, ROW)]))
    rows.expect([1])
    del rows
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
