"""What each drafter brings against plain decoding of the same bundle: paired, interleaved, greedy.

    python benchmarks/drafting.py BUNDLE [--prompts FILE] [--limit N] [--tokens 96] [--max-draft K ...]

Every prompt is answered plainly and by every drafter in turn before the next prompt comes. The speedup is the ratio of
their wall clock, prompt included. FILE is in the format of Spec-Bench: JSON lines with "category" and "turns".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import edge_spec


def main() -> None:
    """Print one JSON object per way to decode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--limit", type=int, help="use only so many prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--max-draft", type=int, nargs="+", default=[None])
    arguments = parser.parse_args()
    prompts = [json.loads(line)["turns"][0] for line in arguments.prompts.read_text("utf-8").splitlines()]
    if arguments.limit:
        prompts = prompts[:: max(1, len(prompts) // arguments.limit)][: arguments.limit]
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with edge_spec.load(arguments.bundle) as engine:
        ways = [("off", None), *((drafter, k) for drafter in engine.drafters for k in arguments.max_draft)]
        for number, prompt in enumerate(prompts, 1):
            plain_tokens = None
            for drafter, max_draft in ways:
                completion = engine.chat(
                    [{"role": "user", "content": prompt}],
                    max_new_tokens=arguments.tokens,
                    speculation=drafter,
                    max_draft=max_draft,
                )
                plain_tokens = plain_tokens or completion.token_ids
                statistics = completion.statistics
                total = totals[drafter if max_draft is None else f"{drafter} {max_draft}"]
                total["identical"] += completion.token_ids == plain_tokens
                total["tokens"] += statistics.new_tokens
                total["rounds"] += statistics.rounds
                total["seconds"] += statistics.total_seconds
                total["later_tokens"] += statistics.new_tokens - statistics.first_round_tokens
                total["decode_seconds"] += statistics.total_seconds - statistics.ttft_seconds
            print(f"prompt {number} of {len(prompts)}", file=sys.stderr)
    for name, total in totals.items():
        figures = {
            "drafter": name,
            "identical": f"{total['identical']:.0f} of {len(prompts)}",
            "mean_accepted_length": round(total["tokens"] / total["rounds"], 2),
            "tokens_per_second": round(total["later_tokens"] / total["decode_seconds"], 2),
            "speedup": round(totals["off"]["seconds"] / total["seconds"], 2),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
