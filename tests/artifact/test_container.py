import hashlib
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot.artifact.codecs import CODECS, compress
from ingot.artifact.container import MAGIC, artifact_name, artifact_sizes, read_artifact, write_artifact
from ingot.artifact.tensors import TensorRecord, pack_tensors
from ingot.backends.torch_state import record, tensor
from ingot.errors import CheckpointError, ConfigError

FACTS = {"config": {"model": {"family": "gpt2"}}, "tokenizer": {"kind": "char", "characters": "aä😀"}, "val_bpb": 1.5}
GENERATOR = torch.Generator().manual_seed(0)
MODEL = {
    "wte": torch.randn(33, 32, generator=GENERATOR),
    "half": torch.randn(3, generator=GENERATOR).bfloat16(),
    "q_gain": torch.randn(4, generator=GENERATOR),
    "steps": torch.tensor(7),
}


def records(model=MODEL):
    return [record(name, value) for name, value in model.items()]


def write(path, quantiser="none", codec="none", **how):
    return write_artifact(path, records(), FACTS, quantiser, codec, **how)


@pytest.fixture(scope="module", params=CODECS)
def whole(request, tmp_path_factory):
    """The bytes of an artifact in every codec."""
    path = tmp_path_factory.mktemp("whole") / request.param
    write(path, "int8", request.param)
    return path.read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("broken") / "model.ingot"


def refuses(path, match=r"cannot be read: it"):
    with pytest.raises(CheckpointError, match=match) as caught:
        read_artifact(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def refused(path, content, match=r"cannot be read: it"):
    path.write_bytes(content)
    refuses(path, match)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
def test_weights_and_facts_come_back(tmp_path, quantiser, codec):
    write(tmp_path / "a", quantiser, codec)
    weights = read_artifact(tmp_path / "a")
    assert {key: weights.facts[key] for key in FACTS} == FACTS
    assert weights.facts["quantiser"] == quantiser
    assert weights.tensors.keys() == MODEL.keys()
    for name, value in MODEL.items():
        found = tensor(weights.tensors[name])
        assert found.dtype == value.dtype
        torch.testing.assert_close(found, value, atol=0 if quantiser == "none" else 0.02, rtol=0)


@pytest.mark.parametrize("quantiser", ["none", "int8"])
def test_without_a_codec_anybody_s_safetensors_reads_the_file(tmp_path, quantiser):
    write(tmp_path / "a", quantiser)
    found = load_file(tmp_path / "a")
    value = found["wte"] * found["wte::scale"].float()[:, None] if quantiser == "int8" else found["wte"]
    torch.testing.assert_close(value, MODEL["wte"], atol=0.02, rtol=0)
    with safe_open(tmp_path / "a", "pt") as opened:
        assert json.loads(opened.metadata()["ingot"])["tokenizer"] == FACTS["tokenizer"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_payload_is_the_same_file_in_every_codec(tmp_path, codec):
    write(tmp_path / "plain", "int8", "none")
    write(tmp_path / "a", "int8", codec)
    payload, data = (tmp_path / "plain").read_bytes(), (tmp_path / "a").read_bytes()
    assert data == payload if codec == "none" else data.endswith(compress(codec, [payload]))


@pytest.mark.parametrize("codec", ["none", "zlib", "lzma"])
@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
def test_the_reader_on_the_page_reads_the_file_without_us(tmp_path, quantiser, codec):
    page = (Path(__file__).parents[2] / "docs" / "artifact.md").read_text()
    program: dict[str, Any] = {}
    exec(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1], program)
    model = {**MODEL, "large": torch.randn(70_000, generator=GENERATOR), "flags": torch.tensor([True, False])}
    write_artifact(tmp_path / "a", records(model), FACTS, quantiser, codec, "bf16")
    tensors, facts = program["read"](tmp_path / "a")
    ours = read_artifact(tmp_path / "a")
    assert facts == ours.facts
    assert tensors.keys() == ours.tensors.keys() == model.keys()
    for name, found in ours.tensors.items():
        assert torch.equal(torch.from_numpy(tensors[name].copy()).to(tensor(found).dtype), tensor(found)), name


def test_the_envelope_is_as_the_page_says(tmp_path):
    write(tmp_path / "a", "int8", "zlib")
    file = (tmp_path / "a").read_bytes()
    assert file[:8].hex(" ").upper() == "89 49 4E 47 4F 54 0D 0A"
    header = json.loads(file[12 : 12 + int.from_bytes(file[8:12], "little")])
    write(tmp_path / "b", "int8", "none")
    assert list(header) == ["version", "codec", "size", "sha256"]
    assert header["size"] == (tmp_path / "b").stat().st_size


def test_the_report_counts_what_was_written(tmp_path):
    report = write(tmp_path / "a", "int8", "zlib")
    assert report.path == tmp_path / "a"
    assert report.bytes == (tmp_path / "a").stat().st_size
    assert report.payload_bytes == 33 * 32 + 2 * 33 + 3 * 2 + 4 * 4 + 8
    assert report.parameters == 33 * 32 + 3 + 4 + 1
    assert (report.quantiser, report.codec) == ("int8", "zlib")


def test_sizes_that_are_tried_are_those_that_would_be_written(tmp_path):
    sizes = dict(artifact_sizes(records(), FACTS, "int8", CODECS))
    assert sizes == {codec: write(tmp_path / codec, "int8", codec).bytes for codec in CODECS}


def test_the_same_model_makes_the_same_file_in_any_order(tmp_path):
    write_artifact(tmp_path / "a", records(), FACTS, "int8", "lzma")
    write_artifact(tmp_path / "b", reversed(records()), FACTS, "int8", "lzma")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_tensor_begins_at_a_multiple_of_its_item_size(tmp_path):
    write(tmp_path / "a", "int8")
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    sizes = {"F32": 4, "F16": 2, "I64": 8, "I8": 1}
    entries = json.loads(data[8 : 8 + length])
    assert all(not e["data_offsets"][0] % sizes[e["dtype"]] for name, e in entries.items() if name != "__metadata__")


def test_the_name_says_who_can_read_the_file():
    assert artifact_name("none") == "model.safetensors"
    assert {artifact_name(codec) for codec in CODECS[1:]} == {"model.ingot"}


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_artifact(tmp_path / "a", records(), {"val_bpb": float("nan")}, "none", "none")
    assert read_artifact(tmp_path / "a").facts["val_bpb"] is None


# Damage of every kind.


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
    refused(tmp_path / "a", pickle.dumps(Bomb(), protocol), r"it is a pickle, and no artifact; code in it is not run")
    assert not ran


def test_a_file_of_torch_save_is_refused(tmp_path):
    torch.save(MODEL, tmp_path / "a")
    refused(tmp_path / "a", (tmp_path / "a").read_bytes(), r"it is a zip file, as torch\.save writes it, and no artifact")


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
    "offsets behind the end": {"x": entry(offsets=[8, 16])},
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
    refused(tmp_path / "a", MAGIC + len(deep).to_bytes(4, "little") + deep, r"its header is damaged")
    deep = b"[" * 100_000
    refused(tmp_path / "a", len(deep).to_bytes(8, "little") + deep, r"its header is no JSON")


def test_a_well_formed_payload_is_what_the_hostile_ones_are_made_from(tmp_path):
    (tmp_path / "a").write_bytes(enveloped(sealed(with_entries({"x": entry()}), bytes(8))))
    assert tensor(read_artifact(tmp_path / "a").tensors["x"]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"size": 2**62}, r"announces 4611686018427387904 bytes in"),
        ({"size": 1 << 36}, r"announces 68719476736 bytes in .*, which cannot be weights"),
        ({"size": 10**3000}, r"which cannot be weights"),
        ({"size": -1}, r"which cannot be weights"),
        ({"size": 5}, r"does not unfold into the 5 bytes"),
        ({"size": 1_000_000}, r"does not unfold into the 1,000,000 bytes"),
        ({"size": "5"}, r"checksum does not match"),
        ({"size": None}, r"checksum does not match"),
        ({"size": 1.5}, r"checksum does not match"),
        ({"sha256": "0" * 64}, r"checksum does not match"),
        ({"version": 2}, r"it has version 2 and this ingot reads version 1"),
        ({"version": 10**3000}, r"it has version 1000"),
        ({"version": "1"}, r"its header is damaged"),
        ({"more": 1}, r"checksum does not match"),
        ({"codec": "pickle"}, r"compressed with 'pickle', which this ingot does not know"),
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
    refused(tmp_path / "a", sealed(with_entries({"x": entry()}, '{"version":9,"dtypes":{}}'), bytes(8)), r"it has version 9")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_somebody_else_says_so(tmp_path, metadata):
    save_file({"x": torch.zeros(2)}, tmp_path / "a", metadata)
    with pytest.raises(CheckpointError, match=r"ingot did not write"):
        read_artifact(tmp_path / "a")


def test_a_file_that_another_program_wrote_anew_says_so(tmp_path):
    write(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as opened:
        save_file(load_file(tmp_path / "a"), tmp_path / "b", {"ingot": opened.metadata()["ingot"]})
    with pytest.raises(CheckpointError, match=r"another program wrote it anew"):
        read_artifact(tmp_path / "b")


@pytest.mark.parametrize("metadata", [5, None, [], "ingot", {"ingot": 5}, {"ingot": {}}])
def test_metadata_of_any_shape_is_no_traceback(tmp_path, metadata):
    text = json.dumps({"__metadata__": metadata}).encode()
    refused(tmp_path / "a", len(text).to_bytes(8, "little") + text, r"cannot be read: it")


def test_a_codec_that_is_not_installed_is_no_damage(tmp_path, monkeypatch):
    write(tmp_path / "a", codec="brotli")
    monkeypatch.setitem(sys.modules, "brotli", None)
    with pytest.raises(ConfigError, match=r"pip install 'ingot\[codecs\]'"):
        read_artifact(tmp_path / "a")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*nowhere\.ingot"):
        read_artifact(tmp_path / "nowhere.ingot")


def test_a_folder_is_no_artifact(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read: Is a directory"):
        read_artifact(tmp_path)


# Writing is whole or not at all.


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    write(tmp_path / "a")
    write_artifact(tmp_path / "a", [record("other", torch.zeros(1))], {"step": 2}, "none", "lzma")
    assert read_artifact(tmp_path / "a").facts["step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_export_before_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left"):
        write_artifact(tmp_path / "a", records(), {"step": 2}, "none", "none")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize(
    ("quantiser", "codec", "facts", "error"),
    [
        ("int4", "none", {}, ConfigError),
        ("none", "rar", {}, ConfigError),
        ("none", "none", {"x": object()}, TypeError),
        ("none", "zlib", {"x": {1, 2}}, TypeError),
    ],
)
def test_a_mistake_leaves_nothing_behind(tmp_path, quantiser, codec, facts, error):
    with pytest.raises(error):
        write_artifact(tmp_path / "a", records(), facts, quantiser, codec)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_does_not_stand_in_the_way(tmp_path, monkeypatch):
    """In a container the next process often has the number of the one that was killed."""

    class Killed(BaseException):
        pass

    def killed(self, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", killed)
        patch.setattr("pathlib.Path.unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Killed):
            write(tmp_path / "a")
    assert [path.name.endswith(".tmp") for path in tmp_path.iterdir()] == [True]
    write(tmp_path / "a")
    assert read_artifact(tmp_path / "a").facts["val_bpb"] == 1.5


def test_weights_that_hold_nothing_are_not_written_in_a_form_that_would_not_be_read(tmp_path):
    zeros = TensorRecord("x", "U8", (50_000_000,), memoryview(bytes(50_000_000)))
    with pytest.raises(CheckpointError, match=r"these weights hold nothing; the codec none stores them"):
        write_artifact(tmp_path / "a", [zeros], {}, "none", "zstd")
    assert not list(tmp_path.iterdir())


def test_a_file_without_tensors_is_a_file(tmp_path):
    write_artifact(tmp_path / "a", [], FACTS, "int8", "lzma")
    assert read_artifact(tmp_path / "a").tensors == {}


def test_headers_of_payloads_begin_as_the_checksum_needs_it():
    head = bytes(pack_tensors([], {"sha256": "0" * 64})[0])
    assert head[35:99] == b"0" * 64
