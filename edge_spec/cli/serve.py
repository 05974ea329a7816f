"""``edge-spec serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import add_command, add_machine_options, given, model_name, named_path
from edge_spec.cli.measuring import measuring
from edge_spec.errors import MissingDependencyError, RequestError

if TYPE_CHECKING:
    from edge_spec.serve.settings import ServeSettings

_KEY_VARIABLE = "EDGE_SPEC_API_KEY"
_HOST, _PORT = "127.0.0.1", 8080


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "serve",
        "answer requests over HTTP, as OpenAI's API does",
        "Serve a bundle to OpenAI's clients and whatever speaks their language, with a page to chat on at /. Instead "
        "of a bundle, a target and a draft can be named, from which one is exported into a cache the first time. The "
        "server is reachable from this machine only, unless --host says otherwise, which needs a key.",
        "edge-spec serve coder.pair",
        "edge-spec serve --target coder-1.5b.gguf --draft coder-0.5b.gguf",
        "EDGE_SPEC_API_KEY=... edge-spec serve coder.pair --host 0.0.0.0 --allowed-host nas.local",
    )
    parser.add_argument(
        "bundle", type=named_path, nargs="?", metavar="BUNDLE", help="folder written by 'edge-spec export'"
    )
    models = parser.add_argument_group("instead of a bundle")
    models.add_argument(
        "--target", type=model_name, metavar="MODEL", help="the model whose text is wanted, as for 'edge-spec export'"
    )
    models.add_argument(
        "--draft", type=model_name, metavar="MODEL", help="a much smaller model with the same tokenizer"
    )
    models.add_argument("--recipe", metavar="RECIPE", help="how the target is stored (w8a8)")
    models.add_argument("--draft-recipe", metavar="RECIPE", help="how the draft is stored (int4-128)")
    models.add_argument("--offline", action="store_true", help="take what is on the hub from its local cache only")

    network = parser.add_argument_group("network")
    network.add_argument("--host", default=_HOST, metavar="ADDRESS", help=f"where to listen ({_HOST})")
    network.add_argument("--port", type=int, default=_PORT, metavar="N", help=f"where to listen ({_PORT}); 0: any")
    network.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"what clients have to bring; can be repeated; {_KEY_VARIABLE} does the same and shows it to nobody",
    )
    network.add_argument(
        "--insecure-no-key", action="store_true", help="listen beyond this machine although everybody may use it"
    )
    network.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that clients may call the server by, besides localhost and plain addresses; can be repeated",
    )
    network.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="a web page from elsewhere that may use the server, such as https://app.example; can be repeated",
    )
    network.add_argument(
        "--max-request-bytes", type=int, default=1 << 20, metavar="N", help="largest request body (1048576)"
    )

    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--name", type=model_name, metavar="MODEL", help="what clients call the model (the name of the bundle)"
    )
    serving.add_argument(
        "--parallel", type=int, default=4, metavar="N", help="requests that share the engine at once (4)"
    )
    serving.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait besides (32)")
    serving.add_argument(
        "--grace", type=float, default=20.0, metavar="SECONDS", help="time for running requests to end at the end (20)"
    )
    serving.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")
    serving.add_argument(
        "--record", type=named_path, metavar="FILE", help="keep prompts in a file, for 'bench --replay'"
    )

    machine = add_machine_options(parser)
    machine.add_argument("--conversations", type=int, metavar="N", help="texts that keep their cache (as --parallel)")
    machine.add_argument(
        "--exactness",
        metavar="bitwise|distribution",
        help="bitwise: drafting changes no bit, or loading fails; distribution: do not measure (what holds by itself)",
    )
    parser.set_defaults(command=_serve, usage_error=parser.error)


def _serve(arguments: argparse.Namespace) -> int:
    if (arguments.bundle is None) == (arguments.target is None):
        arguments.usage_error("one of BUNDLE and --target is required")
    if arguments.target is None and (arguments.draft or arguments.recipe or arguments.draft_recipe):
        arguments.usage_error("--draft, --recipe and --draft-recipe go with --target; a bundle has its models")
    api_keys = tuple(arguments.api_key or filter(None, [os.environ.get(_KEY_VARIABLE)]))
    _require_key(arguments.host, api_keys, arguments.insecure_no_key)
    try:
        import edge_spec
        from edge_spec.serve.app import create_app
        from edge_spec.serve.json_log import log_as_json
        from edge_spec.serve.server import Server, listen, run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("edge_spec"):
            raise
        raise MissingDependencyError(
            f"The server needs the package {error.name!r}, which is not installed: pip install 'edge-spec[serve]'"
        ) from error

    settings = _settings(arguments, api_keys)
    opened = listen(arguments.host, arguments.port)  # before the model is loaded, which takes a while
    with opened:
        bundle = arguments.bundle if arguments.target is None else _exported(arguments)
        options = given(arguments, "device", "threads", "context", "memory_budget", "kv", "drafter", "exactness")
        options["conversations"] = arguments.parallel if arguments.conversations is None else arguments.conversations
        with measuring() as progress:
            engine = edge_spec.load(bundle, **options, progress=progress)
        log_as_json()
        with engine:
            host, port = opened.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            address = f"Serving {settings.model} at http://{shown}:{port}/ (Ctrl-C ends it)"
            ready = partial(print, address, file=sys.stderr, flush=True)
            run(Server(create_app(engine, settings), settings.grace_seconds, ready), opened)
    return 0


def _settings(arguments: argparse.Namespace, api_keys: tuple[str, ...]) -> ServeSettings:
    from edge_spec.prompt_record import PromptRecorder
    from edge_spec.serve.settings import ServeSettings

    source = arguments.bundle if arguments.target is None else Path(arguments.target.partition("@")[0])
    stem = source.resolve().name if arguments.target is None else source.name
    name = arguments.name or stem.removesuffix(".pair").removesuffix(".gguf").replace(" ", "-")
    return ServeSettings(
        model=name,
        api_keys=api_keys,
        allowed_hosts=tuple(arguments.allowed_host),
        cors_origins=tuple(arguments.cors_origin),
        parallel=arguments.parallel,
        queue_limit=arguments.queue,
        max_request_bytes=arguments.max_request_bytes,
        log_prompts=arguments.log_prompts,
        grace_seconds=arguments.grace,
        recorder=None if arguments.record is None else PromptRecorder(arguments.record),
    )


def _exported(arguments: argparse.Namespace) -> Path:
    from edge_spec.export.cached_bundle import cached_bundle
    from edge_spec.progress_bars import ProgressBars

    with ProgressBars() as progress:
        path, notes = cached_bundle(
            arguments.target,
            arguments.draft,
            arguments.recipe,
            arguments.draft_recipe,
            # What nothing is said of is exported for the processor.
            device="cuda" if arguments.device == "cuda" else "cpu",
            offline=arguments.offline,
            progress=progress,
        )
    for note in notes:
        print(note, file=sys.stderr)
    return path


def _require_key(host: str, api_keys: tuple[str, ...], insecure: bool) -> None:
    """Raise RequestError if the server would be open to everybody on the network."""
    if api_keys or insecure or _is_loopback(host):
        return
    raise RequestError(
        f"With --host {host} everybody on the network could use the server. Set {_KEY_VARIABLE} (or --api-key) to a "
        "key that clients have to bring, or insist with --insecure-no-key."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
