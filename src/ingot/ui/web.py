"""The web server of the live page.

The server reads only the run folders it was given; clients refer to a run by an id that the server assigns, never by a path.
Stopping a run and opening a model require a secret token. Requests with a foreign Host header and cross-site requests are
rejected, so that another website cannot read runs through a visitor's browser.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ingot.errors import CheckpointError, IngotError
from ingot.runs.view import Run
from ingot.serve.app import add_error_handlers, check_local, complete, has_token
from ingot.serve.protocol import Refused
from ingot.ui.watcher import WatchedRun, Watcher

if TYPE_CHECKING:
    from ingot.inference.batching import Engine

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501
KEEPALIVE_SECONDS = 15.0  # if no event is sent for this long, send an SSE comment to detect a closed browser


class Playground:
    """The model that completes prompts on the page: the newest checkpoint of one run at a time, loaded on request."""

    def __init__(self, device: str, allow_custom_models: bool) -> None:
        self.device, self._allow_custom_models = device, allow_custom_models
        self._lock = asyncio.Lock()
        self._opened: tuple[Path, Engine] | None = None

    async def engine(self, run: Run) -> tuple[Engine, Path]:
        """Return an engine for a run's newest checkpoint, loaded if necessary, and the path of the checkpoint."""
        checkpoints = run.checkpoints()
        if not checkpoints:
            raise CheckpointError(f"{run.path} has no checkpoint yet; wait until it has saved one")
        newest = checkpoints[max(checkpoints)]
        async with self._lock:
            if self._opened is None or self._opened[0] != newest:
                await asyncio.to_thread(self.close)
                self._opened = (newest, await asyncio.to_thread(self._open, newest))
            return self._opened[1], newest

    def _open(self, path: Path) -> Engine:
        from ingot.inference.batching import Engine
        from ingot.inference.model import find_tokenizer, open_model, open_weights

        weights = open_weights(path)
        if weights.config.model.family == "file" and not self._allow_custom_models:
            why = f"opening {path} would run its custom model's Python file; start ingot ui with --allow-custom-models to do so"
            raise Refused(why, status=403)
        return Engine(open_model(weights, find_tokenizer(weights), self.device))

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


def make_app(watcher: Watcher, token: str, device: str = "cpu", allow_custom_models: bool = False) -> FastAPI:
    """Build the web server of the live page; clients need `token` to stop a run or use a model."""
    playground = Playground(device, allow_custom_models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watcher.thread.start()
        yield
        await asyncio.to_thread(watcher.close)
        await asyncio.to_thread(playground.close)

    async def close() -> None:
        watcher.end_pages()  # an open event stream, which never ends by itself, would delay the shutdown
        await asyncio.to_thread(playground.close)

    app = FastAPI(lifespan=lifespan, dependencies=[Depends(check_local)], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.watcher, app.state.playground, app.state.close = watcher, playground, close
    add_error_handlers(app)

    @app.exception_handler(IngotError)
    async def on_ingot_error(request: Request, error: IngotError) -> Response:
        return JSONResponse(Refused(str(error)).record(), 409)

    files = {path.name: path for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES}

    @app.get("/")
    @app.get("/page/{name}")
    async def page(name: str = "index.html") -> Response:
        if name not in files:
            raise Refused(f"there is no file {name!r:.60} here", status=404)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return Response(files[name].read_bytes(), media_type=MEDIA_TYPES[files[name].suffix], headers=headers)

    @app.get("/api/events")
    async def events() -> Response:
        return StreamingResponse(_events(watcher), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.post("/api/page/{first}")
    async def turn(first: int) -> dict[str, Any]:
        watcher.turn(first)
        return {"first": watcher.first}

    @app.get("/api/settings")
    def settings(runs: str) -> dict[str, Any]:
        """Return the settings that differ between runs; for a single run, those that differ from the defaults."""
        from ingot.experiments.compare import settings_table

        readable = _readable(watcher, runs)
        rows = settings_table([settings for _, settings in readable]) if readable else []
        return {"runs": [run.id for run, _ in readable], "rows": rows}

    @app.get("/api/statistics")
    def statistics(runs: str) -> dict[str, Any]:
        """Return the mean val_bpb of each group of runs that differ only in their seeds, and how the groups compare."""
        from ingot.experiments.compare import SeedRun, over_seeds, tested

        readable = _readable(watcher, runs)
        arms = over_seeds([SeedRun(run.name, run.path, settings, run.facts.get("val_bpb")) for run, settings in readable])
        tests = [{"a": a.name, "b": b.name, "said": said} for a, b, said in tested(arms)]
        return {"arms": [{"runs": arm.name, "n": arm.n, "mean": arm.mean, "std": arm.std} for arm in arms], "tests": tests}

    @app.get("/api/runs/{run}/samples/{step}")
    def sample(run: str, step: int) -> dict[str, Any]:
        try:
            return {"step": step, "text": _run(watcher, run).run.sample(step)}
        except CheckpointError as error:
            raise Refused(str(error), status=404) from None

    @app.post("/api/runs/{run}/stop")
    async def stop(request: Request, run: str) -> dict[str, Any]:
        watched = _run(watcher, run)
        _require_token(request, token, "stopping a run")
        status = await asyncio.to_thread(watched.run.stop)
        return {"step": status.state.step if status is not None else 0}

    @app.post("/api/runs/{run}/open")
    async def open_model(request: Request, run: str) -> dict[str, Any]:
        _require_token(request, token, "opening a model")
        engine, path = await playground.engine(_run(watcher, run).run)
        return {"checkpoint": path.name, "device": engine.model.backend.device.name, "context": engine.model.context}

    @app.post("/api/runs/{run}/completions")
    async def completions(request: Request, run: str) -> Response:
        _require_token(request, token, "asking for a completion")
        watched = _run(watcher, run)
        engine, _ = await playground.engine(watched.run)
        return await complete(request, engine, watched.name)

    return app


def _require_token(request: Request, token: str, action: str) -> None:
    if not has_token(request, token):
        raise Refused(f"{action} needs the token that ingot ui printed when it was started", status=401)


def _run(watcher: Watcher, run_id: str) -> WatchedRun:
    run = watcher.runs.get(run_id)
    if run is None:
        raise Refused(f"this page shows no run {run_id!r:.60}", status=404)
    return run


def _readable(watcher: Watcher, ids: str) -> list[tuple[WatchedRun, dict[str, Any]]]:
    runs = [_run(watcher, run) for run in ids.split(",")]
    return [(run, run.settings) for run in runs if run.settings is not None]


async def _events(watcher: Watcher) -> AsyncIterator[bytes]:
    """Yield the current state of all runs and then every change, until the browser or the server closes the stream."""
    page = watcher.open_page()
    try:
        while True:
            try:
                event = await asyncio.wait_for(page.queue.get(), KEEPALIVE_SECONDS)
            except TimeoutError:
                event = b": still here\n\n"
            if event is None:
                return
            yield event
    finally:
        watcher.close_page(page)
