"""The demo on a tiny model, and the words it finds for good and bad figures."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from edge_spec.demo import run_demo
from edge_spec.demo.race import Lane, Outcome, race
from edge_spec.demo.view import print_summary, verdict
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.statistics import Statistics
from gguf_files import model_metadata, model_tensors, tokenizer_metadata, write_model


class Words:
    """Stands in for a text stream: every token is a word."""

    def push(self, token: int) -> str:
        return f"w{token} "

    def flush(self) -> str:
        return ""


def tiny_model(folder: Path) -> Path:
    metadata = {**model_metadata(), **tokenizer_metadata(merges=("z z",))}
    tensors = model_tensors()
    tensors["token_embd.weight"] *= 0.05  # or the logits would be too steep for w8a8
    return write_model(folder / "tiny.gguf", metadata=metadata, tensors=tensors)


def lane(rounds: Sequence[Sequence[int]], seconds: float = 0.0) -> Lane:
    def chunks() -> Iterator[Chunk]:
        tokens: list[int] = []
        for index, emitted in enumerate(rounds, 1):
            tokens += emitted
            origins = ("lookup",) * (len(emitted) - 1) + ("target",)
            statistics = Statistics(prompt_tokens=1, new_tokens=len(tokens), rounds=index)
            done = Completion("", tuple(tokens), "stop", statistics) if index == len(rounds) else None
            yield Chunk("", tuple(emitted), origins, done)

    return Lane("a lane", chunks(), Words(), seconds)  # type: ignore[arg-type]


def outcome(speedup: float, identical: bool = True) -> Outcome:
    return Outcome(identical, tokens=100, plain_seconds=speedup, speculative_seconds=1.0, target_calls=50)


def test_lane_marks_the_tokens_that_were_drafted() -> None:
    one = lane([[1, 2, 3], [4]])
    race([one], lambda: None)
    assert [piece for piece in one.pieces if piece[0]] == [("w1 ", True), ("w2 ", True), ("w3 ", False), ("w4 ", False)]
    assert one.tokens == 4


def test_race_gives_every_round_to_the_lane_that_has_had_less_time() -> None:
    late, early = lane([[1], [2]], seconds=1e6), lane([[1], [2]])
    after: list[tuple[int, int]] = []
    race([late, early], lambda: after.append((late.tokens, early.tokens)))
    assert after == [(0, 1), (0, 2), (1, 2), (2, 2)]


def test_outcome_compares_tokens_and_times() -> None:
    plain, speculative = lane([[1], [2], [3]]), lane([[1, 2], [3]])
    race([plain, speculative], lambda: None)
    plain.seconds, speculative.seconds = 3.0, 1.5
    result = Outcome.of(plain, speculative)
    assert result.identical
    assert (result.speedup, result.mean_accepted_length) == (2.0, 1.5)
    assert (result.plain_speed, result.speculative_speed) == (1.0, 2.0)


def test_total_weighs_prompts_by_their_time() -> None:
    total = Outcome.total([outcome(3.0), Outcome(True, 100, 3.0, 3.0, 100)])
    assert total.speedup == pytest.approx(6 / 4)
    assert total.mean_accepted_length == pytest.approx(200 / 150)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([outcome(2.0), outcome(1.5)], r"Identical: yes.*1\.75 times as fast over all prompts, from 1\.50 to 2\.00\.$"),
        ([outcome(2.0), outcome(0.8)], r"1\.40 times as fast.*pays for wrong guesses"),
        ([outcome(0.8)], r"slower here, 0\.80 times as fast\. .*pays for wrong guesses"),
        ([outcome(1.0)], r"made no difference to the speed \(1\.00 times as fast\)\.$"),
        ([outcome(2.0), outcome(2.0, identical=False)], r"did not give the same tokens.*report"),
    ],
)
def test_verdict_is_honest(outcomes: list[Outcome], words: str) -> None:
    assert re.search(words, verdict(outcomes))


def test_demo_exports_and_measures_once_then_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path)
    outputs, bars = [], []
    for _ in range(2):
        console = Console(file=io.StringIO(), width=100, force_terminal=False)
        assert run_demo(str(model), ["one two one two"], 20, tmp_path / "cache", console) == 0
        outputs.append(console.file.getvalue())  # type: ignore[attr-defined]
        bars.append(re.findall(r"^(.*\S) +━+ 100%", capsys.readouterr().err, re.MULTILINE))
    assert bars == [["export target", "check target", "seal", "target"], []]
    assert "Exported to" in outputs[0]
    assert "which was exported before" in " ".join(outputs[1].split())
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert "plain: 20 tokens" in outputs[1]
    assert "Identical: yes" in outputs[1]


def test_demo_exports_again_when_the_cached_bundle_is_damaged(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    console = Console(file=io.StringIO(), width=100)
    assert run_demo(str(model), ["one two"], 4, tmp_path / "cache", console) == 0
    (weights,) = (tmp_path / "cache").glob("*/target/*.data")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert run_demo(str(model), ["one two"], 4, tmp_path / "cache", console) == 0


def test_demo_on_a_terminal_shows_both_columns(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    assert run_demo(str(model), ["one two one two"], 20, tmp_path / "cache", console) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"plain ─+╮ +╭─+ speculative", text)


def test_figures_stay_whole_on_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    print_summary(console, [Outcome(True, 100, 3.0, 2.0, 50)])
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompts", "most", "message"), [([""], 8, "a prompt is empty"), (["one"], -1, "max_new_tokens is -1")]
)
def test_what_cannot_be_asked_is_told_before_the_export(
    tmp_path: Path, prompts: list[str], most: int, message: str
) -> None:
    with pytest.raises(EdgeSpecError, match=message):
        run_demo("nowhere.gguf", prompts, most, tmp_path / "cache")


def test_missing_weights_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edge_spec.demo.pair.WEIGHTS_PACKAGE", "no-such-distribution")
    with pytest.raises(CheckpointError, match="make demo"):
        run_demo(cache=tmp_path)
