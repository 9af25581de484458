"""train.py from its first line to its last: what it prints, what it leaves behind, what it refuses."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from small_runs import EVALUATION, ITERATION, words
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.compat.nanogpt.prepare import shakespeare
from ingot.compat.nanogpt.sample import main as sample
from ingot.data.tokenizers import ByteTokenizer


def test_there_are_max_iters_and_one_iterations_and_evaluations_before_those_that_are_due(train):
    ran = train(words(max_iters=9, eval_interval=4))
    assert list(ran.losses) == list(range(10))
    assert list(ran.evaluations) == [0, 4, 8]
    lines = ran.out.splitlines()
    place = {line.partition(":")[0]: number for number, line in enumerate(lines)}
    assert place["iter 3"] < place["step 4"] < place["iter 4"]
    assert lines[place["step 4"] + 1] == "saving checkpoint to out"
    assert lines[place["step 0"] + 1].startswith("iter 0")  # nothing is saved before the first iteration


def test_the_lines_are_those_that_people_search_for(train):
    out = train(words()).out
    assert "tokens per iteration will be: 128" in out.splitlines()
    assert re.search(r"^number of parameters: 0\.01M$", out, re.M)
    assert re.search(r"^num decayed parameter tensors: 10, with [\d,]+ parameters$", out, re.M)
    assert all(ITERATION.fullmatch(line) for line in out.splitlines() if line.startswith("iter "))
    assert all(EVALUATION.fullmatch(line) for line in out.splitlines() if line.startswith("step "))
    assert "mfu is relative to 1 TFLOP/s, set by mfu_peak" in out and "training on cpu, 1 thread" in out.splitlines()


def test_what_ingot_warns_of_is_warned_of_here_in_the_words_of_the_keys(train, monkeypatch):
    monkeypatch.setenv("INGOT_MAX_RUNTIME", "1")  # which are over: it stops after the first iteration
    many = train(words(max_iters=20_000, lr_decay_iters=20_000))
    assert re.search(r"^data\.repeated: .* data is read 5\d\d\.\d times; lower max_iters or prepare more text$", many.err, re.M)
    assert "data.repeated" not in train(words()).err


def test_only_every_log_interval_th_iteration_is_printed(train):
    assert list(train(words(log_interval=3)).losses) == [0, 3, 6]


def test_the_first_losses_are_those_of_a_guess(train):
    ran = train(words(max_iters=0))
    train_loss, val_loss = map(float, ran.evaluations[0])
    size = pickle.loads(Path("data/words/meta.pkl").read_bytes())["vocab_size"]
    assert all(abs(loss - math.log(size)) < 0.1 for loss in (train_loss, val_loss, float(ran.losses[0])))


def test_the_loss_falls(train):
    ran = train(words(max_iters=60, lr_decay_iters=60, eval_interval=30))
    assert float(ran.evaluations[60][1]) < float(ran.evaluations[0][1]) - 0.2


def test_ckpt_pt_holds_what_nanogpt_s_does(train):
    train(words(max_iters=9, eval_interval=4))
    found = torch.load("out/ckpt.pt", weights_only=True)
    assert found.keys() >= {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert found["iter_num"] == 10 and found["config"]["n_embd"] == 16 and len(found["config"]) == 33
    assert "transformer.h.1.mlp.c_proj.weight" in found["model"] and found["best_val_loss"].dim() == 0


def test_with_always_save_checkpoint_off_ckpt_pt_stays_the_best(train):
    # A learning rate that ruins the model: the first evaluation after the start is better, then all are worse.
    keys = {"learning_rate": 3e-3, "min_lr": 3e-3, "warmup_iters": 0, "eval_interval": 10}
    first = train(words(max_iters=10, lr_decay_iters=1000, always_save_checkpoint=False, **keys))
    best = torch.load("out/ckpt.pt", weights_only=True)
    assert best["iter_num"] == 10 and float(best["best_val_loss"]) == pytest.approx(float(first.evaluations[10][1]), abs=1e-3)
    ruin = {**keys, "learning_rate": 1.0, "min_lr": 1.0}
    worse = train(words(init_from="resume", max_iters=30, lr_decay_iters=1000, always_save_checkpoint=False, **ruin))
    assert all(float(val) > float(first.evaluations[10][1]) for _, val in worse.evaluations.values())
    kept = torch.load("out/ckpt.pt", weights_only=True)
    assert kept["iter_num"] == 10
    assert torch.equal(kept["model"]["transformer.wte.weight"], best["model"]["transformer.wte.weight"])
    assert Path("out/checkpoints/step-00000010").is_dir()  # the best of ours, beside the newest
    assert max(path.name for path in Path("out/checkpoints").iterdir()) == "step-00000031"


def test_a_run_that_ends_without_a_ckpt_pt_says_how_to_make_one(train):
    ran = train(words(max_iters=2, always_save_checkpoint=False))
    assert not Path("out/ckpt.pt").exists()
    assert "with always_save_checkpoint=False there is no out/ckpt.pt" in ran.err
    command = ran.err.splitlines()[-1].partition("weights to it, run: ingot ")[2]
    assert CliRunner().invoke(app, command.split()).exit_code == 0
    assert torch.load("out/ckpt.pt", weights_only=True)["iter_num"] == 3
    resumed = train(words(max_iters=4, always_save_checkpoint=False, init_from="resume"))
    assert list(resumed.losses) == [3, 4] and resumed.err == ""


def test_a_new_run_sets_the_one_before_it_aside(train):
    train(words())
    before = Path("out/ckpt.pt").read_bytes()
    ran = train(words(max_iters=3))
    assert "the run that was in out is now in out/earlier-1" in ran.out
    assert Path("out/earlier-1/ckpt.pt").read_bytes() == before
    assert list(ran.losses) == [0, 1, 2, 3]
    train(words(max_iters=3))
    assert {path.name for path in Path("out").glob("earlier-*")} == {"earlier-1", "earlier-2"}


def test_evaluating_only_writes_nothing_and_repeats_the_number_of_training(train, work):
    ran = train(words(max_iters=8))
    before = {path: path.stat().st_mtime_ns for path in sorted(work.rglob("*"))}
    for init_from, iteration in (("scratch", 0), ("resume", 9)):
        found = train(words(eval_only=True, init_from=init_from))
        assert list(found.evaluations) == [iteration] and not found.losses
        if init_from == "scratch":
            assert found.evaluations[0] == ran.evaluations[0]
    assert {path: path.stat().st_mtime_ns for path in sorted(work.rglob("*"))} == before


def test_a_run_of_train_py_is_a_run_folder_of_ours(train):
    from ingot import api

    train(words(max_iters=9))
    assert len(api.load("out", device="cpu").generate("ab", tokens=10)) == 12
    lines = Path("out/metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 10


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"dataset": "nothing"}, 3, "dataset=nothing has no data in data/nothing"),
        ({"init_from": "resume"}, 4, "there is no out/ckpt.pt"),
        ({"init_from": "gpt5"}, 2, "unknown weights 'gpt5'; give gpt2, "),
        ({"init_from": "scrach"}, 2, "can also be resume or, in train.py, scratch"),
        ({"out_dir": ""}, 2, "out_dir is empty; give a folder"),
        ({"block_size": 5000}, 3, "4,500 tokens but a row needs block_size"),
        ({"device": "abacus"}, 2, "device=abacus is not a device"),
        ({"eval_interval": 0}, 2, "eval_interval=0 must be a whole number >= 1"),
        ({"out_dir": "data/words/train.bin"}, 2, "train.bin is not a folder"),
        ({"out_dir": "data/words/train.bin/x"}, 2, "train.bin is not a folder"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(train, keys, code, says):
    ran = train(words(**keys), code=code)
    assert says in ran.err and len(ran.err.splitlines()) == 1 and ran.err.startswith("train.py: error: ")
    assert not Path("out").exists() or not any(Path("out").iterdir())


def test_a_meta_pkl_that_runs_something_is_refused(train, work):
    class Evil:
        def __reduce__(self):
            return Path.touch, (work / "ran",)

    Path("own/data/evil").mkdir(parents=True)
    for split in ("train", "val"):
        Path(f"own/data/evil/{split}.bin").write_bytes(bytes(2000))
    Path("own/data/evil/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "stoi": Evil()}))
    Path("data").unlink()
    Path("data").symlink_to("own/data")
    refused = train(words(dataset="evil"), code=3).err
    assert "data/evil/meta.pkl" in refused and "Path.touch" in refused
    assert not (work / "ran").exists()


def test_a_folder_that_ingot_prepared_does_as_data_too(train, work, tmp_path):
    from ingot.data.prepare.pipeline import prepare

    Path("text.txt").write_text("to be or not to be\n" * 200)
    Path("data").unlink()
    prepare([Path("text.txt")], Path("data/bytes"), "byte")
    ran = train(words(dataset="bytes"))
    assert "with vocab_size 260" in ran.out and float(ran.evaluations[0][1]) == pytest.approx(math.log(260), abs=0.1)


def test_ids_are_numbers_unless_the_tokenizer_that_made_them_is_named(train, work, capfd):
    Path("data").unlink()
    Path("data/bytes").mkdir(parents=True)
    for split, text in (("train", "to be or not to be\n" * 100), ("val", "that is the question\n" * 10)):
        ByteTokenizer().encode(text).tofile(f"data/bytes/{split}.bin")
    Path("data/bytes/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 260}))
    ran = train(words(dataset="bytes", out_dir="numbers"))
    assert "name the tokenizer with --tokenizer=FILE" in ran.err
    assert torch.load("numbers/ckpt.pt", weights_only=True)["ingot"]["tokenizer"] == {"kind": "number", "vocab_size": 260}
    capfd.readouterr()
    assert sample(["--out_dir=numbers", "--device=cpu", "--start=120 115", "--num_samples=1", "--max_new_tokens=3"]) == 0
    assert re.search(r"^120 115( \d+){3}$", capfd.readouterr().out, re.M)
    ran = train(words(dataset="bytes", tokenizer="byte"))
    assert "with vocab_size 260 of data/bytes" in ran.out
    assert torch.load("out/ckpt.pt", weights_only=True)["ingot"]["tokenizer"] == {"kind": "byte"}
    assert list(train(words(dataset="bytes", tokenizer="byte", init_from="resume", max_iters=9)).losses) == [9]


def test_another_process_in_the_folder_is_respected(train):
    from ingot.runs.state import RunLock

    train(words())
    before = {path.name for path in Path("out").iterdir()}
    with RunLock(Path("out")):
        for init_from in ("scratch", "resume"):
            refused = train(words(init_from=init_from, max_iters=12), code=1)
            assert "is in use" in refused.err and "number of parameters" not in refused.out
    assert {path.name for path in Path("out").iterdir()} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "wandb.json"])
def test_files_of_ones_own_in_out_dir_are_refused_by_name_and_stay(train, name):
    Path("out").mkdir()
    (Path("out") / name).write_text("mine")
    (Path("out") / "model.py").write_text("a copy of the model beside the run is nobody's business")
    refused = train(words(), code=4)
    assert f"out already contains {name}, " in refused.err and "choose another out_dir" in refused.err
    assert {path.name: path.is_file() for path in Path("out").iterdir()} == {name: True, "model.py": True}
    assert (Path("out") / name).read_text() == "mine"


def test_a_disk_that_is_full_is_told_and_ends_with_an_error(train, monkeypatch):
    from ingot.compat.nanogpt import checkpoint
    from ingot.errors import CheckpointError

    def full(*arguments: object) -> None:
        raise CheckpointError("out/ckpt.pt cannot be written: No space left on device")

    monkeypatch.setattr(checkpoint, "write_ckpt", full)
    ran = train(words(), code=4)
    assert list(ran.losses) == list(range(9))  # training went on
    assert "training continues and the next save tries again" in ran.err


def test_data_that_the_model_has_no_ids_for_are_refused_before_it_reads_them(train, work):
    train(words(max_iters=0))
    Path("data").unlink()
    Path("text").write_text("some words " * 200)
    assert shakespeare(Path("data/words"), ["--input", "text"]) == 0
    for eval_only in (True, False):
        ran = train(words(init_from="resume", eval_only=eval_only), code=2)
        assert "dataset=words has a vocabulary of 50,257" in ran.err


def test_train_runs_on_mlx_as_on_torch_and_sample_says_that_it_does_not(train, capfd):
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot-lm[mlx]'", exc_type=ImportError)
    ours, theirs = train(words(device="mlx", out_dir="mlx", mfu_peak=None)), train(words(out_dir="torch"))
    assert ours.losses.keys() == theirs.losses.keys()
    assert all(float(loss) == pytest.approx(float(theirs.losses[step]), abs=1e-3) for step, loss in ours.losses.items())
    assert "measured with large matrices on mlx" in ours.out + ours.err
    assert sample(["--out_dir=mlx", "--device=mlx"]) == 2
    assert "use cpu" in capfd.readouterr().err
    assert sample(["--out_dir=mlx", "--device=cpu", "--max_new_tokens=2", "--num_samples=1"]) == 0
