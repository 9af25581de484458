"""A server of `ingot serve` in a thread, for the tests of this folder."""

import json

from web import Web


class Client(Web):
    """A server of a model, and what one may ask it."""

    def __init__(self, model, token=None):
        from ingot.serve.app import make_app

        super().__init__(make_app(model, "small", token))

    def ask(self, body=None, path="/v1/completions", **headers):
        return super().ask(path, body, **headers)

    def stream(self, **body):
        with self.open("/v1/completions", {**body, "stream": True}) as answer:
            lines = [line.decode().strip() for line in answer]
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
