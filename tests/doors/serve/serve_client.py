"""A server of `ingot serve` in a thread, for the tests of this folder."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request


class Client:
    """A server in a thread, and what one may ask it."""

    def __init__(self, model, token=None):
        import uvicorn

        from ingot.doors.serve.app import make_app

        self.app = make_app(model, "small", token)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="critical", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self):
        self.server.should_exit = True
        self.thread.join()
        self.app.state.engine.close()

    def open(self, path, body=None, **headers):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        words = {"Content-Type": "application/json", **{name.capitalize(): value for name, value in headers.items()}}
        return urllib.request.urlopen(urllib.request.Request(self.address + path, data, words), timeout=20)

    def ask(self, body=None, path="/v1/completions", **headers):
        """The status and the JSON of an answer."""
        try:
            with self.open(path, body, **headers) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stream(self, **body):
        with self.open("/v1/completions", {**body, "stream": True}) as answer:
            lines = [line.decode().strip() for line in answer]
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
