"""The demo: one small model answers a few prompts twice at once, plainly and speculatively."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from edge_spec.bundle import open_bundle
from edge_spec.demo.pair import cached_pair
from edge_spec.demo.race import Lane, Outcome, race
from edge_spec.demo.view import open_view, print_legend, print_summary
from edge_spec.errors import RequestError
from edge_spec.manifest import CHAT_TEMPLATE
from edge_spec.progress_bars import ProgressBars
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.load import load
from edge_spec.runtime.request import checked_count
from edge_spec.runtime.text_stream import TextStream
from edge_spec.runtime.tokenizer import TextTokenizer

MAX_NEW_TOKENS = 110

# The first two answers repeat much of their prompt, where guesses are found for nothing; the third does not, and is
# left to the head, if there is one.
PROMPTS = (
    "Correct the spelling mistakes in this text:\n\nDear Tom, thank you for your letter. I was very happy to recieve "
    "it. We will arive at the station on Friday evening at seven, and we are looking forward to seeing you and the "
    "children. Please tell Anna that we will bring the books and the blue lamp.",
    "Turn this text into a list of bullet points:\n\nCheck the oil before every flight. Fill the tanks to the brim and "
    "drain a sample to look for water. Walk around the aircraft and look at the tyres, the propeller and the control "
    "surfaces. Set the altimeter to the pressure of the airfield. Test the brakes as soon as the aircraft begins to "
    "move.",
    "Explain in three sentences why the sky is blue.",
)


def run_demo(
    model: str | None = None,
    prompt: Sequence[str] = PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    cache: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the demo and return its exit status: 1 if speculation changed a text, which it must not.

    Args:
        model: a GGUF file, Hugging Face folder or hub id; by default the model that ``make demo`` installs.
        prompt: what to ask, one after the other.
        max_new_tokens: longest answer.
        cache: folder the exported bundle is kept in; by default in the user's cache.
        console: where to show it; by default stdout.

    Raises:
        EdgeSpecError: the model cannot be found, exported or loaded, or there is nothing to ask or to answer.
    """
    checked_count("max_new_tokens", max_new_tokens, 1)
    if not all(prompt):
        raise RequestError("a prompt is empty; ask something (--prompt).")
    console = console or Console(highlight=False)
    path = cached_pair(model, cache, console)
    # Two engines, so that neither answer waits for the turns of the other.
    with _load(path) as plain, _load(path) as speculative:
        tokenizer = TextTokenizer(open_bundle(path, verify=False).tokenizer_path)
        for engine in (plain, speculative):
            engine.generate("Once upon a time", max_new_tokens=8, speculation="off")  # first calls are slower
        print_legend(console, "head" in speculative.drafters)
        outcomes = []
        for number, text in enumerate(prompt, 1):
            lanes = (
                _lane("plain", plain, text, max_new_tokens, "off", tokenizer),
                _lane("speculative", speculative, text, max_new_tokens, "auto", tokenizer),
            )
            with open_view(console, f"prompt {number} of {len(prompt)}", text, lanes) as update:
                race(lanes, update)
            outcomes.append(Outcome.of(*lanes))
    print_summary(console, outcomes)
    return 0 if all(outcome.identical for outcome in outcomes) else 1


def _load(path: Path) -> Engine:
    """Load a bundle, and show how far its measurement is where it takes place."""
    with ProgressBars(measuring=True) as bars:
        return load(path, progress=bars.share)


def _lane(
    title: str, engine: Engine, text: str, max_new_tokens: int, speculation: str, tokenizer: TextTokenizer
) -> Lane:
    question = [{"role": "user", "content": text}] if CHAT_TEMPLATE in engine.manifest.files else text
    # In a session of its own, since the second answer would otherwise find the prompt in the cache.
    chunks = engine.session().stream(question, max_new_tokens=max_new_tokens, speculation=speculation)
    return Lane(title, chunks, TextStream(tokenizer, ()))
