"""The Python side: what `ingot.train` returns, and that every way to a trained model leads to the same one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from programs import DEMO, Ingot, checkpoints, losses, progress

import ingot as package
from ingot.artifact.container import read_artifact, write_artifact
from ingot.errors import CheckpointError, DataError

PYTHON = """
import dataclasses, json, sys
import ingot
assert "torch" not in sys.modules
result = ingot.train(config="c.yaml", quiet=True)
print(json.dumps({name: str(value) for name, value in dataclasses.asdict(result).items()}))
"""


def test_training_from_python_gives_what_the_command_line_gives(ingot: Ingot, data, reference, tmp_path):
    settings = {**DEMO, "data.path": data, "training.output_dir": tmp_path / "run"}
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, []).append(f"  {key}: {value}\n")
    (tmp_path / "c.yaml").write_text("base: demo\n" + "".join(f"{name}:\n{''.join(keys)}" for name, keys in sections.items()))
    program = ingot(command=[sys.executable, "-c", PYTHON], folder=tmp_path, fresh=True)
    result = json.loads(program.stdout)
    assert losses(tmp_path / "run") == losses(reference)
    assert float(result["val_bpb"]) == progress(reference)["val_bpb"]
    assert float(result["final_loss"]) == losses(reference)[40]
    assert (result["total_tokens"], result["total_steps"], result["status"]) == ("10240", "40", "completed")
    assert (result["run_dir"], result["checkpoint_path"]) == (str(tmp_path / "run"), str(checkpoints(tmp_path / "run")[40]))
    assert program.stderr == ""


def test_a_result_has_the_promised_fields():
    names = {field.name for field in dataclasses.fields(package.TrainingResult)}
    assert names >= {"final_loss", "val_bpb", "total_tokens", "total_steps", "checkpoint_path", "run_dir"}


@pytest.fixture(scope="module")
def models(reference: Path) -> list[package.LoadedModel]:
    """The same model by its run folder, its checkpoint and its artifact."""
    return [package.load(path) for path in (reference, checkpoints(reference)[40], reference / "artifact" / "model.safetensors")]


def test_run_folder_checkpoint_and_artifact_are_the_same_model(models):
    weights = [dict(model.backend.model.named_parameters()) for model in models]
    for other in weights[1:]:
        assert weights[0].keys() == other.keys()
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


def test_run_folder_checkpoint_and_artifact_write_the_same_text(models, reference):
    texts = {model.generate("abc", tokens=40, seed=3) for model in models}
    assert len(texts) == 1
    assert texts == {package.generate(reference, "abc", tokens=40, seed=3)}
    assert models[0].generate("abc", tokens=40, seed=4) not in texts


def test_evaluating_again_gives_the_score_of_the_training(models, reference):
    for model in models:
        score = model.evaluate()
        assert score.bits_per_byte == pytest.approx(progress(reference)["val_bpb"], abs=1e-6)
        assert score.loss == pytest.approx(progress(reference)["val_loss"], abs=1e-6)


def test_the_command_line_evaluates_to_the_score_of_the_training(ingot: Ingot, reference):
    result = json.loads(ingot("eval", reference, "--json").stdout)
    assert result["val_bpb"] == pytest.approx(progress(reference)["val_bpb"], abs=1e-6)


def test_the_command_line_writes_what_python_writes(ingot: Ingot, reference, models):
    words = ["generate", reference / "artifact" / "model.safetensors", "--prompt", "abc", "--tokens", "20", "--greedy", "--json"]
    assert json.loads(ingot(*words).stdout)["texts"] == [models[0].generate("abc", tokens=20, temperature=0.0)]


def test_a_mistake_is_an_error_of_ours(data, tmp_path):
    with pytest.raises(package.ConfigError, match="did you mean"):
        package.train(recipe="demo", optimizer={"learning_rat": 1.0})
    with pytest.raises(package.DataError, match="no data at"):
        package.train(recipe="demo", data={"path": str(tmp_path / "nowhere")})
    with pytest.raises(package.CheckpointError, match="there is no checkpoint in"):
        package.load(tmp_path)


def test_a_model_whose_weights_went_astray_says_so_when_it_shall_write(reference):
    model = package.load(reference)
    with torch.no_grad():
        for parameter in model.backend.model.parameters():
            parameter.mul_(1e30)
    with pytest.raises(package.IngotError, match="finite"):
        model.generate("abc", tokens=3)


def test_a_damaged_artifact_is_refused(reference, tmp_path):
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes((reference / "artifact" / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(package.CheckpointError, match=str(damaged)):
        package.load(damaged)


HOSTILE = [
    ({"vocab_size": 2**40}, "must be less than 2147483648"),
    ({"vocab_size": 2**30}, "has shape"),
    ({"width": 2**20}, "has shape"),
    ({"layers": 10**9}, "must be at most 1000"),
    ({"layers": 1000}, "has fewer tensors than model.layers=1,000 needs"),
    ({"context": 2**38}, "must be less than 2147483648"),
    ({"context": 2**30}, "has shape"),
]


@pytest.mark.parametrize(("lie", "said"), HOSTILE, ids=str)
def test_an_artifact_that_asks_for_the_moon_is_refused_before_memory_is_taken(reference, tmp_path, lie, said):
    good = read_artifact(reference / "artifact" / "model.safetensors")
    model = {**good.facts["config"]["model"], **lie}
    facts = {**good.facts, "config": {**good.facts["config"], "model": model}}
    write_artifact(tmp_path / "hostile", good.tensors.values(), facts, "none", "none")
    with pytest.raises(CheckpointError, match=said):
        package.load(tmp_path / "hostile")


@pytest.mark.parametrize("spec", ["byte", ["byte"], 3])
def test_an_artifact_whose_tokenizer_is_none_is_refused(reference, tmp_path, spec):
    good = read_artifact(reference / "artifact" / "model.safetensors")
    write_artifact(tmp_path / "hostile", good.tensors.values(), {**good.facts, "tokenizer": spec}, "none", "none")
    with pytest.raises(CheckpointError, match="has no valid settings for building its model"):
        package.load(tmp_path / "hostile")


def test_numbers_of_another_kind_are_refused(reference, tmp_path):
    good = read_artifact(reference / "artifact" / "model.safetensors")
    tensors = [dataclasses.replace(r, dtype="I32") if r.name.endswith("ln_f.weight") else r for r in good.tensors.values()]
    write_artifact(tmp_path / "hostile", tensors, good.facts, "none", "none")
    with pytest.raises(CheckpointError, match="has dtype I32, but F32 in the model"):
        package.load(tmp_path / "hostile")


def test_another_tokenizer_than_the_models_own_is_refused(reference):
    with pytest.raises(CheckpointError, match="contains its tokenizer, but gpt2 does not match"):
        package.load(reference, tokenizer="gpt2")


def test_the_coldest_temperature_is_greedy(reference):
    model = package.load(reference)
    assert model.generate("abc", tokens=20, temperature=1e-40) == model.generate("abc", tokens=20, temperature=0.0)


def test_a_prompt_that_cannot_be_encoded_is_told_before_anything_is_written(reference):
    with pytest.raises(DataError):
        package.load(reference).stream("\udcff")
