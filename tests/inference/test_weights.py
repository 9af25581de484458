"""What is known of a trained model before any framework is loaded."""

import numpy as np
import pytest

from ingot.artifact.container import write_artifact
from ingot.config.schema import Config
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError
from ingot.inference.model import foreign_weights, model_file, open_weights
from ingot.runs.checkpoints import save_checkpoint
from ingot.runtime.tensors import to_record

RECORDS = [to_record(name, np.arange(6, dtype=np.float32).reshape(2, 3), "F32") for name in ("a", "b")]
CONFIG = Config(training={"max_steps": 1}).model_dump(mode="json")
FACTS = {"config": CONFIG, "tokenizer": ByteTokenizer().spec(), "step": 3, "val_bpb": 1.5, "val_step": 3, "val_whole": True}


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, the first of which was the best."""
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 3):
        save_checkpoint(tmp_path / "checkpoints", step, {"model": RECORDS}, {**FACTS, "step": step, "best_step": 1})
    return tmp_path


def test_a_run_a_checkpoint_and_an_artifact_are_read_alike(run, tmp_path):
    write_artifact(tmp_path / "a", RECORDS, FACTS, "none", "none")
    found = [open_weights(path) for path in (run, run / "checkpoints/step-00000003", tmp_path / "a")]
    assert [weights.run for weights in found] == [run, run, None]
    for weights in found:
        assert {name: bytes(r.data) for name, r in weights.tensors.items()} == {r.name: bytes(r.data) for r in RECORDS}
        assert (weights.config.training.max_steps, weights.facts["val_bpb"], weights.names_data) == (1, 1.5, False)


def test_the_best_checkpoint_of_a_run_can_be_asked_for(run):
    assert open_weights(run, "best").path.name == "step-00000001"


def test_a_score_of_other_weights_is_not_taken_for_the_checkpoints(run):
    assert open_weights(run, "best").facts["val_bpb"] is None


@pytest.mark.parametrize(
    "facts",
    [
        {"tokenizer": None},
        {"config": CONFIG},
        {"config": CONFIG, "tokenizer": "byte"},
        {"config": {}, "tokenizer": None},
        {"config": {"model": 3}, "tokenizer": None},
        {"config": {"model": {}}, "tokenizer": None},
    ],
)
def test_what_does_not_say_how_to_build_its_model_is_refused(tmp_path, facts):
    write_artifact(tmp_path / "a", RECORDS, facts, "none", "none")
    with pytest.raises(CheckpointError, match="has no valid settings for building its model"):
        open_weights(tmp_path / "a")


def test_a_foreign_model_has_a_whole_config_around_it(tmp_path):
    settings = {"family": "gpt2", "layers": 2, "heads": 2, "width": 8, "context": 24, "vocab_size": 300}
    weights = foreign_weights(tmp_path / "ckpt.pt", RECORDS, settings, ByteTokenizer())
    assert (weights.config.data.seq_len, weights.config.model.context, weights.names_data) == (24, 24, False)
    assert weights.facts["tokenizer_fingerprint"] == ByteTokenizer().fingerprint()
    write_artifact(tmp_path / "a", RECORDS, weights.facts, "none", "none")
    assert open_weights(tmp_path / "a").config == weights.config


def test_the_code_of_a_model_of_ones_own_must_be_what_it_was_trained_with(tmp_path):
    write_artifact(tmp_path / "a", RECORDS, {**FACTS, "model_file_sha256": "0" * 64}, "none", "none")
    weights = open_weights(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"put its Python file next to it as model\.py"):
        model_file(weights)
    (tmp_path / "model.py").write_text("class Model: ...")
    with pytest.raises(CheckpointError, match=r"is not the file that .* was trained with"):
        model_file(weights)
