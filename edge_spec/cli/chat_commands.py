"""What can be said in a chat: messages to the model, and commands to the program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_spec.byte_size import size_text
from edge_spec.cli.conversation import Conversation
from edge_spec.cli.terminal import Terminal
from edge_spec.errors import RequestError
from edge_spec.runtime.memory_profile import resident_memory

if TYPE_CHECKING:
    from edge_spec import Completion

_HELP = """\
/speculation WHO   who drafts: on (as auto), off, or the name of a drafter
/again             the last question again with the same seed, drafted the other way, and whether the text is the same
/system TEXT       set the system message; without TEXT, do without one
/temperature T     0 always takes the likeliest token
/seed S            same seed, same text; without S, draw one for each answer
/stats             what the last answer cost, and where its tokens came from
/new               begin another conversation
/save FILE         write the conversation to a new file, whose questions 'edge-spec bench --replay' asks again
/quit              leave, as Ctrl-D does
A backslash at the end of a line goes on in the next one. Ctrl-C stops an answer. A message that begins with a slash:
begin with two."""
_WIDTH = 30  # characters of a bar


class ChatCommands:
    """Heeds what is said in a chat.

    Attributes:
        ended: whether to leave.
    """

    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        """Take part in a conversation on a terminal."""
        self.ended = False
        self._conversation = conversation
        self._terminal = terminal
        self._commands = {
            "help": self._help,
            "speculation": self._speculation,
            "again": self._again,
            "system": self._system,
            "temperature": self._temperature,
            "seed": self._seed,
            "stats": self._stats,
            "new": self._new,
            "save": self._save,
            "quit": self._quit,
        }

    def heed(self, said: str) -> None:
        """Do what is said, or get it answered.

        Raises:
            EdgeSpecError: that does not work.
        """
        if not said.strip():
            return
        if said[0] != "/" or said.startswith("//"):
            self._answer(said.removeprefix("/"))
            return
        name, _, argument = said[1:].partition(" ")
        if name not in self._commands:
            raise RequestError(f"There is no command /{name}; /help lists them.")
        self._commands[name](argument.strip())

    def _answer(self, question: str) -> None:
        completion = self._conversation.ask(question)
        self._terminal.end_answer()
        self._terminal.note(_cost(completion))

    def _help(self, argument: str) -> None:
        self._terminal.note(_HELP)
        for origin in self._terminal.colors:
            self._terminal.note(f"words in this colour: {origin}", origin)

    def _speculation(self, argument: str) -> None:
        who = {"on": "auto", "": self._conversation.options.get("speculation", "auto")}.get(argument, argument)
        names = ("auto", "off", *self._conversation.engine.drafters)
        if who not in names:
            raise RequestError(f"speculation is {who!r}, expected 'on' or one of {', '.join(map(repr, names))}.")
        self._conversation.options["speculation"] = who
        self._terminal.note(f"speculation: {who}")

    def _again(self, argument: str) -> None:
        who, second = self._conversation.ask_again()
        self._terminal.end_answer()
        self._terminal.note(_cost(second))
        self._terminal.note(_comparison(self._conversation.completions[-1], second, who))

    def _system(self, argument: str) -> None:
        self._conversation.system = argument or None
        self._terminal.note("system message set" if argument else "no system message")

    def _temperature(self, argument: str) -> None:
        from edge_spec import SamplingParams

        try:
            temperature = SamplingParams(temperature=float(argument)).temperature
        except ValueError as error:
            raise RequestError(f"temperature is {argument!r}, expected a number of at least 0.") from error
        self._conversation.options["temperature"] = temperature
        self._terminal.note(f"temperature: {temperature:g}")

    def _seed(self, argument: str) -> None:
        from edge_spec import SamplingParams

        try:
            seed = SamplingParams(seed=int(argument)).seed if argument else None
        except ValueError as error:
            raise RequestError(f"seed is {argument!r}, expected an integer that a 64-bit number holds.") from error
        self._conversation.options["seed"] = seed
        self._terminal.note(f"seed: {'drawn for each answer' if seed is None else seed}")

    def _stats(self, argument: str) -> None:
        completions = self._conversation.completions
        if not completions:
            raise RequestError("There is no answer yet.")
        counts = completions[-1].statistics
        self._terminal.note(_cost(completions[-1]))
        self._terminal.note(f"prompt: {counts.prompt_tokens} tokens, {counts.reused_tokens} of them read before")
        self._terminal.note("proposed by, and accepted:")
        origins = {"target": counts.new_tokens - counts.accepted, **counts.accepted_by_drafter}
        for origin, tokens in origins.items():
            self._terminal.note(_bar(origin, tokens / max(counts.new_tokens, 1), str(tokens)), origin)
        if counts.drafted:
            self._terminal.note("accepted, by position:")
            for position, share in enumerate(counts.acceptance_by_position, 1):
                self._terminal.note(_bar(str(position), share, f"{share:.0%}"))
        times = {
            "drafting": counts.draft_seconds,
            "verifying": counts.verify_seconds,
            "overhead": counts.overhead_seconds,
        }
        whole = sum(times.values())
        self._terminal.note("time of the rounds:")
        for name, seconds in times.items():
            self._terminal.note(_bar(name, seconds / whole if whole else 0.0, f"{seconds:.2f} s"))
        plan, resident = self._conversation.engine.plan, resident_memory()
        used = "" if resident is None else f"{size_text(resident)} in use, "
        self._terminal.note(f"memory: {used}{size_text(plan.total_bytes)} planned")

    def _new(self, argument: str) -> None:
        self._conversation.begin_anew()
        self._terminal.note("a new conversation")

    def _save(self, argument: str) -> None:
        if not argument:
            raise RequestError("Give a file: /save FILE")
        self._conversation.save(Path(argument).expanduser())
        self._terminal.note(f"written to {argument}")

    def _quit(self, argument: str) -> None:
        self.ended = True


def _cost(completion: Completion) -> str:
    counts = completion.statistics
    ends = {"length": "cut off at the limit of tokens", "deadline": "its time was over", "cancelled": "stopped"}
    parts = [
        f"{counts.new_tokens} tokens",
        f"{counts.tokens_per_second:.1f} tokens/s",
        f"MAL {counts.mean_accepted_length:.2f}",
        f"first after {counts.ttft_seconds:.2f} s",
        *([] if counts.seed is None else [f"seed {counts.seed}"]),
        *([ends[completion.finish_reason]] if completion.finish_reason in ends else []),
    ]
    return " · ".join(parts)


def _comparison(first: Completion, second: Completion, who: str) -> str:
    """What asking again showed; ``who`` drafted the second time."""
    if "cancelled" in (first.finish_reason, second.finish_reason):
        return "one of the two was stopped, so they cannot be compared"
    if first.token_ids != second.token_ids:
        pairs = enumerate(zip(first.token_ids, second.token_ids, strict=False))
        where = next((position for position, (one, other) in pairs if one != other), None)
        if where is None:
            where = min(len(first.token_ids), len(second.token_ids))
        return f"the texts differ from token {where + 1} on"
    drafted, plain = (first, second) if who == "off" else (second, first)
    speeds = [completion.statistics.tokens_per_second for completion in (drafted, plain)]
    gain = f"; {speeds[0] / speeds[1]:.2f} times the speed with speculation" if all(speeds) else ""
    # What was generated is known to the drafters from then on.
    flattered = ", which had seen this answer before" if gain and drafted is second else ""
    return f"the same text, token for token{gain}{flattered}"


def _bar(name: str, share: float, value: str) -> str:
    return f"  {name:<10} {'█' * round(_WIDTH * share):<{_WIDTH}} {value}"
