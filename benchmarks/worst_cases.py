"""What "auto" costs where there is nothing to gain: paired with plain decoding, interleaved.

    python benchmarks/worst_cases.py BUNDLE [--sabotaged BUNDLE] [--tokens 96] [--prompts 6] [--output FILE.json]

Three cases: prompts of random tokens; temperature 1.5; and, in a bundle whose draft has random weights (see
random_draft.py), ordinary prompts. Each prompt is answered plainly and by "auto" in turn (A B, B A). The ratio is
plain seconds per token over those of "auto", prompt included; 1 is as fast as plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import edge_spec
from edge_spec.bench.prompts import SHIPPED_PROMPTS, alternate
from edge_spec.prompt_file import read_questions

MODES = ("off", "auto")


def answer(engine: edge_spec.Engine, prompt: Any, options: dict[str, Any]) -> edge_spec.Completion:
    """Answer messages as a chat, and continue token ids; nothing of the prompt is in the cache yet."""
    with engine.session() as session:
        return session.chat(prompt, **options) if isinstance(prompt, tuple) else session.generate(prompt, **options)


def measure(bundle: Path, name: str, prompts: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts in both modes and compare."""
    seconds = dict.fromkeys(MODES, 0.0)
    decoding = dict.fromkeys(MODES, 0.0)
    identical = rounds = tokens = 0
    with edge_spec.load(bundle) as engine:
        for mode in MODES:
            answer(engine, [1, 2, 3], {"max_new_tokens": 8, "speculation": mode})
        for number, prompt in enumerate(prompts):
            texts = {}
            for mode in MODES if number % 2 else MODES[::-1]:
                completion = answer(engine, prompt, {**options, "seed": number, "speculation": mode})
                statistics = completion.statistics
                seconds[mode] += statistics.total_seconds
                decoding[mode] += statistics.total_seconds - statistics.ttft_seconds
                texts[mode] = completion.token_ids
                if mode == "auto":
                    rounds += statistics.rounds
                    tokens += statistics.new_tokens
            identical += texts["off"] == texts["auto"]
            print(f"{name}: prompt {number + 1} of {len(prompts)}", file=sys.stderr)
    return {
        "case": name,
        "identical": f"{identical} of {len(prompts)}",
        "mean_accepted_length": round(tokens / rounds, 2),
        "decode_ratio": round(decoding["off"] / decoding["auto"], 3),
        "ratio": round(seconds["off"] / seconds["auto"], 3),
    }


def main() -> None:
    """Print one JSON object per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sabotaged", type=Path, metavar="BUNDLE")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--output", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    def cases() -> Iterator[dict[str, Any]]:
        usual = [question.opening for question in alternate(read_questions(SHIPPED_PROMPTS))][: arguments.prompts]
        options: dict[str, Any] = {"max_new_tokens": arguments.tokens}
        if arguments.sabotaged:
            yield measure(arguments.sabotaged, "random draft", usual, options)
        random = np.random.default_rng(0)
        noise = [random.integers(1000, 40_000, 64).tolist() for _ in range(arguments.prompts)]
        yield measure(arguments.bundle, "random tokens", noise, options)
        yield measure(arguments.bundle, "temperature 1.5", usual, {**options, "temperature": 1.5})

    results = []
    for result in cases():
        print(json.dumps(result), flush=True)
        results.append(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
