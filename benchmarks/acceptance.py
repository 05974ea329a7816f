"""How many draft tokens each verification rule keeps on a real pair: what decides the default rule.

    python benchmarks/acceptance.py BUNDLE [--per-category 2] [--tokens 64] [--max-draft 4] [--temperatures 0 0.7 1.0]

Every prompt is answered with every rule at every temperature, with the same seeds. At temperature 0 all rules are one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import edge_spec
from edge_spec.bench.prompts import SHIPPED_PROMPTS, pick
from edge_spec.prompt_file import read_questions

RULES = ("coupled", "token", "block")


def main() -> None:
    """Print one JSON object per temperature and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, default=SHIPPED_PROMPTS)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-draft", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    arguments = parser.parse_args()
    prompts = pick(read_questions(arguments.prompts), per_category=arguments.per_category)
    counts: dict[tuple[float, str], list[int]] = defaultdict(lambda: [0] * (3 + arguments.max_draft))
    with edge_spec.load(arguments.bundle) as engine:
        for number, prompt in enumerate(prompts, 1):
            for temperature in arguments.temperatures:
                for rule in RULES if temperature else RULES[:1]:
                    statistics = engine.chat(
                        prompt.opening,
                        max_new_tokens=arguments.tokens,
                        temperature=temperature,
                        seed=number,
                        speculation="model",
                        verification=rule,
                        max_draft=arguments.max_draft,
                    ).statistics
                    total = counts[temperature, rule]
                    # The first round drafts nothing, whatever the rule.
                    total[0] += statistics.new_tokens - statistics.first_round_tokens
                    total[1] += statistics.rounds - 1
                    total[2] += statistics.drafted_by_position[0] if statistics.drafted else 0
                    for position, accepted in enumerate(statistics.accepted_by_position):
                        total[3 + position] += accepted
            print(f"prompt {number} of {len(prompts)}", file=sys.stderr)
    for (temperature, rule), (tokens, rounds, drafted, *accepted) in counts.items():
        figures = {
            "temperature": temperature,
            "rule": rule,
            "mean_accepted_length": round(tokens / rounds, 3),
            "acceptance_by_position": [round(count / drafted, 3) for count in accepted],
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
