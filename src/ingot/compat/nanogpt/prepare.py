"""data/*/prepare.py: write train.bin and val.bin, byte for byte what nanoGPT's own scripts write for the same text.

Both files are uint16 tokens without a header. For character tokens, meta.pkl beside them is the vocabulary; without one the
tokens are GPT-2's.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ingot.compat.nanogpt.keys import key_name
from ingot.console.entry import explained, say
from ingot.console.output import Parser
from ingot.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ingot.data.tokenizers import Tokenizer

PROGRAM = "prepare.py"
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MADE = ("input.txt", "train.bin", "val.bin", "meta.pkl")
OPENWEBTEXT = "hf:Skylion007/openwebtext"
TRAIN_FRACTION = 0.9  # share of Shakespeare's characters used for training; the rest is for validation
VAL_FRACTION, VAL_SEED = 0.0005, 2357  # OpenWebText's validation split, as nanoGPT draws it
SMALL_BYTES = 1 << 23  # a smaller input is encoded faster than worker processes start


def shakespeare_char(folder: Path, arguments: Sequence[str]) -> int:
    """Prepare Shakespeare by characters; return the exit code."""
    about = "Shakespeare, or another text, by characters: the first nine tenths are train.bin, the rest val.bin."
    return _prepare_text(folder, arguments, about, _write_characters)


def shakespeare(folder: Path, arguments: Sequence[str]) -> int:
    """Prepare Shakespeare with GPT-2's tokens; return the exit code."""
    about = "Shakespeare, or another text, with GPT-2's tokens: the first nine tenths are train.bin, the rest val.bin."
    return _prepare_text(folder, arguments, about, _write_gpt2)


def openwebtext(folder: Path, arguments: Sequence[str]) -> int:
    """Prepare OpenWebText or other documents with GPT-2's tokens and <|endoftext|> after each; return the exit code."""
    parser = _parser(
        "OpenWebText, or other documents, with GPT-2's tokens, shuffled; one in two thousand is in val.bin. "
        "Needs 55 GB of disk: 20 to download, 17 for train.bin and as much while it is made.",
        folder,
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, metavar="PATH", help=f"files or folders of documents instead of {OPENWEBTEXT}")
    add("--text-field", default="text", metavar="NAME", help="field of JSON lines, or column, with the text (text)")
    add("--workers", type=int, metavar="N", help="encoding processes (one per CPU)")
    with explained(PROGRAM, key_name) as outcome:
        given = parser.parse_args(list(arguments))
        if given.input and given.bundled:
            raise ConfigError("give either --input or --bundled, not both")
        if given.workers is not None and given.workers < 1:
            raise ConfigError(f"--workers {given.workers}: at least one process is needed")
        _write_documents(given.output, given.input, given.text_field, given.bundled, given.workers)
    return outcome.code


def _parser(about: str, folder: Path) -> Parser:
    parser = Parser(PROGRAM, description=about)
    parser.add_argument("--bundled", action="store_true", help="use ingot's works of Shakespeare; needs no network")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="folder to write to (the script's own)")
    return parser


def _prepare_text(folder: Path, arguments: Sequence[str], about: str, write: Callable[[Path, str], None]) -> int:
    parser = _parser(about, folder)
    parser.add_argument("--input", type=Path, metavar="FILE", help="a text file (input.txt here; it is downloaded if missing)")
    with explained(PROGRAM, key_name) as outcome:
        given = parser.parse_args(list(arguments))
        if given.input and given.bundled:
            raise ConfigError("give either --input or --bundled, not both")
        with _alone_in(given.output):
            text = "".join(_bundled()) if given.bundled else _read(given.input or _tiny_shakespeare(given.output))
            if len(text) < 2:
                raise DataError("the text is too short to be split; give a longer one")
            say(f"length of dataset in characters: {len(text):,}")
            write(given.output, text)
    return outcome.code


def _write_characters(folder: Path, text: str) -> None:
    from ingot.data.formats.nanogpt_folder import META, meta_bytes
    from ingot.data.tokenizers import CharTokenizer

    tokenizer = CharTokenizer(text)
    say(f"all the unique characters: {tokenizer.characters}")
    say(f"vocab size: {tokenizer.vocab_size:,}")
    _place(folder, tokenizer, text, {META: meta_bytes(tokenizer)})


def _write_gpt2(folder: Path, text: str) -> None:
    from ingot.data.tokenizers import open_tokenizer

    _refuse_characters(folder)
    _place(folder, open_tokenizer("gpt2"), text, {})


def _refuse_characters(folder: Path) -> None:
    from ingot.data.formats.nanogpt_folder import META

    if (folder / META).exists():
        raise DataError(f"{folder / META} belongs to character data; give another --output or delete it")


def _place(folder: Path, tokenizer: Tokenizer, text: str, others: dict[str, bytes]) -> None:
    """Write the two splits of a text and other files beside them."""
    from ingot.data.store.staging import writing
    from ingot.runtime.files import write_atomically

    end = int(len(text) * TRAIN_FRACTION)
    train, val = (tokenizer.encode(part).astype("<u2").tobytes() for part in (text[:end], text[end:]))
    for name, content in {"train.bin": train, "val.bin": val, **others}.items():
        with writing(folder / name):
            write_atomically(folder / name, content)
        if name.endswith(".bin"):
            say(f"{name.removesuffix('.bin')} has {len(content) // 2:,} tokens")


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # universal newlines, like open() in text mode


def _bundled() -> Iterator[str]:
    """Yield the works of Shakespeare in the package: a different, longer edition than tiny Shakespeare."""
    from importlib.resources import files

    from ingot.data.prepare.cached import SAMPLES

    packed = (files("ingot.data") / "samples" / SAMPLES["shakespeare"]).read_bytes()
    return (str(json.loads(line)["text"]) for line in lzma.decompress(packed).splitlines())


def _tiny_shakespeare(folder: Path) -> Path:
    """Return input.txt, downloaded if it is missing."""
    from urllib.request import urlopen

    from ingot.data.store.staging import writing
    from ingot.runtime.files import write_atomically

    path = folder / "input.txt"
    if path.exists():
        return path
    try:
        with urlopen(TINY_SHAKESPEARE, timeout=30) as answer:
            content = answer.read()
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise DataError(
            f"cannot download {TINY_SHAKESPEARE} ({reason}); give a text file with --input FILE, or use the one that comes "
            "with ingot: --bundled"
        ) from None
    if hashlib.sha256(content).hexdigest() != TINY_SHA256:
        raise DataError(
            f"the file at {TINY_SHAKESPEARE} is not tiny Shakespeare; try again, or give a text file with --input FILE"
        )
    with writing(path):
        write_atomically(path, content)
    return path


def _write_documents(folder: Path, inputs: list[Path] | None, text_field: str, bundled: bool, workers: int | None) -> None:
    """Encode documents in input order, then copy them in shuffled order: two passes, for inputs larger than memory."""
    import numpy as np

    from ingot.console.progress import progress_bar
    from ingot.data.store.staging import writing
    from ingot.data.text.text_files import adding_up, file_bytes, find_files, read_documents
    from ingot.runtime.files import temporary_beside

    try:
        files = [] if bundled else find_files(inputs or [Path(OPENWEBTEXT)])[0]
    except DataError as error:
        raise (error if inputs else DataError(f"{error}; give --input PATH or --bundled")) from None
    if not bundled and not files:
        raise DataError("no documents in the given folders; give files of text, JSON lines or parquet")
    total, scratch = sum(map(file_bytes, files)), temporary_beside(folder / "tokens")
    with _alone_in(folder):
        _refuse_characters(folder)
        with progress_bar("encoding", in_bytes=True) as show, writing(scratch), scratch.open("xb") as file:
            texts = _bundled() if bundled else read_documents(files, text_field, adding_up(show, total))
            counts = _encode(texts, file, 1 if total < SMALL_BYTES else workers)
        if len(counts) < 2:
            raise DataError("there are fewer than two documents, and val.bin needs one of them; give more")
        order = np.random.default_rng(VAL_SEED).permutation(len(counts))
        held_out = math.ceil(VAL_FRACTION * len(counts))
        for name, documents in (("train.bin", order[held_out:]), ("val.bin", order[:held_out])):
            with writing(folder / name):
                tokens = _copy(scratch, counts, documents, folder / name)
            say(f"{name.removesuffix('.bin')} has {tokens:,} tokens in {len(documents):,} documents")


def _encode(texts: Iterable[str], file: BinaryIO, workers: int | None) -> NDArray[np.int64]:
    """Write the tokens of every document with <|endoftext|> after it, and return their counts."""
    import numpy as np

    from ingot.data.prepare.blocks import EveryText, text_blocks
    from ingot.data.prepare.workers import local_engine
    from ingot.data.tokenizers import open_tokenizer
    from ingot.runtime.processes import cpu_count

    tokenizer = open_tokenizer("gpt2")
    end = np.array([tokenizer.bos], "<u2")
    counts: list[NDArray[np.int64]] = []
    with local_engine(tokenizer, workers or cpu_count()) as engine:
        for encoded in engine(map(EveryText, text_blocks(texts))):
            file.write(
                np.concatenate([encoded.ids[1:].astype("<u2"), end]).tobytes()
            )  # nanoGPT puts <|endoftext|> after a document, not before it
            counts.append(encoded.tokens)
    return np.concatenate([np.empty(0, np.int64), *counts])


def _copy(scratch: Path, counts: NDArray[np.int64], documents: NDArray[np.int64], path: Path) -> int:
    """Write documents in the given order and return the number of tokens."""
    import numpy as np

    from ingot.console.progress import progress_bar
    from ingot.runtime.files import replace_file

    tokens = np.memmap(scratch, "<u2", mode="r")
    starts = np.cumsum(counts) - counts
    with progress_bar(f"writing {path.name}") as show, replace_file(path) as file:
        for done, document in enumerate(documents.tolist()):
            file.write(tokens[starts[document] : starts[document] + counts[document]].tobytes())
            if done % 10_000 == 0:
                show(done, len(documents))
    return int(counts[documents].sum())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other preparations, and remove temporary files before and after.

    A preparation that fails before it has written anything leaves no folder behind.
    """
    from ingot.data.store.staging import LOCK, alone_in, writing
    from ingot.runtime.files import sweep_temporaries

    new = not folder.exists()
    with alone_in(folder, say):
        with writing(folder):
            sweep_temporaries(folder)
        try:
            yield
        finally:
            with writing(folder):
                sweep_temporaries(folder)
            if not any((folder / name).exists() for name in MADE):
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    if new:
                        folder.rmdir()
