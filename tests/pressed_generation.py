"""Generates with somebody beside it who takes its memory; told by lines on stdin when to go on."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import edge_spec


def main() -> None:
    """Print a JSON line when ready, when half of the text is there, when three quarters are, and at the end."""
    bundle, new_tokens, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    with edge_spec.load(bundle) as engine:
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "speculation": "auto"}
        with engine.session() as session:
            undisturbed = session.generate(prompt, **options)
        engine.generate(prompt[:-1], max_new_tokens=2)  # an idle conversation
        _say(ready=True)
        with engine.session() as session:
            tokens: list[int] = []
            pauses = [new_tokens // 2, new_tokens * 3 // 4]
            completion = None
            for chunk in session.stream(prompt, **options):
                tokens += chunk.token_ids
                completion = chunk.completion
                if pauses and len(tokens) >= pauses[0]:
                    pauses.pop(0)
                    _say(tokens=len(tokens))
                    sys.stdin.readline()
                    time.sleep(0.2)  # the watch looks again
        assert completion is not None
        _say(
            level=engine.exactness,
            expected=undisturbed.token_ids,
            undisturbed_events=len(undisturbed.statistics.memory_events),
            tokens=tokens,
            events=[[event.action, event.part] for event in completion.statistics.memory_events],
        )


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
