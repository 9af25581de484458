"""The score a run ends with is that of its checkpoint and of its artifact, read by programs that know nothing of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import Ingot, one_line, plant_modules, train_words

EXACT = {"abs": 1e-6, "rel": 0}
SHORT = {"training__max_steps": 8, "artifact__score": "true"}


def said(program) -> dict:
    return json.loads(program.stdout)


@pytest.fixture
def folding(ingot: Ingot, tmp_path: Path) -> Path:
    """A data set whose tokenizer folds white space, so that text and pieces have different bytes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i}  over   the hills and far away, {'so ' * (i % 7)}\n\n" for i in range(1500)))
    ingot(
        "data",
        "train-tokenizer",
        "--input",
        text,
        "--kind",
        "sentencepiece",
        "--vocab-size",
        "300",
        "--output",
        tmp_path / "t.model",
    )
    ingot("data", "prepare", "--input", text, "--tokenizer", tmp_path / "t.model", "--output", tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("rule", ["text", pytest.param("pieces", marks=pytest.mark.long)])
def test_training_evaluation_and_an_unquantised_artifact_agree(ingot: Ingot, folding, tmp_path, rule):
    run = tmp_path / "run"
    trained = said(ingot(*train_words(folding, run, **SHORT, evaluation__bytes=rule), "--json"))
    judged = said(ingot("eval", run, "--json"))
    read = said(ingot("eval", "--artifact", run / "artifact" / "model.safetensors", "--json"))
    assert trained["val_bpb"] == pytest.approx(trained["artifact_bpb"], **EXACT) == pytest.approx(judged["val_bpb"], **EXACT)
    assert read["val_bpb"] == pytest.approx(judged["val_bpb"], **EXACT)
    other = "val_bpb_pieces" if rule == "text" else "val_bpb_text"
    assert trained["val_other"][other] == pytest.approx(judged[other], **EXACT)
    assert (judged["val_bpb"] < judged[other]) == (rule == "text")  # the text has more bytes than its pieces


def test_a_run_ends_with_the_score_of_its_quantised_artifact(ingot: Ingot, data, tmp_path):
    run = tmp_path / "run"
    words = {**SHORT, "artifact__quantiser": "int8", "artifact__codec": "lzma", "model__family": "golf", "model__kv_heads": 2}
    trained = said(ingot(*train_words(data, run, **words), "--json"))
    artifact = run / "artifact" / "model.ingot"
    read = said(ingot("eval", "--artifact", artifact, "--json"))
    assert (trained["artifact_path"], trained["artifact_bytes"]) == (str(artifact), artifact.stat().st_size)
    assert read["artifact_bytes"] == trained["artifact_bytes"]
    assert read["val_bpb"] == trained["artifact_bpb"] != trained["val_bpb"]
    assert trained["artifact_bpb"] == pytest.approx(trained["val_bpb"], abs=0.01)


def test_two_ranks_leave_one_artifact_with_one_score(ingot: Ingot, data, tmp_path):
    run = tmp_path / "run"
    ranks = ingot.ranks(2, *train_words(data, run, **SHORT), "--json")
    assert ranks.end() == 0, ranks.stderr
    trained = said(ranks.first)
    assert trained["artifact_bpb"] == pytest.approx(trained["val_bpb"], abs=1e-5)


def test_an_artifact_without_its_tokenizer_takes_it_from_the_data(ingot: Ingot, folding, data, tmp_path):
    run = tmp_path / "run"
    trained = said(ingot(*train_words(folding, run, **SHORT, artifact__tokenizer="false"), "--json"))
    assert trained["artifact_bpb"] == pytest.approx(trained["val_bpb"], **EXACT)
    artifact = run / "artifact" / "model.safetensors"
    words = ["generate", artifact, "--tokens", "5", "--greedy"]
    whole = ingot("generate", run, "--tokens", "5", "--greedy").stdout
    assert ingot(*words, "--tokenizer", tmp_path / "t.model").stdout == whole
    refused = ingot(*words, "--tokenizer", "byte", code=4)
    message = one_line(refused)
    assert "was exported without its tokenizer, but byte does not match" in message and "give the tokenizer" in message


def test_eval_wants_a_model_or_an_artifact(ingot: Ingot, reference):
    for words in ([], [reference, "--artifact", reference / "artifact" / "model.safetensors"]):
        assert "--artifact FILE" in one_line(ingot("eval", *words, code=2))
    for path in (reference / "nowhere", reference):
        assert f"{path} does not exist" in one_line(ingot("eval", "--artifact", path, code=4))


def test_scoring_runs_no_file_of_the_current_folder(ingot: Ingot, data, tmp_path):
    plant_modules(tmp_path)
    words = train_words(data, tmp_path / "run", **SHORT)
    ingot(*words, command=(sys.executable, "-P", "-m", "ingot"), folder=tmp_path, fresh=True)
    assert not (tmp_path / "ran").exists()
