"""How much wall time plain decoding adds to the bare session calls it makes.

Every session call is timed from within the same generation, so that noise of the machine hits both sides alike.

    python benchmarks/plain_overhead.py BUNDLE [--tokens 128] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import edge_spec

PROMPT = "Explain how a bicycle stays upright, step by step."


class TimedSession:
    """Stands in for a model's session and adds up the seconds spent in its calls."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds = 0.0

    def io_binding(self) -> Any:
        """Return a new binding of the session."""
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        """Run the session and note the time."""
        started = perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += perf_counter() - started


def main() -> None:
    """Print the overhead of every repetition and their median as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with edge_spec.load(arguments.bundle) as engine:
        model = engine._target
        timed = model._session = TimedSession(model._session)
        overheads = []
        for _ in range(arguments.repeat):
            timed.seconds = 0.0
            started = perf_counter()
            engine.generate(PROMPT, max_new_tokens=arguments.tokens, speculation="off")
            overheads.append((perf_counter() - started) / timed.seconds - 1)
    print(json.dumps({"overheads": overheads, "median_overhead": median(overheads)}))


if __name__ == "__main__":
    main()
