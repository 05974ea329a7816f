"""Decoders that optimum-onnx exports, from checkpoint to text: as transformers has them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import edge_spec
from edge_spec import cli
from edge_spec.bundle import Bundle, open_bundle
from edge_spec.errors import (
    CheckpointError,
    EdgeSpecError,
    MissingDependencyError,
    PairError,
    QualityError,
    UnsupportedError,
)
from edge_spec.export import export_pair
from edge_spec.runtime.model import Model
from tiny_models import EOS, TOKENS, letter_tokenizer, perturbed, random_model, save_checkpoint

needs_optimum = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None,
    reason="optimum-onnx is NOT INSTALLED: 'make test-optimum' runs these tests in an environment that has it",
)

CONTEXT = 128
_IDS = {"vocab_size": TOKENS, "bos_token_id": None, "eos_token_id": None}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
# Learned positions, positions from the mask, parallel residuals with rotary parts, ALiBi, one KV head, windows.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "opt with a narrow embedding": ("OPT", {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "gpt-neox": ("GPTNeoX", {**_SMALL, "intermediate_size": 96}),
    "bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", _SMALL),
    "gpt-neo": ("GPTNeo", {"hidden_size": 64, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
                           "num_heads": 4, "max_position_embeddings": CONTEXT, "window_size": 16}),
    "phi": ("Phi", {**_SMALL, "intermediate_size": 80}),
    "mistral with a window": ("Mistral", {**_SMALL, "intermediate_size": 80, "num_key_value_heads": 2,
                                          "sliding_window": 16}),
}  # fmt: skip


def decoder(kind: str, seed: int = 0) -> Any:
    """A random float32 model whose logits spread over a few nats."""
    import transformers

    name, sizes = DECODERS[kind]
    torch.manual_seed(seed)
    model_name = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, model_name)(getattr(transformers, f"{name}Config")(**sizes, **_IDS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(1.2 / (parameter.std() * parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


@dataclass(frozen=True)
class Exported:
    """A model as transformers has it, and as it was exported."""

    reference: Any
    bundle: Bundle

    def expected(self, tokens: list[int]) -> np.ndarray:
        """Logits of every token by one pass of transformers, float32 [tokens, vocab]."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([tokens])).logits[0]
        return np.asarray(logits.numpy())

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """What transformers generates."""
        with torch.no_grad():
            generated = self.reference.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in generated[0, len(tokens) :]]

    def model(self) -> Model:
        record = self.bundle.manifest.target
        return Model(self.bundle, record, ["CPUExecutionProvider"], CONTEXT - 1, True, threads=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function from a kind of decoder to the model and its checkpoint."""
    found: dict[str, tuple[Any, Path]] = {}

    def find(kind: str) -> tuple[Any, Path]:
        if kind not in found:
            model = decoder(kind)
            found[kind] = model, save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", model, eos=None)
        return found[kind]

    return find


@pytest.fixture(scope="module", params=DECODERS)
def exported(
    request: pytest.FixtureRequest,
    checkpoints: Callable[[str], tuple[Any, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    reference, checkpoint = checkpoints(request.param)
    report = export_pair(checkpoint, None, tmp_path_factory.mktemp("optimum") / "bundle", via="optimum")
    return Exported(reference, open_bundle(report.path))


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.ptp(expected) > 2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def tokens_of(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(3).integers(0, TOKENS, count)]


@needs_optimum
def test_logits_are_those_of_transformers_however_tokens_arrive(exported: Exported) -> None:
    model, text = exported.model(), tokens_of(90)
    expected = exported.expected(text)
    close(model.forward(text, range(90)), expected)
    model.cache.rollback(0)
    model.prefill(text[:30])
    steps = [model.forward([token], [0]).copy() for token in text[30:36]]
    close(np.concatenate(steps), expected[30:36])
    model.forward([1, 2, 3, 4], range(4))
    model.cache.rollback(33)
    close(model.forward(text[33:50], range(17)), expected[33:50])


@needs_optimum
def test_greedy_text_is_that_of_transformers_with_speculation_and_without(exported: Exported) -> None:
    text = tokens_of(12)
    expected = exported.greedy(text, 40)
    with edge_spec.load(exported.bundle.path, threads=1) as engine:
        for speculation in ("off", "auto", "suffix"):
            assert list(engine.generate(text, max_new_tokens=40, speculation=speculation).token_ids) == expected


@needs_optimum
def test_the_check_has_measured_the_written_graph(exported: Exported) -> None:
    quality = exported.bundle.manifest.target.quality
    assert quality is not None
    assert abs(quality.mean_kl) < 1e-6 and quality.top1_agreement == 1.0


@needs_optimum
def test_a_llama_is_the_same_by_either_way(tmp_path: Path) -> None:
    reference = random_model(vocab_size=TOKENS)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", reference, eos=None)
    text = tokens_of(50)
    found = {}
    for via in ("native", "optimum"):
        report = export_pair(checkpoint, None, tmp_path / via, recipe="fp32", via=via)  # type: ignore[arg-type]
        record = report.manifest.target
        assert [graph.via for graph in record.graphs] == [via] * len(record.graphs)
        bundle = open_bundle(report.path)
        model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], CONTEXT, True, threads=1)
        model.prefill(text[:20])
        logits = model.forward(text[20:], range(30)).copy()
        with edge_spec.load(report.path, threads=1) as engine:
            found[via] = logits, engine.generate(text[:12], max_new_tokens=60).token_ids
    close(found["optimum"][0], found["native"][0])
    expected = Exported(reference, bundle).greedy(text[:12], 60)
    assert list(found["optimum"][1]) == list(found["native"][1]) == expected


@needs_optimum
@pytest.mark.parametrize(("target_via", "draft_via"), [("optimum", "native"), ("native", "optimum"), ("optimum", None)])
def test_either_model_of_a_pair_may_come_this_way(tmp_path: Path, target_via: Any, draft_via: Any) -> None:
    reference = random_model(vocab_size=TOKENS)
    checkpoint = save_checkpoint(tmp_path / "target", reference, eos=None)
    draft = save_checkpoint(tmp_path / "draft", perturbed(reference, 0.001), eos=None)
    report = export_pair(
        checkpoint,
        draft,
        tmp_path / "bundle",
        recipe="fp32",
        draft_recipe="fp32",
        via=target_via,
        draft_via=draft_via,
    )
    assert report.manifest.draft is not None
    assert report.manifest.draft.graphs[0].via == (draft_via or target_via)
    text = tokens_of(12)
    expected = Exported(reference, open_bundle(report.path)).greedy(text, 60)
    with edge_spec.load(report.path, threads=1) as engine:
        found = engine.generate(text, max_new_tokens=60, speculation="model", max_draft=4)
        assert list(found.token_ids) == expected
        assert found.statistics.accepted > 30


@needs_optimum
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_int4_is_measured_and_owes_the_same_text_with_speculation_and_without(
    kind: str, checkpoints: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    report = export_pair(checkpoints(kind)[1], None, tmp_path / "bundle", recipe="int4", via="optimum", check=False)
    recipe = report.manifest.target.recipe
    assert (recipe["embedding"], recipe["attention"], recipe["lm_head"]) == ("fp32", "int4", "int4")
    text = tokens_of(12)
    with edge_spec.load(report.path, threads=1) as engine:
        assert engine.exactness == "bitwise"
        plain = engine.generate(text, max_new_tokens=40, speculation="off").token_ids
        assert engine.generate(text, max_new_tokens=40, speculation="suffix").token_ids == plain
    assert any(file.stat().st_size for file in report.path.rglob("*.data"))
    assert sorted(file.name for file in (report.path / "target").iterdir()) == ["model.onnx", "model.onnx.data"]


@needs_optimum
def test_an_export_that_strays_too_far_is_refused(
    checkpoints: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    # The random model's logits are far steeper than a trained one's.
    steep = decoder("gpt2")
    with torch.no_grad():
        steep.transformer.ln_f.weight.mul_(20)
    checkpoint = save_checkpoint(tmp_path / "steep", steep, eos=None)
    with pytest.raises(QualityError, match="strays too far"):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe="int4", via="optimum")
    assert not (tmp_path / "bundle").exists()


@needs_optimum
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recipe": "w8a8"}, "'w8a8' cannot be had by way of optimum; fp32, int4, int4-128 can"),
        ({"recipe": "fp16"}, "'fp16' cannot be had by way of optimum"),
        ({"draft_recipe": "w8a8"}, "'w8a8' cannot be had by way of optimum"),
        ({"device": "cuda"}, "run on the CPU only"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(
    options: dict[str, Any], reason: str, checkpoints: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    with pytest.raises(EdgeSpecError, match=reason):
        export_pair(checkpoints("gpt2")[1], None, tmp_path / "bundle", via="optimum", **options)


@needs_optimum
def test_a_checkpoint_that_is_damaged_or_not_for_this_is_an_error_of_the_checkpoint(
    checkpoints: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    import shutil

    def changed(name: str, **entries: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints("gpt2")[1], folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **entries}))
        return folder

    cases = {
        changed("encoder", model_type="bert"): (UnsupportedError, "does not export model_type 'bert'"),
        changed("unknown", model_type="no-such-model"): (UnsupportedError, "does not export model_type"),
        changed("quantized", quantization_config={"bits": 4}): (UnsupportedError, "is quantized"),
        changed("deeper", n_layer=3): (CheckpointError, "lacks the tensor"),
        changed("wider", n_embd=128): (CheckpointError, "cannot load|another shape"),
        tmp_path / "nothing": (CheckpointError, "no checkpoint at"),
    }
    stranger = changed("stranger")
    letter_tokenizer("abc").save(str(stranger / "tokenizer.json"))
    for checkpoint, (kind, reason) in cases.items():
        with pytest.raises(kind, match=reason):
            export_pair(checkpoint, None, tmp_path / "bundle", via="optimum")
    with pytest.raises(PairError, match="cannot be written with a part of its vocabulary"):
        export_pair(checkpoints("gpt2")[1], stranger, tmp_path / "bundle", via="optimum", draft_vocab=3)
    assert not (tmp_path / "bundle").exists()


@needs_optimum
def test_the_command_prints_nothing_but_its_own_words(
    checkpoints: Callable[[str], tuple[Any, Path]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["export", "--target", str(checkpoints("opt")[1]), "--output", str(tmp_path / "out"), "--via", "optimum"]
    assert cli.main([*command, "--json"]) == 0
    printed = capfd.readouterr()
    manifest = json.loads(printed.out)
    assert manifest["target"]["graphs"][0]["via"] == "optimum"
    assert manifest["target"]["architecture"]["family"] == "opt"
    assert "Warning" not in printed.err and "deprecated" not in printed.err.lower()


def test_without_optimum_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model(), eos=EOS)
    monkeypatch.setitem(sys.modules, "optimum.exporters.onnx", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'edge-spec\[optimum\]'"):
        export_pair(checkpoint, None, tmp_path / "bundle", via="optimum")
    command = ["export", "--target", str(checkpoint), "--output", str(tmp_path / "bundle"), "--via", "optimum"]
    assert cli.main(command) == 2
    assert "edge-spec[optimum]" in capsys.readouterr().err


def test_the_native_exporter_points_to_optimum_where_it_does_not_know_a_model(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model())
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(UnsupportedError, match="'gpt2' is not supported.*--via optimum"):
        export_pair(checkpoint, None, tmp_path / "bundle")
