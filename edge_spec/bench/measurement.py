"""Paired measurement: every prompt is answered in every way before the next one comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, cast

from edge_spec.bench.modes import BASELINE, PLAIN, Mode
from edge_spec.errors import RequestError
from edge_spec.prompt_file import Message, Opening, Question
from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.engine import Engine


@dataclass(frozen=True)
class Lane:
    """A mode and the engine it runs in."""

    mode: Mode
    engine: Engine

    def stream(self, prompt: Opening, options: Mapping[str, Any]) -> Iterator[Chunk]:
        """Answer, without anything that an earlier answer has left in the target's cache.

        Raises:
            RequestError: the prompt or an option is refused.
        """
        with self.engine.session() as session:
            yield from session.stream(prompt, speculation=self.mode.speculation, **{**options, **self.mode.options})


@dataclass(frozen=True)
class Answer:
    """What one mode's answer to one turn of one question cost.

    Attributes:
        line: the question's line in its file.
        question: its name.
        category: the task it counts under.
        turn: which turn, from 0.
        repetition: which pass over the questions, from 0.
        mode: name of the mode.
        place: when this mode answered, among the others: 0 for the first.
        wall_seconds: from the request to the end of its answer, rendering and tokenizing included.
        finish_reason: why the text ended.
        identical: whether the tokens are those of plain decoding; ``None`` for another bundle.
        statistics: of the completion, as in ``Statistics.to_dict``.
    """

    line: int
    question: str
    category: str
    turn: int
    repetition: int
    mode: str
    place: int
    wall_seconds: float
    finish_reason: str
    identical: bool | None
    statistics: Mapping[str, Any]

    @property
    def sampled(self) -> bool:
        """Whether noise chose its tokens."""
        return self.statistics["seed"] is not None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Skipped:
    """A turn that could not be asked, and why; the turns after it are left out as well."""

    line: int
    question: str
    category: str
    turn: int
    reason: str


def measure(
    lanes: Sequence[Lane],
    questions: Sequence[Question],
    options: Mapping[str, Any],
    repetition: int = 0,
    answered: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Answer] | Skipped]:
    """Ask every question in every lane, and yield the answers to a turn when all lanes have given theirs.

    The order of the lanes changes from turn to turn, so that what happens to the machine meanwhile, and what the first
    answer does to its caches, hits each of them alike. In a conversation every lane continues from the answers of
    plain decoding.

    Args:
        lanes: what is compared; plain decoding among them.
        questions: what to ask, in this order.
        options: what every request asks for, unless its question asks for something else; a ``seed`` among them, which
            is moved on from question to question.
        repetition: which pass over the questions this is.
        answered: told about progress, in answers.
    """
    number = 0
    for index, question in enumerate(questions):
        prompt: Opening = question.opening
        seed = options["seed"] + repetition * len(questions) + index
        asked = {**options, "seed": seed, **question.options}
        turns = 1 + len(question.followups)
        for turn in range(turns):
            completions: dict[str, tuple[int, float, Completion]] = {}
            order = rotated(lanes, number)
            number += 1
            try:
                for place, lane in enumerate(order):
                    completions[lane.mode.name] = (place, *_answer(lane, prompt, asked))
                    answered(1)
            except RequestError as error:  # the run's own options were accepted before
                answered(len(lanes) * (turns - turn) - len(completions))
                yield Skipped(question.line, question.name, question.category, turn, str(error))
                break
            plain = completions[PLAIN][2]
            yield [
                Answer(
                    line=question.line,
                    question=question.name,
                    category=question.category,
                    turn=turn,
                    repetition=repetition,
                    mode=lane.mode.name,
                    place=place,
                    wall_seconds=seconds,
                    finish_reason=completion.finish_reason,
                    identical=None if lane.mode.name == BASELINE else completion.token_ids == plain.token_ids,
                    statistics=completion.statistics.to_dict(),
                )
                for lane in lanes
                for place, seconds, completion in [completions[lane.mode.name]]
            ]
            if turn < len(question.followups):
                said = (
                    {"role": "assistant", "content": plain.text},
                    {"role": "user", "content": question.followups[turn]},
                )
                prompt = cast("tuple[Message, ...]", (*prompt, *said))  # only conversations have follow-ups


def rotated(lanes: Sequence[Lane], number: int) -> list[Lane]:
    """Order the lanes for the turn of this number: AB, BA, BA, AB for two; every lane comes early and late."""
    start = number // 2 % len(lanes)
    order = [*lanes[start:], *lanes[:start]]
    return order[::-1] if number % 2 else order


def _answer(lane: Lane, prompt: Opening, options: Mapping[str, Any]) -> tuple[float, Completion]:
    completion = None
    started = perf_counter()
    for chunk in lane.stream(prompt, options):
        completion = chunk.completion
    seconds = perf_counter() - started
    assert completion is not None  # every stream ends with one
    return seconds, completion
