import struct
from contextlib import ExitStack

import numpy as np
import pytest
from shard_files import write_shard

from ingot.data.store.shards import TokenWriter, open_shard
from ingot.errors import DataError


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train_000000.bin"
    write_shard(path, np.arange(5, dtype=np.uint16))
    return path


def test_every_id_survives(tmp_path):
    tokens = np.arange(65536)
    write_shard(tmp_path / "a.bin", tokens)
    assert np.array_equal(open_shard(tmp_path / "a.bin"), tokens)


def test_the_file_is_1024_bytes_of_header_and_little_endian_tokens(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([1, 258], np.uint16))
    data = (tmp_path / "a.bin").read_bytes()
    assert data == struct.pack("<3i", 20240520, 1, 2) + bytes(1012) + b"\x01\x00\x02\x01"


@pytest.mark.parametrize("sizes", [[100], [9, 1, 10, 80], [3] * 33 + [1], [99, 0, 1]])
def test_a_shard_grows_by_parts_of_any_size(tmp_path, sizes):
    tokens = np.arange(100, dtype=np.uint16)
    with ExitStack() as files:
        writer = TokenWriter(tmp_path / "a.bin", files, header=True)
        for part in np.split(tokens, np.cumsum(sizes[:-1])):
            writer.append(part)
        writer.close()
    assert np.array_equal(open_shard(tmp_path / "a.bin"), tokens)


def test_a_shard_that_another_process_began_is_continued_where_it_was_saved(tmp_path):
    tokens = np.arange(50, dtype=np.uint16)
    with ExitStack() as files:
        writer = TokenWriter(tmp_path / "a.bin", files, header=True)
        writer.append(tokens[:20])
        writer.sync()
        writer.append(tokens[:9])
        writer.sync()  # of this nobody took note
    with ExitStack() as files:
        writer = TokenWriter(tmp_path / "a.bin", files, written=20, header=True)
        writer.append(tokens[20:])
        writer.close()
    assert open_shard(tmp_path / "a.bin").tolist() == tokens.tolist()


def test_tokens_are_mapped_and_cannot_be_changed(shard):
    tokens = open_shard(shard)
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match=r"read-only"):
        tokens[0] = 7


def test_a_shard_without_tokens_can_be_read(tmp_path):
    write_shard(tmp_path / "a.bin", np.empty(0, np.uint16))
    assert len(open_shard(tmp_path / "a.bin")) == 0


@pytest.mark.parametrize("size", [0, 1, 1023])
def test_a_header_that_is_cut_short_is_unexpected(shard, size):
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"train_000000.bin has {size:,} bytes, fewer than the 1,024 of a header"):
        open_shard(shard)


@pytest.mark.parametrize(("place", "found"), [(0, "magic 7 and version 1"), (1, "magic 20240520 and version 7")])
def test_other_constants_are_an_unexpected_header(shard, place, found):
    data = bytearray(shard.read_bytes())
    struct.pack_into("<i", data, 4 * place, 7)
    shard.write_bytes(data)
    with pytest.raises(DataError, match=f"train_000000.bin has {found}, which no supported format has"):
        open_shard(shard)


@pytest.mark.parametrize(("change", "found"), [(lambda data: data[:-1], 1033), (lambda data: data + b"\0", 1035)])
def test_a_size_that_does_not_follow_from_the_header_is_refused(shard, change, found):
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(DataError, match=rf"has {found:,} bytes instead of the 1,034 of a header and 5 tokens"):
        open_shard(shard)


def test_a_negative_count_is_a_size_mismatch(shard):
    data = bytearray(shard.read_bytes())
    struct.pack_into("<i", data, 8, -1)
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"bytes instead of the 1,022"):
        open_shard(shard)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.bin cannot be read"):
        open_shard(tmp_path / "gone.bin")
