"""The entropy coder: what it writes comes back, is as small as entropy allows, and is refused where it is damaged."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.artifact import rans
from ingot.artifact.rans import COUNT, LEAST, SECTION, TURNS, decode, encode, entropy_bytes


def drawn(seed, size, symbols):
    """Bytes of so many different values, some of them rare."""
    generator = np.random.default_rng(seed)
    weights = generator.random(symbols) ** 4 + 1e-6
    values = generator.permutation(256)[:symbols].astype(np.uint8)
    return generator.choice(values, size, p=weights / weights.sum()).astype(np.uint8).tobytes()


def headed(sections, rest=b"", words=b""):
    """Data with a head of one's own."""
    head = zlib.compress(COUNT.pack(len(sections)) + b"".join(SECTION.pack(*section) for section in sections) + rest)
    return memoryview(COUNT.pack(len(head)) + head + words)


@given(
    st.lists(st.tuples(st.integers(0, LEAST + 9), st.integers(1, 256)), max_size=3),
    st.integers(0, 1 << 32),
)
@settings(max_examples=25)
def test_parts_of_any_size_and_any_number_of_symbols_come_back(shapes, seed):
    parts = [drawn(seed + i, *shape) for i, shape in enumerate(shapes)]
    whole = b"".join(parts)
    assert decode(memoryview(encode(parts)), len(whole)) == whole


@pytest.mark.parametrize("symbols", [1, 2, 255, 256])
def test_parts_of_many_turns_and_states_come_back(symbols):
    parts = [drawn(1, 2 * TURNS + 5, symbols), drawn(2, LEAST, symbols), drawn(3, TURNS, symbols)]
    whole = b"".join(parts)
    assert decode(memoryview(encode(parts)), len(whole)) == whole


def test_codes_of_weights_take_their_entropy_and_half_a_percent():
    codes = np.clip(np.rint(np.random.default_rng(0).standard_normal(1 << 18) * 4), -31, 31).astype(np.int8)
    least = entropy_bytes(np.bincount(codes.view(np.uint8), minlength=256))
    data = encode([codes.data])
    assert least < len(data) < 1.005 * least
    assert len(data) < 0.95 * len(zlib.compress(codes.tobytes(), 9))


def test_one_value_alone_takes_no_bits():
    assert len(encode([bytes(1 << 18)])) < 200


def test_floats_have_a_table_for_each_byte_of_an_item():
    scales = np.exp(np.random.default_rng(0).standard_normal(20_000) / 4).astype(np.float16)
    assert len(encode([scales.view(np.uint8).data])) < 0.9 * entropy_bytes(np.bincount(scales.view(np.uint8), minlength=256))


WHOLE = drawn(0, LEAST, 20)
CODED = encode([WHOLE])


@given(st.integers(0, len(CODED) - 1), st.integers(1, 255))
@settings(max_examples=25)
def test_a_changed_byte_is_refused_or_changes_bytes_of_the_same_number(place, change):
    """There is no checksum in here: the container has one. But nothing may crash, hang or give another size."""
    broken = bytearray(CODED)
    broken[place] ^= change
    try:
        found = decode(memoryview(broken), len(WHOLE))
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(found) == len(WHOLE)


FLAT = np.packbits([1] * 256).tobytes() + np.full(256, 255, "<u2").tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff",
        headed([(1, LEAST)], FLAT[:-2]),
        headed([(1, LEAST)], FLAT[:-2] + b"\x00\x00", bytes(5)),
        headed([(1, LEAST)], bytes(32)),
        headed([(1, LEAST)], FLAT),
        headed([(1, LEAST)], FLAT, bytes(5)),
        headed([(1, LEAST)], FLAT, bytes(8)),
        headed([(3, LEAST)], 3 * FLAT, bytes(5)),
        headed([(0, LEAST)], bytes(LEAST - 1)),
        headed([(0, LEAST)], bytes(LEAST + 1)),
        headed([(0, LEAST), (1, 1 << 63)], bytes(LEAST)),
        headed([(0, 1 << 63), (0, 1 << 63), (0, LEAST)], bytes(LEAST)),
        headed([], b""),
    ],
)
def test_data_that_no_encoder_writes_is_refused(data):
    with pytest.raises(ValueError, match=r"^(the (compressed |coded )?(header|data|sizes)|it is cut|incomplete)"):
        decode(memoryview(data), LEAST)


def test_a_head_that_unfolds_into_too_much_is_stopped():
    head = zlib.compress(bytes(1 << 24))
    with pytest.raises(ValueError, match=r"^the compressed header is invalid"):
        decode(memoryview(COUNT.pack(len(head)) + head), 1000)


def test_the_number_of_turns_does_not_follow_from_what_a_file_says():
    assert rans._lanes([np.empty(1 << 30, np.uint8)]) * TURNS == 1 << 30
