"""Builds src/ingot/data/tokenizers/gpt2.tiktoken.xz, the ranks of GPT-2's BPE, from the source package of Whisper.

pip download openai-whisper==20250625 --no-deps --no-binary :all:
python tools/build_gpt2_ranks.py openai_whisper-20250625.tar.gz
"""

from __future__ import annotations

import hashlib
import lzma
import sys
import tarfile
from pathlib import Path

FILE = "openai_whisper-20250625/whisper/assets/gpt2.tiktoken"
SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
TARGET = Path(__file__).parents[1] / "src/ingot/data/tokenizers/gpt2.tiktoken.xz"


def main(archive: str) -> None:
    with tarfile.open(archive) as tar:
        ranks = tar.extractfile(FILE).read()  # type: ignore[union-attr]
    if (found := hashlib.sha256(ranks).hexdigest()) != SHA256:
        sys.exit(f"{FILE} in {archive} has sha256 {found} instead of {SHA256}")
    TARGET.write_bytes(lzma.compress(ranks, preset=9 | lzma.PRESET_EXTREME))
    print(f"{TARGET}: {len(ranks.splitlines()):,} ranks, {TARGET.stat().st_size:,} bytes packed")


if __name__ == "__main__":
    main(*sys.argv[1:])
