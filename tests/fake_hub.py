"""A Hugging Face hub on this machine, as far as its client asks it: commits, files in ranges, tokens, broken wires."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_somebody_who_may"

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """What the hub holds under one name.

    Attributes:
        commits: files of each commit, by its hash.
        revisions: commits by branch and tag.
        access: ``"public"``, ``"private"`` (unknown without the token) or ``"gated"`` (known, but not given out).
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    access: str = "public"

    def commit(self, files: dict[str, bytes], *revisions: str) -> str:
        """Add a commit, to the main branch unless other revisions are named, and return its hash."""
        content = b"".join(name.encode() + content for name, content in sorted(files.items()))
        commit = hashlib.sha1(content + bytes([len(self.commits)])).hexdigest()
        self.commits[commit] = dict(files)
        self.revisions.update(dict.fromkeys(revisions or ("main",), commit))
        return commit


@dataclass
class FakeHub:
    """The hub's state.

    Attributes:
        endpoint: for ``HF_ENDPOINT``.
        repositories: by ``owner/name``.
        requests: method, path and ``Range`` of each request so far.
        status: sent to every request, if not ``None``.
        cut_after: bytes of a file after which the connection breaks, so often as there are numbers.
    """

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    status: int | None = None
    cut_after: list[int] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], *revisions: str, access: str = "public") -> str:
        """Add a commit to a repository, which is made if need be, and return its hash."""
        repository = self.repositories.setdefault(name, Repository())
        repository.access = access
        return repository.commit(files, *revisions)

    def clear(self) -> None:
        """Forget everything but where it runs."""
        self.__init__(self.endpoint)  # type: ignore[misc]

    def fetched(self) -> list[str]:
        """Return the files that were sent, wholly or in part, without the repository's name."""
        return [match[3] for method, path, _ in self.requests if method == "GET" and (match := _FILE.fullmatch(path))]


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Run an empty hub in a thread."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.state.requests.append((self.command, unquote(path), self.headers.get("Range")))
        if self.state.status is not None:
            return self._fail(self.state.status, "")
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self._fail(404, "")
        name, revision, *rest = (unquote(part or "main") for part in match.groups())
        repository = self.state.repositories.get(name)
        sent = self.headers.get("Authorization")
        if sent not in (None, f"Bearer {TOKEN}"):
            return self._fail(401, "", "Invalid credentials in Authorization header")
        if repository is None or (repository.access == "private" and sent is None):
            return self._fail(401 if sent is None else 404, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if match.re is _API:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            body = {"_id": "1", "id": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
            return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if repository.access == "gated" and sent is None:
            return self._fail(401, "GatedRepo", "Access to this model is restricted.")
        if rest[0] not in files:
            return self._fail(404, "EntryNotFound", "Entry not found", commit)
        return self._file(files[rest[0]], commit)

    def _file(self, content: bytes, commit: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        start = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        status = 206 if asked else 200
        cuts = self.state.cut_after
        if self.command == "GET" and cuts and len(content) - start > cuts[0]:
            self._send(status, content[start:], headers, cuts.pop(0))
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self._send(status, content[start:], headers)

    def _fail(self, status: int, code: str, message: str = "", commit: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self._send(status, json.dumps({"error": message}).encode(), {k: v for k, v in headers.items() if v})

    def _send(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:most])
