"""Whatever is done to an artifact, reading it is a sentence: no traceback, no code, no memory that is not there."""

import hashlib
import json
import os
import pickle

import pytest
import torch
from artifact_kit import MODEL, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot.artifact.codecs import CODECS, compress
from ingot.artifact.container import MAGIC, read_artifact
from ingot.backends.torch.state import tensor
from ingot.errors import CheckpointError


@pytest.fixture(scope="module", params=CODECS)
def whole(request, tmp_path_factory):
    """The bytes of an artifact in every codec."""
    path = tmp_path_factory.mktemp("whole") / request.param
    write(path, "int8", request.param)
    return path.read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("broken") / "model.ingot"


def refuses(path, match="cannot be read: "):
    with pytest.raises(CheckpointError, match=match) as caught:
        read_artifact(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def refused(path, content, match="cannot be read: "):
    path.write_bytes(content)
    refuses(path, match)


def test_a_file_cut_at_any_byte_is_refused(whole, place):
    place.write_bytes(whole)
    for length in reversed(range(len(whole))):
        os.truncate(place, length)
        refuses(place)


@given(st.data())
@settings(max_examples=200)
def test_any_flipped_bit_is_refused(whole, place, data):
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    broken = bytearray(whole)
    broken[bit // 8] ^= 1 << bit % 8
    refused(place, broken)


def test_any_flipped_bit_of_a_header_is_refused(whole, place):
    place.write_bytes(whole)
    with place.open("r+b", buffering=0) as file:
        for bit in range(8 * 140):
            flipped = whole[bit // 8] ^ 1 << bit % 8
            os.pwrite(file.fileno(), bytes([flipped]), bit // 8)
            refuses(place)
            os.pwrite(file.fileno(), whole[bit // 8 : bit // 8 + 1], bit // 8)
    assert read_artifact(place).facts["val_bpb"] == 1.5


@given(st.binary(min_size=1, max_size=40))
def test_bytes_behind_the_end_are_refused(whole, place, more):
    refused(place, whole + more)


@given(st.binary(max_size=400))
def test_noise_is_refused(place, content):
    refused(place, content)
    refused(place, MAGIC + content)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/this-must-not-exist",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_is_refused_and_not_run(tmp_path, monkeypatch, protocol):
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    refused(tmp_path / "a", pickle.dumps(Bomb(), protocol), r"the file is a pickle, not an artifact; code in the file is not run")
    assert not ran


def test_a_file_of_torch_save_is_refused(tmp_path):
    torch.save(MODEL, tmp_path / "a")
    refused(tmp_path / "a", (tmp_path / "a").read_bytes(), r"the file is a zip file, as torch\.save writes it, not an artifact")


def sealed(header, data=b""):
    """A payload with any header, and a checksum that is right."""
    text = '{"__metadata__":{"sha256":"' + "0" * 64 + '",' + header
    file = len(text.encode()).to_bytes(8, "little") + text.encode() + data
    return file[:35] + hashlib.sha256(file).hexdigest().encode() + file[99:]


def enveloped(payload, **told):
    data = compress("zlib", [payload])
    header = {"version": 1, "codec": "zlib", "size": len(payload), "sha256": hashlib.sha256(data).hexdigest(), **told}
    text = json.dumps(header, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + data


def with_entries(entries, facts='{"version":1,"dtypes":{}}'):
    return f'"ingot":{json.dumps(facts)}}},' + json.dumps(entries)[1:]


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE_ENTRIES = {
    "a negative offset": {"x": entry(offsets=[-8, 0])},
    "offsets after the end": {"x": entry(offsets=[8, 16])},
    "offsets that turn back": {"x": entry(offsets=[8, 0])},
    "huge offsets": {"x": entry(offsets=[0, 2**64])},
    "a huge shape": {"x": entry(shape=[2**62, 2**62])},
    "a huge shape of nothing": {"x": entry(shape=[0, 2**62, 2**62], offsets=[0, 0]), "y": entry()},
    "a thousand dimensions": {"x": entry(shape=[1] * 1000 + [2])},
    "a negative shape": {"x": entry(shape=[-1, -2])},
    "a wrong type": {"x": entry(dtype="F64")},
    "an unknown type": {"x": entry(dtype="pickle")},
    "a type that is an object": {"x": entry(dtype={})},
    "two tensors in one place": {"x": entry(shape=[2]), "y": entry(shape=[2])},
    "overlapping tensors": {"x": entry(shape=[1], offsets=[0, 4]), "y": entry("I16", [3], [2, 8])},
    "a hole": {"x": entry(shape=[1], offsets=[4, 8])},
    "an entry that is a number": {"x": 5},
    "a scale without codes": {"x::scale": entry()},
}


@pytest.mark.parametrize("entries", HOSTILE_ENTRIES.values(), ids=HOSTILE_ENTRIES.keys())
@pytest.mark.parametrize("wrap", [bytes, enveloped], ids=["plain", "compressed"])
def test_a_hostile_header_with_a_right_checksum_is_refused(tmp_path, entries, wrap):
    refused(tmp_path / "a", wrap(sealed(with_entries(entries), bytes(8))), r"cannot be read: ")


@pytest.mark.parametrize(
    "facts",
    ["{", "5", "[]", "null", '"text"', "{}", '{"version":1}', '{"version":1,"dtypes":[]}', '{"version":null,"dtypes":{}}'],
)
def test_facts_that_say_nothing_are_refused(tmp_path, facts):
    refused(tmp_path / "a", sealed(with_entries({"x": entry()}, facts), bytes(8)), r"cannot be read: ")


def test_deep_json_is_refused(tmp_path):
    refused(tmp_path / "a", sealed(with_entries({"x": entry()}, "[" * 100_000), bytes(8)), r"cannot be read: ")
    deep = b"[" * 4000
    refused(tmp_path / "a", MAGIC + len(deep).to_bytes(4, "little") + deep, r"the header is damaged")
    deep = b"[" * 100_000
    refused(tmp_path / "a", len(deep).to_bytes(8, "little") + deep, r"its header is not JSON")


def test_a_well_formed_payload_is_what_the_hostile_ones_are_made_from(tmp_path):
    (tmp_path / "a").write_bytes(enveloped(sealed(with_entries({"x": entry()}), bytes(8))))
    assert tensor(read_artifact(tmp_path / "a").tensors["x"]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"size": 2**62}, r"the 4611686018427387904 bytes that the header declares"),
        ({"size": 1 << 36}, r"compressed bytes cannot decompress to the 68719476736 bytes that the header declares"),
        ({"size": 10**3000}, r"compressed bytes cannot decompress to the"),
        ({"size": -1}, r"compressed bytes cannot decompress to the"),
        ({"size": 5}, r"does not decompress to the 5 bytes"),
        ({"size": 1_000_000}, r"does not decompress to the 1,000,000 bytes"),
        ({"size": "5"}, r"checksum does not match"),
        ({"size": None}, r"checksum does not match"),
        ({"size": 1.5}, r"checksum does not match"),
        ({"sha256": "0" * 64}, r"checksum does not match"),
        ({"version": 2}, r"the format version is 2, not 1"),
        ({"version": 10**3000}, r"the format version is 1000"),
        ({"version": "1"}, r"the header is damaged"),
        ({"more": 1}, r"checksum does not match"),
        ({"codec": "pickle"}, r"compressed with 'pickle', which this version of ingot does not support"),
        ({"codec": "none"}, r"compressed with 'none', which"),
        ({"codec": ["zlib"]}, r"checksum does not match"),
    ],
)
def test_a_hostile_envelope_is_refused(tmp_path, told, match):
    refused(tmp_path / "a", enveloped(sealed(with_entries({"x": entry()}), bytes(8)), **told), match)


def test_a_header_that_says_it_is_huge_is_refused(tmp_path):
    refused(tmp_path / "a", MAGIC + b"\xff\xff\xff\xff" + b"{}" * 9000, r"cut short or its header is damaged")


def test_an_envelope_in_an_envelope_is_refused(tmp_path):
    refused(tmp_path / "a", enveloped(enveloped(sealed(with_entries({"x": entry()}), bytes(8)))))


def test_a_version_of_the_future_is_refused(tmp_path):
    refused(
        tmp_path / "a",
        sealed(with_entries({"x": entry()}, '{"version":9,"dtypes":{}}'), bytes(8)),
        r"the format version is 9, not 1",
    )


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_somebody_else_says_so(tmp_path, metadata):
    save_file({"x": torch.zeros(2)}, tmp_path / "a", metadata)
    with pytest.raises(CheckpointError, match=r"ingot did not write"):
        read_artifact(tmp_path / "a")


def test_a_file_that_another_program_wrote_anew_says_so(tmp_path):
    write(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as opened:
        save_file(load_file(tmp_path / "a"), tmp_path / "b", {"ingot": opened.metadata()["ingot"]})
    with pytest.raises(CheckpointError, match=r"rewritten by another program"):
        read_artifact(tmp_path / "b")


@pytest.mark.parametrize("metadata", [5, None, [], "ingot", {"ingot": 5}, {"ingot": {}}])
def test_metadata_of_any_shape_is_no_traceback(tmp_path, metadata):
    text = json.dumps({"__metadata__": metadata}).encode()
    refused(tmp_path / "a", len(text).to_bytes(8, "little") + text, r"cannot be read: (its|the|ingot) ")


def test_a_file_of_another_kind_is_told_with_what_to_give(tmp_path):
    refused(tmp_path / "a.txt", b"Once upon a time", r"not a safetensors file; give a run folder, a checkpoint or an artifact$")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.ingot does not exist"):
        read_artifact(tmp_path / "nowhere.ingot")


def test_a_folder_is_no_artifact(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read: Is a directory"):
        read_artifact(tmp_path)
