"""`ranvier watch`: serve a run's report.html on this machine alone; the page reloads itself when it is rewritten."""

from __future__ import annotations

import os
import re
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from ranvier.errors import RanvierError
from ranvier.system.terminal import print_stderr
from ranvier.system.untrusted_file import open_regular_file

_NAME = "report.html"
_NO_PAGE_YET = b"""<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>Ranvier</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<p>There is no report here yet: a run writes it 20 seconds after its first step begins, and at its end."""
_OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
"""Accepted Host headers: a page from elsewhere whose name resolves to this machine (DNS rebinding) has another."""


@click.command(short_help="Show a run's report while it is in progress.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; by default a free one.")
def watch(run: Path, port: int) -> int:
    """Serve report.html of the folder RUN at a printed address, until Ctrl-C. The page reloads itself while the run is
    in progress. Only programs on this machine can connect; from elsewhere use an SSH tunnel."""
    with server_of(run, port) as server:
        waits = "" if (run / _NAME).exists() else ", which does not exist yet"
        if not run.exists():
            print_stderr(f"ranvier: there is no folder {run}. The page waits for a run that is started with "
                         f"--run-dir {run}; if one has been started, name the folder that it has printed.")
        print(f"http://127.0.0.1:{server.server_address[1]}/ shows {run / _NAME}{waits}; Ctrl-C ends this.", flush=True)
        server.serve_forever()
    return 0


def server_of(run: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on 127.0.0.1, not started. RanvierError if the folder is not a run's, or the port is
    taken."""
    try:
        names = set(os.listdir(run))
    except FileNotFoundError:  # the run has not begun
        names = set()
    except OSError:
        names = {"unreadable"}
    if names and not names & {_NAME, "run.toml"} and not any(name.startswith(".owner") for name in names):
        raise RanvierError("is not a run's folder", code="run-without-report", where="RUN", value=str(run),
                           remedy="Name the folder that the run prints, or its `--run-dir`.")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, run / _NAME))
    except OSError as error:
        raise RanvierError(f"cannot be used: {error.strerror or error}", code="port-not-usable", where="--port",
                           value=port, remedy="Leave it out to use a free port.") from error


class _Handler(BaseHTTPRequestHandler):
    """Serves one file, with an ETag that changes with it."""

    def __init__(self, page: Path, *args: object) -> None:
        self._page = page
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with the page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the page's headers only."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if not _OWN_NAMES.fullmatch(self.headers.get("Host", "")) or self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            if self._page.exists():
                with open_regular_file(self._page) as file:
                    content = file.read()
                tag = f'"{self._page.stat().st_mtime_ns}"'
            else:
                content, tag = _NO_PAGE_YET, '"none"'
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(content))),
                            ("ETag", tag), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
