"""A hub on this machine, as far as an upload asks it: repositories, LFS, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a" * 34


class FakeHub(ThreadingHTTPServer):
    """Repositories by name, each with its files; what was asked, in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, code: int, found: Any) -> None:
        body = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            whole = b""
            while size := int(self.rfile.readline().strip(), 16):
                whole += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return whole
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self._answer(200, {})

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        self._answer(404, {"error": "not found"})

    def do_PUT(self) -> None:
        body = self._body()
        self.server.asked.append(f"PUT {self.path}")
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "another file"})
            return
        self.server.stored[oid] = body
        self._answer(200, {})

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        hub.asked.append(f"POST {self.path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [
                {**each, "actions": {"upload": {"href": f"{hub.address}/store/{each['oid']}"}}}
                for each in objects
            ]
            self._answer(200, {"transfer": "basic", "objects": upload})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.server.address}/{name}", "name": name}
        if name.startswith("others/"):
            self._answer(403, {"error": "You don't have the rights"})
        elif name in self.server.repositories:
            self._answer(409, {"error": "You already created this model repo", **url})
        else:
            self.server.repositories[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            self._answer(200, url)

    def _commit(self, body: bytes) -> None:
        name = "/".join(self.path.split("/")[3:5])
        files = self.server.repositories[name]
        for line in filter(None, body.split(b"\n")):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        url = f"{self.server.address}/{name}/commit/1"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": "1" * 40})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers while the block runs."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
