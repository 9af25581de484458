"""nanoGPT's data folder: train.bin and val.bin, uint16 without a header, and for characters a meta.pkl.

Nothing in the files says where documents begin: GPT-2's <|endoftext|> stands behind each, characters have no mark at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ingot.data.formats.base import (
    ByteCounter,
    Document,
    Marks,
    PlainWriter,
    Stream,
    StreamWriter,
    TokenSource,
    cut,
    map_tokens,
    read_file,
)
from ingot.data.formats.meta import META, char_tokenizer, checked_size, meta_bytes
from ingot.data.tokenizers import Tokenizer
from ingot.errors import DataError
from ingot.runtime.files import write_atomically

FILES = {"train": "train.bin", "val": "val.bin"}
HEADER_BYTES = 1024


class NanoGPTSource(TokenSource):
    """A folder with train.bin and perhaps val.bin, or one such file."""

    format = "nanogpt"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        if path.is_dir():
            files = {split: path / name for split, name in FILES.items() if (path / name).is_file()}
        else:
            files = {"val" if path.name.startswith("val") else "train": path}
        if not files:
            raise DataError(f"{path} has neither train.bin nor val.bin; it is no data of nanoGPT")
        self._streams = {split: Stream([file], [token_count(file, sure)], open_plain) for split, file in files.items()}
        self.tokens = {split: stream.tokens for split, stream in self._streams.items()}
        self._meta = meta = next(iter(files.values())).with_name(META)
        self.about = f"nanoGPT's {' and '.join(file.name for file in files.values())}"
        if meta.is_file():
            self.tokenizer = char_tokenizer(meta)
            self.about += f" with {META}" + (f" ({self.tokenizer.vocab_size} characters)" if self.tokenizer else "")

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        return cut(self._streams[split], marks, ends_first=True)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if self._meta.is_file():
            checked_size(self._meta, tokenizer)


def nanogpt_writer(folder: Path, split: str, marks: Marks, counter: ByteCounter | None, files: ExitStack) -> StreamWriter:
    """Writes train.bin or val.bin: each document with its end mark behind it."""
    limit = 1 << 62
    return StreamWriter(Marks(None, marks.eos), counter, limit, lambda _: PlainWriter(folder / FILES[split], files))


def write_meta(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes meta.pkl, except for GPT-2's vocabulary, which is what nanoGPT takes without one."""
    if tokenizer.kind != "gpt2":
        write_atomically(folder / META, meta_bytes(tokenizer))


def token_count(path: Path, sure: bool) -> int:
    """The tokens of a file without a header; `sure`: not even if it begins like one."""
    head, size = read_file(path, HEADER_BYTES)
    if size % 2:
        raise DataError(
            f"{path} has {size:,} bytes, an odd number, and tokens have two each; it is cut short or no data of nanoGPT"
        )
    if not sure and size > HEADER_BYTES and not any(head[12:]):
        raise DataError(f"{path} begins with what looks like a damaged header; if it has none, say so with --from nanogpt")
    return size // 2


def open_plain(path: Path) -> NDArray[Any]:
    """The tokens of a file without a header, mapped from the disk."""
    return map_tokens(path, "<u2", 0, read_file(path, 0)[1] // 2)
