"""`ingot export --format nanogpt`, and ckpt.pt where `ingot import`, `generate` and `eval` take a model."""

import json
import shutil

import pytest
import torch
from foreign import ARGUMENTS, CONFIG, Foreign
from typer.testing import CliRunner

from ingot.api import train
from ingot.artifact.container import read_artifact
from ingot.cli.main import app
from ingot.compat.nanogpt.checkpoint import read_ckpt
from ingot.compat.nanogpt.keys import TRAIN
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.runs.checkpoints import find_checkpoint

torch.set_num_threads(1)


@pytest.fixture
def call():
    """The verbs in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def reference(prepared, tmp_path_factory):
    """A run that train.py did not train."""
    run = tmp_path_factory.mktemp("run")
    train(
        model={"family": "gpt2", "layers": 2, "heads": 2, "width": 16},
        data={"path": str(prepared / "data/words"), "seq_len": 16},
        training={"max_steps": 3, "tokens_per_step": 64, "output_dir": str(run), "device": "cpu"},
        artifact={"write": False},
    )
    return run


@pytest.fixture
def exported(call, reference, tmp_path):
    """ckpt.pt of a run of `ingot train`."""
    found = call("export", reference, "--format", "nanogpt", "--output", tmp_path / "ckpt.pt")
    assert found.exit_code == 0, found.exception
    return tmp_path / "ckpt.pt"


def written(call, path):
    found = call("generate", path, "--prompt", "bad ", "--tokens", 30, "--greedy", "--device", "cpu")
    assert found.exit_code == 0, found.exception
    return found.stdout


def test_any_run_of_the_gpt2_family_becomes_a_ckpt(exported, reference):
    found, ours = torch.load(exported, weights_only=True), find_checkpoint(reference)
    assert list(found["model_args"]) == list(ARGUMENTS)
    assert found["iter_num"] == ours.step
    assert found["config"].keys() == CONFIG.keys()
    for name, value in found["config"].items():
        assert type(value).__name__ == TRAIN[name].kind, name
    assert found["config"]["learning_rate"] == ours.progress["config"]["optimizer"]["learning_rate"]


def test_it_has_the_score_of_its_run(call, exported, reference, prepared):
    scores = []
    for words in ((reference,), (exported, "--data", prepared / "data/words")):
        found = call("eval", *words, "--device", "cpu", "--json")
        assert found.exit_code == 0, found.exception
        scores.append(json.loads(found.stdout)["val_loss"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)
    assert "choose the text to score it on with --data DIR" in str(call("eval", exported, "--device", "cpu").exception)


def test_it_writes_the_same_and_is_imported_bit_for_bit(call, exported, reference, tmp_path):
    assert written(call, exported) == written(call, reference)
    assert call("import", exported, "--output", tmp_path / "model.ingot").exit_code == 0
    here, there = find_checkpoint(reference).weights, read_artifact(tmp_path / "model.ingot").tensors
    assert here.keys() == there.keys()
    assert all(bytes(there[name].data) == bytes(record.data) for name, record in here.items())
    assert written(call, tmp_path / "model.ingot") == written(call, reference)


def test_it_is_known_by_its_content_whatever_its_name(call, exported, reference, tmp_path):
    unnamed = shutil.copy(exported, tmp_path / "nanogpt out")
    assert call("import", unnamed, "--output", tmp_path / "model.ingot").exit_code == 0
    assert written(call, unnamed) == written(call, reference)


def test_an_artifact_becomes_a_ckpt_without_an_optimizer(call, exported, tmp_path):
    call("import", exported, "--output", tmp_path / "model.ingot")
    again = tmp_path / "again.pt"
    assert call("export", tmp_path / "model.ingot", "--format", "nanogpt", "--output", again).exit_code == 0
    assert read_ckpt(again).missing[0] == "the optimizer state (it is empty)"
    assert read_ckpt(again).weights.keys() == read_ckpt(exported).weights.keys()


def test_a_file_that_is_there_is_not_replaced_and_options_that_mean_nothing_are_refused(call, exported, reference):
    words = ("export", reference, "--format", "nanogpt", "--output", exported)
    assert "exists; --force replaces it" in str(call(*words).exception)
    assert call(*words, "--force").exit_code == 0
    for option in (("--quantiser", "int8"), ("--codec", "lzma"), ("--dtype", "bf16"), ("--data", "x")):
        refused = call(*words, "--force", *option).exception
        assert isinstance(refused, ConfigError) and option[0] in str(refused)


def test_a_checkpoint_of_nanogpt_needs_its_characters_to_be_imported(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Foreign().save(tmp_path / "ckpt.pt")
    refused = call("import", "ckpt.pt", "--output", "model.ingot").exception
    assert isinstance(refused, DataError) and "there is no data/words/meta.pkl to list its characters" in str(refused)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    assert isinstance(call("import", "ckpt.pt", "--output", "model.ingot").exception, CheckpointError)
    assert isinstance(call("generate", "ckpt.pt", "--device", "cpu").exception, CheckpointError)
    assert [file.name for file in tmp_path.iterdir()] == ["ckpt.pt"]
