"""`ingot serve`: a trained model behind OpenAI's completions, on this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.generate import DeviceName, Dtype, ModelPath, TokenizerName, Which
from ingot.cli.verbs import app
from ingot.errors import ConfigError, shown

TOKEN = "INGOT_SERVE_TOKEN"


@app.command("serve")
def serve(
    path: ModelPath,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Another than this machine's own needs --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0: any that is free.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"What clients must send. Default: what {TOKEN} says.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What clients call the model. Default: its folder's.")] = None,
    which: Which = "latest",
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
) -> None:
    """Answer OpenAI's /v1/completions with a trained model; needs the extra `serve`."""
    try:
        from ingot.serve.app import make_app, serve_until_stopped
    except ImportError:
        raise ConfigError("ingot serve needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[serve]'") from None
    token = token or os.environ.get(TOKEN) or None
    if token is None and not _is_own(host):
        raise ConfigError(
            f"--host {host} lets others than this machine ask; give them a --token, or leave --host out",
        )
    listening = listen(host, port)
    from ingot.cli.generate import open_any
    from ingot.console.progress import progress_bar

    with progress_bar("loading"):
        model = open_any(path, device, tokenizer, dtype, which)
    called = _called(path, name)
    app = make_app(model, called, token)
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {called} at http://{shown}:{listening.getsockname()[1]}/v1 on {model.backend.device.name}; Ctrl-C ends it",
        flush=True,
    )
    serve_until_stopped(app, listening)


def _is_own(host: str) -> bool:
    """Whether an address is one that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()  # or another could be bound to it too, until both listen
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened at: {error.strerror or error}; choose another --port") from None
    return listening


def _called(path: Path, name: str | None) -> str:
    """What clients call a model: as asked, as its run folder, or as its file without the ending; none of them need be UTF-8."""
    resolved = path.resolve()
    folder = resolved.parent.parent if resolved.parent.name == "checkpoints" else resolved
    return shown(name or (resolved.stem if resolved.is_file() else folder.name), kept="")
