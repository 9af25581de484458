"""The command line of nanoGPT: presets and keys, from left to right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ROOT

from ingot.compat.nanogpt.command_line import KEYS, help_text, read_arguments
from ingot.compat.nanogpt.keys import BENCH, SAMPLE, TRAIN, defaults, theirs
from ingot.compat.nanogpt.train import main
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
    assert [len(theirs(keys.values())) for keys in (TRAIN, SAMPLE, BENCH)] == [33, 11, 9]
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
        assert keys[name].of(value, "default") == value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_ours_has_the_values_of_nanogpt_s(name):
    found = read_arguments("train.py", [str(ROOT / "config" / f"{name}.py")], lambda line: None)
    told = {key: value for key, value in found.values.items() if key in found.origins}
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


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_numbers_survive_the_way_through_the_command_line(number, whole):
    found = read(f"--weight_decay={number!r}", f"--max_iters={whole}")
    assert (found["weight_decay"], found["max_iters"]) == (number, whole)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--batch_size=1.5", "batch_size = 1.5 is not a whole number"),
        ("--batch_size=True", "batch_size = True is not a whole number"),
        ("--batch_size=many", "batch_size = 'many' is not a whole number"),
        ("--batch_size=None", "batch_size = None is not a whole number"),
        ("--compile=1", "compile = 1 is not True or False"),
        ("--learning_rate=1e999", "learning_rate = inf is not a number"),
        ("--learning_rate=fast", "learning_rate = 'fast' is not a number"),
        ("--batch_siz=3", "unknown key batch_siz in --batch_siz=3; did you mean batch_size?"),
        ("--batch-size=3", "did you mean batch_size?"),
        ("--zebra=3", "--help lists them"),
        ("--compile", "--compile has no value; write --compile=True"),
        ("--batch_size", "write --batch_size=12"),
        ("batch_size=3", "keys begin with two dashes: --batch_size=3"),
        ("-batch_size=3", "keys begin with two dashes: --batch_size=3"),
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
    assert all(f"--{name}=" in help_text(program) for program, keys in KEYS.items() for name in keys)


def test_what_is_overridden_is_printed_as_nanogpt_prints_it(tmp_path):
    file, lines = preset(tmp_path, "# mine\nbatch_size = 3\n"), []
    read_arguments("train.py", [file, "--max_iters=7"], lines.append)
    assert lines == [f"Overriding config with {file}:", "# mine\nbatch_size = 3\n", "Overriding: max_iters = 7"]


def test_a_preset_computes_with_literals_names_and_the_clock(tmp_path):
    text = """
'''A preset.'''
import time
from time import strftime as now
batch_size, block_size = 4, 2**5
_rows = batch_size * 10
gradient_accumulation_steps = _rows // batch_size
max_iters = lr_decay_iters = 100
max_iters += 1
learning_rate: float = 6e-4 / 2
weight_decay = -(-0.5)
decay_lr = not True
dtype = None
wandb_run_name = f"b{batch_size}-{learning_rate:.1e}-" + str(int(time.time())) + now("%Y")
min_lr = min(learning_rate, 1e-5)
"""
    found = read(preset(tmp_path, text))
    told = {
        "batch_size": 4, "block_size": 32, "gradient_accumulation_steps": 10, "max_iters": 101, "lr_decay_iters": 100,
        "learning_rate": 3e-4, "weight_decay": 0.5, "decay_lr": False, "dtype": None, "min_lr": 1e-5,
    }  # fmt: skip
    assert {name: found[name] for name in told} == told
    assert re.fullmatch(r"b4-3\.0e-04-\d{14}", str(found["wandb_run_name"]))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import os", "import os is more than the clock, which is time.time and time.strftime; a preset is not run"),
        ("from datetime import datetime", "is more than the clock"),
        (
            "batch_size = len([1, 2])",
            "len([1, 2]) is a call of something else; a preset is not run: it has literals, arithmetic, names, "
            "f-strings and calls of str, int, float, bool, round, min, max, abs, time.time, time.strftime",
        ),
        ("batch_size = open('/etc/passwd').read()", "is a call"),
        ("batch_size = __import__('os').getpid()", "is a call"),
        ("if True: batch_size = 3", "is not a setting"),
        ("for i in (1, 2): pass", "is not a setting"),
        ("def batch_size(): pass", "def batch_size(): pass is not a setting"),
        ("batch_size = [1][0]", "[1][0] cannot stand here"),
        ("batch_size = undefined + 1", "undefined is not a key"),
        ("batch_size = 9**9**9", "is too large"),
        ("out_dir = 'a' * 10**9", "is too long"),
        ("out_dir = '%999999999d' % 1", "is more than simple arithmetic"),
        ("out_dir = f'{1:999999999}'", "is too long"),
        ("batch_size = 1 / 0", "cannot be computed"),
        ("batch_size = 'a' + 1", "cannot be computed"),
        ("batch_size = lambda: 1", "cannot stand here"),
        ("batch_size.x = 1", "is not the name of a key"),
        ("batch_size = 1 << 3", "is more than simple arithmetic"),
        ("batch_size = time.sleep(9)", "is a call"),
        ("batch_size = 3 4", "this is not Python"),
        ("batch_siz = 3", "unknown key batch_siz; did you mean batch_size? (a name of your own is one that a key below uses)"),
        ("num_gpus = 8", "unknown key num_gpus; --help lists them (a name of your own is one that a key below uses)"),
        ("batch_siz = 3\nbatch_siz += batch_siz\nother = batch_siz", "unknown key batch_siz"),
        ("batch_size = 1.5", "batch_size = 1.5 is not a whole number"),
        ("batch_size = " + "(" * 150 + "1" + ")" * 150 + "+1" * 3000, "nested"),
        ("batch_size = 1" + "+1" * 1500, "nested"),
        ("batch_size = nothing()" + "+1" * 1500, "nested"),
    ],
)
def test_a_preset_is_never_run_and_what_it_may_not_say_is_refused_with_its_line(tmp_path, line, says):
    file = preset(tmp_path, f"max_iters = 5\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read(file)
    assert says in str(error.value) or "this is not Python" in str(error.value)
    assert f"{file}, line 2" in str(error.value) or "nested" in says


@given(st.text(max_size=200))
def test_any_text_is_either_a_preset_or_refused_in_a_sentence(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_bytes(text.encode(errors="surrogatepass"))
    try:
        read(str(file))
    except ConfigError as error:
        assert str(file) in str(error)


def test_a_preset_finds_the_clock_without_importing_it(tmp_path):
    assert re.fullmatch(r"run-\d+\.\d+", str(read(preset(tmp_path, "wandb_run_name = f'run-{time.time()}'"))["wandb_run_name"]))


def test_a_preset_for_training_does_for_the_other_programs_too():
    found = read(str(ROOT / "config/train_shakespeare_char.py"), program="sample.py")
    assert found["out_dir"] == "out-shakespeare-char" and "eval_interval" not in found
    with pytest.raises(ConfigError, match="unknown key eval_interval"):
        read("--eval_interval=3", program="sample.py")


def test_a_name_of_one_s_own_is_allowed_where_a_key_below_uses_it(tmp_path):
    file = preset(tmp_path, "depth = 2\nrows = depth * 4\nn_layer, n_head = depth, 1\nbatch_size = rows")
    found = read(file)
    assert (found["n_layer"], found["batch_size"]) == (2, 8) and "depth" not in found
    assert "n_layer" not in read(file, program="sample.py")  # where the key that uses it is another program's


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max_iters", "10"), "--max_iters has no value; write --max_iters=10"),
        (("--out_dir", "my runs"), "write --out_dir='my runs'"),
        (("--max_iters", "config/train_gpt2.py"), "write --max_iters=600000"),
        (("--max_iters", "--batch_size=3"), "write --max_iters=600000"),
        (("--compile", "batch_size=3"), "write --compile=True"),
    ],
)
def test_a_value_behind_a_space_is_named_with_the_sign_that_is_missing(arguments, says):
    with pytest.raises(ConfigError) as error:
        read(*arguments)
    assert str(error.value).endswith(says)
