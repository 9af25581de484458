"""TensorBoard's event files: scalars by step, as `tensorboard --logdir RUN` reads them.

Written without the package: a record is a length, some forty bytes of protocol buffer and two checksums, and the format has not
changed in ten years, while the package brings ten others. Each session has a file of its own; where it goes on from an earlier
one it begins with a mark that makes TensorBoard forget what that one wrote after the step.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

from ingot.runs.state import this_process

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # how a field of a protocol buffer is written


class EventFile:
    """One file of events, open to append to."""

    def __init__(self, folder: Path, step: int) -> None:
        """Begin a file after a step; 0 at the start of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        host, pid, _ = this_process()
        self._file: BinaryIO = (folder / f"events.out.tfevents.{time.time():.6f}.{host}.{pid}").open("xb")
        self._write(0, _field(3, BYTES, b"brain.Event:2"))
        if step:
            self._write(step + 1, _field(7, BYTES, _field(1, VARINT, 1)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        told = (_field(1, BYTES, name.encode()) + _field(2, FLOAT, float(value)) for name, value in values.items())
        self._write(step, _field(5, BYTES, b"".join(_field(1, BYTES, one) for one in told)))

    def close(self, failed: bool) -> None:
        """Leave it on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        event = _field(1, DOUBLE, time.time()) + (_field(2, VARINT, step) if step else b"") + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))
        self._file.flush()  # somebody may be watching


def _field(number: int, kind: int, value: int | float | bytes) -> bytes:
    tag = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint(len(value)) + value
    if kind == VARINT:
        return tag + _varint(int(value))
    return tag + struct.pack("<d" if kind == DOUBLE else "<f", value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as the records of TensorFlow have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _table()[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table
