"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_spec.bundle import new_bundle
from edge_spec.manifest import ArchitectureRecord, GraphRecord, Manifest, ModelRecord, QualityRecord, RopeRecord

_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_REAL_WEIGHTS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "qwen-draft": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen-target": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}


def _weights_folder() -> Path:
    return Path(os.environ.get("EDGE_SPEC_WEIGHTS") or Path.home() / ".cache" / "edge-spec" / "weights")


def pytest_report_header() -> list[str]:
    folder = _weights_folder()
    missing = [file for file in _REAL_WEIGHTS.values() if not (folder / file).is_file()]
    weights = f"real weights: all in {folder}"
    if missing:
        lacks = f"{folder} lacks {', '.join(missing)} (EDGE_SPEC_WEIGHTS names a folder)"
        weights = f"real weights: tests are SKIPPED, since {lacks}"
    has_optimum = importlib.util.find_spec("optimum") is not None
    optimum = "installed" if has_optimum else "tests of it are SKIPPED here; 'make test-optimum' runs them"
    return [weights, f"optimum-onnx: {optimum}"]


@pytest.fixture(scope="session", autouse=True)
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place of this session's own for what loading measures."""
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_SPEC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def real_weights() -> Callable[[str], Path]:
    """Return a function from a model's short name to its GGUF file, which skips the test where the file is absent."""

    def find(name: str) -> Path:
        path = _weights_folder() / _REAL_WEIGHTS[name]
        if not path.is_file():
            pytest.skip(f"no real weights of {name}: {path} is absent (EDGE_SPEC_WEIGHTS names another folder)")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2_bundle(real_weights: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of SmolLM2-135M-Instruct, exported once a session; skips the test where its weights are absent."""
    from edge_spec.export import export_pair

    output = tmp_path_factory.mktemp("bundles") / "smollm2"
    export_pair(real_weights("smollm2"), None, output)
    return output


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that exports a tiny random pair (see ``tiny_models.export_tiny``), each kind once a session."""
    from tiny_models import export_tiny  # imports torch

    bundles: dict[str, Path] = {}

    def find(**kind: Any) -> Path:
        key = repr(sorted(kind.items()))
        if key not in bundles:
            bundles[key] = export_tiny(tmp_path_factory.mktemp("tiny"), **kind)
        return bundles[key]

    return find


@pytest.fixture
def described_bundle(tmp_path: Path) -> Path:
    """A bundle as far as ``inspect`` looks: a true manifest over files that are no graphs."""
    from edge_spec.export.recipe import RECIPES

    facts = ArchitectureRecord(
        "llama", 2, 64, 128, 4, 2, 16, 320, 512, (RopeRecord(10000.0, False, 16, 2),), None, 0, True
    )
    quality = QualityRecord(tokens=160, mean_kl=0.0412, p95_kl=0.1234, top1_agreement=0.95)
    recipe = RECIPES["w8a8"].to_dict()
    graphs = (GraphRecord("target/model.onnx", tree=True, kv="float32"),)
    target = ModelRecord("coder-1.5b.gguf", "ab" * 32, facts, recipe, "int8", graphs, quality)
    manifest = Manifest(
        created_by="edge-spec 0.1.0",
        device="cpu",
        vocab_size=300,
        context_length=512,
        eos_token_ids=(2, 7),
        bos_token_id=None,
        special_token_ids=(0, 1, 2, 7),
        named_tokens={"eos_token": "<|end|>"},
        default_sampling={"temperature": 0.7},
        target=target,
        draft=None,
        files={},
    )
    path = tmp_path / "coder.pair"
    with new_bundle(path) as (folder, seal):
        (folder / "target").mkdir()
        (folder / "target" / "model.onnx").write_bytes(bytes(3 << 20))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        seal(manifest)
    return path


@pytest.fixture(scope="session")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny random model with a chat template."""
    return _export_tiny(tmp_path_factory.mktemp("chat"), **{"tokenizer.chat_template": _CHAT_TEMPLATE})


@pytest.fixture(scope="session")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny random model without a chat template."""
    return _export_tiny(tmp_path_factory.mktemp("plain"))


def _export_tiny(folder: Path, **metadata: str) -> Path:
    from edge_spec.export import export_pair
    from gguf_files import METADATA, write_model

    model = write_model(folder / "tiny.gguf", metadata={**METADATA, **metadata})
    return export_pair(model, None, folder / "tiny.pair", recipe="fp32").path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright, whose event loop runs in this thread meanwhile: no other may."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("THE PAGE IS NOT TESTED: there is no chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="THE PAGE IS NOT TESTED: playwright is not installed")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """A visit to the server's page, see ``page_visit.Visit``."""
    from page_visit import Visit

    visit = Visit(browser)
    yield visit
    visit.close()
