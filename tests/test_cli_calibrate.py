"""``edge-spec calibrate``: the costs it shows, and when it measures them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec import cli


def test_calibrate_shows_what_rows_cost(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(plain_pair)]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +[\d.]+ +([\d.]+)  █+$", text, re.MULTILINE)
    assert [int(count) for count, _ in rows][:4] == [1, 2, 3, 4]
    ratios = [float(ratio) for _, ratio in rows]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios)
    assert "draft model: none" in text
    assert re.search(r"overhead: [\d.]+ ms a round", text)


def test_calibrate_shows_the_draft_model(tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_bundle(draft="same"))
    assert cli.main(["calibrate", path]) == 0
    text = capsys.readouterr().out
    assert re.search(r"draft model: milliseconds of a step: [\d.]+ at past 32; \d+% of a target's", text)
    assert re.search(r"catching up on tokens: [\d.]+ for 8, [\d.]+ for 64", text)
    assert re.search(r"guesses \d+% of \d+ tokens", text)


def test_calibrate_measures_again_only_when_told(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(*options: str) -> dict[str, Any]:
        assert cli.main(["calibrate", str(plain_pair), "--json", *options]) == 0
        costs: dict[str, Any] = json.loads(capsys.readouterr().out)
        return costs

    first = measured()
    assert measured() == first
    assert measured("--threads", "1") != first
    again = measured("--fresh")
    assert again != first
    assert measured() == again
    assert len(again["verify_seconds"]["32"]) == len(again["rows"])
    assert again["draft_seconds"] is again["draft_agreement"] is None
    assert {"target", "draft", "overhead", "agreement"} <= again["calibration"].keys()


def test_calibrate_draws_an_image(plain_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["calibrate", str(plain_pair), "--plot", str(tmp_path / "costs.png")]) == 0
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["calibrate", str(plain_pair), "--plot", str(tmp_path / "costs.doc")]) == 2
    assert "expected a file that ends in .png" in capsys.readouterr().err
    assert cli.main(["calibrate", str(plain_pair), "--plot", str(tmp_path / "nowhere" / "costs.png")]) == 2
    shown = capsys.readouterr()
    assert "there is no folder" in shown.err and not shown.out


def test_calibrate_names_the_extra_for_images(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["calibrate", str(plain_pair), "--plot", "costs.png"]) == 2
    assert "pip install 'edge-spec[bench]'" in capsys.readouterr().err


def test_calibrate_works_without_the_package_for_bars(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "edge_spec.progress_bars", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["calibrate", str(plain_pair), "--fresh"]) == 0
    assert capsys.readouterr().out.startswith("target: milliseconds")
