"""Many requests of every kind to one engine, most of them disturbed; run by hand for the long version.

Example:
    python tests/soak.py smollm2.pair --requests 10000
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import edge_spec
from edge_spec import Chunk, Completion, Engine, LogitsError, Proposal, Session
from edge_spec.errors import EdgeSpecError, ProviderError

PROMPTS = (
    "Once upon a time",
    "def fibonacci(n):\n    if n < 2:\n",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "List three fruits.\n- apple\n-",
    "Dear Sir or Madam, I am writing to you because",
    "the cat sat on the mat. the cat sat on the mat. the cat",
    "Q: What is two plus two?\nA:",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.1},
)
SPECULATIONS = ("auto", "auto", "auto", "suffix", "recycling", "lookup", "off")
# What happens to a request, and how often.
FATES = {
    "left alone": 10,
    "cancelled": 4,
    "deadline": 3,
    "dropped": 3,
    "provider fails": 3,
    "processor raises": 2,
    "processor says NaN": 2,
    "drafter raises": 2,
}
LONGEST = 16
# No request takes that long: whoever waits longer waits for ever.
STUCK_SECONDS = 300.0


class SoakError(Exception):
    """An error that the soak put in."""


@dataclass
class Report:
    """What came of it.

    Attributes:
        fates: how many requests met which end.
        tokens: tokens compared with the reference.
        wrong: descriptions of answers that differ from it.
        memory_bytes: resident set size after the first requests and at the end.
    """

    fates: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """By which share memory has grown since the first tenth of the requests."""
        settled = self.memory_bytes[len(self.memory_bytes) // 10 :]
        return settled[-1] / settled[0] - 1


class Flaky:
    """A session of ONNX Runtime that fails when told to, before it runs or after it has written its results."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.fails_in: int | None = None

    def run_with_iobinding(self, binding: Any) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                self._session.run_with_iobinding(binding)
                raise SoakError("the provider failed")
        self._session.run_with_iobinding(binding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Raising:
    """A drafter that sometimes raises."""

    name = "raising"
    memory_bytes = 0

    def __init__(self) -> None:
        self.raises = False

    def propose(self, context: Any, budget: Any, prefix: Sequence[int] = ()) -> Proposal:
        if self.raises:
            self.raises = False
            raise SoakError("the drafter failed")
        return Proposal()

    def observe(self, outcome: Any) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


class Soak:
    """Requests to one engine from several threads."""

    def __init__(self, engine: Engine, seed: int = 0, longest: int = LONGEST) -> None:
        self.report = Report()
        self._engine = engine
        self._longest = longest
        self._random = random.Random(seed)
        self._flaky = Flaky(engine._target._session.session)
        engine._target._session.session = self._flaky
        self._raising = Raising()
        engine.add_drafter(self._raising)
        self._lock = threading.Lock()
        self._started = 0
        self._progress = time.monotonic()
        self._expected: dict[tuple[int, int], tuple[int, ...]] = {}
        for prompt, text in enumerate(PROMPTS):
            for sampling, options in enumerate(SAMPLINGS):
                with engine.session() as session:
                    answer = session.generate(text, max_new_tokens=longest, speculation="off", **options)
                self._expected[prompt, sampling] = answer.token_ids

    def run(self, requests: int, threads: int = 2, every: int = 50, show: Callable[[int], None] | None = None) -> None:
        """Send so many requests. Raises TimeoutError if nothing moves any more."""
        workers = [
            threading.Thread(target=self._work, args=(requests, every, show), daemon=True) for _ in range(threads)
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.05)
            if time.monotonic() - self._progress > STUCK_SECONDS:
                faulthandler.dump_traceback(file=sys.stderr)
                raise TimeoutError(f"no request has ended for {STUCK_SECONDS:.0f} s")

    def _work(self, requests: int, every: int, show: Callable[[int], None] | None) -> None:
        sessions = [self._engine.session() for _ in range(2)]
        while True:
            with self._lock:
                if self._started >= requests:
                    break
                self._started += 1
                number, choice = self._started, random.Random(self._random.random())
            try:
                self._request(choice, choice.choice([self._engine, *sessions]))
            except BaseException as error:
                with self._lock:
                    self.report.wrong.append(f"request {number}: {error!r}")
            if choice.random() < 0.05:
                sessions.pop(0).close()
                sessions.append(self._engine.session())
            with self._lock:
                self._progress = time.monotonic()
                if number % every == 0:
                    self.report.memory_bytes.append(resident_set_size())
                    if show is not None:
                        show(number)
        for session in sessions:
            session.close()

    def _request(self, choice: random.Random, source: Engine | Session) -> None:
        prompt, sampling = choice.randrange(len(PROMPTS)), choice.randrange(len(SAMPLINGS))
        fate = choice.choices(list(FATES), list(FATES.values()))[0]
        length = choice.randint(1, self._longest)
        options: dict[str, Any] = {
            "max_new_tokens": length,
            "speculation": choice.choice(SPECULATIONS),
            **SAMPLINGS[sampling],
        }
        if choice.random() < 0.3:
            options["max_draft"] = choice.randint(0, 12)
        step = choice.randint(0, length)
        if fate == "cancelled":
            polls = iter(range(step + 1))
            options["cancelled"] = lambda: next(polls, None) is None
        elif fate == "deadline":
            options["deadline"] = choice.uniform(0.001, 0.3)
        elif fate.startswith("processor"):
            options["logits_processors"] = [_processor(step, fate == "processor raises")]
        elif fate == "provider fails":
            # Whoever comes next meets it; that may be another thread's request.
            self._flaky.fails_in = step
        elif fate == "drafter raises":
            self._raising.raises = True
        tokens: list[int] = []
        completion: Completion | None = None
        end = fate
        try:
            for chunk in source.stream(PROMPTS[prompt], **options):
                tokens += _checked(chunk)
                completion = chunk.completion
                if fate == "dropped" and len(tokens) >= step:
                    end = "dropped"
                    break
        except (ProviderError, LogitsError, SoakError) as error:
            end = type(error).__name__
        expected = self._expected[prompt, sampling]
        whole = completion is not None and completion.finish_reason in ("stop", "length")
        with self._lock:
            self.report.fates[f"{fate}: {completion.finish_reason if completion is not None else end}"] += 1
            self.report.tokens += len(tokens)
            right = expected[: len(tokens)] == tuple(tokens)
            if not right or (whole and len(tokens) != min(length, len(expected))):
                self.report.wrong.append(f"{PROMPTS[prompt]!r} {options}: {tokens} instead of {expected[:length]}")


def _checked(chunk: Chunk) -> tuple[int, ...]:
    if len(chunk.origins) != len(chunk.token_ids):
        raise EdgeSpecError(f"{len(chunk.token_ids)} tokens, but {len(chunk.origins)} origins")
    return chunk.token_ids


def _processor(step: int, raises: bool) -> Callable[[Sequence[int], Any], Any]:
    """Fails once the text has grown by ``step`` tokens."""
    start: list[int] = []

    def process(token_ids: Sequence[int], logits: Any) -> Any:
        if not start:
            start.append(len(token_ids))
        if len(token_ids) >= start[0] + step:
            if raises:
                raise SoakError("the processor failed")
            logits = logits * float("nan")
        return logits

    return process


def resident_set_size() -> int:
    """Bytes of this process in memory. Not in proportion to who shares them, since others come and go."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not tell the resident set size")


def main() -> int:
    """Run the long version and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with edge_spec.load(arguments.bundle, context=256, conversations=2) as engine:
        soak = Soak(engine, arguments.seed)

        def show(number: int) -> None:
            megabytes = soak.report.memory_bytes[-1] / 2**20
            seconds = time.monotonic() - started
            wrong = len(soak.report.wrong)
            print(f"{number} requests, {seconds:.0f} s, {megabytes:.1f} MiB, {wrong} wrong", flush=True)

        soak.run(arguments.requests, arguments.threads, show=show)
    report = soak.report
    for fate, count in sorted(report.fates.items()):
        print(f"{count:6d} {fate}")
    print(f"{report.tokens} tokens compared, memory grew by {report.growth:.2%}")
    print(*report.wrong[:20], sep="\n")
    return 1 if report.wrong or report.growth > 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
