"""Copies ONNX Runtime Web (MIT), which runs models in the page of `ingot export --format web`, into the package.

    npm pack onnxruntime-web@1.24.1
    pip download --no-deps onnxruntime==1.24.1
    python tools/copy_onnxruntime.py onnxruntime-web-1.24.1.tgz onnxruntime-1.24.1-*.whl

The npm archive has no licence files, so they come from the wheel of the same version. The archive is taken only with the checksum
below; whoever wants another version changes both and looks at the page.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import tarfile
import zipfile
from pathlib import Path

VERSION, SHA256 = "1.24.1", "63f65a0b3ca5b35cfbcf2b8185d48d63a5aa7bc3651e474f5cf0fd96f577d1ec"
SCRIPT, BINARY = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
TARGET = Path(__file__).parents[1] / "src/ingot/ui/model_page/onnxruntime"


def main(archive: str, wheel: str) -> None:
    found = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{archive} is not ONNX Runtime Web {VERSION}: its sha256 is {found}, not {SHA256}")
    TARGET.mkdir(exist_ok=True)
    with tarfile.open(archive) as tar:
        script, binary = (tar.extractfile(f"package/dist/{name}") for name in (SCRIPT, BINARY))
        assert script is not None and binary is not None  # the checksum says so
        (TARGET / SCRIPT).write_bytes(script.read())
        (TARGET / f"{BINARY}.gz").write_bytes(gzip.compress(binary.read(), 9, mtime=0))
    with zipfile.ZipFile(wheel) as files:
        for name in ("LICENSE", "ThirdPartyNotices.txt"):
            (TARGET / name).write_bytes(files.read(f"onnxruntime/{name}"))
    print(f"ONNX Runtime Web {VERSION} is in {TARGET}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
