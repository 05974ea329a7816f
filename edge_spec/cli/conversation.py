"""A conversation in a terminal: what was said, how to go on, and what the answers cost."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from edge_spec.errors import RequestError

if TYPE_CHECKING:
    from edge_spec import Completion, Engine

Show = Callable[[str, str], None]


class Conversation:
    """Asks an engine and remembers what was said.

    Attributes:
        system: the system message; ``None`` without one.
        options: of the requests to come.
        messages: what was said, without the system message.
        completions: the answers so far, the last one last.
    """

    def __init__(self, engine: Engine, system: str | None, options: dict[str, Any], show: Show) -> None:
        """Begin a conversation.

        Args:
            engine: answers; its bundle has a chat template.
            system: the system message.
            options: of the requests, see :meth:`edge_spec.Engine.stream`.
            show: shows text as it comes, and who proposed it.
        """
        self.engine = engine
        self.system = system
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.completions: list[Completion] = []
        self._show = show
        self._session = engine.session()
        self._asked: list[list[dict[str, str]]] = []
        self._last_options: dict[str, Any] = {}

    def ask(self, question: str) -> Completion:
        """Get the answer to ``question``. Ctrl-C stops it, and what came until then counts as the answer.

        Raises:
            EdgeSpecError: it cannot be answered; the conversation is then as it was.
        """
        said = [*self.messages, {"role": "user", "content": question}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        completion = self._answer([*system, *said], self.options)
        # With the seed that was drawn, so that it can be asked again.
        self._last_options = {**self.options, "seed": completion.statistics.seed}
        self._asked.append([*system, *said])
        self.messages = [*said, {"role": "assistant", "content": completion.text}]
        self.completions.append(completion)
        return completion

    def ask_again(self) -> tuple[str, Completion]:
        """Ask the last question once more with the same seed: without speculation, or with it if it was off.

        Returns:
            Who drafted now, and the answer; the conversation goes on with the first one.

        Raises:
            RequestError: nothing has been asked.
        """
        if not self._asked:
            raise RequestError("Nothing has been asked yet.")
        speculation = "auto" if self._last_options.get("speculation") == "off" else "off"
        return speculation, self._answer(self._asked[-1], {**self._last_options, "speculation": speculation})

    def _answer(self, messages: list[dict[str, str]], options: dict[str, Any]) -> Completion:
        completion = None
        with _heeding_ctrl_c() as stopped:
            for chunk in self._session.stream(messages, **options, cancelled=stopped.is_set):
                completion = chunk.completion
                for text, origin in zip_longest(chunk.pieces, chunk.origins, fillvalue=""):
                    if text:
                        self._show(text, origin or "target")
        assert completion is not None  # every stream ends with one
        return completion

    def begin_anew(self) -> None:
        """Forget what was said; system message and options stay."""
        self._session.close()
        self._session = self.engine.session()
        self.messages, self.completions, self._asked = [], [], []

    def save(self, path: Path) -> None:
        """Write a line of JSON for each question: the messages up to it, which ``edge-spec bench --replay`` asks again.

        Raises:
            RequestError: nothing has been asked, or the file is there already, or cannot be written.
        """
        if not self._asked:
            raise RequestError("Nothing has been asked yet.")
        lines = (
            json.dumps({"messages": messages, "answer": completion.text}, ensure_ascii=False)
            for messages, completion in zip(self._asked, self.completions, strict=True)
        )
        try:
            with path.open("x", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except FileExistsError as error:
            raise RequestError(f"{path} is there already; give another name.") from error
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} cannot be written: {error}.") from error


@contextmanager
def _heeding_ctrl_c() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C sets. A second Ctrl-C interrupts the program, as ever."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield stopped
        return
    usual = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, usual)
