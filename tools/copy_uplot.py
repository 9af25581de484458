"""Copies uPlot (MIT), which draws the charts of `ingot ui`, into the package.

    npm pack uplot@1.6.32
    python tools/copy_uplot.py uplot-1.6.32.tgz

The archive is taken only with the checksum below; whoever wants another version changes both and looks at the page.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from pathlib import Path

VERSION, SHA256 = "1.6.32", "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d"
FILES = {"dist/uPlot.iife.min.js": "uPlot.iife.min.js", "dist/uPlot.min.css": "uPlot.min.css", "LICENSE": "uPlot.LICENSE"}
TARGET = Path(__file__).parents[1] / "src/ingot/ui/page"


def main(archive: str) -> None:
    content = Path(archive).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        sys.exit(f"{archive} is not uPlot {VERSION}: its sha256 is {found}, not {SHA256}")
    with tarfile.open(archive) as tar:
        for name, target in FILES.items():
            member = tar.extractfile(f"package/{name}")
            assert member is not None  # the checksum says so
            (TARGET / target).write_bytes(member.read())
    print(f"uPlot {VERSION} is in {TARGET}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
