"""``edge-spec chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import (
    REQUEST_OPTIONS,
    add_command,
    add_exactness_option,
    add_machine_options,
    add_sampling_options,
    add_speculation_options,
    given,
    named_path,
)
from edge_spec.cli.measuring import measuring
from edge_spec.errors import EdgeSpecError, RequestError

if TYPE_CHECKING:
    from edge_spec.cli.chat_commands import ChatCommands
    from edge_spec.cli.terminal import Terminal


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "chat",
        "chat with a bundle in the terminal",
        "A conversation with streamed answers. Words have the colour of who proposed them, and a line below each "
        "answer tells what it cost. /help lists what can be said to the program rather than to the model; Ctrl-C stops "
        "an answer, Ctrl-D ends the conversation. Through a pipe, every line of stdin is a message, and stdout gets "
        "the answers and nothing else.",
        "edge-spec chat coder.pair",
        "edge-spec chat coder.pair --system 'Answer in one sentence.' --temperature 0.7 --seed 1",
        "cat questions.txt | edge-spec chat coder.pair --max-new-tokens 100",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--no-color", action="store_true", help="do not show who proposed what")
    add_sampling_options(parser)
    add_speculation_options(parser)
    add_exactness_option(add_machine_options(parser))
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    import edge_spec
    from edge_spec.cli.chat_commands import ChatCommands
    from edge_spec.cli.conversation import Conversation
    from edge_spec.cli.terminal import Terminal
    from edge_spec.manifest import CHAT_TEMPLATE

    options = given(arguments, "device", "threads", "context", "memory_budget", "kv", "drafter", "exactness")
    with measuring() as progress:
        engine = edge_spec.load(arguments.bundle, **options, progress=progress)
    with engine:
        if CHAT_TEMPLATE not in engine.manifest.files:
            raise RequestError("This bundle has no chat template; 'edge-spec run' continues a text with it.")
        terminal = Terminal(color=not arguments.no_color)
        request = given(arguments, *REQUEST_OPTIONS)
        engine.stream([{"role": "user", "content": ""}], **request)  # only checked: a slip is told before a question
        conversation = Conversation(engine, arguments.system, request, terminal.say)
        if terminal.interactive:
            terminal.note(f"{arguments.bundle.name} · {engine.exactness} · /help lists the commands, Ctrl-D leaves")
        _converse(terminal, ChatCommands(conversation, terminal))
    return 0


def _converse(terminal: Terminal, commands: ChatCommands) -> None:
    """Answer what is said until nothing more is."""
    while not commands.ended:
        try:
            said = terminal.read()
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
            terminal.note("\nCtrl-D or /quit leaves")
            continue
        if said is None:
            if terminal.interactive:
                terminal.note()
            return
        try:
            commands.heed(said)
        except EdgeSpecError as error:
            if not terminal.interactive:
                raise
            terminal.note(f"error: {error}")
