"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_spec.errors import RequestError

if TYPE_CHECKING:
    from edge_spec.serve.recording import Recorder

_MOST_PARALLEL = 64


@dataclass(frozen=True)
class ServeSettings:
    """How a server is set up.

    Attributes:
        model: the name clients call the model by.
        api_keys: any of them opens the server; without any it is open to everybody who reaches it.
        allowed_hosts: names, besides ``localhost`` and plain addresses, that clients may call the server by; ``"*"``
            for any.
        cors_origins: web pages from elsewhere that may use the server, such as ``https://app.example``.
        parallel: requests that are in the engine at once, which they share round by round.
        queue_limit: requests that may wait besides; further ones are answered with 429.
        max_request_bytes: largest body of a request.
        log_prompts: write prompts and answers to the log.
        grace_seconds: how long running requests may take to end once the server is told to stop.
        recorder: is told every prompt; ``None``: nobody is.

    Raises:
        RequestError: a value is out of range.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    parallel: int = 4
    queue_limit: int = 32
    max_request_bytes: int = 1 << 20
    log_prompts: bool = False
    grace_seconds: float = 20.0
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        if not self.model or any(character.isspace() for character in self.model):
            raise RequestError(f"The model's name is {self.model!r}, expected one without spaces.")
        if not all(key.isascii() and key.isprintable() and len(key) >= 8 for key in self.api_keys):
            raise RequestError(
                "An API key has to have at least 8 printable ASCII characters, so that nobody guesses it."
            )
        if not 1 <= self.parallel <= _MOST_PARALLEL:
            raise RequestError(f"parallel is {self.parallel}, expected 1 to {_MOST_PARALLEL} requests at once.")
        if self.queue_limit < 0:
            raise RequestError(f"The queue's limit is {self.queue_limit}, expected at least 0.")
        if self.max_request_bytes < 1024:
            raise RequestError(f"max_request_bytes is {self.max_request_bytes}, expected at least 1024.")
        if not 0 <= self.grace_seconds < 1e6:
            raise RequestError(f"grace_seconds is {self.grace_seconds}, expected a number of seconds.")
