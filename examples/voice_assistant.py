"""A voice assistant without a microphone: a line of stdin is what was heard, and speaking is printing slowly.

Each sentence is spoken as soon as it is final, while the next ones are still being written. Whoever says something
meanwhile interrupts the answer; an answer that takes too long ends where it is.

    python examples/voice_assistant.py coder.pair
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import threading
from collections.abc import Iterator
from typing import TypeAlias

import edge_spec

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
SECONDS_PER_LETTER = 0.05

# What was said, and whether something has been said since; None where nothing more will be.
Heard: TypeAlias = "queue.SimpleQueue[tuple[str, threading.Event] | None]"


def main() -> None:
    """Answer line after line, until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--deadline", type=float, default=20.0, metavar="SECONDS", help="longest time to think (20)")
    arguments = parser.parse_args()

    heard: Heard = queue.SimpleQueue()
    threading.Thread(target=listen, args=(heard,), daemon=True).start()
    messages = [{"role": "system", "content": "You are a voice assistant. Answer in a few short sentences."}]
    with edge_spec.load(arguments.bundle, context=2048) as engine:
        print("listening", flush=True)
        while (utterance := heard.get()) is not None:
            question, interrupted = utterance
            messages.append({"role": "user", "content": question})
            said = answer(engine, messages, interrupted, arguments.deadline)
            # What nobody has heard is no part of the conversation.
            messages.append({"role": "assistant", "content": " ".join(said)})


def listen(heard: Heard) -> None:
    """Hear what is said, also while an answer is being spoken."""
    last = threading.Event()
    for line in sys.stdin:
        last.set()
        last = threading.Event()
        heard.put((line.strip(), last))
    heard.put(None)


def answer(
    engine: edge_spec.Engine, messages: list[dict[str, str]], interrupted: threading.Event, seconds: float
) -> list[str]:
    """Speak the answer while it is written; return the sentences that were spoken to their end."""
    said: list[str] = []
    to_say: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    voice = threading.Thread(target=speak, args=(to_say, said, interrupted))
    voice.start()
    chunks = engine.stream(messages, max_new_tokens=150, deadline=seconds, cancelled=interrupted.is_set)
    for sentence in sentences(chunks):
        to_say.put(sentence)
    to_say.put(None)
    voice.join()
    return said


def sentences(chunks: Iterator[edge_spec.Chunk]) -> Iterator[str]:
    """Cut a stream into sentences, each as soon as it is final."""
    rest = ""
    for chunk in chunks:
        *whole, rest = SENTENCE_END.split(rest + chunk.text)
        yield from filter(None, whole)
        if chunk.completion is not None:
            print(f"({chunk.completion.finish_reason})", flush=True)
            yield rest


def speak(to_say: queue.SimpleQueue[str | None], said: list[str], interrupted: threading.Event) -> None:
    """Stand in for a speech synthesizer that can be stopped."""
    while (sentence := to_say.get()) is not None:
        if sentence and not interrupted.is_set():
            print(f"says: {sentence}", flush=True)
            if not interrupted.wait(len(sentence) * SECONDS_PER_LETTER):
                said.append(sentence)


if __name__ == "__main__":
    main()
