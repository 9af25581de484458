"""A web server of ours in a thread, and what one may ask it."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any


class Site:
    """A web server somewhere."""

    def __init__(self, address: str) -> None:
        self.address = address

    def open(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        words = {"Content-Type": "application/json", **{name.capitalize(): value for name, value in headers.items()}}
        return urllib.request.urlopen(urllib.request.Request(self.address + path, data, words, method=method), timeout=300)

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        try:
            with self.open(path, body, method, **headers) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


class Web(Site):
    """An app that listens at a free port until it is closed."""

    def __init__(self, app: Any) -> None:
        from ingot.serve.app import make_server

        self.app = app
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        super().__init__(f"http://127.0.0.1:{self.socket.getsockname()[1]}")
        self.server = make_server(app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
