"""The command line of nanoGPT: presets and keys, from left to right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ROOT

from ingot.compat.nanogpt.keys import BENCH, SAMPLE, TRAIN, nanogpt_keys, read_arguments
from ingot.compat.nanogpt.train import main
from ingot.compat.options import defaults
from ingot.errors import ConfigError

PRESETS = {
    "train_gpt2": {
        "wandb_log": True, "wandb_project": "owt", "wandb_run_name": "gpt2-124M", "batch_size": 12, "block_size": 1024,
        "gradient_accumulation_steps": 40, "max_iters": 600000, "lr_decay_iters": 600000, "eval_interval": 1000,
        "eval_iters": 200, "log_interval": 10, "weight_decay": 0.1,
    },
    "train_shakespeare_char": {
        "out_dir": "out-shakespeare-char", "eval_interval": 250, "eval_iters": 200, "log_interval": 10,
        "always_save_checkpoint": False, "wandb_log": False, "wandb_project": "shakespeare-char", "wandb_run_name": "mini-gpt",
        "dataset": "shakespeare_char", "gradient_accumulation_steps": 1, "batch_size": 64, "block_size": 256, "n_layer": 6,
        "n_head": 6, "n_embd": 384, "dropout": 0.2, "learning_rate": 1e-3, "max_iters": 5000, "lr_decay_iters": 5000,
        "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100,
    },
    "finetune_shakespeare": {
        "out_dir": "out-shakespeare", "eval_interval": 5, "eval_iters": 40, "wandb_log": False, "wandb_project": "shakespeare",
        "dataset": "shakespeare", "init_from": "gpt2-xl", "always_save_checkpoint": False, "batch_size": 1,
        "gradient_accumulation_steps": 32, "max_iters": 20, "learning_rate": 3e-5, "decay_lr": False,
    },
    **{
        f"eval_{name.replace('-', '_')}": {
            "batch_size": 8, "eval_iters": 500, "eval_only": True, "wandb_log": False, "init_from": name
        }
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
}  # fmt: skip


def read(*arguments: str, program: str = "train.py") -> dict[str, object]:
    return dict(read_arguments(program, arguments, lambda line: None).values)


def preset(folder: Path, text: str) -> str:
    (folder / "preset.py").write_text(text)
    return str(folder / "preset.py")


def test_there_are_33_keys_to_train_11_to_sample_and_9_to_bench_with_nanogpt_s_defaults():
    assert [len(nanogpt_keys(keys)) for keys in (TRAIN, SAMPLE, BENCH)] == [33, 11, 9]
    told = {
        "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
        "always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False, "wandb_project": "owt",
        "wandb_run_name": "gpt2", "dataset": "openwebtext", "gradient_accumulation_steps": 40, "batch_size": 12,
        "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False, "learning_rate": 6e-4,
        "max_iters": 600000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True,
        "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5, "backend": "nccl", "device": "cuda", "compile": True,
    }  # fmt: skip
    assert {name: read()[name] for name in told} == told
    sample = {"init_from": "resume", "start": "\n", "num_samples": 10, "max_new_tokens": 500, "temperature": 0.8, "top_k": 200}
    assert {name: read(program="sample.py")[name] for name in sample} == sample


@pytest.mark.parametrize("keys", [TRAIN, SAMPLE, BENCH], ids=["train", "sample", "bench"])
def test_every_default_is_of_its_key_s_type(keys):
    for name, value in defaults(keys).items():
        assert keys[name].check(value) == value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_ours_has_the_values_of_nanogpt_s(name):
    found = read_arguments("train.py", [str(ROOT / "config" / f"{name}.py")], lambda line: None)
    told = {key: value for key, value in found.values.items() if key in found.set_keys}
    if name == "finetune_shakespeare":
        assert re.fullmatch(r"ft-\d+\.\d+", str(told.pop("wandb_run_name")))
    assert told == PRESETS[name]


def test_later_arguments_win_whether_presets_or_keys(tmp_path):
    first = preset(tmp_path, "batch_size = 3\nmax_iters = 7")
    assert read("--batch_size=2", first)["batch_size"] == 3
    found = read(first, "--batch_size=2", "--batch_size=5")
    assert (found["batch_size"], found["max_iters"]) == (5, 7)


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("--wandb_run_name=a=b", "wandb_run_name", "a=b"),
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--min_lr=0", "min_lr", 0.0),
        ("--beta2=.99", "beta2", 0.99),
        ("--max_iters=6e5", "max_iters", 600000),
        ("--max_iters=1_000", "max_iters", 1000),
        ("--compile=false", "compile", False),
        ("--compile=True", "compile", True),
        ("--out_dir=123", "out_dir", "123"),
        ("--out_dir='quoted'", "out_dir", "quoted"),
        ("--out_dir=", "out_dir", ""),
        ("--dtype=None", "dtype", None),
        ("--wandb_run_name=None", "wandb_run_name", "None"),
        ("--wandb_run_name=True", "wandb_run_name", "True"),
        ("--mfu_peak=312e12", "mfu_peak", 312e12),
    ],
)
def test_a_value_is_taken_as_its_key_has_it(argument, key, value):
    found = read(argument)[key]
    assert found == value and type(found) is type(value)


def test_top_k_can_be_switched_off():
    assert read("--top_k=None", program="sample.py")["top_k"] is None


@given(st.text(), st.sampled_from(["out_dir", "wandb_run_name"]))
def test_a_text_that_is_no_literal_is_taken_as_it_is(text, key):
    text = text.strip() + "/x"  # no literal of Python ends so
    assert read(f"--{key}={text}")[key] == text


@given(st.floats(min_value=0, max_value=1e299), st.integers(min_value=0))
def test_numbers_survive_the_way_through_the_command_line(number, whole):
    found = read(f"--weight_decay={number!r}", f"--max_iters={whole}")
    assert (found["weight_decay"], found["max_iters"]) == (number, whole)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--batch_size=1.5", "batch_size=1.5 must be a whole number"),
        ("--batch_size=True", "batch_size=True must be a whole number"),
        ("--batch_size=many", "batch_size=many must be a whole number"),
        ("--batch_size=None", "batch_size=None must be a whole number"),
        ("--batch_size=0", "batch_size=0 must be a whole number >= 1"),
        ("--compile=1", "compile=1 must be true or false"),
        ("--learning_rate=1e999", "learning_rate=inf must be a number"),
        ("--learning_rate=fast", "learning_rate=fast must be a number"),
        ("--batch_siz=3", "unknown key batch_siz in --batch_siz=3; did you mean batch_size?"),
        ("--batch-size=3", "did you mean batch_size?"),
        ("--zebra=3", "--help lists the keys"),
        ("--compile", "--compile has no value; write --compile=VALUE"),
        ("batch_size=3", "keys begin with two dashes; write --batch_size=3"),
        ("-batch_size=3", "keys begin with two dashes; write --batch_size=3"),
        ("config/nowhere.py", "there is no preset config/nowhere.py"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(argument, says):
    with pytest.raises(ConfigError) as error:
        read(argument)
    assert says in str(error.value)


def test_help_lists_every_key_and_does_not_train(capsys):
    assert main(["config/whatever.py", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"--{name}=" in told for name in TRAIN)


def test_what_is_overridden_is_printed_as_nanogpt_prints_it(tmp_path):
    file, lines = preset(tmp_path, "# mine\nbatch_size = 3\n"), []
    read_arguments("train.py", [file, "--max_iters=7"], lines.append)
    assert lines == [f"Overriding config with {file}:\n# mine\nbatch_size = 3\n", "Overriding: max_iters = 7"]


def test_a_preset_is_python_that_sees_the_values_so_far(tmp_path):
    text = """
import os
if block_size == 64:
    batch_size = len([1, 2, 3])
gradient_accumulation_steps = batch_size * 10
max_iters = lr_decay_iters = 100
max_iters += 1
decay_lr = not True
dtype = None
wandb_run_name = f"b{batch_size}-{os.path.basename(__file__)}"
rows = [0, 1]
"""
    found = read("--block_size=64", preset(tmp_path, text))
    expected = {
        "batch_size": 3, "gradient_accumulation_steps": 30, "max_iters": 101, "lr_decay_iters": 100, "decay_lr": False,
        "dtype": None, "wandb_run_name": "b3-preset.py", "block_size": 64,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected and "rows" not in found


def test_a_key_that_a_preset_sets_to_its_default_counts_as_given(tmp_path):
    found = read_arguments("train.py", [preset(tmp_path, "compile = True")], lambda line: None)
    assert found.set_keys == {"compile"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("batch_size = 1 / 0", ", line 2: the preset failed with ZeroDivisionError"),
        ("batch_size = undefined + 1", ", line 2: the preset failed with NameError"),
        ("batch_size = 3 4", "line 2"),
        ("batch_siz = 3", "unknown key batch_siz; did you mean batch_size?"),
        ("batch_size = 1.5", "batch_size=1.5 must be a whole number"),
        ("batch_size = lambda: 1", "must be a whole number"),
    ],
)
def test_a_mistake_in_a_preset_is_refused_with_its_file(tmp_path, line, says):
    file = preset(tmp_path, f"max_iters = 5\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read(file)
    assert says in str(error.value) and file in str(error.value)


def test_a_preset_uses_time_without_importing_it(tmp_path):
    assert re.fullmatch(r"run-\d+\.\d+", str(read(preset(tmp_path, "wandb_run_name = f'run-{time.time()}'"))["wandb_run_name"]))


def test_a_preset_for_training_does_for_the_other_programs_too():
    found = read(str(ROOT / "config/train_shakespeare_char.py"), program="sample.py")
    assert found["out_dir"] == "out-shakespeare-char" and "eval_interval" not in found
    with pytest.raises(ConfigError, match="unknown key eval_interval"):
        read("--eval_interval=3", program="sample.py")


def test_a_preset_may_have_names_of_its_own(tmp_path):
    file = preset(tmp_path, "depth = 2\n_batch_siz = depth * 4\nn_layer, n_head = depth, 1\nbatch_size = _batch_siz")
    found = read(file)
    assert (found["n_layer"], found["batch_size"]) == (2, 8) and "depth" not in found
    assert "n_layer" not in read(file, program="sample.py")  # a key of another program
