"""The artifact: a single file with a model's weights and the metadata needed to rebuild the model. Reading it runs no code.

The payload is a safetensors file with the metadata in its header. If it is compressed, a small header precedes it. Every byte is
covered by a checksum: the payload stores its own checksum at a fixed offset, computed with zeros in that field, and the header
stores the checksum of the compressed bytes. docs/artifact.md specifies the format; changing it requires a new version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.artifact.codecs import CODECS, Progress, check_codec, compress, decompress, is_plausible_size
from ingot.artifact.quantise import dequantise, quantise
from ingot.errors import CheckpointError
from ingot.runtime.files import open_to_read, readable, replace_file, to_json
from ingot.runtime.tensors import METADATA, TensorRecord, pack_tensors, unpack_tensors

MAGIC = b"\x89INGOT\r\n"  # like PNG's signature: not valid text, and broken by a transfer that converts line endings
VERSION = 1
MAX_HEADER = 4096
PRELUDE = f'{{"{METADATA}":{{"sha256":"'.encode()  # first bytes of a payload's JSON header; the checksum follows
CHECKSUM = slice(8 + len(PRELUDE), 8 + len(PRELUDE) + 64)
FOREIGN = {b"PK": "a zip file, as torch.save writes it", b"\x80": "a pickle", b"\x1f\x8b": "a gzip file", b"GGUF": "a GGUF file"}

Codes = Mapping[str, list[TensorRecord]]  # maps a tensor's name to its quantised codes and the scale of each row


@dataclass(frozen=True)
class Artifact:
    """The contents of an artifact file: a model's tensors and the metadata needed to rebuild the model."""

    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]


@dataclass(frozen=True)
class ArtifactReport:
    """Path, size and encoding of a written artifact."""

    path: Path
    bytes: int
    payload_bytes: int  # size of the stored tensors before compression: codes, scales and unquantised floats
    parameters: int
    quantiser: str
    codec: str


def artifact_name(codec: str) -> str:
    """Return the file name of an artifact: model.safetensors if uncompressed, model.ingot otherwise."""
    return "model.safetensors" if codec == "none" else "model.ingot"


def write_artifact(
    path: Path,
    records: Iterable[TensorRecord],
    facts: Mapping[str, Any],
    quantiser: str,
    codec: str,
    dtype: str = "fp32",
    progress: Progress = lambda done, total: None,
    codes: Codes = MappingProxyType({}),
) -> ArtifactReport:
    """Write an artifact atomically; `quantiser`, `codec` and `dtype` take the same values as the settings `artifact.*`.

    `codes` holds the codes and scales of the tensors that were already quantised by a quantiser that needs the model (std, gptq).
    """
    check_codec(codec)
    records = list(records)
    stored, payload = _pack(records, facts, quantiser, dtype, codes)
    parts = _envelope(payload, codec, progress)
    with replace_file(path) as file:
        file.writelines(parts)
    payload_bytes = sum(record.data.nbytes for record in stored)
    parameters = sum(prod(record.shape) for record in records)
    return ArtifactReport(path, sum(map(len, parts)), payload_bytes, parameters, quantiser, codec)


def artifact_sizes(
    records: Iterable[TensorRecord],
    facts: Mapping[str, Any],
    quantiser: str,
    codecs: Iterable[str],
    dtype: str = "fp32",
    progress: Progress = lambda done, total: None,
    codes: Codes = MappingProxyType({}),
) -> Iterator[tuple[str, int]]:
    """Yield each codec and the size in bytes of the artifact when compressed with that codec; no file is written."""
    _, payload = _pack(records, facts, quantiser, dtype, codes)
    for codec in codecs:
        yield codec, sum(map(len, _envelope(payload, codec, progress)))


def read_artifact(path: Path) -> Artifact:
    """Read an artifact file; raise CheckpointError if it is invalid. Code in the file is never run."""
    with readable(path, CheckpointError):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        with open_to_read(path) as file:
            data = memoryview(file.read())
        return _opened(_unwrapped(data) if data[: len(MAGIC)] == MAGIC else data)


def _pack(
    records: Iterable[TensorRecord], facts: Mapping[str, Any], quantiser: str, dtype: str, codes: Codes
) -> tuple[list[TensorRecord], list[bytes | memoryview]]:
    """Quantise the tensors; return the tensors to store, and the payload as a list of byte strings with the checksum set."""
    stored, formats = quantise(records, quantiser, dtype, codes=codes)
    header = to_json({**facts, "version": VERSION, "quantiser": quantiser, "dtypes": dict(sorted(formats.items()))})
    head, *rest = pack_tensors(stored, {"sha256": "0" * 64, "format": "pt", "ingot": header})
    digest = hashlib.sha256()
    for part in (head, *rest):
        digest.update(part)
    assert bytes(head[8 : CHECKSUM.start]) == PRELUDE
    return stored, [head[: CHECKSUM.start], digest.hexdigest().encode(), head[CHECKSUM.stop :], *rest]


def _envelope(payload: list[bytes | memoryview], codec: str, progress: Progress) -> list[bytes | memoryview]:
    if codec == "none":
        return payload
    size, data = sum(map(len, payload)), compress(codec, payload, progress)
    if not is_plausible_size(size, len(data)):  # read_artifact would reject the file as a decompression bomb
        problem = f"{size:,} bytes of weights, stored with the codec {codec}, would be refused as a decompression bomb"
        raise CheckpointError(f"{problem}; use the codec none")
    return [_header(codec, size, data), data]


def _header(codec: str, size: int, data: bytes | memoryview) -> bytes:
    facts = {"version": VERSION, "codec": codec, "size": size, "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text


def _unwrapped(file: memoryview) -> memoryview:
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(file[len(MAGIC) : begin], "little")
    if end > min(len(file), MAX_HEADER):
        raise ValueError("the file is cut short or its header is damaged")
    header = _facts(bytes(file[begin:end]), "the header is damaged")
    codec, size, data = header.get("codec"), header.get("size"), file[end:]
    # Require exactly the header that we would write, so that no changed bit goes unnoticed.
    if not isinstance(codec, str) or not isinstance(size, int) or file[:end] != _header(codec, size, data):
        raise ValueError("the checksum does not match; the file is damaged or cut short")
    if codec == "none" or codec not in CODECS:
        raise ValueError(f"the file is compressed with {codec!r:.20}, which this version of ingot does not support")
    if not is_plausible_size(size, len(data)):
        raise ValueError(f"{len(data):,} compressed bytes cannot decompress to the {size!s:.20} bytes that the header declares")
    return memoryview(decompress(codec, data, size))


def _opened(payload: memoryview) -> Artifact:
    try:
        stored, metadata = unpack_tensors(payload)
    except ValueError as error:
        if foreign := next((what for magic, what in FOREIGN.items() if payload[: len(magic)] == magic), None):
            raise ValueError(f"the file is {foreign}, not an artifact; code in the file is not run") from None
        raise ValueError(f"{error}; give a run folder, a checkpoint or an artifact") from None
    if not isinstance(metadata.get("ingot"), str):
        raise ValueError("ingot did not write this safetensors file: the settings needed to build the model are missing")
    if bytes(payload[8 : CHECKSUM.start]) != PRELUDE:
        raise ValueError("the checksum is missing; the file is damaged or was rewritten by another program")
    digest = hashlib.sha256(payload[: CHECKSUM.start])
    digest.update(b"0" * 64)
    digest.update(payload[CHECKSUM.stop :])
    if bytes(payload[CHECKSUM]) != digest.hexdigest().encode():
        raise ValueError("the checksum does not match; the file is damaged or was rewritten by another program")
    lacking = "the settings needed to build the model are missing"
    facts = _facts(metadata["ingot"], lacking)
    if not isinstance(facts.get("dtypes"), dict):
        raise ValueError(lacking)
    return Artifact(dequantise(stored, facts["dtypes"]), facts)


def _facts(text: str | bytes, damage: str) -> dict[str, Any]:
    """Parse JSON metadata; raise ValueError if it is invalid (with the message `damage`) or its version is unsupported."""
    facts = None
    with suppress(ValueError, RecursionError):
        facts = json.loads(text)
    if not isinstance(facts, dict) or not isinstance(facts.get("version"), int):
        raise ValueError(damage)
    if (version := facts["version"]) != VERSION:
        raise ValueError(f"the format version is {version!s:.20}, not {VERSION}; use the version of ingot that wrote the file")
    return facts
