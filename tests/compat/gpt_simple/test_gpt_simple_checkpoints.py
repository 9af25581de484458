"""gpt-simple's checkpoint folders, both ways: what the original wrote is read here, what ours wrote it reads."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from original import TheirRun

from ingot.api import load, train
from ingot.artifact.gpt_simple import MODEL_KEYS, model_keys, model_settings, read_model, read_saved, saved_checkpoints
from ingot.backends.sampling import Sampling
from ingot.cli.main import run
from ingot.compat.gpt_simple.config import GptSimpleConfig, ModelConfig
from ingot.compat.gpt_simple.files import learning_rate, write_checkpoint
from ingot.compat.gpt_simple.foreign import read_cursors, read_training_state
from ingot.data.tokenizers import open_tokenizer
from ingot.errors import CheckpointError, DataError, Unreadable
from ingot.inference.model import LoadedModel, open_model, open_weights
from ingot.runs.checkpoints import Checkpoint


def main(words: list[str]) -> int:
    """`ingot` in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        run(words)
    return int(ended.value.code or 0)


IDS = torch.arange(24).reshape(2, 12) * 7


def logits(model: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.backend.model(IDS)  # type: ignore[attr-defined]


def greedy(model: LoadedModel, prompt: str, tokens: int = 12) -> str:
    ids = [row[0] for row in islice(model.backend.generate([model.tokenizer.encode(prompt).tolist()], Sampling(0.0)), tokens)]
    return model.tokenizer.decode_bytes(ids).decode()


@pytest.mark.parametrize("name", ["", "checkpoints/final", "checkpoints/checkpoint-12"])
def test_a_run_of_the_original_gives_its_logits_and_its_greedy_text(their_run: TheirRun, name: str) -> None:
    model = load(their_run.folder / "out" / name, device="cpu")
    torch.testing.assert_close(logits(model), torch.tensor(their_run.logits), atol=1e-5, rtol=0)
    assert [greedy(model, prompt) for prompt in ("00001 ab", "00002")] == their_run.texts


@pytest.mark.parametrize("number", [0, 1])
def test_every_shape_that_its_keys_describe_gives_its_logits(their_run: TheirRun, number: int) -> None:
    weights = open_weights(their_run.folder / f"shape-{number}")
    model = open_model(weights, load(their_run.folder / "out", device="cpu").tokenizer, "cpu")
    torch.testing.assert_close(logits(model), torch.tensor(their_run.shapes[number]), atol=1e-5, rtol=0)


def test_a_checkpoint_without_its_tokenizer_is_not_opened_with_another_unless_one_is_named(our_copy: Path) -> None:
    shutil.rmtree("out/tokenizer")
    with pytest.raises(DataError, match=r"out/checkpoints/final .* 384 ids .*; give one"):
        load("out/checkpoints/final", device="cpu")
    assert load("out/checkpoints/final", device="cpu", tokenizer="tok").tokenizer.vocab_size == 300


def test_its_21_model_keys_are_settings_of_ours_and_back() -> None:
    default = ModelConfig(vocab_size=384, n_embd=64, n_head=4)
    other = ModelConfig(
        vocab_size=384, n_embd=64, n_layer=3, n_head=4, n_kv_head=2, n_positions=77, dropout=0.1, use_bias=True, qkv_bias=False,
        attn_out_bias=False, mlp_bias=True, activation="gelu", mlp_type="mlp", intermediate_size=99, norm="layernorm",
        norm_eps=1e-3, tie_word_embeddings=False, rope_base=123.0, rope_scaling_type="ntk", rope_scaling_factor=2.0,
    )  # fmt: skip
    for keys in (vars(default), vars(other)):
        assert list(keys) == list(MODEL_KEYS)
        assert model_keys(model_settings(keys, "here")) == keys


def test_the_original_opens_the_tokenizers_that_are_written_for_it(their_run: TheirRun) -> None:
    ours = [open_tokenizer(str(their_run.folder / name)) for name in ("sentencepiece", "gpt2-files")]
    assert [tokenizer.encode("the quick fox over 12").tolist() for tokenizer in ours] == their_run.tokens
    assert [tokenizer.kind for tokenizer in ours] == ["sentencepiece", "gpt2"]


def as_ours(folder: Path) -> Checkpoint:
    """A checkpoint of the original's as one of ours, without the detour over the disk."""
    saved = read_saved(folder)
    weights, memory, settings, problem = read_training_state(saved)
    assert problem is None
    known = {"tokens": saved.state["tokens_trained"], "elapsed_seconds": 1.0, "loss": None, "config": {"model": settings}}
    return Checkpoint(folder, saved.step, known, {"model": weights, "optimizer": memory})


def test_weights_adamw_and_schedule_that_are_written_again_are_those_that_the_original_wrote(
    their_run: TheirRun, tmp_path: Path
) -> None:
    theirs = their_run.folder / "out" / "checkpoints" / "checkpoint-8"
    keys = json.loads((their_run.folder / "out" / "config.json").read_text())
    write_checkpoint(tmp_path / "checkpoint-8", as_ours(theirs), keys)
    for name in ("model/pytorch_model.bin", "optimizer.bin", "scheduler.bin"):
        was, now = (torch.load(folder / name, weights_only=True) for folder in (theirs, tmp_path / "checkpoint-8"))
        assert_same(was, now)
        assert "optimizer" in name or list(was) == list(now)  # the optimizer numbers them in this order
    was, now = (json.loads((folder / "trainer_state.json").read_text()) for folder in (theirs, tmp_path / "checkpoint-8"))
    assert was.keys() == now.keys() and len(now) == 10
    for name in ("step", "tokens_trained", "config_hash", "model_arch_hash"):
        assert now[name] == was[name]
    assert now["curriculum"]["current_mix"] == was["curriculum"]["current_mix"]


def assert_same(was: Any, now: Any) -> None:
    if isinstance(was, dict):
        assert was.keys() == now.keys()
        for key in was:
            assert_same(was[key], now[key])
    elif isinstance(was, list | tuple):
        assert len(was) == len(now)
        for one, other in zip(was, now, strict=True):
            assert_same(one, other)
    elif isinstance(was, torch.Tensor):
        assert torch.equal(was, now)
    else:
        assert was == pytest.approx(now) if isinstance(was, float) else was == now


def test_the_rate_of_the_next_step_is_by_the_original_schedule_which_begins_with_zero() -> None:
    o = {"learning_rate": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.1, "decay_steps": None}
    assert [round(learning_rate(o, 12, step), 4) for step in (0, 1, 2, 7, 12)] == [0.0, 0.5, 1.0, 0.55, 0.1]


def fake(run: Path, name: str, step: int) -> None:
    (run / "checkpoints" / name).mkdir(parents=True)
    (run / "checkpoints" / name / "trainer_state.json").write_text(json.dumps({"schema_version": 1, "step": step}))


def test_the_newest_step_is_the_newest_whatever_is_called_final(tmp_path: Path) -> None:
    for name, step in (("final", 12), ("checkpoint-16", 16), ("checkpoint-8", 8), ("checkpoint-16-shutdown", 16)):
        fake(tmp_path, name, step)
    fake(tmp_path, "checkpoint-20.partial", 20)
    fake(tmp_path, "checkpoint-24", 24)
    (tmp_path / "checkpoints/checkpoint-24/trainer_state.json").write_text("{")
    names = [saved.path.name for saved in saved_checkpoints(tmp_path)]
    assert names == ["checkpoint-8", "final", "checkpoint-16-shutdown", "checkpoint-16"]


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


FILES = ("model/pytorch_model.bin", "optimizer.bin", "dataloader_state/rank_0.pkl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_a_hostile_pickle_is_refused_by_its_name_and_nothing_in_it_runs(
    their_copy: Path, name: str, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from ingot.compat.gpt_simple.main import main as gpt_simple

    for checkpoint in (their_copy / "out/checkpoints").iterdir():
        if way == "torch":
            torch.save({"step": Hostile()}, checkpoint / name)
        else:
            (checkpoint / name).write_bytes(pickle.dumps(Hostile()))
    code = gpt_simple(["train", "--config", "config.yaml", "--training.max_steps", "14"])
    said = capfd.readouterr().err
    assert code == 4 and name.rpartition("/")[2] in said and "Traceback" not in said
    assert not Path("ran").exists() and not list(Path("out/checkpoints").glob("step-*"))


def test_a_hostile_model_is_refused_by_generate_too(their_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(Hostile(), their_copy / "out/checkpoints/final" / FILES[0])
    assert main(["generate", "out/checkpoints/final", "--prompt", "a"]) == 4
    assert "pytorch_model.bin" in capfd.readouterr().err and not Path("ran").exists()


def test_the_place_in_the_data_is_read_as_plain_records(their_run: TheirRun) -> None:
    found = read_cursors(their_run.folder / "out/checkpoints/checkpoint-4")
    assert found is not None and set(found) == {"books", "web"}
    assert sum(rows for files in found.values() for rows in files.values()) == 4 * 8  # steps of eight rows


def test_a_damaged_model_is_named(their_copy: Path) -> None:
    path = their_copy / "out/checkpoints/final/model"
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), "norm": "foo"}))
    with pytest.raises(CheckpointError, match="has no valid settings for building its model"):
        open_weights(path.parent)
    (path / "config.json").write_text(json.dumps({"n_embd": 32}))
    with pytest.raises(CheckpointError, match="vocab_size is None"):
        open_weights(path.parent)


def test_import_and_export_keep_the_model(their_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "out", "-o", "model.ingot"]) == 0
    assert main(["export", "model.ingot", "--format", "gpt-simple", "-o", "exported"]) == 0
    assert main(["export", "model.ingot", "--format", "gpt-simple", "-o", "exported"]) == 2  # exists
    first, last = (load(path, device="cpu") for path in ("out", "exported"))
    assert torch.equal(logits(first), logits(last)) and greedy(first, "00001") == greedy(last, "00001")
    assert read_saved(Path("exported")).step == 0 and (Path("exported/tokenizer/tokenizer.json")).is_file()
    keys = json.loads(Path("exported/model/config.json").read_text())
    assert keys == json.loads(Path("out/checkpoints/final/model/config.json").read_text())


def test_a_model_without_a_context_of_its_own_is_exported_with_that_of_its_rows(
    their_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = "--model.family llama --model.layers 1 --model.heads 2 --model.width 16 --data.seq_len 16"
    short = "--training.tokens_per_step 64 --training.max_steps 1 --training.device cpu --evaluation.final_rows 2"
    data = "--data.path sample:shakespeare --data.tokenizer byte --training.output_dir ours"
    assert main(["train", *model.split(), *short.split(), *data.split()]) == 0
    assert main(["export", "ours", "--format", "gpt-simple", "-o", "theirs"]) == 0
    assert json.loads(Path("theirs/model/config.json").read_text())["n_positions"] == 16
    assert main(["import", "theirs", "-o", "back.ingot"]) == 0
    assert torch.equal(logits(load("ours", device="cpu")), logits(load("back.ingot", device="cpu")))


def test_all_59_keys_have_a_value_in_an_export() -> None:
    from ingot.compat.gpt_simple.files import keys_of
    from ingot.config.loading import load_config

    config = load_config(python={"model": {"family": "llama"}, "training": {"max_steps": 1}}, environment={}).config
    keys = keys_of(config)
    assert {name: list(section) for name, section in keys.items()} == {n: list(s) for n, s in GptSimpleConfig().to_dict().items()}
    assert sum(map(len, keys.values())) == 59


def test_a_model_of_the_original_is_scored_on_its_data_and_on_what_was_made_with_its_tokenizer(their_copy: Path) -> None:
    """The tokenizer beside it has a mark for padding more than the one that made the data."""
    assert main(["data", "convert", "data", "--to", "ingot", "--tokenizer", "tok", "--output", "prepared"]) == 0
    model = load("out", device="cpu")
    losses = [model.evaluate(data).loss for data in ("data", "prepared")]
    assert losses[0] == pytest.approx(losses[1], abs=0.1) and 3 < losses[0] < 5
    with pytest.raises(DataError, match=r"was prepared with a different tokenizer than .*; prepare the text with the model's"):
        model.evaluate("sample:shakespeare")


def test_a_new_run_takes_its_weights(their_copy: Path) -> None:
    settings = read_model(Path("out/checkpoints/final"))
    train(
        {
            "model": settings,
            "data": {"path": "data", "tokenizer": "tok", "seq_len": 32, "sampling": "pack"},
            "optimizer": {"learning_rate": 0.0, "weight_decay": 0.0},
            "training": {"max_steps": 1, "tokens_per_step": 64, "weights": "out", "output_dir": "new", "device": "cpu"},
            "evaluation": {"at_end": False, "sample_tokens": 0},
            "artifact": {"write": False},
        }
    )
    assert torch.equal(logits(load("new", device="cpu")), logits(load("out", device="cpu")))


def test_a_checkpoint_of_theirs_without_read_permission_is_told_and_not_passed_over(open_folder, as_nobody):
    fake(open_folder, "checkpoint-2", 2)
    fake(open_folder, "checkpoint-4", 4)
    (open_folder / "checkpoints/checkpoint-4/trainer_state.json").chmod(0)
    with as_nobody(), pytest.raises(Unreadable, match=r"checkpoint-4/trainer_state.json cannot be read: Permission denied"):
        saved_checkpoints(open_folder)
