"""Who may come in: by the name they call the server, by the page that sends them, and by their key."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_spec.serve.api_error import ApiError

# What says nothing of anybody, and what has to be readable before somebody can type a key.
_OPEN = frozenset({"/", "/health", "/ready"})


class Gate:
    """Middleware that turns away whoever has no business here.

    A web page that has its own name point at this machine (DNS rebinding) calls the server by that name, so unknown
    names are refused; plain addresses cannot be made to point elsewhere. Browsers say which page a request comes from.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], allowed_hosts: Sequence[str], origins: Sequence[str] = ()
    ) -> None:
        """Guard an app.

        Args:
            app: what is behind the gate.
            api_keys: any of them opens; without any, everybody may come in.
            allowed_hosts: names the server may be called by besides ``localhost``; ``"*"`` for any.
            origins: web pages from elsewhere that may use it; ``"*"`` for any.
        """
        self._origins = frozenset(origin.lower() for origin in origins)
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._hosts = frozenset(host.lower() for host in allowed_hosts) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["client"] = address = scope["client"][0] if scope.get("client") else "local"
        try:
            self._check_host(headers.get("host", ""))
            self._check_origin(headers.get("origin"), headers.get("host", ""))
            key = self._check_key(headers.get("authorization", ""), scope["path"])
        except ApiError as error:
            await Response(error.content(), error.status, error.headers, "application/json")(scope, receive, send)
            return
        if key:
            state["client"] = f"{address} key {key}"
        await self._app(scope, receive, send)

    def _check_host(self, given: str) -> None:
        name = _without_port(given.strip().lower())
        if name in self._hosts or "*" in self._hosts or _is_address(name):
            return
        raise ApiError(
            403,
            f"This server is not called {name[:200]!r}. If that is its name, start it with --allowed-host.",
            code="host_not_allowed",
        )

    def _check_origin(self, given: str | None, host: str) -> None:
        if given is None or "*" in self._origins:
            return
        origin = given.strip().lower()
        if origin in self._origins or origin.partition("://")[2] == host.strip().lower():
            return
        raise ApiError(
            403,
            f"Pages of {given[:200]!r} may not use this server. If that is meant, start it with --cors-origin.",
            code="origin_not_allowed",
        )

    def _check_key(self, given: str, path: str) -> int:
        """Return which key it is, counted from 1; 0 where none is needed."""
        if not self._keys or path in _OPEN:
            return 0
        scheme, _, key = given.strip().partition(" ")
        # Each is compared, and as a whole, so that the time tells nothing.
        matches = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            problem = "No API key was given" if not given else "The API key is wrong"
            raise ApiError(
                401,
                f"{problem}; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matches.index(True) + 1


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
