"""How a server of ours ends: its requests wait for a model or a page, and uvicorn waits for its requests."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI


class ClosingServer(uvicorn.Server):
    """A server that first closes what its requests wait for, by the app's `state.close`, so that each is answered."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is being written, then the server."""
        # A client that does not take its answer is cut off, which uvicorn would tell with a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        app: Any = self.config.app
        await app.state.close()
        await super().shutdown(sockets)


def make_server(app: FastAPI) -> ClosingServer:
    """The server of an app, which tells of nothing but warnings."""
    return ClosingServer(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))


def serve_until_stopped(app: FastAPI, listening: socket.socket) -> None:
    """Answer who asks until Ctrl-C."""
    try:
        make_server(app).run(sockets=[listening])
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
