"""A server that shows the page of a run in a browser on this host, while the run trains."""

import secrets
import socket
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.config import InputError
from ptdmpi.report.page.content import content, head
from ptdmpi.report.page.document import as_json, document
from ptdmpi.report.run import METRICS, recorded, records
from ptdmpi.report.sound import LineCount
from ptdmpi.report.status import BROKEN, Tail, Watched

HOST = "127.0.0.1"
# the server spends at most this fraction of its time on making the content of the page, even if the
# run is long
BUSY_FRACTION = 0.1


class Followed:
    """A run whose page is updated while the run trains. Raises InputError if `path` is not a run
    directory.

    Several threads may call `news`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched = Watched(path)
        self._metrics = Tail(path / METRICS)
        self._count = LineCount(METRICS)
        self._problems: list[str] = []
        self._records: list[dict[str, Any]] = []
        self._content: dict[str, Any] | None = None
        self._version = 0
        self._made_of: Any = None
        self._rest_until = 0.0
        self._lock = Lock()

    def news(self, known: int = 0) -> dict[str, Any]:
        """Return the head of the page, its content, and the version number of the content. `known`
        is the version of the content that the caller already has. If this is the newest version,
        the returned content is None."""
        with self._lock:
            status = self._watched.status()
            problem = ""
            if time.monotonic() >= self._rest_until:
                start = time.monotonic()
                problem = self._refresh()
                end = time.monotonic()
                self._rest_until = end + (end - start) / BUSY_FRACTION
            shown = head(status, self._problems)
            if problem:
                shown["warnings"] = [*shown["warnings"], problem]
            news = {"head": shown, "version": self._version, "content": None}
            if known != self._version:
                news["content"] = self._content
            return news

    def _refresh(self) -> str:
        """Make the content again if files have changed. Return "" after success. If the content
        cannot be made, keep the old content, and return the reason."""
        made_of = self._signature()
        if made_of == self._made_of:
            return ""
        lines = self._metrics.lines()
        if self._metrics.begun_anew:
            self._records.clear()
            self._count = LineCount(METRICS)
        self._records.extend(records(lines, self._count))
        self._problems = []
        try:
            config = tables_of(read_file(self.path / "config.toml"))
            run = recorded(self.path, config, list(self._records), self._count.problems())
            self._content = content(run)
            self._problems = run.problems
        except (InputError, *BROKEN) as error:
            return f"the records cannot be shown: {error}"
        self._version += 1
        self._made_of = made_of
        return ""

    def _signature(self) -> list[tuple[str, int, int]]:
        """Return the name, size and modification time of each file from which the content is
        made."""
        names = ("metrics.jsonl", "log.txt", "config.toml", "history.jsonl")
        paths = [self.path / name for name in names]
        paths += sorted((self.path / "timeline").glob("step-*.json"))[-1:]
        stats = [(path.name, path.stat()) for path in paths if path.is_file()]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


class PageServer(ThreadingHTTPServer):
    """The server of a run's page. It accepts only connections from this host.

    `address` is the web address of the page. The address contains a random key, because every user
    of this host can connect to the port, even a user who may not read the run directory. If `port`
    is 0, any free port is used. Raises InputError if the port is in use.
    """

    daemon_threads = True

    def __init__(self, followed: Followed, port: int, every_s: float) -> None:
        self.followed = followed
        self.every_s = every_s
        self.root = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(
                f"--port {port}: {error.strerror}; without --port, any free port is used"
            ) from None
        self.address = f"http://{HOST}:{self.server_port}{self.root}"

    def server_bind(self) -> None:
        """Bind the socket. Unlike the base class, do not look up the name of the host, because this
        could wait for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = HOST, self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    """A handler that answers one request of a browser: with the page as HTML, or with the new data
    of the page as JSON."""

    server: PageServer

    def do_GET(self) -> None:
        """Answer a request for the page or for its new data. All other requests are refused."""
        asked = urlsplit(self.path)
        server = self.server
        # Refuse other host names, so that a page of another site whose name resolves to 127.0.0.1
        # cannot read the answers. The port is not checked, because an ssh tunnel may use another
        # port.
        name = self.headers.get("Host", "").partition(":")[0]
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif asked.path == server.root:
            page = document(server.followed.news(), server.every_s)
            self._answer(page, "text/html; charset=utf-8")
        elif asked.path == f"{server.root}news":
            known = parse_qs(asked.query).get("known", ["0"])[0]
            number = int(known) if len(known) < 10 and known.isascii() and known.isdigit() else 0
            self._answer(as_json(server.followed.news(number)), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        data = text.encode(errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because a line for each request would make the page's address scroll
        away."""
