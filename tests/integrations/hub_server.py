"""A small substitute for the Hugging Face Hub on 127.0.0.1: one that keeps what is committed and serves it again."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class HubServer(ThreadingHTTPServer):
    """The server, with the files of every repository and the paths of all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict] = []
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        """Return the address that stands for https://huggingface.co."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The answers to the requests of `create_repo`, `upload_folder` and `snapshot_download`."""

    server: HubServer

    def log_message(self, *arguments):
        """Print nothing."""

    def answer(self, value, headers=(), code=200):
        """Send JSON, or bytes as they are."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for key, text in (("Content-Length", str(len(data))), *headers):
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        self.server.requests.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            self.server.created.append(request)
            name = f"{request.get('organization', 'user')}/{request['name']}"
            self.server.repositories.setdefault(name, {})
            self.answer({"url": f"{self.server.address}/{name}", "id": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(
                {"files": [{key: file[key] for key in ("path", "uploadMode", "shouldIgnore")} for file in files]}
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main.*", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    data = base64.b64decode(line["value"]["content"])
                    self.server.repositories[match[1]][line["value"]["path"]] = data
            url = f"{self.server.address}/{match[1]}/commit/{COMMIT}"
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        else:
            self.answer({"error": f"unknown path {self.path}"}, code=404)

    def do_GET(self):
        self.server.requests.append(self.path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(/revision/[^/?]+)?(\?.*)?", self.path):
            files = self.server.repositories.get(match[1])
            if files is None:
                self.answer({"error": "not found"}, [("X-Error-Code", "RepoNotFound")], 404)
                return
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            facts = {"id": match[1], "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            self.answer({**facts, "siblings": siblings})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", self.path):
            files = self.server.repositories[match[1]]
            hashes = {name: hashlib.sha1(data, usedforsecurity=False).hexdigest() for name, data in files.items()}
            self.answer(
                [{"type": "file", "path": name, "size": len(data), "oid": hashes[name]} for name, data in files.items()]
            )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path):
            data = self.server.repositories[match[1]][match[2]]
            etag = hashlib.sha256(data).hexdigest()
            self.answer(data, [("ETag", f'"{etag}"'), ("X-Repo-Commit", COMMIT), ("Accept-Ranges", "bytes")])
        else:
            self.answer({"error": f"unknown path {self.path}"}, code=404)

    do_HEAD = do_GET


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """Yield a hub that runs until the block ends."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
