"""Token data of other programs: which format a folder has, and how it is read and written.

Every format gives the same documents: token ids without the marks that the format puts around them. No file is taken for what it
might be: one that no format recognises is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot.data.formats.documents import TokenSource
from ingot.data.formats.gpt_simple_folder import GPTSimpleSource, find_pairs
from ingot.data.formats.nanogpt_folder import FILES, NanoGPTSource
from ingot.data.formats.shard_folder import PreparedSource, ShardSource
from ingot.data.store.dataset import MANIFEST, prepare_command
from ingot.data.store.shards import has_header
from ingot.data.text.text_files import is_text
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading

SOURCES: dict[str, Callable[[Path, bool], TokenSource]] = {
    "ingot": PreparedSource,
    "nanogpt": NanoGPTSource,
    "gpt-simple": GPTSimpleSource,
    "shards": ShardSource,
}
LOOKED_FOR = f"{MANIFEST}, train.bin, .bin with .idx, or shards with a header"


def open_source(path: Path, format: str | None = None) -> TokenSource:
    """The token data at `path`, in the format that is given or found."""
    if format is not None and format not in SOURCES:
        raise ConfigError(f"unknown format {format!r}; known are {', '.join(SOURCES)}")
    with reading(path):
        if not path.exists():
            raise DataError(f"no data at {path}: there is no such file or folder; give one with {LOOKED_FOR}")
        return SOURCES[format or detect(path)](path, format is not None)


def detect(path: Path) -> str:
    """The format of the token data at `path`."""
    if not path.is_dir():
        if any(find_pairs(path).values()):
            return "gpt-simple"
        if path.suffix == ".bin" and has_header(path):
            return "shards"
        return "nanogpt" if path.name in FILES.values() else _refuse(path)
    if (path / MANIFEST).is_file():
        return "ingot"
    if find_pairs(path):
        return "gpt-simple"
    if any(has_header(file) for file in path.glob("*.bin") if file.is_file()):
        return "shards"
    return "nanogpt" if any((path / name).is_file() for name in FILES.values()) else _refuse(path)


def _refuse(path: Path) -> str:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if text := next((file for file in files if is_text(file)), None):
        raise DataError(f"{path} holds text ({text.name}) and no tokens; prepare it with: {prepare_command(path, 'DIR')}")
    if binary := next((file for file in files if file.suffix == ".bin"), None):
        raise DataError(
            f"cannot tell what {path} is: {binary.name} has no header that is known and no .idx; a damaged shard looks so, "
            "and so does data without a header: if it is that, say --from nanogpt"
        )
    raise DataError(f"no token data at {path}; looked for {LOOKED_FOR}")
