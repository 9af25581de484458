"""The completions server: routes, authorisation, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ingot.backends.sampling import Sampling
from ingot.errors import ConfigError
from ingot.inference.batching import Chunk, Completion, Engine
from ingot.inference.model import LoadedModel
from ingot.serve.protocol import MAX_SEED, Answer, Refused, read_request

MAX_BODY_BYTES = 1 << 24
CLOSE_SECONDS = 5.0  # how long a shutdown waits for responses in progress
CLIENT_CLOSED = 499  # status code for a request whose client has disconnected
NO_CHAT = "this is a base model, which does not support chat; use /v1/completions to continue a prompt"

Indexed = tuple[int, Chunk]  # index of the completion, and its chunk


def make_app(model: LoadedModel, name: str, token: str | None = None) -> FastAPI:
    """Build the completions server for a model; if `token` is given, clients must send it."""
    engine = Engine(model)

    async def check(request: Request) -> None:
        if token is None:
            await check_local(request)
        elif not has_token(request, token):
            wrong = "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
            raise Refused(wrong, status=401, code="invalid_api_key")

    app = FastAPI(title="ingot serve", dependencies=[Depends(check)], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine, app.state.close = engine, partial(in_thread, engine.close)
    add_error_handlers(app, "; use /v1/completions or /v1/models")

    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ingot"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> dict[str, Any]:
        if asked != name:
            raise Refused(f"there is no model {asked!r:.100}; this server has {name!r}", "model", 404, "model_not_found")
        return about

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        raise Refused(NO_CHAT, code="no_chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(request, engine, name)

    return app


async def complete(request: Request, engine: Engine, name: str) -> Response:
    """Respond to a completion request, as a stream of events if the client asks for one."""
    model, loop = engine.model, asyncio.get_running_loop()
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise Refused(f"the request has more than {MAX_BODY_BYTES:,} bytes", status=413)
    except ClientDisconnect:
        raise Refused("the client disconnected before its request was complete", status=CLIENT_CLOSED) from None
    # Read the request in a thread, so that encoding a long prompt does not block other requests.
    asked, prompts = await in_thread(read_request, bytes(body), model.tokenizer, model.context, name)
    rows = [prompt for prompt in prompts for _ in range(asked.n)]
    answer = Answer(model.tokenizer, name, rows, asked.logprobs, asked.echo)
    chunks: asyncio.Queue[Indexed] = asyncio.Queue()

    def put(index: int, chunk: Chunk) -> None:
        with suppress(RuntimeError):  # the server has shut down in the meantime
            loop.call_soon_threadsafe(chunks.put_nowait, (index, chunk))

    completions = [
        Completion(
            prompt.ids,
            prompt.is_new,
            asked.max_tokens,
            Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed % MAX_SEED + index),
            partial(put, index),
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
            logprobs=asked.logprobs,
            echo=asked.echo,
            stream=asked.stream,
        )
        for index, prompt in enumerate(rows)
    ]
    for completion in completions:
        engine.submit(completion)
    if asked.stream:
        usage = len(prompts) if asked.stream_options.include_usage else None
        return StreamingResponse(_events(answer, completions, chunks, usage), media_type="text/event-stream")
    return await _whole(request, answer, completions, chunks, len(prompts))


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a daemon thread and return its result. (Asyncio's own threads would keep the server from exiting.)"""
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # if the client disconnects, the thread continues and its result is dropped

    def work() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


def add_error_handlers(app: FastAPI, advice: str = "") -> None:
    """Make the app return errors in OpenAI's format; `advice` is appended to the message for an unknown route."""

    @app.exception_handler(Refused)
    async def on_refused(request: Request, refused: Refused) -> Response:
        return JSONResponse(refused.record(), refused.status)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        wrong = f"{request.method} {request.url.path:.100}"
        reason = f"{wrong} is not allowed" if error.status_code == 405 else f"there is no {wrong}{advice}"
        return await on_refused(request, Refused(reason, status=error.status_code))


async def check_local(request: Request) -> None:
    """Reject requests whose Host header names another machine (DNS rebinding), and cross-site requests."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if not is_own_name(host):
        raise Refused(f"the host {host!r:.100} is not this machine; use http://127.0.0.1", status=421)
    if origin is not None and origin != f"http://{host}":
        raise Refused(f"web pages of {origin:.100} may not use this server", status=403)


def has_token(request: Request, token: str) -> bool:
    """Return True if the request's Authorization header carries the token."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode("latin-1"), token.encode())


def is_own_name(host: str) -> bool:
    """Return True if a Host header, with or without a port, is localhost or a loopback address."""
    name, _, port = host.rpartition(":")
    name = (name if port.isdigit() else host).lower().removesuffix(".")
    try:
        return name == "localhost" or ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


async def _whole(
    request: Request, answer: Answer, completions: list[Completion], chunks: asyncio.Queue[Indexed], prompts: int
) -> Response:
    """Return the response once it is complete; generation stops if the client disconnects first."""
    choices: dict[int, dict[str, Any]] = {}

    async def disconnected() -> None:
        # request.is_disconnected is not used: behind middleware it may return False although the client has disconnected.
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(disconnected())
    try:
        while len(choices) < len(completions):
            getting = asyncio.ensure_future(chunks.get())
            await asyncio.wait({getting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                return Response(status_code=CLIENT_CLOSED)
            index, chunk = getting.result()
            choices[index] = answer.choice(index, chunk)
    finally:
        leaving.cancel()
        for completion in completions:
            completion.gone.set()
    record = answer.record([choices[index] for index in range(len(completions))])
    return JSONResponse({**record, "usage": answer.usage(prompts)})


async def _events(
    answer: Answer, completions: list[Completion], chunks: asyncio.Queue[Indexed], usage: int | None
) -> AsyncIterator[str]:
    """Yield the response as server-sent events; the server closes this generator when the client disconnects."""
    left = len(completions)
    try:
        while left:
            index, chunk = await chunks.get()
            left -= chunk.finish is not None
            yield f"data: {json.dumps(answer.record([answer.choice(index, chunk)]))}\n\n"
        if usage is not None:
            yield f"data: {json.dumps({**answer.record([]), 'usage': answer.usage(usage)})}\n\n"
        yield "data: [DONE]\n\n"
    except Refused as failure:
        yield f"data: {json.dumps(failure.record())}\n\n"
    finally:
        for completion in completions:
            completion.gone.set()


# Shutdown: uvicorn waits for open requests, and these wait for the model or for events, so the app is closed first.


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on `host` and `port`; raise ConfigError if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None


class ClosingServer(uvicorn.Server):
    """A server that calls the app's `state.close` before it shuts down, so that no open request delays the shutdown."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the app, then shut down the server."""
        # Clients that do not read their response are disconnected, and uvicorn would log a traceback for each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        app: Any = self.config.app
        with suppress(TimeoutError):
            await asyncio.wait_for(app.state.close(), CLOSE_SECONDS)
        await super().shutdown(sockets)


def make_server(app: FastAPI) -> ClosingServer:
    """Return a server for an app; the server logs only warnings."""
    return ClosingServer(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))


def serve_until_stopped(app: FastAPI, listening: socket.socket) -> None:
    """Serve the app until Ctrl-C is pressed."""
    try:
        make_server(app).run(sockets=[listening])
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
