"""The page of `ingot export --format web`: static files that run an exported model in a browser, so no model server is needed.

ONNX Runtime Web is compressed in the package and in the exported folder; the page unpacks it. Only tokenizers
that tokenizer.js implements are exported, so that a page never encodes a prompt differently from `ingot generate`.
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HFTokenizer, from_spec
from ingot.data.tokenizers.plain import CharTokenizer
from ingot.errors import ConfigError
from ingot.runtime.files import write_atomically

HERE = Path(__file__).parent


def check_tokenizer(spec: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless tokenizer.js implements this tokenizer."""
    if spec is None:
        raise ConfigError("--format web needs the model's tokenizer; leave out --no-tokenizer")
    tokenizer = from_spec(spec)
    supported = isinstance(tokenizer, ByteTokenizer | CharTokenizer | GPT2Tokenizer)
    if isinstance(tokenizer, HFTokenizer) and tokenizer.lossless and tokenizer.splits_like_gpt2:
        supported = not json.loads(tokenizer.contents)["model"].get("ignore_merges")
    if not supported:
        advice = "it supports byte, char, bpe:N and gpt2; --format onnx supports all tokenizers"
        raise ConfigError(f"--format web does not support this model's tokenizer ({tokenizer.kind})", advice=advice)


def write_page(folder: Path) -> int:
    """Add the page to a folder with an exported ONNX model; return the size of the files added."""
    names = [path.relative_to(HERE) for path in HERE.rglob("*") if path.is_file() and not path.suffix.startswith(".py")]
    files = {str(name): (HERE / name).read_bytes() for name in names}
    files |= {name: (HERE.parent / "page" / name).read_bytes() for name in ("style.css", "icon.svg")}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomically(folder / name, content)
    return sum(map(len, files.values()))


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | dict.fromkeys((".js", ".mjs"), "text/javascript")

    def log_message(self, *_: Any) -> None:
        pass


def serve_page(folder: Path) -> None:
    """Serve an exported folder on a free loopback port and open it in the browser, until Ctrl-C."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"showing {folder} at {address}; Ctrl-C to stop", flush=True)
        webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        print("ended")
