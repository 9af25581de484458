import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.artifact.weights import read_weights, write_weights
from ingot.backends.torch_state import record, tensor
from ingot.errors import CheckpointError

FACTS = {"config": {"model": {"family": "gpt2"}}, "tokenizer": {"kind": "char", "characters": "aä😀"}, "val_bpb": 1.5}


def records():
    return [record("weight", torch.arange(6.0).reshape(2, 3)), record("half", torch.ones(3, dtype=torch.bfloat16))]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    write_weights(path, records(), FACTS)
    return path


def test_weights_and_facts_come_back(path):
    weights = read_weights(path)
    assert weights.facts == FACTS
    assert torch.equal(tensor(weights.tensors["weight"]), torch.arange(6.0).reshape(2, 3))
    assert tensor(weights.tensors["half"]).dtype == torch.bfloat16


def test_others_read_the_weights_with_safetensors(path):
    found = load_file(path)
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["half"], torch.ones(3, dtype=torch.bfloat16))


def test_the_size_is_that_of_the_file(path):
    assert write_weights(path, records(), FACTS) == path.stat().st_size


def test_an_export_replaces_the_one_before(path):
    write_weights(path, [record("other", torch.zeros(1))], {"step": 2})
    assert read_weights(path).facts == {"step": 2}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def failing():
    yield records()[0]
    raise OSError("the device is gone")


def test_a_failed_export_leaves_the_one_before_and_nothing_else(path):
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"the device is gone"):
        write_weights(path, failing(), FACTS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_export_before_and_nothing_else(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left"):
        write_weights(path, records(), {"step": 2})
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_facts_that_are_no_json_leave_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        write_weights(tmp_path / "a", records(), {"x": object()})
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_does_not_stand_in_the_way(tmp_path, monkeypatch):
    """In a container the next process often has the number of the one that was killed."""
    path = tmp_path / "model.safetensors"

    class Killed(BaseException):
        pass

    def killed(self, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", killed)
        patch.setattr("pathlib.Path.unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Killed):
            write_weights(path, records(), FACTS)
    assert len(list(tmp_path.iterdir())) == 1
    write_weights(path, records(), FACTS)
    assert read_weights(path).facts == FACTS


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*nowhere\.safetensors"):
        read_weights(tmp_path / "nowhere.safetensors")


def test_a_folder_is_no_export(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        read_weights(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 50, -1])
def test_a_file_cut_short_is_named(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: it"):
        read_weights(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_somebody_else_says_so(tmp_path, metadata):
    save_file({"x": torch.zeros(2)}, tmp_path / "a", metadata)
    with pytest.raises(CheckpointError, match=r"ingot did not write"):
        read_weights(tmp_path / "a")


@pytest.mark.parametrize("facts", ["{", "5", "[]", "null", '"text"', "[" * 100_000])
def test_facts_that_say_nothing_are_refused(tmp_path, facts):
    save_file({"x": torch.zeros(2)}, tmp_path / "a", {"ingot": facts})
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "a")


@pytest.mark.parametrize("metadata", [5, None, [], "ingot", {"ingot": 5}, {"ingot": {}}])
def test_metadata_of_any_shape_is_no_traceback(tmp_path, metadata):
    text = json.dumps({"__metadata__": metadata}).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "a")
