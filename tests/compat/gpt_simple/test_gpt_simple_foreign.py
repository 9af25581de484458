"""Half-finished runs of the original go on here, and no document is read twice."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from original import LENGTH, PHASES, TheirRun
from programs import Ingot

from ingot.artifact.gpt_simple import Saved, saved_checkpoints
from ingot.compat.gpt_simple.config import GptSimpleConfig, read_config
from ingot.compat.gpt_simple.foreign import adopt, documents_read, file_rows, read_cursors
from ingot.compat.gpt_simple.main import main
from ingot.compat.gpt_simple.translate import kept_tokens, resume_setting, translate
from ingot.config.schema import Config as IngotConfig
from ingot.data.formats.gpt_simple_folder import Pair
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.errors import CheckpointError
from ingot.preflight.validate import foreign_checkpoint
from ingot.runs.checkpoints import Checkpoint, load_checkpoint
from ingot.runtime.tensors import to_array

PAD, END = 300, 0  # ids


def pairs(folder: Path, bucket: str) -> list[Pair]:
    return [Pair(path) for path in sorted((folder / "data/train" / bucket).glob("*.bin"))]


def documents(pair: Pair) -> list[list[int]]:
    tokens = pair.map().tolist()
    return [tokens[begin:end] for begin, end in zip(pair.offsets[:-1].tolist(), pair.offsets[1:].tolist(), strict=True)]


def test_the_rows_of_a_file_hold_the_documents_that_the_original_puts_there(their_run: TheirRun) -> None:
    found = []
    for number, pair in enumerate(pairs(their_run.folder, "web")):
        texts = documents(pair)
        for row in file_rows(np.diff(pair.offsets), number, LENGTH):
            tokens = [token for document in row for token in texts[document]]
            found.append(tokens + [PAD] * (LENGTH - len(tokens)))
    assert found == their_run.rows and len(found) > 300


def adopted(folder: Path, *overrides: tuple[str, Any], said: list[str] | None = None) -> tuple[Checkpoint, IngotConfig]:
    config = read_config(str(folder / "config.yaml"), dict(overrides))
    told = said if said is not None else []
    path = adopt(config, told.append, told.append)
    assert path is not None
    return load_checkpoint(path), translate(config, 1, kept_tokens(config)).config


def test_weights_adamw_step_tokens_phase_and_the_wandb_run_are_taken_over(their_copy: Path) -> None:
    final = their_copy / "out/checkpoints/final"
    state = json.loads((final / "trainer_state.json").read_text())
    (final / "trainer_state.json").write_text(json.dumps({**state, "wandb_run_id": "abc123"}))
    said: list[str] = []
    ours, config = adopted(their_copy, said=said)
    assert (ours.step, ours.progress["tokens"], ours.kind) == (12, state["tokens_trained"], "final")
    assert json.loads(Path("out/wandb.json").read_text()) == {"id": "abc123"}
    assert state["curriculum"]["phase_idx"] == 1 and ours.progress["phases_begun"] == 2
    assert config.training.tokens_per_step == 4 * 2 * LENGTH == ours.progress["config"]["training"]["tokens_per_step"]
    theirs = torch.load(final / "model/pytorch_model.bin", weights_only=True)
    assert theirs.keys() == ours.tensors["model"].keys()
    for name, value in theirs.items():
        assert ours.tensors["model"][name].data.tobytes() == value.numpy().tobytes()
    optimizer = torch.load(final / "optimizer.bin", weights_only=True)
    matrices = [name for name, value in theirs.items() if value.dim() >= 2]
    rest = [name for name in theirs if name not in matrices]
    for number, name in enumerate([*matrices, *rest]):
        for key in ("exp_avg", "exp_avg_sq"):
            assert ours.tensors["optimizer"][f"{name}/{key}"].data.tobytes() == optimizer["state"][number][key].numpy().tobytes()
    assert said[0] == "resuming from gpt-simple's out/checkpoints/final at step 12" and len(said) == 1


def read_by_ours(config: IngotConfig, bucket: str) -> list[tuple[int, ...]]:
    """The documents of a bucket that a run reads in its one epoch, by their tokens, in order."""
    rows = make_rows(config.data, config.rows_per_step, open_dataset(config.data.path, config.data.tokenizer)).sources[bucket]  # type: ignore[attr-defined]
    count = rows.available(range(1000), 1)
    batch = np.empty((count, rows.planes, rows.seq_len), np.int32)
    rows.read(range(count), range(count), batch)
    ends = [[place + 1 for place, token in enumerate(row) if token == END] for row in batch[:, 0].tolist()]  # padding too
    parts = [row[a:b] for row, stops in zip(batch[:, 0].tolist(), ends, strict=True) for a, b in pairwise([0, *stops])]
    return [tuple(part) for part in parts if len(part) > 1]


def test_every_document_is_read_once_by_the_original_or_by_ours(their_copy: Path) -> None:
    cursors: dict[str, dict[int, int]] = {}
    for saved in saved_checkpoints(Path("out")):  # the second phase begins its files anew, and forgets what the first had read
        for bucket, files in (read_cursors(saved.path) or {}).items():
            for number, rows in files.items():
                cursors.setdefault(bucket, {})[number] = max(rows, cursors.get(bucket, {}).get(number, 0))
    _, config = adopted(their_copy)
    for bucket in ("books", "web"):
        texts = [tuple(text) for pair in pairs(their_copy, bucket) for text in documents(pair)]
        assert len(set(texts)) == len(texts) == 600
        before = set()
        for number, pair in enumerate(pairs(their_copy, bucket)):
            rows = list(file_rows(np.diff(pair.offsets), number, LENGTH))[: cursors[bucket].get(number, 0)]
            before |= {tuple(documents(pair)[document]) for row in rows for document in row}
        after = read_by_ours(config, bucket)
        assert 10 < len(before) < 300 and len(after) == len(set(after))
        assert before.isdisjoint(after) and before | set(after) == set(texts)


def test_a_file_that_was_read_to_its_end_is_left_out_whole(their_run: TheirRun) -> None:
    masks = documents_read(their_run.folder / "data", {"web": {0: -1, 1: 3}}, LENGTH, packing=False)
    assert list(masks) == ["web"] and masks["web"][:300].all() and masks["web"][300:].sum() == 3


def test_a_place_in_other_data_is_refused(their_run: TheirRun) -> None:
    with pytest.raises(CheckpointError, match=r"has read file number 3 in .*web, which has only 2 files; resume with the data"):
        documents_read(their_run.folder / "data", {"web": {2: 5}}, LENGTH, packing=True)


def test_a_checkpoint_without_the_place_in_the_data_says_so_and_takes_the_last_that_is_known(their_copy: Path) -> None:
    said: list[str] = []
    for name in ("final", "checkpoint-12"):
        shutil.rmtree(their_copy / "out/checkpoints" / name / "dataloader_state")
    adopted(their_copy, said=said)
    assert "the position in the data (known only up to step 8)" in said[1]
    assert Path("out/already-read.json").exists()


def test_a_run_of_the_original_goes_on_with_train_and_is_ours_from_then_on(
    their_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", "config.yaml", "--training.max_steps"]
    assert main([*words, "13"]) == 0
    assert "Resuming from step 12" in (said := capfd.readouterr().err) and "gpt-simple's out/checkpoints/final" in said
    assert main([*words, "14"]) == 0
    assert "Resuming from step 13" in (said := capfd.readouterr().err) and "resuming from gpt-simple's" not in said
    last = load_checkpoint(Path("out/checkpoints/step-00000014")).progress
    assert last["config"]["data"]["already_read"] == "out/already-read.json" and last["tokens"] > PHASES[0]["duration_tokens"]


def test_a_checkpoint_elsewhere_is_taken_into_a_new_folder(their_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--config", "config.yaml", "--training.output_dir", "new", "--training.resume", NEW["training.resume"]]
    assert main([*words, "--training.max_steps", "5"]) == 0
    assert "Resuming from step 4" in capfd.readouterr().err
    assert load_checkpoint(Path("new/checkpoints/step-00000005")).step == 5
    assert not list(Path("out/checkpoints").glob("step-*")) and not Path("out/already-read.json").exists()
    assert find_foreign(read_config("config.yaml", {**NEW, "training.output_dir": "new"})) is None  # the same command again
    # and from there into a third folder, which does not read those documents either
    third = read_config("config.yaml", {"training.output_dir": "third", "training.resume": "new"})
    assert translate(third, 1, kept_tokens(third)).config.data.already_read == "new/already-read.json"


NEW = {"training.resume": "out/checkpoints/checkpoint-4"}


def test_a_folder_with_another_run_or_newer_checkpoints_is_not_taken(their_copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"out has newer checkpoints \(newest checkpoint: step 12\)"):
        find_foreign(read_config("config.yaml", NEW))
    adopted(their_copy)
    shutil.copytree("out", "other")
    shutil.rmtree("out/checkpoints/step-00000012")
    with pytest.raises(CheckpointError, match=r"other holds another run \(newest checkpoint: step 12\)"):
        find_foreign(read_config("config.yaml", {**NEW, "training.output_dir": "other"}))


def test_force_begins_anew_with_all_documents(their_copy: Path) -> None:
    adopted(their_copy)
    assert main(["-q", "train", "--config", "config.yaml", "--training.max_steps", "3", "--force"]) == 0
    last = load_checkpoint(Path("out/checkpoints/step-00000003")).progress
    assert last["config"]["data"]["already_read"] is None and not Path("out/already-read.json").exists()


def test_a_model_of_another_shape_is_refused_in_the_words_of_the_keys(
    their_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", "config.yaml", "--training.max_steps", "14", "--model.n_layer", "3"]) == 4
    said = capfd.readouterr().err
    assert "model.n_layer was 2 and is 3" in said and "Traceback" not in said


def test_validate_finds_what_train_refuses_of_a_checkpoint_elsewhere(their_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "config.yaml", "--training.output_dir", "new", "--training.resume", NEW["training.resume"]]
    assert main(["validate", "--json", *words, "--model.activation", "gelu"]) == 1
    [found] = json.loads(capfd.readouterr().out)["findings"]
    assert found["code"] == "resume.arch_drift" and "model.activation was" in found["message"]
    assert main(["train", *words, "--model.activation", "gelu"]) == 4


def test_validate_notes_keys_that_differ_from_those_of_the_originals_run(
    their_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, expected in ([], False), (["--optimizer.learning_rate", "0.02"], True):
        main(["validate", "--json", "--config", "config.yaml", *words])
        assert expected == ("resume.config_drift" in capfd.readouterr().out)


def test_scratch_takes_nothing_over(their_copy: Path) -> None:
    config = read_config("config.yaml", {"training.resume": "scratch"})
    assert adopt(config, print, print) is None


def find_foreign(config: GptSimpleConfig) -> Saved | None:
    return foreign_checkpoint(resume_setting(config), Path(config.training.output_dir))


@pytest.mark.long
def test_two_ranks_go_on_with_a_run_of_one_and_its_batch(their_copy: Path, ingot: Ingot) -> None:
    command = [sys.executable, "-m", "ingot.compat.gpt_simple"]
    words = ["train", "--config", "config.yaml", "--training.max_steps", "14"]
    shutil.copytree("out", "alone")
    ingot(*words, "--training.output_dir", "alone", command=command, folder=their_copy)
    said = ingot(*words, "--nproc_per_node", "2", command=command, folder=their_copy).stderr
    assert said.count("resuming from gpt-simple's out/checkpoints/final") == 1 and "keeps this number" in said
    one, two = (load_checkpoint(Path(run) / "checkpoints/step-00000014") for run in ("alone", "out"))
    assert one.progress["tokens"] == two.progress["tokens"]
    for name, record in one.weights.items():
        assert np.allclose(to_array(record), to_array(two.weights[name]), atol=1e-5)
