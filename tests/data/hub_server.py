"""A small Hugging Face hub on this machine, for the real client: repositories, commits, redirects to a CDN, and mishaps.

Large files (LFS, by their endings) are hashed with sha256, as on the hub, and `resolve` redirects to another origin that must not
get the token. Other files are plain git blobs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".bin", ".model", ".jsonl", ".safetensors")


@dataclass
class Fault:
    """What goes wrong with requests whose path ends so; `times` of them, then all is well."""

    path: str
    method: str = "GET"
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body, then the connection ends in the middle of it
    reset: bool = False  # and by a reset instead of an orderly end
    short: int = 0  # bytes missing at the end of a body that claims to be whole
    flip: bool = False  # the first byte of the body is another one
    pause: threading.Event | None = None  # wait for it before the second half of the body


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


class HubServer:
    """Repositories with their commits, the faults still to come, and the requests that were made."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.token: str | None = None  # if set, only who sends it gets in
        self.gated = False
        self.claims: dict[str, int] = {}  # sizes that the list of files gives instead of the true ones
        self.lock = threading.Lock()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Make these the files of a repository."""
        state = repr(sorted((name, hashlib.sha1(content).hexdigest()) for name, content in files.items()))
        sha = hashlib.sha1(f"{repo}{len(self.commits.get(repo, ()))}{state}".encode()).hexdigest()
        self.commits.setdefault(repo, {})[sha] = dict(files)
        self.heads[repo] = sha
        return sha

    def fail(self, path: str, **mishap: Any) -> Fault:
        """Let requests for a path fail."""
        fault = Fault(path, **mishap)
        self.faults.append(fault)
        return fault

    def asked(self, method: str, ending: str) -> list[Request]:
        """The requests of a method for paths that end so."""
        return [request for request in self.requests if request.method == method and request.path.endswith(ending)]

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and path.endswith(fault.path) and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@contextmanager
def serving() -> Iterator[HubServer]:
    """A hub that ends with the block."""
    server = HubServer()
    try:
        yield server
    finally:
        for fault in server.faults:
            if fault.pause is not None:
                fault.pause.set()
        server.close()


def etag(name: str, content: bytes) -> str:
    if name.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two packets; the second would wait 40 ms for the first

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            """Create a repository, or add files to it; all of them travel in the commit, none by LFS."""
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else self._chunks()
            hub.requests.append(Request(self.command, path, None, self.headers.get("Authorization")))
            answer: dict[str, Any] = {"errors": [], "warnings": []}  # of /api/validate-yaml
            if hub.token is None or self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, {"X-Error-Code": "RepoNotFound"})
                return
            if path == "/api/repos/create":
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}"
                if repo not in hub.heads:
                    hub.commit(repo, {})
                answer = {"url": f"{hub.endpoint}/{repo}"}
            elif path.endswith("/preupload/main"):
                names = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            elif path.endswith("/commit/main"):
                repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
                added = [record["value"] for record in map(json.loads, body.splitlines()) if record["key"] == "file"]
                files = {file["path"]: base64.b64decode(file["content"]) for file in added}
                sha = hub.commit(repo, hub.commits[repo][hub.heads[repo]] | files)
                answer = {"commitUrl": f"{hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
            fault = hub.fault_for(self.command, path)
            if fault is not None and fault.status is not None:
                self._send(fault.status, fault.headers)
            elif path.startswith("/cdn/"):
                _, _, repo, commit, name = path.split("/", 4)
                self._body(hub.commits[repo.replace("--", "/")][commit][name], fault)
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                code = "GatedRepo" if hub.gated else "RepoNotFound"
                self._send(403 if hub.gated else 401, {"X-Error-Code": code, "X-Error-Message": "Access is restricted."})
            elif path.startswith(("/api/datasets/", "/api/models/")):
                self._info(path.split("/", 3)[3])
            else:
                self._resolve(path.removeprefix("/datasets").removeprefix("/"), fault)

        def _info(self, path: str) -> None:
            repo, _, revision = path.replace("/tree/", "/revision/").partition("/revision/")
            if (found := self._find(repo, revision or "main")) is None:
                return
            sha, files = found
            siblings = []
            for name, content in files.items():
                size = hub.claims.get(name, len(content))
                entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": etag("", content)}
                if name.endswith(LFS):
                    sha256 = etag(name, content)
                    entry["lfs"] = {"sha256": sha256, "oid": sha256, "size": size, "pointerSize": 130}
                siblings.append(entry)
            tree = [{"type": "file", "path": entry["rfilename"], "oid": entry["blobId"], **entry} for entry in siblings]
            facts = {"id": repo, "sha": sha, "private": False, "siblings": siblings}
            body = json.dumps(tree if "/tree/" in path else facts).encode()
            self._send(200, {"Content-Type": "application/json"}, body)

        def _resolve(self, path: str, fault: Fault | None) -> None:
            repo, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            if (found := self._find(repo, revision)) is None:
                return
            sha, files = found
            if name not in files:
                self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
                return
            mark = {"X-Repo-Commit": sha, "ETag": f'"{etag(name, files[name])}"'}
            if name.endswith(LFS):
                linked = {"X-Linked-Etag": mark["ETag"], "X-Linked-Size": str(len(files[name]))}
                self._send(302, {**mark, **linked, "Location": f"{hub.cdn}/cdn/{repo.replace('/', '--')}/{sha}/{name}"})
            elif self.command == "HEAD":
                self._send(200, mark, length=len(files[name]))
            else:
                self._body(files[name], fault, mark)

        def _find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            if repo not in hub.heads:
                self._send(404, {"X-Error-Code": "RepoNotFound"})
                return None
            sha = hub.heads[repo] if revision == "main" else revision
            if sha not in hub.commits[repo]:
                self._send(404, {"X-Error-Code": "RevisionNotFound"})
                return None
            return sha, hub.commits[repo][sha]

        def _body(self, content: bytes, fault: Fault | None, headers: dict[str, str] | None = None) -> None:
            fault = fault or Fault("")
            if fault.flip:
                content = bytes([content[0] ^ 1]) + content[1:]
            content = content[: len(content) - fault.short]
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if "Range" in self.headers else {}
            body = content[start:]
            self._head(206 if ranged else 200, {**(headers or {}), **ranged}, len(body))
            if fault.cut_after is not None:
                self.wfile.write(body[: fault.cut_after])
                self.wfile.flush()
                if fault.reset:
                    time.sleep(0.05)  # the bytes before a reset are to arrive
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            if fault.pause is not None:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                fault.pause.wait(30)
                body = body[len(body) // 2 :]
            self.wfile.write(body)

        def _send(self, status: int, headers: dict[str, str], body: bytes = b"", length: int | None = None) -> None:
            self._head(status, headers, len(body) if length is None else length)
            if self.command != "HEAD":
                self.wfile.write(body)

        def _head(self, status: int, headers: dict[str, str], length: int) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(length)}.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler
