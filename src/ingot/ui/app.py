"""The web server of the live page: what can be asked, and by whom.

It reads only the run folders it was given, and a client names a run by a number of ours, never by a path. Stopping a run
and opening a model need the token. A name in the Host header that is not this machine's is refused, as are web
pages of others: a page somewhere cannot read runs through the browser of who looks at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ingot.backends.sampling import prompt_ids
from ingot.errors import CheckpointError, IngotError
from ingot.runs.view import Run
from ingot.serve.app import complete, is_token, read_body, refuse_others
from ingot.serve.protocol import Refused, check_size
from ingot.ui.watcher import Watched, Watcher

if TYPE_CHECKING:
    from ingot.inference.engine import Engine


# The models that the page lets write: one at a time, the newest checkpoint of a run, by the engine that serves clients.


class Playground:
    """Opens models when they are asked for."""

    def __init__(self, device: str, allow_custom_models: bool) -> None:
        self.device, self._allow_custom_models = device, allow_custom_models
        self._lock = asyncio.Lock()
        self._opened: tuple[Path, Engine] | None = None

    async def engine(self, run: Run) -> tuple[Engine, Path]:
        """The engine of a run's newest checkpoint, and which that is."""
        saved = run.checkpoints()
        if not saved:
            raise CheckpointError(f"{run.path} has no checkpoint yet; wait for its first")
        newest = saved[max(saved)]
        async with self._lock:
            if self._opened is None or self._opened[0] != newest:
                await asyncio.to_thread(self.close)
                self._opened = (newest, await asyncio.to_thread(_open, newest, self.device, self._allow_custom_models))
            return self._opened[1], newest

    def close(self) -> None:
        """Let go of the model."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


def _open(path: Path, device: str, allow_custom_models: bool) -> Engine:
    from ingot.inference.engine import Engine
    from ingot.inference.model import find_tokenizer, open_model, open_weights

    weights = open_weights(path)
    if weights.config.model.family == "file" and not allow_custom_models:
        said = f"{path} has a custom model, whose Python file would run; start ingot ui with --allow-custom-models to open it"
        raise Refused(said, status=403)
    return Engine(open_model(weights, find_tokenizer(weights), device))


PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501
SILENT_SECONDS = 15.0  # then a comment is sent, by which a browser that is gone is found


def make_app(watcher: Watcher, token: str, device: str = "cpu", allow_custom_models: bool = False) -> FastAPI:
    """The server of one page."""
    playground = Playground(device, allow_custom_models)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        watcher.start()
        yield
        await asyncio.to_thread(watcher.close)
        await asyncio.to_thread(playground.close)

    async def close() -> None:
        watcher.end_pages()  # their streams have no end of their own
        await asyncio.to_thread(playground.close)

    app = FastAPI(lifespan=life, dependencies=[Depends(check_client)], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.watcher, app.state.playground, app.state.close = watcher, playground, close
    _tell_errors(app)
    _serve_page(app)
    _serve_runs(app, watcher, token)
    _serve_playground(app, watcher, playground, token)
    return app


def _tell_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def tell(request: Request, refused: Refused) -> Response:
        return JSONResponse(refused.record(), refused.status)

    @app.exception_handler(IngotError)
    async def tell_mistake(request: Request, error: IngotError) -> Response:
        return JSONResponse(Refused(str(error), status=409).record(), 409)

    @app.exception_handler(HTTPException)
    async def tell_http(request: Request, error: HTTPException) -> Response:
        refused = Refused(f"there is no {request.method} {request.url.path:.100}", status=error.status_code)
        return JSONResponse(refused.record(), refused.status)


def _serve_page(app: FastAPI) -> None:
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in KINDS}

    @app.get("/")
    async def page() -> Response:
        return _file(files["index.html"])

    @app.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise Refused(f"there is no file {name!r:.60} here", status=404)
        return _file(files[name])


def _serve_runs(app: FastAPI, watcher: Watcher, token: str) -> None:
    @app.get("/api/events")
    async def events() -> Response:
        return StreamingResponse(_events(watcher), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/api/settings")
    async def settings(runs: str) -> dict[str, Any]:
        return await asyncio.to_thread(_settings, [_run(watcher, one) for one in runs.split(",")])

    @app.get("/api/statistics")
    async def statistics(runs: str) -> dict[str, Any]:
        return await asyncio.to_thread(_statistics, [_run(watcher, one) for one in runs.split(",")])

    @app.get("/api/runs/{run}/samples/{step}")
    async def sample(run: str, step: int) -> dict[str, Any]:
        return {"step": step, "text": await asyncio.to_thread(_sample, _run(watcher, run), step)}

    @app.post("/api/runs/{run}/stop")
    async def stop(request: Request, run: str) -> dict[str, Any]:
        watched = _run(watcher, run)
        _require_token(request, token, "stopping a run")
        found = await asyncio.to_thread(watched.run.stop)
        return {"step": found.state.step if found is not None else 0}


def _serve_playground(app: FastAPI, watcher: Watcher, playground: Playground, token: str) -> None:
    @app.post("/api/runs/{run}/open")
    async def open_model(request: Request, run: str) -> dict[str, Any]:
        _require_token(request, token, "opening a model")
        engine, path = await playground.engine(_run(watcher, run).run)
        prompt, model = (await read_body(request)).decode(errors="replace"), engine.model
        check_size(prompt, model.tokenizer, model.context)
        room = None if model.context is None else model.context - len(prompt_ids(model.tokenizer, prompt))
        return {"checkpoint": path.name, "device": model.backend.device.name, "context": model.context, "room": room}

    @app.post("/api/runs/{run}/completions")
    async def completions(request: Request, run: str) -> Response:
        _require_token(request, token, "asking for a completion")
        watched = _run(watcher, run)
        engine, _ = await playground.engine(watched.run)
        return await complete(request, engine, watched.name)


def _require_token(request: Request, token: str, action: str) -> None:
    if not is_token(request, token):
        raise Refused(f"{action} needs the token that ingot ui printed when it was started", status=401)


def _run(watcher: Watcher, asked: str) -> Watched:
    found = watcher.runs.get(asked)
    if found is None:
        raise Refused(f"there is no run {asked!r:.60} here", status=404)
    return found


async def check_client(request: Request) -> None:
    """Refuse who is not at this machine, as `ingot serve` does without a token."""
    refuse_others(request)


def _file(path: Path) -> Response:
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=headers)


async def _events(watcher: Watcher) -> AsyncIterator[bytes]:
    """All that is known of the runs and then what changes, until the browser or the server leaves."""
    number, queue = watcher.open_page()
    try:
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), SILENT_SECONDS)
            except TimeoutError:
                event = b": still here\n\n"
            if event is None:
                return
            yield event
    finally:
        watcher.close_page(number)


def _settings(runs: list[Watched]) -> dict[str, Any]:
    """The settings in which runs differ; of one alone, those that are not the default."""
    from ingot.experiments.compare import settings_table

    known = [run for run in runs if run.settings is not None]
    return {"runs": [run.id for run in known], "rows": settings_table([run.settings or {} for run in known]) if known else []}


def _statistics(runs: list[Watched]) -> dict[str, Any]:
    """Runs that differ in their seeds alone, and what the tests between such groups say."""
    from ingot.experiments.compare import Known, over_seeds, tested

    known = [Known(run.name, run.run.path, run.settings, run.facts.get("val_bpb")) for run in runs if run.settings is not None]
    arms = over_seeds(known)
    told = [{"runs": arm.name, "n": arm.n, "mean": arm.mean, "std": arm.std} for arm in arms]
    return {"arms": told, "tests": [{"a": one.a.name, "b": one.b.name, "said": one.said} for one in tested(arms)]}


def _sample(watched: Watched, step: int) -> str:
    """A text that the run wrote; never one that lies elsewhere."""
    path = watched.run.samples().get(step)
    if path is None or not path.resolve().is_relative_to(watched.run.path.resolve()):
        raise Refused(f"{watched.name} has no sample of step {step:,}", status=404)
    try:
        return watched.run.sample(step)
    except CheckpointError as error:
        raise Refused(str(error), status=404) from None
