"""Completes code while it is typed, as an editor's plugin does.

Every keystroke asks for a completion of the text so far, and whatever was being written for an older text is dropped.
What the text has in common with the one before is not read again, so a completion begins after a fraction of a second.
Typing is simulated.

    python examples/code_completion.py coder.pair --text 'def is_palindrome(word):'
"""

from __future__ import annotations

import argparse
import queue
import threading
import time

import edge_spec

STOPS = ("\n\n", "\ndef ", "\nclass ")


class Completer:
    """Completes the newest text it has been given."""

    def __init__(self, engine: edge_spec.Engine) -> None:
        """Begin to wait for texts.

        Args:
            engine: the model.
        """
        self.suggestions: queue.SimpleQueue[tuple[str, edge_spec.Completion]] = queue.SimpleQueue()
        self._engine = engine
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def typed(self, text: str) -> None:
        """A key was pressed: ``text`` is what stands before the cursor now."""
        self._texts.put(text)

    def close(self) -> None:
        """Stop; a completion that is being written is dropped."""
        self._texts.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (text := self._newest()) is not None:
            completion = self._engine.generate(
                text, max_new_tokens=48, stop=STOPS, cancelled=lambda: not self._texts.empty()
            )
            self.suggestions.put((text, completion))

    def _newest(self) -> str | None:
        text = self._texts.get()
        while not self._texts.empty():
            text = self._texts.get()
        return text


def main() -> None:
    """Type a text, and show what is suggested on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--text", default="def is_palindrome(word):", help="what is typed")
    parser.add_argument("--seconds", type=float, default=0.1, help="time between two keystrokes (0.1)")
    arguments = parser.parse_args()
    # What an editor has open above the cursor; all of it is read once.
    head = '"""Functions for words."""\n\n\ndef is_empty(word):\n    return len(word) == 0\n\n\n'

    with edge_spec.load(arguments.bundle, context=2048) as engine:
        completer = Completer(engine)
        try:
            for end in range(1, len(arguments.text) + 1):
                completer.typed(head + arguments.text[:end])
                time.sleep(arguments.seconds)
            text = ""
            while text != head + arguments.text:
                text, completion = completer.suggestions.get()
                statistics = completion.statistics
                reused = f"{statistics.reused_tokens} of {statistics.prompt_tokens} tokens reused"
                print(f"{text[len(head) :]!r}: {completion.finish_reason}, {reused}, {statistics.total_seconds:.2f} s")
            print(text[len(head) :] + completion.text)
        finally:
            completer.close()


if __name__ == "__main__":
    main()
