"""init_from=resume: the losses of the unbroken run, from our own checkpoints and from ckpt.pt files of any origin."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PATIENCE, Ingot, losses
from small_runs import ROOT, words

from ingot.compat.nanogpt.train import main

# Dropout, so that random numbers have to be right too. The schedule does not depend on max_iters.
KEYS: dict[str, Any] = {"dropout": 0.2, "lr_decay_iters": 40, "eval_interval": 3, "always_save_checkpoint": True}

# torchrun --standalone --nproc_per_node=2 train.py; the ranks are forks, so that torch is imported once.
TORCHRUN = """
import sys
import torch._dynamo, ingot.backends.torch.backend, ingot.compat.nanogpt.checkpoint, ingot.train.start
from ingot.compat.nanogpt.train import main
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
elastic_launch(LaunchConfig(1, 1, nproc_per_node=2, start_method="fork", **place), main)(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve iterations in one go."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(prepared)
        assert main(words(out_dir=out, max_iters=11, **KEYS)) == 0
    return out


@pytest.fixture
def unbroken(whole: Path) -> dict[int, float]:
    """Their losses, by step, as floats."""
    return losses(whole)


def test_a_run_that_is_continued_has_the_losses_of_the_unbroken_one_bit_for_bit(train, whole, unbroken):
    train(words(max_iters=4, **KEYS))
    ran = train(words(max_iters=11, init_from="resume", **KEYS))
    assert list(ran.losses) == list(range(5, 12)) and list(ran.evaluations) == [6, 9]
    assert losses(Path("out")) == unbroken
    weights = [torch.load(folder / "ckpt.pt", weights_only=True) for folder in (Path("out"), whole)]
    assert all(torch.equal(weights[0]["model"][name], value) for name, value in weights[1]["model"].items())
    assert weights[0]["iter_num"] == weights[1]["iter_num"] == 12


def test_a_run_that_is_stopped_by_a_signal_is_continued_bit_for_bit(train, unbroken):
    metrics = Path("out/metrics.jsonl")

    def stop() -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (not metrics.exists() or metrics.read_text().count('"kind": "train"') < 7):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    ran = train(words(max_iters=100_000, **KEYS))
    stopper.join()
    stopped = torch.load("out/ckpt.pt", weights_only=True)["iter_num"]
    assert f"stopped before iteration {stopped}; resume with the same command and --init_from=resume" in ran.err
    assert list(train(words(max_iters=stopped + 3, init_from="resume", **KEYS)).losses) == list(range(stopped, stopped + 4))
    found = losses(Path("out"))
    assert all(found[step] == loss for step, loss in unbroken.items() if step in found) and len(found) == stopped + 4


def test_a_kill_during_a_save_leaves_a_ckpt_pt_that_loads_and_a_run_that_goes_on(train, unbroken, work, ingot: Ingot):
    keys = {**KEYS, "eval_interval": 1, "eval_iters": 1}
    program = start(ingot, work, words(max_iters=100_000, **keys))
    printed(program, "iter 5")
    printed(program, "saving checkpoint to out", times=program.stdout.count("saving checkpoint") + 1)
    program.kill()
    assert "Overriding: max_iters = 100000" in program.stdout
    reached = torch.load("out/ckpt.pt", weights_only=True)["iter_num"]
    train(words(max_iters=reached + 3, init_from="resume", **keys))
    found = losses(Path("out"))
    same = {step: pytest.approx(loss, abs=1e-5) for step, loss in unbroken.items() if step in found}  # by another process
    assert reached >= 4 and {step: found[step] for step in same} == same


def test_a_ckpt_pt_that_a_kill_left_behind_its_checkpoint_is_brought_up_to_it(train):
    train(words(max_iters=2, **KEYS))
    old = Path("out/ckpt.pt").read_bytes()
    train(words(max_iters=4, init_from="resume", **KEYS))
    Path("out/ckpt.pt").write_bytes(old)
    os.utime("out/ckpt.pt", (0, 0))  # as if killed after the checkpoint of iteration 5 and before its ckpt.pt
    train(words(max_iters=4, init_from="resume", **KEYS))
    assert torch.load("out/ckpt.pt", weights_only=True)["iter_num"] == 5


def test_a_run_of_another_family_is_not_for_train_py(train):
    from ingot import api as python

    python.train(
        model={"family": "llama", "layers": 1, "heads": 2, "width": 8},
        data={"path": "data/words", "seq_len": 8},
        training={"max_steps": 1, "tokens_per_step": 16, "output_dir": "out", "device": "cpu"},
        artifact={"write": False},
    )
    assert "holds a model of the family llama" in train(words(init_from="resume"), code=4).err


def test_a_run_that_ingot_train_began_goes_on_here(train):
    from ingot import api as python

    python.train(
        model={"layers": 1, "heads": 2, "width": 8},  # neither context nor vocab_size, which nanoGPT has to know
        data={"path": "data/words", "seq_len": 8},
        training={"max_steps": 1, "tokens_per_step": 16, "output_dir": "out", "device": "cpu"},
        artifact={"write": False},
        quiet=True,
    )
    ran = train(words(init_from="resume", max_iters=2, n_layer=1, n_embd=8, block_size=8))
    assert "resuming from out/checkpoints/step-00000001" in ran.out and 2 in ran.losses


@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
def test_a_ckpt_pt_without_its_run_restores_weights_optimizer_and_iteration(train, unbroken, prefix):
    train(words(max_iters=4, **KEYS))
    found = torch.load("out/ckpt.pt", weights_only=True)
    del found["ingot"]
    found["model"] = {prefix + name: value for name, value in found["model"].items()}
    Path("foreign").mkdir()
    torch.save(found, "foreign/ckpt.pt")
    ran = train(words(out_dir="foreign", max_iters=11, init_from="resume", **KEYS))
    assert "resuming from foreign/ckpt.pt at iteration 5" in ran.out
    assert "foreign/ckpt.pt" in ran.err and "the order of the data" in ran.err
    assert "ingot" not in torch.load("foreign/earlier-1/ckpt.pt", weights_only=True)  # the original is kept
    # With us the place in the data and the random numbers follow from the iteration, so nothing is lost after all.
    assert {int(number): loss for number, loss in ran.losses.items()} == {
        step - 1: f"{loss:.4f}" for step, loss in unbroken.items() if step > 5
    }


def test_a_smaller_block_size_crops_the_model_and_the_optimizer_s_memory(train):
    train(words(max_iters=4, **KEYS))
    before = torch.load("out/ckpt.pt", weights_only=True)
    ran = train(words(max_iters=8, init_from="resume", block_size=8, **KEYS))
    assert list(ran.losses) == [5, 6, 7, 8]
    assert "step-00000005: block_size was 16 and is 8; tokens per iteration was 128 and is 64\n" in ran.err
    after = torch.load("out/ckpt.pt", weights_only=True)
    assert after["model_args"]["block_size"] == 8 and after["model"]["transformer.wpe.weight"].shape == (8, 16)
    kept = torch.load("out/earlier-1/ckpt.pt", weights_only=True)  # the uncropped one is not lost
    assert torch.equal(kept["model"]["transformer.wpe.weight"], before["model"]["transformer.wpe.weight"])


def test_a_larger_block_size_than_the_checkpoint_s_is_refused(train):
    train(words(max_iters=4, **KEYS))
    ran = train(words(max_iters=8, init_from="resume", block_size=32, **KEYS), code=2)
    assert "block_size=32 is more than the 16 positions of out/checkpoints/step-00000005; give --block_size=16" in ran.err


def test_a_block_size_that_nobody_gives_is_the_checkpoint_s(train):
    train(words(max_iters=4, **KEYS))
    train(words(max_iters=6, init_from="resume", block_size=8, **KEYS))
    silent = [word for word in words(max_iters=8, init_from="resume", **KEYS) if not word.startswith("--block_size")]
    looked = train([*silent, "--eval_only=True"])
    assert list(looked.evaluations) == [7] and "tokens per iteration will be: 64" in looked.out
    ran = train(silent)
    assert list(ran.losses) == [7, 8] and ran.err == "" and "tokens per iteration will be: 64" in ran.out
    found = torch.load("out/ckpt.pt", weights_only=True)
    assert found["model_args"]["block_size"] == found["config"]["block_size"] == 8


def test_the_shape_of_the_model_is_the_checkpoint_s_and_the_rest_the_command_line_s(train):
    train(words(max_iters=4, **KEYS))
    keys = {**KEYS, "dropout": 0.0, "batch_size": 2}
    ran = train(words(max_iters=6, init_from="resume", n_layer=5, n_embd=32, bias=True, **keys))
    found = torch.load("out/ckpt.pt", weights_only=True)
    assert found["model_args"] == {
        "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": False, "vocab_size": 12, "dropout": 0.0
    }  # fmt: skip
    assert "dropout was 0.2 and is 0.0" in ran.err and "tokens per iteration will be: 64" in ran.out
    assert list(ran.losses) == [5, 6]


def test_a_ckpt_pt_that_was_brought_into_a_folder_is_what_is_resumed(train):
    train(words(out_dir="mine", max_iters=4, **KEYS))
    train(words(out_dir="other", max_iters=4, **{**KEYS, "batch_size": 3}))
    shutil.copy("other/ckpt.pt", "mine/ckpt.pt")
    ran = train(words(out_dir="mine", max_iters=4, init_from="resume", eval_only=True, **KEYS))
    assert list(ran.evaluations) == [5]
    expected = train(words(out_dir="other", max_iters=4, init_from="resume", eval_only=True, **KEYS))
    assert ran.evaluations == expected.evaluations


def test_a_ckpt_pt_that_was_brought_and_is_none_of_nanogpt_s_is_not_passed_over(train):
    train(words(max_iters=4, **KEYS))
    torch.save({"model": {"other.weight": torch.ones(2)}, "model_args": {}}, "out/ckpt.pt")
    assert "is not a nanoGPT model" in train(words(max_iters=6, init_from="resume", **KEYS), code=4).err


def test_a_finished_run_says_that_nothing_is_left_and_goes_on_when_there_is(train):
    train(words(max_iters=4, **KEYS))
    ran = train(words(max_iters=4, init_from="resume", **KEYS))
    assert not ran.losses and "nothing is left to do" in ran.err
    assert list(train(words(max_iters=5, init_from="resume", **KEYS)).losses) == [5]


def test_a_damaged_ckpt_pt_alone_is_refused_in_a_sentence(train):
    Path("out").mkdir()
    Path("out/ckpt.pt").write_bytes(b"not a checkpoint")
    ran = train(words(init_from="resume"), code=4)
    assert "out/ckpt.pt" in ran.err and len(ran.err.splitlines()) == 1


@pytest.fixture
def damaged(train) -> None:
    """A run whose ckpt.pt is half there and whose newest checkpoint has a byte flipped."""
    train(words(max_iters=4, **KEYS))
    Path("out/ckpt.pt").write_bytes(Path("out/ckpt.pt").read_bytes()[:5000])
    weights = Path("out/checkpoints/step-00000005/model.safetensors")
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)


def test_a_damaged_ckpt_pt_is_kept_and_the_run_goes_on_from_a_checkpoint_that_is_whole(train, unbroken, damaged):
    ran = train(words(max_iters=11, init_from="resume", **KEYS))
    assert "out/checkpoints/step-00000003 is used instead" in ran.err
    assert losses(Path("out")) == unbroken
    assert torch.load("out/ckpt.pt", weights_only=True)["iter_num"] == 12 and Path("out/ckpt.pt.damaged").stat().st_size == 5000


def test_evaluating_only_writes_nothing_even_where_something_is_damaged(train, damaged, work):
    before = {path: path.stat().st_mtime_ns for path in sorted(work.rglob("*"))}
    ran = train(words(eval_only=True, init_from="resume", **KEYS))
    assert list(ran.evaluations) == [3] and "step-00000003 is used instead" in ran.err
    assert {path: path.stat().st_mtime_ns for path in sorted(work.rglob("*"))} == before


def test_a_ckpt_pt_that_is_gone_is_written_anew(train):
    train(words(max_iters=4, **KEYS))
    Path("out/ckpt.pt").unlink()
    train(words(max_iters=4, init_from="resume", **KEYS))
    assert torch.load("out/ckpt.pt", weights_only=True)["iter_num"] == 5


def test_the_best_loss_of_a_foreign_run_is_not_forgotten_before_the_next_evaluation(train):
    keys = {**KEYS, "eval_interval": 100}
    train(words(max_iters=4, **keys))
    found = torch.load("out/ckpt.pt", weights_only=True)
    del found["ingot"]
    Path("foreign").mkdir()
    torch.save({**found, "best_val_loss": torch.tensor(1.25)}, "foreign/ckpt.pt")
    for max_iters in (5, 6):
        train(words(out_dir="foreign", max_iters=max_iters, init_from="resume", **keys))
        assert float(torch.load("foreign/ckpt.pt", weights_only=True)["best_val_loss"]) == pytest.approx(1.25)
        keys["dropout"] = 0.0  # another run, which begins with what this one knew


def test_the_best_loss_of_a_foreign_run_follows_the_next_evaluation_as_in_nanogpt(train):
    train(words(max_iters=4, **KEYS))
    found = torch.load("out/ckpt.pt", weights_only=True)
    del found["ingot"]
    Path("foreign").mkdir()
    torch.save({**found, "best_val_loss": torch.tensor(0.5)}, "foreign/ckpt.pt")  # lower than this run will ever see
    ran = train(words(out_dir="foreign", max_iters=6, init_from="resume", **KEYS))
    best = float(torch.load("foreign/ckpt.pt", weights_only=True)["best_val_loss"])
    assert best == pytest.approx(float(ran.evaluations[6][1]), abs=1e-4)


SELDOM: dict[str, Any] = {**KEYS, "always_save_checkpoint": False, "eval_interval": 100}  # no ckpt.pt after that of the start


def test_a_run_whose_settings_have_changed_goes_on_from_where_it_came_to_and_the_old_ckpt_pt_is_kept(train):
    train(words(max_iters=4, **{**KEYS, "always_save_checkpoint": False}))
    best = Path("out/ckpt.pt").read_bytes()
    changed = {**SELDOM, "batch_size": 3, "init_from": "resume"}
    assert list(train(words(max_iters=6, **changed)).losses) == [5, 6]
    assert Path("out/earlier-1/ckpt.pt").read_bytes() == best
    assert list(train(words(max_iters=8, **changed)).losses) == [7, 8]
    assert not Path("out/earlier-2").exists()
    shutil.copyfile("out/earlier-1/ckpt.pt", "out/ckpt.pt")
    at = int(torch.load("out/ckpt.pt", weights_only=True)["iter_num"])
    assert min(train(words(max_iters=8, **changed)).losses) == at  # the copy is what is resumed


@pytest.mark.parametrize("iteration", [0, 5])
def test_a_foreign_run_without_a_best_loss_goes_on_from_where_it_came_to_without_another_evaluation(train, iteration):
    train(words(max_iters=4, **KEYS))
    found = torch.load("out/ckpt.pt", weights_only=True)
    del found["ingot"], found["best_val_loss"]
    Path("foreign").mkdir()
    torch.save({**found, "iter_num": iteration}, "foreign/ckpt.pt")
    keys = {**SELDOM, "out_dir": "foreign", "init_from": "resume"}
    for last in range(iteration + 1, iteration + 8, 2):  # until the checkpoint of the start would be deleted
        assert list(train(words(max_iters=last, **keys)).losses) == [last - 1, last]


def test_weights_of_gpt2_are_a_start_and_keep_their_form(train, work):
    from ingot.artifact.huggingface import write_model
    from ingot.backends.torch.state import model_records
    from ingot.data.tokenizers import open_tokenizer
    from ingot.model.gpt2 import GPT2

    section = {
        "vocab_size": 50257,
        "context": 32,
        "layers": 1,
        "heads": 2,
        "width": 16,
        "dropout": 0.0,
        "bias": True,
        "gelu": "tanh",
    }
    model = GPT2(**section)
    write_model(Path("small-gpt2"), model_records(model), {"family": "gpt2", "dropout": 0.0, **section}, None)
    own = work / "own"
    shutil.copytree(work / "data/words", own / "words")
    Path("data").unlink()
    Path("data").symlink_to(own)
    (own / "words/meta.pkl").unlink()
    for split in ("train", "val"):
        open_tokenizer("gpt2").encode("The quick brown fox jumps over the lazy dog. " * 60).tofile(own / f"words/{split}.bin")
    keys = {"init_from": "small-gpt2", "max_iters": 2, "learning_rate": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
    ran = train(words(**keys))
    found = torch.load("out/ckpt.pt", weights_only=True)
    assert found["model_args"]["block_size"] == 16 and found["model_args"]["bias"] is True  # cropped, with biases
    weight = found["model"]["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(weight, model.transformer.h[0].mlp.c_fc.weight)
    assert found["ingot"]["gelu"] == "tanh"
    resumed = train(words(**{**keys, "init_from": "resume", "max_iters": 4}))
    assert list(resumed.losses) == [3, 4] and list(ran.losses) == [0, 1, 2]


def test_two_ranks_under_torchrun_give_the_losses_of_one(train, work, ingot: Ingot):
    keys = {**KEYS, "dropout": 0.0, "max_iters": 5, "backend": "gloo"}
    train(words(out_dir="one", **keys))
    two = ingot(*words(out_dir="two", **keys), command=(sys.executable, "-c", TORCHRUN), folder=work)
    assert losses(work / "two") == pytest.approx(losses(work / "one"), abs=1e-5, rel=0)
    assert two.stdout.count("tokens per iteration will be: 128") == 1 and two.stdout.count("iter 5:") == 1


def test_what_every_rank_finds_wrong_is_said_once(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert "cannot be divided among 3 ranks" in train(words(gradient_accumulation_steps=2), code=2).err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("ingot.console.entry.PEER_WAIT_SECONDS", 0)
    silent = train(words(gradient_accumulation_steps=2), code=2)
    assert silent.err == silent.out == ""


def start(ingot: Ingot, work: Path, arguments: list[str]) -> Any:
    return ingot.start(*arguments, command=(sys.executable, str(ROOT / "train.py")), folder=work)


def printed(program: Any, words: str, times: int = 1) -> None:
    """Return when these words stand so often on stdout."""
    deadline = time.monotonic() + PATIENCE
    while program.stdout.count(words) < times:
        assert program.process.poll() is None, f"it ended:\n{program.stderr}"
        assert time.monotonic() < deadline, f"it never said {words!r}:\n{program.stdout[-500:]}"
        time.sleep(0.001)


def test_a_resume_that_cannot_write_leaves_the_run_as_it_was(train, monkeypatch):
    train(words(max_iters=4, **KEYS))
    before = sorted(Path("out/checkpoints").iterdir())

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ingot.compat.nanogpt.checkpoint.save_checkpoint", full)
        ran = train(words(max_iters=8, init_from="resume", block_size=8, **KEYS), code=4)
    assert "cannot write out/checkpoints: No space left on device; free disk space" in ran.err
    assert sorted(Path("out/checkpoints").iterdir()) == before and not Path("out/earlier-1").exists()
    assert list(train(words(max_iters=8, init_from="resume", block_size=8, **KEYS)).losses) == [5, 6, 7, 8]


def test_a_run_whose_checkpoints_are_gone_is_set_aside_by_a_new_one(train):
    train(words(max_iters=2, **KEYS))
    Path("out/ckpt.pt").unlink()
    shutil.rmtree("out/checkpoints")
    assert list(train(words(max_iters=2, **KEYS)).losses) == [0, 1, 2]
    assert Path("out/earlier-1/state.json").is_file()
