"""Files made wrong. A damage knows the format of its file: JSON stays JSON, and a header a header.

Where a format carries checksums they are made to fit again, so that what comes after the checksum is tried too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from ingot.artifact.container import CHECKSUM, MAGIC, _envelope, _unwrapped
from ingot.data.store.dataset import identity
from ingot.runs.checkpoints import _checksum

from .models import own_model
from .values import DEPTH, HUGE, json_value, tweaked

Damage = Callable[[random.Random, Path], None]
BOMB = 40  # parts of 64 MB
IN_TEXT = (
    b"\0",
    b"\xff\xfe", b"\r\n", b"\x1b[2J", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b",,,,", b"\t", b"{", b"x" * 100_000, b"\n" * 1000,
)  # fmt: skip
IN_YAML = (
    "&a [*a]", "!!python/object:os.system x", '"\\0"', "<<: *a", "? [a, b]", "\t", "{", "- ", "1e999", "2024-01-01", "0o17",
)  # fmt: skip
IN_PRESET = (
    "import os", "batch_size = 'x'", "x = 1", "max_iter = 1", "n_embd = 1 / 0", "print(1)", "\0",
    "(" * 5000,
)  # fmt: skip


def damage(draw: random.Random, path: Path) -> str:
    """Make a file wrong and say how."""
    own = BY_NAME.get(path.name, BY_NAME.get(path.suffix, ()))
    how = draw.choice(own) if own and draw.random() < 0.7 else draw.choice(ANY)
    try:
        how(draw, path)
    except Exception:  # it was no longer such a file
        flip(draw, path)
        return f"{path.name}: flip"
    return f"{path.name}: {how.__name__}"


def flip(draw: random.Random, path: Path) -> None:
    """One bit, or a few, are others."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8))):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def overwrite(draw: random.Random, path: Path) -> None:
    """A number somewhere in the first bytes, or anywhere, is another."""
    content = bytearray(path.read_bytes())
    size, form = draw.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
    places = range(0, max(1, min(len(content), draw.choice((32, 2048, len(content)))) - size + 1), size)
    number = draw.choice((0, 1, 2, 3, *HUGE, len(content))) % (1 << 8 * size)
    place = draw.choice(places)
    content[place : place + size] = struct.pack(form, draw.choice((number, (1 << 8 * size) - 1)))
    path.write_bytes(content)


def cut(draw: random.Random, path: Path) -> None:
    """The end is missing."""
    size = path.stat().st_size
    os.truncate(path, draw.choice((0, 1, size // 2, max(0, size - 1), draw.randrange(size + 1))))


def append(draw: random.Random, path: Path) -> None:
    """Something stands after the end."""
    with path.open("ab") as file:
        file.write(draw.choice((b"\0", b"\n", b"x" * 100, draw.randbytes(64), path.read_bytes()[:10000])))


def replace(draw: random.Random, path: Path) -> None:
    """Something else has its name: nothing, a folder, a pipe, a link into nowhere or in a circle, another file."""
    beside = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    path.unlink()
    match draw.randrange(7):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("nowhere-at-all")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.write_bytes(draw.randbytes(200))
        case 5 if beside:
            shutil.copy(draw.choice(beside), path)


def text(draw: random.Random, path: Path) -> None:
    """The text has something in it that text hardly has."""
    content = path.read_bytes()
    place = draw.randrange(len(content) + 1)
    path.write_bytes(content[:place] + draw.choice(IN_TEXT) + content[place:])


def deep(draw: random.Random, path: Path) -> None:
    """JSON, or YAML, nested deeper than a stack is high."""
    path.write_text("[" * DEPTH + "]" * DEPTH if draw.random() < 0.5 else '{"a":' * DEPTH + "0" + "}" * DEPTH)


def json_part(draw: random.Random, path: Path) -> None:
    """A part of the JSON is another; checkpoints and datasets have the checksums that fit."""
    record = json.loads(path.read_bytes())
    sealed = isinstance(record, dict) and "sha256" in record
    record = tweaked(draw, {key: value for key, value in record.items() if key != "sha256"} if sealed else record)
    if sealed and isinstance(record, dict) and draw.random() < 0.9:
        record["sha256"] = _checksum(record)
    if path.name == "dataset.json" and isinstance(record, dict):
        with suppress(Exception):
            record["fingerprint"] = identity(record)
    path.write_text(json.dumps(record))


def json_line(draw: random.Random, path: Path) -> None:
    """A line of the JSON lines is another, or has other parts."""
    lines = path.read_text().splitlines()
    place = draw.randrange(len(lines))
    other = json.dumps(tweaked(draw, json.loads(lines[place])))
    lines[place] = draw.choice((other, other, "", "{", "[" * DEPTH, lines[place][:-1], "null"))
    path.write_text("\n".join(lines))


def yaml_part(draw: random.Random, path: Path) -> None:
    """A part of the YAML is another."""
    path.write_text(yaml.safe_dump(tweaked(draw, yaml.safe_load(path.read_text())), allow_unicode=True))


def yaml_text(draw: random.Random, path: Path) -> None:
    """A line of the YAML has something in it that is hardly there."""
    lines = path.read_text().splitlines() or [""]
    place = draw.randrange(len(lines))
    lines[place] = draw.choice((lines[place].partition(":")[0] + ": ", "", "  ")) + draw.choice(IN_YAML)
    path.write_text("\n".join(lines) + "\n")


def tensors_header(draw: random.Random, path: Path) -> None:
    """The header of a safetensors file is another, and what carries its checksum agrees."""
    path.write_bytes(_other_header(draw, path.read_bytes()))
    index = path.parent / "checkpoint.json"
    if index.is_file():
        record = json.loads(index.read_bytes())
        record.pop("sha256")
        content = path.read_bytes()
        record["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        index.write_text(json.dumps({**record, "sha256": _checksum(record)}))


def _other_header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header, and with the checksum that artifacts carry in it."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    facts = header.get("__metadata__", {})
    if "ingot" in facts and draw.random() < 0.8:
        facts["ingot"] = json.dumps(tweaked(draw, json.loads(facts["ingot"])))
    else:
        header = tweaked(draw, header)
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    made = len(packed).to_bytes(8, "little") + packed + content[8 + length :]
    if not facts:
        return made
    blank = made[: CHECKSUM.start] + b"0" * 64 + made[CHECKSUM.stop :]
    return blank[: CHECKSUM.start] + hashlib.sha256(blank).hexdigest().encode() + blank[CHECKSUM.stop :]


def artifact_facts(draw: random.Random, path: Path) -> None:
    """What an artifact says of itself is another, under checksums that fit."""
    content = path.read_bytes()
    codec = json.loads(content[len(MAGIC) + 4 :].split(b"}", 1)[0] + b"}")["codec"]
    payload = _other_header(draw, bytes(_unwrapped(memoryview(content))))
    path.write_bytes(b"".join(_envelope([payload], codec, lambda done, total: None)))


def pickled_part(draw: random.Random, path: Path) -> None:
    """A part of what torch.save wrote is another: numbers, text, or tensors of other shapes, types and strides."""
    torch.save(tweaked(draw, torch.load(path, map_location="cpu", weights_only=True), _torch_value), path)


def _torch_value(draw: random.Random) -> Any:
    tensors = (
        lambda: torch.zeros(1).expand(1 << 31),
        lambda: torch.zeros(1).expand(1 << 20, 1 << 20),
        lambda: torch.zeros(0),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.zeros(4, 4, dtype=torch.int64).t(),
        lambda: torch.full((2, 2), float("nan")),
    )
    return draw.choice(tensors)() if draw.random() < 0.4 else json_value(draw)


def meta_part(draw: random.Random, path: Path) -> None:
    """A part of nanoGPT's meta.pkl is another, or it asks for code to be run."""
    if draw.random() < 0.2:
        path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    else:
        path.write_bytes(pickle.dumps(tweaked(draw, pickle.loads(path.read_bytes()))))


def code(draw: random.Random, path: Path) -> None:
    """A model of one's own is another."""
    path.write_text(own_model(draw), errors="surrogatepass")


def preset(draw: random.Random, path: Path) -> None:
    """A preset of nanoGPT's has a line more."""
    with path.open("a") as file:
        file.write("\n" + draw.choice(IN_PRESET) + "\n")


def bomb(draw: random.Random, path: Path) -> None:
    """A small packed file that unfolds into 2.5 GB."""
    if draw.random() < 0.9:  # it takes seconds to read
        return flip(draw, path)
    path.write_bytes(_bomb_part() * BOMB)
    return None


@cache
def _bomb_part() -> bytes:
    return gzip.compress(bytes(1 << 26))


ANY: tuple[Damage, ...] = (flip, overwrite, cut, append, replace)
BY_NAME: dict[str, tuple[Damage, ...]] = {
    ".json": (json_part, json_part, json_part, deep),
    ".jsonl": (json_line, text, deep),
    ".yaml": (yaml_part, yaml_part, yaml_text, deep),
    ".safetensors": (tensors_header,),
    ".ingot": (artifact_facts,),
    ".pt": (pickled_part,),
    ".pkl": (meta_part,),
    ".py": (code,),
    "preset.py": (preset,),
    ".gz": (bomb,),
    ".bin": (overwrite, flip),
    ".idx": (overwrite,),
    ".index": (overwrite, flip),
    ".model": (overwrite, flip, text),
    ".txt": (text,),
    ".csv": (text,),
    ".tsv": (text,),
    ".md": (text,),
}
