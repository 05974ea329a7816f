"""``edge-spec chat``: through pipes, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_spec
from edge_spec import Chunk, Session, cli
from edge_spec.bundle import read_manifest
from edge_spec.prompt_file import read_questions

PROGRAM = "import sys; from edge_spec.cli import main; sys.exit(main())"
SHORT = ("--max-new-tokens", "24")


class Piped:
    """Runs a chat on lines, and keeps what is asked of the engine."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.asked: list[tuple[list[dict[str, str]], dict[str, Any]]] = []
        self._patch, self._capsys = patch, capsys
        stream = Session.stream

        def watched(session: Session, messages: Any, **options: Any) -> Iterator[Chunk]:
            assert not options.pop("cancelled")()
            self.asked.append((messages, options))
            return stream(session, messages, **options)

        patch.setattr(Session, "stream", watched)

    def __call__(self, pair: Path, *lines: str, options: tuple[str, ...] = SHORT, status: int = 0) -> tuple[str, str]:
        self._patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert cli.main(["chat", str(pair), *options]) == status
        captured = self._capsys.readouterr()
        return captured.out, captured.err


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    return Piped(monkeypatch, capsys)


def reference(pair: Path, *messages: dict[str, str], **options: Any) -> str:
    with edge_spec.load(pair) as engine:
        return engine.chat(messages, max_new_tokens=24, **options).text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_every_line_of_a_pipe_is_answered_with_what_was_said_before(chat_pair: Path, piped: Piped) -> None:
    first = reference(chat_pair, user("hello"))
    second = reference(chat_pair, user("hello"), {"role": "assistant", "content": first}, user("more"))
    out, err = piped(chat_pair, "hello", "", "more")
    assert out == f"{first}\n{second}\n"
    assert len(re.findall(r"^24 tokens · [\d.]+ tokens/s · MAL [\d.]+ · first after", err, re.MULTILINE)) == 2


def test_new_forgets_what_was_said_and_system_sets_the_system_message(chat_pair: Path, piped: Piped) -> None:
    piped(chat_pair, "a", "/new", "b", "/system Be brief.", "c", "/system", "d")
    roles = [[message["role"] for message in messages] for messages, _ in piped.asked]
    assert roles[:2] == [["user"], ["user"]]
    assert piped.asked[2][0][0] == {"role": "system", "content": "Be brief."}
    assert roles[3] == ["user", "assistant"] * 2 + ["user"]
    piped(chat_pair, "a", options=(*SHORT, "--system", "Be kind."))
    assert piped.asked[4][0][0] == {"role": "system", "content": "Be kind."}


def test_options_of_the_command_line_and_commands_reach_the_engine(chat_pair: Path, piped: Piped) -> None:
    given = ("--max-new-tokens", "2", "--top-k", "9", "--speculation", "lookup", "--no-tree")
    _, err = piped(
        chat_pair, "a", "/temperature 0.5", "/seed 7", "/speculation off", "b", "/speculation on", "/seed", "c",
        options=given,
    )  # fmt: skip
    fixed = {"max_new_tokens": 2, "top_k": 9, "tree": False}
    assert [options for _, options in piped.asked] == [
        {**fixed, "speculation": "lookup"},
        {**fixed, "speculation": "off", "temperature": 0.5, "seed": 7},
        {**fixed, "speculation": "auto", "temperature": 0.5, "seed": None},
    ]
    assert "seed 7" in err


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9")])
def test_again_asks_with_the_same_seed_and_compares(chat_pair: Path, piped: Piped, sampling: tuple[str, ...]) -> None:
    with edge_spec.load(chat_pair) as engine:
        if engine.exactness != "bitwise":
            pytest.skip("THIS PROCESSOR PROMISES NO MORE THAN THE DISTRIBUTION for the tiny fp32 model")
    out, err = piped(chat_pair, "hello", "/again", "more", options=(*SHORT, *sampling))
    assert "the same text, token for token" in err
    (messages, _), (repeated, options), (after, _) = piped.asked
    assert messages == repeated and options["speculation"] == "off"
    assert (options["seed"] is not None) == bool(sampling)
    question, first, followup = (message["content"] for message in after)
    assert (question, followup) == ("hello", "more")
    assert out.startswith(f"{first}\n{first}\n")
    off = (*SHORT, "--speculation", "off")
    piped(chat_pair, "hello", "/again", options=off)
    assert piped.asked[-1][1]["speculation"] == "auto"


def test_again_tells_where_texts_differ(chat_pair: Path, piped: Piped, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Session.stream

    def changed(session: Session, messages: Any, **options: Any) -> Iterator[Chunk]:
        bias = {"logit_bias": {66: 100.0}} if options.get("speculation") == "off" else {}
        return stream(session, messages, **options, **bias)

    monkeypatch.setattr(Session, "stream", changed)
    _, err = piped(chat_pair, "hello", "/again")
    assert "the texts differ from token 1 on" in err


def test_stats_tell_where_tokens_and_time_went(chat_pair: Path, piped: Piped) -> None:
    _, err = piped(chat_pair, "one two one two one two", "/stats")
    assert re.search(r"^  target +█+ +\d+$", err, re.MULTILINE)
    assert re.search(r"^  verifying +█* +[\d.]+ s$", err, re.MULTILINE)
    assert re.search(r"^memory: .* in use, .* planned$", err, re.MULTILINE)


def test_a_saved_conversation_can_be_replayed(chat_pair: Path, piped: Piped, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    out, _ = piped(chat_pair, "/system Be brief.", "grüße", "more", f"/save {path}")
    first, second = out.splitlines()
    opening = [{"role": "system", "content": "Be brief."}, user("grüße")]
    then = [*opening, {"role": "assistant", "content": first}, user("more")]
    saved = [json.loads(line) for line in path.read_text().splitlines()]
    assert saved == [{"messages": opening, "answer": first}, {"messages": then, "answer": second}]
    questions = read_questions(path, recorded=True)
    assert [list(question.opening) for question in questions] == [opening, then]
    _, err = piped(chat_pair, "hello", f"/save {path}", status=2)
    assert "is there already" in err and len(path.read_text().splitlines()) == 2


def test_lines_can_be_continued_and_may_begin_with_a_slash(chat_pair: Path, piped: Piped) -> None:
    piped(chat_pair, "one\\", "two", "//usr", "/quit", "not said")
    assert [messages[-1]["content"] for messages, _ in piped.asked] == ["one\ntwo", "/usr"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/fly", "There is no command /fly; /help lists them."),
        ("/speculation psychic", "speculation is 'psychic', expected 'on' or one of 'auto', 'off', 'suffix'"),
        ("/temperature warm", "temperature is 'warm'"),
        ("/temperature -1", "temperature is '-1'"),
        ("/temperature", "temperature is ''"),
        ("/seed lucky", "seed is 'lucky'"),
        ("/again", "Nothing has been asked yet."),
        ("/stats", "There is no answer yet."),
        ("/save", "Give a file"),
        ("/save x", "Nothing has been asked yet."),
        ("x" * 5000, "5\\d\\d\\d tokens"),
    ],
)
def test_a_pipe_ends_at_what_does_not_work(chat_pair: Path, piped: Piped, line: str, message: str) -> None:
    _, err = piped(chat_pair, line, "hello", status=2)
    assert re.search(f"^edge-spec: error: .*{message}", err, re.MULTILINE)
    assert not [messages for messages, _ in piped.asked if messages[-1]["content"] == "hello"]


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--temperature", "nan"), "temperature is nan"), (("--speculation", "bogus"), "speculation is 'bogus'")],
)
def test_options_out_of_range_are_refused_before_anything_is_said(
    chat_pair: Path, piped: Piped, options: tuple[str, ...], message: str
) -> None:
    assert message in piped(chat_pair, options=options, status=2)[1]
    assert not piped.asked


def test_a_bundle_without_a_chat_template_is_refused(plain_pair: Path, piped: Piped) -> None:
    _, err = piped(plain_pair, "hello", status=2)
    assert "no chat template; 'edge-spec run' continues a text" in err


def test_a_file_that_cannot_be_written_is_an_error(chat_pair: Path, piped: Piped) -> None:
    _, err = piped(chat_pair, "hello", "/save /nowhere/at/all", status=2)
    assert "/nowhere/at/all cannot be written" in err


def test_a_pipe_that_is_no_text_is_an_error(chat_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert cli.main(["chat", str(chat_pair), *SHORT]) == 2


class Tty:
    """A chat in a process of its own, on a pseudo-terminal."""

    def __init__(self, *arguments: str, program: str = PROGRAM, **environment: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")}
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execve(
                sys.executable,
                [sys.executable, "-c", program, "chat", *arguments],
                {**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
            )
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until the pattern shows up, and return what was shown since the last one did."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{pattern!r} did not show up in {self.shown!r}"
            try:
                self.shown += os.read(self._terminal, 4096).decode(errors="replace")
            except OSError as error:  # how Linux tells the end
                raise AssertionError(f"it ended without {pattern!r}, after {self.shown!r}") from error
        shown, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return shown

    def type_until(self, key: str, pattern: str) -> None:
        """Press a key until the pattern shows up: before it waits, Python hears of a signal only at the next key."""
        for _ in range(30):
            self.type(key)
            until = time.monotonic() + 2.0
            while (left := until - time.monotonic()) > 0 and not re.search(pattern, self.shown):
                if select.select([self._terminal], [], [], left)[0]:
                    self.shown += os.read(self._terminal, 4096).decode(errors="replace")
            if re.search(pattern, self.shown):
                break
        self.wait_for(pattern, 1.0)

    def ended(self) -> int:
        """Read what is left, and return the exit status."""
        while True:
            ready, _, _ = select.select([self._terminal], [], [], 60.0)
            assert ready, "it does not end"
            try:
                if not os.read(self._terminal, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.fixture
def tty() -> Iterator[Any]:
    opened: list[Tty] = []

    def start(*arguments: str, **rest: str) -> Tty:
        opened.append(Tty(*arguments, **rest))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_a_terminal_shows_who_proposed_what_in_colour(chat_pair: Path, tty: Any) -> None:
    banned = [f"--ban-token={token}" for token in range(read_manifest(chat_pair).vocab_size) if token != 70]
    terminal = tty(str(chat_pair), "--max-new-tokens", "60", "--speculation", "suffix", "--max-draft", "4", *banned)
    terminal.wait_for("> ")
    terminal.type("one two one two one two\n")
    assert re.search("\x1b\\[38;5;\\d+m", terminal.wait_for("60 tokens"))
    terminal.wait_for("> ")
    terminal.type("/help\n")
    assert "words in this colour: suffix" in terminal.wait_for("> ")
    terminal.type("/fly\n")
    terminal.wait_for("error: There is no command /fly.*> ".replace(".*", "[^>]*"))
    terminal.type("\x04")
    assert terminal.ended() == 0


@pytest.mark.parametrize("way", ["--no-color", "NO_COLOR"])
def test_colours_can_be_left_out(chat_pair: Path, tty: Any, way: str) -> None:
    options = [way] if way.startswith("-") else []
    terminal = tty(str(chat_pair), *SHORT, *options, **({} if options else {way: "1"}))
    terminal.wait_for("> ")
    terminal.type("one two one two\n")
    assert "[38;" not in terminal.wait_for("24 tokens")
    terminal.wait_for("> ")
    terminal.type("/quit\n")
    assert terminal.ended() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(chat_pair: Path, tty: Any) -> None:
    # A terminal so slow that the answer is still coming when the signal does.
    program = (
        "import sys, time; from edge_spec.cli import main, terminal; say = terminal.Terminal.say\n"
        "terminal.Terminal.say = lambda *text: (say(*text), time.sleep(0.05))\nsys.exit(main())"
    )
    terminal = tty(str(chat_pair), "--max-new-tokens", "400", "--ban-token", "0", program=program)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for(r"hello\r\n(\x1b\[[^m]*m)?.")
    terminal.type("\x03")
    stopped = terminal.wait_for("(\\d+) tokens .*stopped")
    count = re.search(r"(\d+) tokens", stopped)
    assert count is not None and int(count[1]) < 400
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.type_until("\x03", "Ctrl-D or /quit leaves")
    terminal.type("/stats\n")
    terminal.wait_for("memory: ")  # it goes on
    terminal.wait_for("> ")  # before, the line discipline would take the key
    terminal.type("\x04")
    assert terminal.ended() == 0


def test_an_earlier_line_can_be_fetched_back(chat_pair: Path, tty: Any) -> None:
    terminal = tty(str(chat_pair), "--max-new-tokens", "3")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("3 tokens")
    terminal.wait_for("> ")
    terminal.type("\x1b[A\n")
    assert "hello" in terminal.wait_for("3 tokens")


def test_text_of_a_model_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edge_spec.cli.terminal import Terminal

    hostile = "a\x1b[2J\x9b1m\r\x07b[bold]c[/bold]\tÜ 👩‍🚀\n"
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    for origin in ("target", "suffix"):
        terminal.say(hostile, origin)
        shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
        assert shown.startswith("a\\x1b[2J\\x9b1m\\r\\x07b[bold]c[/bold]") and shown.endswith("Ü 👩‍🚀\n")
    terminal = Terminal(color=False)
    terminal.say(hostile, "suffix")
    assert "\x1b" not in capsys.readouterr().out
