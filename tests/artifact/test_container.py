import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_kit import FACTS, GENERATOR, MODEL, records, write
from safetensors import safe_open
from safetensors.torch import load_file

from ingot.artifact.codecs import CODECS, decompress
from ingot.artifact.container import artifact_name, artifact_sizes, read_artifact, write_artifact
from ingot.backends.torch.state import record, tensor
from ingot.errors import CheckpointError, ConfigError
from ingot.runtime.tensors import TensorRecord, pack_tensors


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
    begin = 12 + int.from_bytes(data[8:12], "little")
    assert (data if codec == "none" else decompress(codec, memoryview(data)[begin:], len(payload))) == payload


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
    with pytest.raises(CheckpointError, match=r"lzma.*; use the codec none"):
        write_artifact(tmp_path / "a", [zeros], {}, "none", "lzma")
    assert not list(tmp_path.iterdir())


def test_a_file_without_tensors_is_a_file(tmp_path):
    write_artifact(tmp_path / "a", [], FACTS, "int8", "lzma")
    assert read_artifact(tmp_path / "a").tensors == {}


def test_headers_of_payloads_begin_as_the_checksum_needs_it():
    head = bytes(pack_tensors([], {"sha256": "0" * 64})[0])
    assert head[35:99] == b"0" * 64


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("none-lzma", "8b8d4481aaa66c1f"),
        ("none-rans", "8b8d4481aaa66c1f"),
        ("int8-none", "0895c00540870f83"),
        ("int8-zlib", "0895c00540870f83"),
        ("int8-rans", "0895c00540870f83"),
        ("int8-golf-lzma", "f3448df6bd7d6dc5"),
    ],
)
def test_artifacts_of_version_1_keep_opening_with_the_same_weights(name, sha256):
    tensors = read_artifact(Path(__file__).parents[1] / f"golden/artifacts/{name}.ingot").tensors
    contents = b"".join(name.encode() + bytes(tensor.data) for name, tensor in sorted(tensors.items()))
    assert hashlib.sha256(contents).hexdigest().startswith(sha256)
