"""The server as it ends: a page's stream has no end of its own, and uvicorn waits for streams before the app may close."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn


class PageServer(uvicorn.Server):
    """A server of the page that ends its streams first."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the pages and the texts that are being written, then the server."""
        app: Any = self.config.app
        app.state.watcher.end_pages()
        await asyncio.to_thread(app.state.playground.close)
        await super().shutdown(sockets)
