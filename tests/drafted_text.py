"""What every engine owes its text, whatever kind of head drafts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from edge_spec import Completion, Engine


def same(one: Completion, other: Completion) -> bool:
    return (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)


def require_that_rules_hold(engine: Engine, prompt: Sequence[int], rule: str, options: dict[str, Any]) -> None:
    """A head's proposals can be verified by any rule, and under the coupled one they do not show."""
    request = {"max_new_tokens": 40, "temperature": 0.9, "seed": 5, **options}
    answer = engine.generate(prompt, speculation="head", max_draft=3, verification=rule, **request)
    assert len(answer.token_ids) == 40
    assert answer.statistics.drafted > 0
    if rule == "coupled":
        assert same(answer, engine.generate(prompt, speculation="off", **request))


def require_that_conversations_go_on(engine: Engine) -> None:
    """Two conversations, whose ends are written otherwise later on, are those of plain decoding."""
    random = Random(3)
    texts: list[list[int]] = [[], []]
    with engine.session() as one, engine.session() as other:
        for number in range(6):
            session, text = ((one, texts[0]), (other, texts[1]))[number % 2]
            if number > 3:
                del text[-random.randrange(1, 30) :]
            text += [random.randrange(28) for _ in range(random.randrange(1, 40))]
            plain = engine.generate(text, max_new_tokens=12, speculation="off")
            answer = session.generate(text, max_new_tokens=12, speculation="head", max_draft=3)
            assert same(answer, plain) and answer.statistics.drafted > 0
            assert number < 2 or answer.statistics.reused_tokens > 0
            text += answer.token_ids
