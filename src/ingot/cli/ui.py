"""`ingot ui`: a live page on runs, in a browser of this machine."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.generate import DeviceName
from ingot.cli.verbs import app
from ingot.errors import CheckpointError, ConfigError


@app.command("ui")
def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run folders, or folders of them. Default: runs/.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="0: any that is free.", min=0, max=65535)] = 8080,
    device: DeviceName = "cpu",
    allow_custom_models: Annotated[
        bool,
        typer.Option("--allow-custom-models", help="Let the page open models that run a Python file (model.file)."),
    ] = False,
) -> None:
    """Show runs as they go on in a page: curves, seeds, settings, samples, and a place to try them; needs the extra `ui`."""
    try:
        from ingot.serve.app import serve_until_stopped
        from ingot.ui.app import make_app
    except ImportError:
        raise ConfigError("ingot ui needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[ui]'") from None
    from ingot.cli.serve import listen
    from ingot.runs.view import RUNS
    from ingot.runtime.machine import cache_root
    from ingot.ui.watcher import Watcher

    for path in runs or ():
        if not path.is_dir():
            raise CheckpointError(f"there is no folder {path}; name run folders, or a folder of them")
    folders = runs or [RUNS]
    listening = listen("127.0.0.1", port)
    token = secrets.token_hex(8)
    app = make_app(Watcher(folders, cache_root() / "ui"), token, device, allow_custom_models)
    print(f"showing the runs of {', '.join(map(str, folders))} at http://127.0.0.1:{listening.getsockname()[1]}; Ctrl-C ends it")
    print(f"to stop a run or open a model from the page, give it this token: {token}", flush=True)
    serve_until_stopped(app, listening)
