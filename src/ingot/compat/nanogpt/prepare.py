"""data/*/prepare.py: write train.bin and val.bin, byte-identical to those of nanoGPT's own scripts for the same text.

Both files are uint16 tokens without a header. Character-level data has its vocabulary in meta.pkl; without that file the tokens
are GPT-2's.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from ingot.compat.nanogpt.keys import key_name
from ingot.console.entry import explained, say
from ingot.console.output import Parser
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import readable

PROGRAM = "prepare.py"
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OPENWEBTEXT = "hf:Skylion007/openwebtext"
TRAIN_FRACTION = 0.9  # fraction of Shakespeare's characters used for training; the rest is for validation
VAL_FRACTION, VAL_SEED = 0.0005, 2357  # fraction and seed of OpenWebText's validation split, as in nanoGPT


def shakespeare(folder: Path, words: Sequence[str], by_characters: bool = False) -> int:
    """Tokenize Shakespeare with GPT-2's tokenizer or, if `by_characters`, into single characters; return the exit code."""
    how = "by characters" if by_characters else "with GPT-2's tokens"
    parser = _parser(f"Tokenize Shakespeare, or another text, {how}; 90% goes to train.bin, the rest to val.bin.", folder)
    parser.add_argument("--input", type=Path, metavar="FILE", help="text file (default: DIR/input.txt, downloaded if missing)")
    return _run(parser, words, _write_text, by_characters)


shakespeare_char = partial(shakespeare, by_characters=True)


def openwebtext(folder: Path, words: Sequence[str]) -> int:
    """Tokenize OpenWebText or other documents with GPT-2's tokenizer, each followed by <|endoftext|>; return the exit code."""
    parser = _parser(
        "Tokenize OpenWebText, or other documents, for GPT-2 and shuffle them; one document in 2,000 goes to val.bin. "
        "OpenWebText needs 55 GB of disk: 20 GB to download, 17 GB for train.bin and 17 GB for a temporary file.",
        folder,
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, metavar="PATH", help=f"files or folders of documents instead of {OPENWEBTEXT}")
    add("--text-field", default="text", metavar="NAME", help="JSON field or table column that contains the text (default: text)")
    add("--workers", type=int, metavar="N", help="number of encoding processes (default: one per CPU)")
    return _run(parser, words, _write_documents)


def _parser(about: str, folder: Path) -> Parser:
    parser = Parser(PROGRAM, description=about)
    parser.add_argument("--bundled", action="store_true", help="use the Shakespeare text that comes with ingot; needs no network")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="output folder (default: the script's folder)")
    return parser


def _run(parser: Parser, words: Sequence[str], write: Callable[[Namespace], None], by_characters: bool = False) -> int:
    from ingot.data.store.staging import alone_in, writing
    from ingot.runtime.files import sweep_temporaries

    with explained(PROGRAM, key_name) as outcome:
        options = parser.parse_args(list(words), Namespace(by_characters=by_characters))
        meta = options.output / "meta.pkl"
        if options.input and options.bundled:
            raise ConfigError("give either --input or --bundled, not both")
        if meta.exists() and not by_characters:
            raise DataError(f"{meta} belongs to character-level data; delete the file, or give another --output")
        with alone_in(options.output, say):
            with writing(options.output):
                sweep_temporaries(options.output)  # left behind if an earlier run was killed
            write(options)
    return outcome.code


def _write_text(options: Namespace) -> None:
    from ingot.data.formats.nanogpt_folder import META, meta_bytes
    from ingot.data.store.staging import writing
    from ingot.data.tokenizers import CharTokenizer, open_tokenizer
    from ingot.runtime.files import write_atomically

    text, files = _text(options), {}
    tokenizer = CharTokenizer(text) if options.by_characters else open_tokenizer("gpt2")
    if isinstance(tokenizer, CharTokenizer):
        say(f"all the unique characters: {tokenizer.characters}")
        say(f"vocab size: {tokenizer.vocab_size:,}")
        files[META] = meta_bytes(tokenizer)
    end = int(len(text) * TRAIN_FRACTION)
    for split, part in (("train", text[:end]), ("val", text[end:])):
        ids = tokenizer.encode(part).astype("<u2")
        files[f"{split}.bin"] = ids.tobytes()
        say(f"{split} has {len(ids):,} tokens")
    for name, content in files.items():
        with writing(options.output / name):
            write_atomically(options.output / name, content)


def _text(options: Namespace) -> str:
    """Return the text to prepare: the bundled text, the --input file, or tiny Shakespeare, which is downloaded if missing."""
    from urllib.request import urlopen

    from ingot.data.store.staging import writing
    from ingot.runtime.files import write_atomically

    path = options.input or options.output / "input.txt"
    if not (options.bundled or options.input or path.exists()):
        advice = "give a text file with --input FILE, or use the text that comes with ingot: --bundled"
        try:
            with urlopen(TINY_SHAKESPEARE, timeout=30) as answer:
                content = answer.read()
        except (OSError, ValueError) as error:
            raise DataError(f"cannot download {TINY_SHAKESPEARE} ({error}); {advice}") from None
        if hashlib.sha256(content).hexdigest() != TINY_SHA256:
            raise DataError(f"the file at {TINY_SHAKESPEARE} is not tiny Shakespeare; {advice}")
        with writing(path):
            write_atomically(path, content)
    with readable(path, DataError):
        text = "".join(_bundled()) if options.bundled else path.read_text(encoding="utf-8")
    if len(text) < 2:
        raise DataError("the text is too short to split into train.bin and val.bin; give a longer one")
    say(f"length of dataset in characters: {len(text):,}")
    return text


def _bundled() -> Iterator[str]:
    """Yield the texts of the bundled works of Shakespeare, which are longer than tiny Shakespeare and from another edition."""
    from ingot.data.prepare.cached import SAMPLES

    packed = (resources.files("ingot.data") / "samples" / SAMPLES["shakespeare"]).read_bytes()
    return (str(json.loads(line)["text"]) for line in lzma.decompress(packed).splitlines())


def _write_documents(options: Namespace) -> None:
    """Encode documents to disk in input order, then copy them in shuffled order, so that the input may be larger than memory."""
    import numpy as np

    from ingot.console.progress import progress_bar
    from ingot.data.prepare.blocks import EveryText, text_blocks
    from ingot.data.prepare.workers import local_engine, workers_for
    from ingot.data.store.staging import writing
    from ingot.data.text.text_files import adding_up, file_bytes, find_files, read_documents
    from ingot.data.tokenizers import open_tokenizer
    from ingot.runtime.files import replace_file, temporary_beside

    folder = options.output
    try:
        files = [] if options.bundled else find_files(options.input or [Path(OPENWEBTEXT)])[0]
    except DataError as error:
        raise (error if options.input else DataError(f"{error}; give --input PATH or --bundled")) from None
    tokenizer, total = open_tokenizer("gpt2"), sum(map(file_bytes, files))
    scratch, end, lengths = temporary_beside(folder / "tokens"), np.array([tokenizer.bos], "<u2"), [np.empty(0, np.int64)]
    try:
        with progress_bar("encoding", in_bytes=True) as show, writing(scratch), scratch.open("xb") as file:
            texts = _bundled() if options.bundled else read_documents(files, options.text_field, adding_up(show, total))
            with local_engine(tokenizer, options.workers or workers_for(tokenizer, total)) as engine:
                for encoded in engine(map(EveryText, text_blocks(texts))):
                    # nanoGPT puts <|endoftext|> after a document, not before it.
                    file.write(np.concatenate([encoded.ids[1:].astype("<u2"), end]).tobytes())
                    lengths.append(encoded.tokens)
        counts = np.concatenate(lengths)
        if len(counts) < 2:
            raise DataError("train.bin and val.bin need at least one document each; give more documents")
        order = np.random.default_rng(VAL_SEED).permutation(len(counts))
        held_out = math.ceil(VAL_FRACTION * len(counts))
        tokens, starts = np.memmap(scratch, "<u2", mode="r"), np.cumsum(counts) - counts
        for name, documents in (("train.bin", order[held_out:]), ("val.bin", order[:held_out])):
            with writing(folder / name), progress_bar(f"writing {name}") as show, replace_file(folder / name) as file:
                for done, document in enumerate(documents.tolist()):
                    file.write(tokens[starts[document] : starts[document] + counts[document]].tobytes())
                    if done % 10_000 == 0:
                        show(done, len(documents))
            say(f"{name.removesuffix('.bin')} has {counts[documents].sum():,} tokens in {len(documents):,} documents")
    finally:
        scratch.unlink(missing_ok=True)
