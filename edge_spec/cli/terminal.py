"""Where a chat takes place: a terminal with colours and a history of lines, or plain pipes."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from edge_spec.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

# Legible on light and on dark ground.
_COLORS = {
    "suffix": "#b07000",
    "ngram": "#857d00",
    "recycling": "#2a7fbf",
    "lookup": "#d0602a",
    "model": "#b65a98",
    "head": "#c2455c",
    "deferred": "#7a7f87",
    "grammar": "#1a8a68",
}
_OTHER_COLOR = "#8a6cd0"


class Terminal:
    """Reads what a person says and shows what the model says.

    On a terminal, a prompt asks for lines, which can be edited and fetched back, and tokens have the colour of who
    proposed them. Through pipes every line of stdin is taken as it is, stdout gets the model's text and nothing else,
    and everything else goes to stderr.

    Attributes:
        interactive: whether a person sits there.
    """

    def __init__(self, color: bool = True) -> None:
        """Look at the standard streams.

        Args:
            color: whether to use colours where there is a terminal.
        """
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.colors: dict[str, str] = {}
        self._console: Console | None = None
        if self.interactive:
            _edit_lines()
            if color:
                self._use_colors()

    def _use_colors(self) -> None:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            self.note("without colours, which need the package 'rich': pip install 'edge-spec[chat]'")
            return
        console = Console(highlight=False, soft_wrap=True)
        if console.color_system is not None:  # NO_COLOR and the kind of terminal have a say
            self._console, self.colors = console, _COLORS

    def read(self) -> str | None:
        """Return what is said next, or ``None`` if nothing more will be. A backslash at a line's end continues it.

        Raises:
            KeyboardInterrupt: the person wants to be rid of the line.
        """
        lines: list[str] = []
        while True:
            line = self._read_line("> " if not lines else "… ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix("\\"))

    def _read_line(self, prompt: str) -> str | None:
        try:
            if self.interactive:
                return input(prompt)
            line = sys.stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is no {error.encoding} text (byte {error.object[error.start]:#04x}).") from error
        return line.rstrip("\n") if line else None

    def say(self, text: str, origin: str = "target") -> None:
        """Show some of the model's text at once, as it was proposed by ``origin``."""
        if not self.interactive:
            print(text, end="", flush=True)
            return
        text = _harmless(text)
        if self._console is None or origin == "target":
            print(text, end="", flush=True)
        else:
            from rich.text import Text

            self._console.print(Text(text, style=_COLORS.get(origin, _OTHER_COLOR)), end="")

    def note(self, text: str = "", origin: str = "") -> None:
        """Show a line that is no part of the conversation, in the colour of an origin if one is given."""
        text = _harmless(text)
        if not self.interactive:
            print(text, file=sys.stderr)
        elif self._console is None:
            print(text)
        else:
            from rich.text import Text

            style = _COLORS.get(origin, _OTHER_COLOR) if origin else "dim"
            self._console.print(Text(text, style=style if origin != "target" else ""))

    def end_answer(self) -> None:
        """End the line of an answer."""
        print(flush=True)


def _harmless(text: str) -> str:
    """What models and files say must not move the cursor, or worse."""
    return "".join(ascii(c)[1:-1] if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" else c for c in text)


def _edit_lines() -> None:
    """Let ``input`` edit lines and fetch earlier ones back, where Python was built with that; no file keeps them."""
    with suppress(ImportError):
        import_module("readline")
