"""The server as it ends: a page's stream has no end of its own, and uvicorn waits for streams before the app may close."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI


class PageServer(uvicorn.Server):
    """A server of the page that ends its streams first."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=1, **options))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the pages and the texts that are being written, then the server."""
        self._app.state.watcher.end_pages()
        await asyncio.to_thread(self._app.state.playground.close)
        await super().shutdown(sockets)
