import lzma
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.artifact import rans
from ingot.artifact.codecs import CODECS, check_codec, compress, decompress, is_plausible_size
from ingot.errors import ConfigError

COMPRESSING = CODECS[1:]
BOMB = {
    "zlib": lambda size: zlib.compress(bytes(size), 9),
    "lzma": lambda size: lzma.compress(bytes(size), preset=0),
    "rans": lambda size: rans.COUNT.pack(len(head := zlib.compress(bytes(size), 9))) + head,
}


@pytest.mark.parametrize("codec", COMPRESSING)
@given(parts=st.lists(st.binary(max_size=200), min_size=1, max_size=4).filter(any))
def test_what_is_compressed_comes_back(codec, parts):
    whole = b"".join(parts)
    assert decompress(codec, memoryview(compress(codec, [memoryview(part) for part in parts])), len(whole)) == whole


@pytest.mark.parametrize("codec", COMPRESSING)
def test_parts_of_many_chunks_come_back_and_show_how_far_they_are(codec):
    parts = [bytes(range(256)) * 8000, b"x" * 3_000_000]
    seen = []
    data = compress(codec, parts, lambda done, total: seen.append((done, total)))
    assert decompress(codec, memoryview(data), 5_048_000) == b"".join(parts)
    assert seen[-1] == (5_048_000, 5_048_000)
    assert seen == sorted(seen)
    assert len(seen) > 3


@pytest.mark.parametrize("codec", [codec for codec in COMPRESSING if codec != "rans"])
def test_standard_tools_unfold_what_we_write(codec):
    data = compress(codec, [b"weights " * 100])
    unfold = {"zlib": zlib.decompress, "lzma": lzma.decompress}
    assert unfold[codec](data) == b"weights " * 100


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("wrong", [-1, 1, 1000])
def test_a_size_that_is_not_the_announced_one_is_refused(codec, wrong):
    data = compress(codec, [b"weights " * 100])
    with pytest.raises(ValueError, match=rf"^the {codec} data "):
        decompress(codec, memoryview(data), 800 + wrong)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_bytes_behind_the_end_are_refused(codec):
    data = compress(codec, [b"weights " * 100]) + b"more"
    with pytest.raises(ValueError, match=rf"^the {codec} data "):
        decompress(codec, memoryview(data), 800)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_data_cut_anywhere_is_refused(codec):
    data = compress(codec, [b"weights " * 100])
    for length in range(len(data)):
        with pytest.raises(ValueError, match=rf"^the {codec} data "):
            decompress(codec, memoryview(data)[:length], 800)


@pytest.mark.parametrize("codec", COMPRESSING)
@given(data=st.binary(max_size=300))
def test_noise_is_refused(codec, data):
    with pytest.raises(ValueError, match=rf"^the {codec} data "):
        decompress(codec, memoryview(data), 1000)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_bomb_is_stopped_at_the_announced_size(codec, python):
    """200 MB of zeros that say they are a thousand bytes are refused by a process that may not have the memory for them."""
    program = """
import resource, sys
from ingot.artifact.codecs import check_codec, decompress
check_codec(sys.argv[1])
data = bytes.fromhex(sys.stdin.read())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150_000_000,) * 2)
try:
    decompress(sys.argv[1], memoryview(data), 1000)
except ValueError as error:
    print(error)
"""
    said, complaint = python(program, codec).communicate(BOMB[codec](200_000_000).hex())
    assert said.startswith(f"the {codec} data "), complaint
    assert "emory" not in said


def test_an_xz_dictionary_that_fills_the_memory_is_refused():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 29}]
    data = lzma.compress(b"weights", filters=filters)
    with pytest.raises(ValueError, match=r"^the lzma data is damaged"):
        decompress("lzma", memoryview(data), 7)


@pytest.mark.parametrize(
    ("size", "stored", "fine"),
    [
        (0, 0, True),
        (1 << 24, 1, True),
        (10**9, 10**6, True),
        (10**9, 9 * 10**5, False),
        (1 << 37, 1 << 36, False),
        (-1, 5, False),
    ],
)
def test_sizes_that_weights_cannot_have_are_not_believed(size, stored, fine):
    assert is_plausible_size(size, stored) is fine


def test_an_unknown_codec_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'rar'.*none, zlib, lzma, rans"):
        check_codec("rar")
