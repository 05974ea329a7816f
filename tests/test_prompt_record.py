"""The recorder of prompts: what a line holds, who may read it, and what happens when there is no room."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec import PromptRecorder
from edge_spec.errors import RequestError
from edge_spec.prompt_file import read_questions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_line_holds_the_prompt_and_what_decides_its_text(path: Path) -> None:
    recorder = PromptRecorder(path)
    chat = [{"role": "user", "content": "Grüß dich\n"}]
    recorder.record("once", {"temperature": 0.5, "seed": None, "speculation": "off", "deadline": 3.0, "api_key": "s"})
    recorder.record(chat, {"stop": ("\n",), "logit_bias": {7: 1.5}, "cancelled": threading.Event().is_set})
    recorder.record(np.array([3, 4]), {"max_new_tokens": np.int64(8), "banned_token_ids": {9, 8}})
    text, messages, ids = lines(path)
    assert (text["prompt"], text["options"]) == ("once", {"temperature": 0.5})
    assert (messages["messages"], messages["options"]) == (chat, {"logit_bias": {"7": 1.5}, "stop": ["\n"]})
    assert (ids["token_ids"], ids["options"]) == ([3, 4], {"max_new_tokens": 8, "banned_token_ids": [8, 9]})
    assert all(line["time"].endswith("+00:00") for line in (text, messages, ids))


@given(st.text(min_size=1), st.floats(0, 2), st.integers(-(2**63), 2**63 - 1))
def test_what_is_recorded_is_what_is_replayed(
    tmp_path_factory: pytest.TempPathFactory, text: str, temperature: float, seed: int
) -> None:
    path = tmp_path_factory.mktemp("record") / "prompts.jsonl"
    options = {"temperature": temperature, "seed": seed}
    PromptRecorder(path).record(text, options)
    (question,) = read_questions(path, recorded=True)
    assert (question.opening, question.options) == (text, options)


def test_half_a_surrogate_pair_is_recorded(path: Path) -> None:
    PromptRecorder(path).record("a\ud800b", {})
    assert lines(path)[0]["prompt"] == "a\ud800b"


def test_only_the_owner_can_read_it(path: Path) -> None:
    PromptRecorder(path).record("secret", {})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    PromptRecorder(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_file_stays_as_it_is_and_a_moved_one_is_followed_by_another(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = PromptRecorder(path, limit_bytes=300)
    for index in range(50):
        recorder.record(f"prompt {index}", {})
    assert path.stat().st_size <= 300
    kept = [line["prompt"] for line in lines(path)]
    assert kept == [f"prompt {index}" for index in range(len(kept))] and 2 <= len(kept) < 5
    (warning,) = warnings(caplog)
    assert "has reached its limit of 300 bytes" in warning and str(path) in warning

    path.rename(path.with_suffix(".1"))
    recorder.record("another file", {})
    assert [line["prompt"] for line in lines(path)] == ["another file"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_prompts_but_leaves_whole_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = PromptRecorder(path)
    recorder.record("before", {})
    write = os.write
    room = [5, 0, 0]

    def full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: room.pop(0)])

    with monkeypatch.context() as patch:
        patch.setattr("edge_spec.prompt_record.os.write", full)
        recorder.record("torn", {})
        recorder.record("lost", {})
    recorder.record("after", {})
    assert [line["prompt"] for line in lines(path)] == ["before", "after"]
    (warning,) = warnings(caplog)
    assert "No space left on device" in warning


def test_a_line_that_a_crash_cut_short_spoils_no_other(path: Path) -> None:
    path.write_text('{"prompt": "to')
    PromptRecorder(path).record("whole", {})
    torn, whole = path.read_text().splitlines()
    assert torn == '{"prompt": "to' and json.loads(whole)["prompt"] == "whole"
    with pytest.raises(RequestError, match="line 1: not valid JSON"):
        read_questions(path, recorded=True)


def test_threads_write_whole_lines(path: Path) -> None:
    recorder = PromptRecorder(path)

    def write(name: int) -> None:
        for index in range(40):
            recorder.record(f"{name} {index} " + "x" * 500, {})

    threads = [threading.Thread(target=write, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["prompt"].split(" x")[0] for line in lines(path)) == sorted(
        f"{name} {index}" for name in range(6) for index in range(40)
    )


@pytest.mark.parametrize("prompt", [{"no": "prompt"}, [{"role": "user", "content": object()}], [1.5], 7])
def test_what_has_no_json_is_not_recorded_and_breaks_nothing(
    prompt: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = PromptRecorder(path)
    recorder.record(prompt, {})
    recorder.record(prompt, {})
    recorder.record("fine", {})
    assert [line["prompt"] for line in lines(path)] == ["fine"]
    assert len(warnings(caplog)) == 1


def test_places_that_cannot_be_recorded_to_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere.*No such file.*name a file of your own"):
        PromptRecorder(tmp_path / "nowhere" / "prompts.jsonl")
    with pytest.raises(RequestError, match="Is a directory"):
        PromptRecorder(tmp_path)
    os.mkfifo(path)
    with pytest.raises(RequestError, match="is no regular file"):
        PromptRecorder(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="cannot be recorded"):
        PromptRecorder(path)
    with pytest.raises(RequestError, match="limit_bytes is 0"):
        PromptRecorder(tmp_path / "other", limit_bytes=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_of_somebody_else_is_refused(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, -1)
    with pytest.raises(RequestError, match="belongs to somebody else"):
        PromptRecorder(path)


@pytest.mark.parametrize("limit", [0, -1, "1 MiB", 1.5, True])
def test_a_limit_that_is_no_number_of_bytes_is_refused(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(RequestError, match="limit_bytes is "):
        PromptRecorder(tmp_path / "record", limit_bytes=limit)


def test_a_path_that_cannot_be_recorded_to_says_why(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="null byte"):
        PromptRecorder(f"{tmp_path}/a\0b")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="a symbolic link, which is not followed"):
        PromptRecorder(tmp_path / "link")
