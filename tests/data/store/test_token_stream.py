from pathlib import Path

import numpy as np
import pytest
from shard_files import write_shard

from ingot.data.store.shards import TokenStream, open_shard
from ingot.errors import DataError


@pytest.fixture
def files(tmp_path):
    """Three shards of four tokens each, 0 to 11."""
    paths = [tmp_path / f"{number}.bin" for number in range(3)]
    for number, path in enumerate(paths):
        write_shard(path, np.arange(4 * number, 4 * number + 4))
    return paths


class Opener:
    """Opens shards, and counts how often each was opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def __call__(self, path: Path) -> np.ndarray:
        self.opened.append(path.name)
        return open_shard(path)


def test_every_file_is_opened_once(files):
    opener = Opener()
    stream = TokenStream(files, [4, 4, 4], opener)
    for _ in range(2):
        assert stream.read(0, 12).tolist() == list(range(12))
    assert [name[0] for name in opener.opened] == list("012")


def test_a_token_has_its_place_in_a_file(files):
    stream = TokenStream(files, [4, 4, 4])
    assert [stream.place(position) for position in (0, 3, 4, 11)] == [
        (str(files[0]), "token 0"),
        (str(files[0]), "token 3"),
        (str(files[1]), "token 0"),
        (str(files[2]), "token 3"),
    ]


def test_wide_ids_are_read_by_a_wide_stream_and_refused_by_a_narrow_one():
    wide = np.array([1, 70_000, 3], np.uint32)
    found = TokenStream([Path("a")], [3], lambda path: wide, dtype=np.dtype(np.uint32))
    assert found.read(0, 3).tolist() == [1, 70_000, 3] and found.slice(1, 3)[0].dtype == np.uint32
    narrow = TokenStream([Path("a")], [3], lambda path: wide)
    assert narrow.read(2, 3).tolist() == [3]
    for read in (narrow.read, narrow.slice):
        with pytest.raises(DataError, match=r"a contains token 70,000: .*16-bit"):
            read(0, 3)
