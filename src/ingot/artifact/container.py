"""The artifact: one file that holds a model, says how to build it, and runs no code when it is read.

Its payload is a safetensors file whose metadata carries the facts; compressed, it stands after a small header. Every byte is
covered by a checksum: the payload carries its own, at a fixed place and counted as zeros there, and the header that of the
compressed bytes. docs/artifact.md describes the format for other readers, so a change here is a new version there.
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

from ingot.artifact.codecs import CODECS, MAX_PAYLOAD_BYTES, Progress, check_codec, compress, decompress, is_plausible_size
from ingot.artifact.quantise import dequantise, quantise
from ingot.errors import CheckpointError, ConfigError
from ingot.runtime.files import open_to_read, readable, replace_users_file, to_json
from ingot.runtime.tensors import METADATA, TensorRecord, pack_tensors, unpack_tensors

MAGIC = b"\x89INGOT\r\n"  # no text, and not whole after a transfer that changes line ends
VERSION = 1
MAX_HEADER = 4096
PRELUDE = f'{{"{METADATA}":{{"sha256":"'.encode()  # how the header of a payload begins; its checksum follows
CHECKSUM = slice(8 + len(PRELUDE), 8 + len(PRELUDE) + 64)
FOREIGN = {b"PK": "a zip file, as torch.save writes it", b"\x80": "a pickle", b"\x1f\x8b": "a gzip file", b"GGUF": "a GGUF file"}

Codes = Mapping[str, list[TensorRecord]]  # by the name of a tensor: its codes, and the scale of each row


@dataclass(frozen=True)
class Artifact:
    """What a file holds: the tensors of a model, and the facts that rebuild it."""

    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]


@dataclass(frozen=True)
class ArtifactReport:
    """What was written, and how large it is."""

    path: Path
    bytes: int
    payload_bytes: int  # of the stored tensors before compression: codes, scales and what stayed as floats
    parameters: int
    quantiser: str
    codec: str


def artifact_name(codec: str) -> str:
    """The name of an artifact's file: one that anybody's safetensors reads, or one of ours."""
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
    """Write an artifact whole or not at all; quantiser, codec and dtype as the settings `artifact.*` name them.

    `codes` are what is stored of tensors that a model's own rounding has worked on.
    """
    check_codec(codec)
    records = list(records)
    stored, payload = _pack(records, facts, quantiser, dtype, codes)
    parts = _envelope(payload, codec, progress)
    with replace_users_file(path) as file:
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
    """How many bytes the file would have with each codec; nothing is written."""
    _, payload = _pack(records, facts, quantiser, dtype, codes)
    for codec in codecs:
        yield codec, sum(map(len, _envelope(payload, codec, progress)))


def read_artifact(path: Path) -> Artifact:
    """The model in a file; whatever is wrong with the file is a CheckpointError, and no code in it is ever run."""
    with readable(path, CheckpointError):
        if not path.exists():
            raise CheckpointError(f"there is no file {path}")
        with open_to_read(path) as file:
            data = memoryview(file.read())
        return _opened(_unwrapped(data) if data[: len(MAGIC)] == MAGIC else data)


def _pack(
    records: Iterable[TensorRecord], facts: Mapping[str, Any], quantiser: str, dtype: str, codes: Codes
) -> tuple[list[TensorRecord], list[bytes | memoryview]]:
    """The stored tensors, and the parts of the payload they make, with the checksum of them all where it belongs."""
    stored, formats = quantise(records, quantiser, dtype, codes=codes)
    told = to_json({**facts, "version": VERSION, "quantiser": quantiser, "dtypes": dict(sorted(formats.items()))})
    head, *rest = pack_tensors(stored, {"sha256": "0" * 64, "format": "pt", "ingot": told})
    digest = hashlib.sha256()
    for part in (head, *rest):
        digest.update(part)
    assert bytes(head[8 : CHECKSUM.start]) == PRELUDE
    return stored, [head[: CHECKSUM.start], digest.hexdigest().encode(), head[CHECKSUM.stop :], *rest]


def _envelope(payload: list[bytes | memoryview], codec: str, progress: Progress) -> list[bytes | memoryview]:
    size = sum(map(len, payload))
    if size > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"the model has {size:,} bytes and an artifact at most {MAX_PAYLOAD_BYTES:,}; choose the quantiser int8"
        )
    if codec == "none":
        return payload
    data = compress(codec, payload, progress)
    if not is_plausible_size(size, len(data)):
        raise CheckpointError(
            f"{codec} makes {len(data):,} bytes of {size:,}: these weights hold nothing; the codec none stores them"
        )
    return [_header(codec, size, data), data]


def _header(codec: str, size: int, data: bytes | memoryview) -> bytes:
    facts = {"version": VERSION, "codec": codec, "size": size, "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text


def _unwrapped(file: memoryview) -> memoryview:
    """The payload inside a compressed file."""
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(file[len(MAGIC) : begin], "little")
    if end > min(len(file), MAX_HEADER):
        raise ValueError("it is cut short or its header is damaged")
    header = None
    with suppress(ValueError, RecursionError):
        header = json.loads(bytes(file[begin:end]))
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        raise ValueError("its header is damaged")
    _check_version(header["version"])
    codec, size, data = header.get("codec"), header.get("size"), file[end:]
    # The header must be the one we would write; so no bit of it can be another without being noticed.
    if not isinstance(codec, str) or not isinstance(size, int) or file[:end] != _header(codec, size, data):
        raise ValueError("its checksum does not match; it is damaged or cut short")
    if codec == "none" or codec not in CODECS:
        raise ValueError(f"it is compressed with {codec!r:.20}, which this ingot does not know")
    if not is_plausible_size(size, len(data)):
        raise ValueError(f"it announces {size!s:.20} bytes in {len(data):,}, which cannot be weights")
    return memoryview(decompress(codec, data, size))


def _opened(payload: memoryview) -> Artifact:
    """The model in a payload that is what was written."""
    try:
        stored, metadata = unpack_tensors(payload)
    except ValueError as error:
        if foreign := next((what for magic, what in FOREIGN.items() if payload[: len(magic)] == magic), None):
            raise ValueError(f"it is {foreign}, and no artifact; code in it is not run") from None
        raise ValueError(f"{error}; give a run folder, a checkpoint or an artifact") from None
    if not isinstance(metadata.get("ingot"), str):
        raise ValueError("it is a safetensors file that ingot did not write: it does not say how to build the model")
    if bytes(payload[8 : CHECKSUM.start]) != PRELUDE:
        raise ValueError("it has no checksum; it is damaged or another program wrote it anew")
    digest = hashlib.sha256(payload[: CHECKSUM.start])
    digest.update(b"0" * 64)
    digest.update(payload[CHECKSUM.stop :])
    if bytes(payload[CHECKSUM]) != digest.hexdigest().encode():
        raise ValueError("its checksum does not match; it is damaged or another program wrote it anew")
    facts = None
    with suppress(ValueError, RecursionError):
        facts = json.loads(metadata["ingot"])
    if not isinstance(facts, dict) or not isinstance(facts.get("dtypes"), dict) or not isinstance(facts.get("version"), int):
        raise ValueError("it does not say how to build the model")
    _check_version(facts["version"])
    return Artifact(dequantise(stored, facts["dtypes"]), facts)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ValueError(f"it has version {version!s:.20} and this ingot reads version {VERSION}; use the ingot that wrote it")
