import hashlib
import json
import struct
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot.backends.torch.state import record, tensor
from ingot.runtime.tensors import ITEM_BYTES, TensorRecord, read_tensors, write_tensors

TENSORS = {
    "weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16),
    "fp16": torch.tensor([[0.5], [65504.0]], dtype=torch.float16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "scalar": torch.tensor(7),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "ints": torch.tensor([-1, 2**31 - 1], dtype=torch.int32),
    "Ümläut/größe": torch.ones(2, 2),
}


def records_of(tensors):
    return [record(name, value) for name, value in tensors.items()]


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, records_of({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3)}), {"note": "x"})
    return path


def test_our_files_are_read_by_safetensors(tmp_path):
    write_tensors(tmp_path / "a", records_of(TENSORS), {"note": "größe"})
    same(load_file(tmp_path / "a"), TENSORS)
    with safe_open(tmp_path / "a", "pt") as opened:
        assert opened.metadata() == {"note": "größe"}


def test_we_read_the_files_of_safetensors(tmp_path):
    save_file(TENSORS, tmp_path / "a", {"note": "größe"})
    records, metadata = read_tensors(tmp_path / "a")
    same({name: tensor(found) for name, found in records.items()}, TENSORS)
    assert metadata == {"note": "größe"}


def test_what_we_write_we_read(tmp_path):
    write_tensors(tmp_path / "a", records_of(TENSORS))
    records, metadata = read_tensors(tmp_path / "a")
    same({name: tensor(found) for name, found in records.items()}, TENSORS)
    assert metadata == {}


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_type_a_file_may_hold_becomes_a_tensor(tmp_path, dtype):
    write_tensors(tmp_path / "a", [TensorRecord("x", dtype, (2,), memoryview(bytes(2 * ITEM_BYTES[dtype])))])
    found = tensor(read_tensors(tmp_path / "a")[0]["x"])
    assert found.shape == (2,)
    assert found.element_size() == ITEM_BYTES[dtype]
    assert not found.any()


def test_a_file_without_tensors_is_a_file(tmp_path):
    write_tensors(tmp_path / "a", [])
    assert read_tensors(tmp_path / "a") == ({}, {})


def test_the_size_and_checksum_are_those_of_the_file(tmp_path):
    size, sha256 = write_tensors(tmp_path / "a", records_of(TENSORS), {"note": "x"})
    data = (tmp_path / "a").read_bytes()
    assert (size, sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_size_is_in_bytes_whatever_the_items_are(tmp_path):
    data = memoryview(array("f", [1.0, 2.0, 3.0]))
    size, _ = write_tensors(tmp_path / "a", [TensorRecord("x", "F32", (3,), data)])
    assert size == (tmp_path / "a").stat().st_size


def test_the_same_tensors_make_the_same_file_in_any_order(tmp_path):
    _, one = write_tensors(tmp_path / "a", records_of(TENSORS))
    _, other = write_tensors(tmp_path / "b", reversed(records_of(TENSORS)))
    assert one == other


def test_the_data_begins_aligned(file):
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert length % 8 == 0


def test_a_file_that_is_there_is_not_overwritten(file):
    before = file.read_bytes()
    with pytest.raises(FileExistsError):
        write_tensors(file, [])
    assert file.read_bytes() == before


def test_a_right_checksum_is_accepted(file):
    assert set(read_tensors(file, hashlib.sha256(file.read_bytes()).hexdigest())[0]) == {"a", "b"}


def test_a_flipped_bit_anywhere_is_seen_by_the_checksum(file):
    good = file.read_bytes()
    sha256 = hashlib.sha256(good).hexdigest()
    for place in range(0, len(good), 7):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"checksum does not match"):
            read_tensors(file, sha256)


def test_a_file_cut_anywhere_is_refused(file):
    good = file.read_bytes()
    for length in range(len(good)):
        file.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"^its |^it is"):
            read_tensors(file)


def test_bytes_behind_the_last_tensor_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"do not cover the data"):
        read_tensors(file)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_header(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HOSTILE = {
    "no file at all": b"",
    "a header longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": with_header(b"{]"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "no object": with_header([1, 2]),
    "a deep header": with_header(b"[" * 100_000),
    "a huge number": with_header(b'{"x": ' + b"9" * 10_000 + b"}"),
    "an entry that is a number": with_header({"x": 5}),
    "an entry that is text": with_header({"x": "F32"}),
    "an entry that is nothing": with_header({"x": None}),
    "no shape": with_header({"x": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "one offset": with_header({"x": entry(offsets=[0])}),
    "offsets that are no list": with_header({"x": entry(offsets=8)}),
    "a negative offset": with_header({"x": entry(offsets=[-8, 0])}),
    "offsets after the end": with_header({"x": entry(offsets=[8, 16])}),
    "offsets that turn back": with_header({"x": entry(offsets=[8, 0])}),
    "fractions": with_header({"x": entry(offsets=[0.0, 8.0])}),
    "a negative shape": with_header({"x": entry(shape=[-1, -2])}),
    "a huge shape": with_header({"x": entry(shape=[2**62, 2**62])}),
    "a shape of words": with_header({"x": entry(shape="ab")}),
    "a shape that does not fit": with_header({"x": entry(shape=[3])}),
    "an unknown type": with_header({"x": entry(dtype="F33")}),
    "a type that is a list": with_header({"x": entry(dtype=["F32"])}),
    "a type that is an object": with_header({"x": entry(dtype={})}),
    "two tensors in one place and a hole": with_header(
        {"x": entry(shape=[1], offsets=[0, 4]), "y": entry(shape=[1], offsets=[0, 4])}
    ),
    "a hole": with_header({"x": entry(offsets=[8, 16])}, bytes(16)),
    "metadata that is not an object": with_header({"__metadata__": 5, "x": entry()}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_or_hostile_file_is_a_value_error(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=r"^it(s| is) "):
        read_tensors(tmp_path / "a")


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_change_to_a_header_raises_anything_but_a_value_error(tmp_path_factory, data):
    header = json.dumps({"__metadata__": {"a": "b"}, "x": entry(shape=[1], offsets=[0, 4]), "y": entry("I32", [1, 1], [4, 8])})
    broken = bytearray(with_header(header.encode()))
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.sampled_from(b'0129-"[]{},:.eEF \x00\xff'))
    path = tmp_path_factory.getbasetemp() / "broken.safetensors"
    path.write_bytes(broken)
    try:
        records, _ = read_tensors(path)
    except ValueError:
        return
    assert sum(found.data.nbytes for found in records.values()) == 8


def test_a_record_is_a_copy_of_its_tensor():
    source = torch.zeros(3)
    copied = record("x", source)
    source.fill_(1)
    assert not any(copied.data)


def test_a_tensor_is_a_copy_of_its_record(file):
    records, _ = read_tensors(file)
    tensor(records["a"]).fill_(9)
    assert np.array_equal(np.frombuffer(records["a"].data, np.float32), np.arange(6))


def test_a_record_of_a_transposed_tensor_is_row_major():
    found = record("x", torch.arange(6.0).reshape(2, 3).T)
    assert found.shape == (3, 2)
    assert np.frombuffer(found.data, np.float32).tolist() == [0, 3, 1, 4, 2, 5]
