"""The live page: a report of runs that are still training, served on this machine only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import PomonaError, require
from ..lab.runs.folder import METRICS_FILE, SUMMARY_FILE
from ..lab.sweeps.run_store import find_run_folders
from .collection import collect_runs
from .page import live_data, render_page

HOST = "127.0.0.1"
DEFAULT_PORT = 8765


class LiveServer(ThreadingHTTPServer):
    """Serves `/`, the page, and `/report.json?version=V`, which answers 204 while the runs have nothing new."""

    daemon_threads = True

    def __init__(self, sources: Sequence[str | Path], port: int = DEFAULT_PORT) -> None:
        self.sources = [Path(source) for source in sources]
        for source in self.sources:
            require(source.is_dir(), f"'{source}' is not a folder: watch the folder of a run or of a sweep.")
        collect_runs(self.sources)  # refuses sources without runs before the port is taken
        try:
            super().__init__((HOST, port), LiveHandler)
        except OSError as error:
            raise PomonaError(f"port {port} cannot be used ({error.strerror}): give another with --port.") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def version(self) -> str:
        """Return a text that changes whenever a run writes metrics or its summary."""
        folders = [folder for source in self.sources for folder in find_run_folders(source)]
        stamps = []
        for file in (folder / name for folder in folders for name in (METRICS_FILE, SUMMARY_FILE)):
            with suppress(OSError):
                found = file.stat()
                stamps.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
        return "-".join([str(len(folders)), *stamps]) if len(stamps) < 9 else f"{len(folders)}-{hash(tuple(stamps)):x}"


class LiveHandler(BaseHTTPRequestHandler):
    """Answers the requests of a live page; requests that name another host are refused."""

    server: LiveServer

    def do_GET(self) -> None:
        """Send the page, or its data if they changed."""
        host, (path, _, query) = self.headers.get("Host", ""), self.path.partition("?")
        if host.rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)
        elif path == "/":
            self.answer("text/html; charset=utf-8", render_page(collect_runs(self.server.sources), live=True).encode())
        elif path == "/report.json":
            version = self.server.version()
            if query == f"version={version}":
                self.answer("application/json", b"", status=204)
            else:
                data: dict[str, Any] = {"version": version} | live_data(collect_runs(self.server.sources))
                self.answer("application/json", json.dumps(data).encode())
        else:
            self.send_error(404)

    def answer(self, kind: str, data: bytes, status: int = 200) -> None:
        """Send a response that no cache keeps."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the page was closed
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page asks every two seconds."""


def serve(
    sources: Sequence[str | Path], port: int = DEFAULT_PORT, on_start: Callable[[str], None] | None = None
) -> None:
    """Serve the live page of runs until Ctrl-C; `on_start` receives its address. Port 0 takes any free one."""
    with LiveServer(sources, port) as server, suppress(KeyboardInterrupt):
        if on_start is not None:
            on_start(server.url)
        server.serve_forever(poll_interval=0.2)
