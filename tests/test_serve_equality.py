"""The same seed gives the same text through Python, the server and the command line, whoever drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import edge_spec
from edge_spec import cli
from edge_spec.export import export_pair
from running_server import serving
from tiny_models import CHAT_TEMPLATE

SETTINGS = [(0.0, None), (0.8, 3), (1.0, 11)]


def require_one_text(
    bundle: Path, prompts: Sequence[str], length: int, drafters: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ask all three ways, with every drafter, and compare."""
    with edge_spec.load(bundle) as engine, serving(engine) as server:
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}]
            for temperature, seed in SETTINGS:
                texts = set()
                for drafter in drafters:
                    options = {"max_new_tokens": length, "temperature": temperature, "seed": seed}
                    texts.add(engine.chat(messages, **options, speculation=drafter).text)  # type: ignore[arg-type]
                    fields = {"max_tokens": length, "temperature": temperature, "seed": seed, "speculation": drafter}
                    answer = server.chat(messages=messages, **fields).json()
                    texts.add(answer["choices"][0]["message"]["content"])
                    words = ["--temperature", str(temperature), *([] if seed is None else ["--seed", str(seed)])]
                    words += ["--max-new-tokens", str(length), "--speculation", drafter, "--json"]
                    capsys.readouterr()
                    assert cli.main(["run", str(bundle), prompt, *words]) == 0
                    texts.add(json.loads(capsys.readouterr().out)["text"])
                assert len(texts) == 1, (prompt, temperature, texts)


def test_one_text_on_a_tiny_pair(tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny_bundle(chat_template=CHAT_TEMPLATE, draft="close")
    require_one_text(bundle, ["one two one two"], 24, ["off", "auto", "model", "suffix"], capsys)


def test_one_text_on_real_weights(
    real_weights: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = export_pair(real_weights("smollm2"), None, tmp_path / "smollm2").path
    require_one_text(bundle, ["Name three fruits."], 16, ["off", "auto"], capsys)
