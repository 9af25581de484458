"""The log of a run: its lines to the letter, when each of them comes, and that what they say is true."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from golf_toys import ROOT, ROWS, Golf, Ran, run_here, shard

from ingot.compat.golf.log import RULE, RunLog
from ingot.compat.golf.main import sdp_backends
from ingot.compat.golf.variables import VARIABLES, as_text, read_variables
from ingot.errors import CheckpointError

TIMES = r"train_time:\d+ms step_avg:\d+\.\d\dms"
FORM = [
    r"logs/toy\.txt",
    r"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=/\S+/toy\.model",
    r"train_loader:dataset:toy train_shards:2",
    r"val_loader:shards pattern=/\S+/data/datasets/toy/fineweb_val_\*\.bin tokens:1312",
    r"model_params:8116",
    r"world_size:1 grad_accum_steps:8",
    r"sdp_backends:cudnn=False flash=True mem_efficient=False math=True",
    r"attention_mode:gqa num_heads:2 num_kv_heads:1",
    r"tie_embeddings:True embed_lr:0\.05 head_lr:0\.0 matrix_lr:0\.04 scalar_lr:0\.04",
    r"train_batch_tokens:512 train_seq_len:32 iterations:4 warmup_steps:2 max_wallclock_seconds:0\.000",
    r"seed:1337",
    r"warmup_step:1/2",
    r"warmup_step:2/2",
    r"step:0/4 val_loss:\d\.\d{4} val_bpb:\d\.\d{4} train_time:0ms step_avg:0\.00ms",
    rf"step:1/4 train_loss:\d\.\d{{4}} {TIMES}",
    rf"step:2/4 train_loss:\d\.\d{{4}} {TIMES}",
    rf"step:2/4 val_loss:\d\.\d{{4}} val_bpb:\d\.\d{{4}} {TIMES}",
    rf"step:3/4 train_loss:\d\.\d{{4}} {TIMES}",
    rf"step:4/4 train_loss:\d\.\d{{4}} {TIMES}",
    rf"step:4/4 val_loss:\d\.\d{{4}} val_bpb:\d\.\d{{4}} {TIMES}",
    r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
    r"Serialized model: \d+ bytes",
    r"Code size: \d+ bytes",
    r"Total submission size: \d+ bytes",
    r"Serialized model int8\+zlib: \d+ bytes \(payload:\d+ raw_torch:\d+ payload_ratio:\d\.\d\dx\)",
    r"Total submission size int8\+zlib: \d+ bytes",
    r"final_int8_zlib_roundtrip val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms",
    r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}",
]


def test_a_run_prints_the_challenges_lines_in_their_order(golf: Golf) -> None:
    lines = golf(WARMUP_STEPS="2", VAL_LOSS_EVERY="2").lines
    wrong = [(line, form) for line, form in zip(lines, FORM, strict=True) if not re.fullmatch(form, line)]
    assert wrong == []


def test_a_program_of_its_own_prints_what_a_run_in_this_process_does(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    ran = golf.program(RUN_ID="own")
    assert (ran.code, ran.err) == (0, "")
    assert ran.losses == pytest.approx(finished.losses, abs=2e-4) and len(ran.losses) == 4
    console, file = ran.out.splitlines(), (tmp_path / "logs/own.txt").read_text().splitlines()
    assert console[0] == "logs/own.txt" and file[-len(console) + 1 :] == console[1:]


def test_what_the_lines_say_is_true(golf: Golf, tmp_path: Path) -> None:
    ran = golf(ITERATIONS="3")
    state, packed = (tmp_path / "final_model.pt").stat().st_size, (tmp_path / "final_model.int8.ptz").stat().st_size
    code = (tmp_path / "logs/toy/train_gpt.py").stat().st_size
    told = [int(number) for number in re.findall(r"(?<=: )\d+(?= bytes)", ran.out)]
    assert told == [state, code, state + code, packed, packed + code]
    weights = torch.load(tmp_path / "final_model.pt", weights_only=True)
    assert int(ran.value("model_params")) == sum(value.numel() for value in weights.values())
    size = sum(value.nbytes for value in weights.values())
    assert ran.value("payload_ratio") == f"{size / int(ran.value('payload')):.2f}x"


def test_step_avg_is_the_time_over_the_steps(golf: Golf) -> None:
    found = re.findall(r"^step:(\d+)/\d+ \S+ (?:\S+ )?train_time:(\d+)ms step_avg:(\S+)ms", golf(VAL_LOSS_EVERY="2").out, re.M)
    assert len(found) == 7
    for step, total, average in found:
        assert abs(float(average) * max(int(step), 1) - int(total)) <= 0.5 + 0.005 * max(int(step), 1) + 1e-9


def test_untied_embeddings_have_their_own_rates_in_the_log(golf: Golf) -> None:
    ran = golf(ITERATIONS="0", TIE_EMBEDDINGS="0", SEED="5", EMBED_LR="0.5")
    assert "tie_embeddings:False embed_lr:0.5 head_lr:0.008 matrix_lr:0.04 scalar_lr:0.04" in ran.lines
    assert "seed:5" in ran.lines


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("cudnn", "cudnn=True flash=False mem_efficient=False math=False"),
        ("flash", "cudnn=False flash=True mem_efficient=False math=False"),
        ("efficient", "cudnn=False flash=False mem_efficient=True math=False"),
        ("default", "cudnn=False flash=True mem_efficient=False math=True"),
    ],
)
def test_the_attention_that_runs_is_the_one_that_is_named(chosen: str, told: str) -> None:
    assert sdp_backends(chosen) == told


# -- which lines, and when ------------------------------------------------------------------------------------------------------


def test_without_an_interval_validation_is_told_once_at_the_end(golf: Golf) -> None:
    assert list(golf(VAL_LOSS_EVERY="0", ITERATIONS="5").evaluations) == [5]


@pytest.mark.parametrize(("every", "steps"), [("2", [0, 2, 4, 5]), ("5", [0, 5]), ("-1", [5])])
def test_validation_is_told_at_the_start_by_the_interval_and_at_the_end(golf: Golf, every: str, steps: list[int]) -> None:
    ran = golf(VAL_LOSS_EVERY=every, ITERATIONS="5")
    assert [int(step) for step in re.findall(r"^step:(\d+)/5 val_loss", ran.out, re.M)] == steps


@pytest.mark.parametrize(("every", "more"), [("6", [12, 18]), ("0", [])])
def test_the_first_ten_losses_are_always_told_and_then_by_the_interval(golf: Golf, every: str, more: list[int]) -> None:
    assert list(golf(TRAIN_LOG_EVERY=every, ITERATIONS="19").losses) == [*range(1, 11), *more]


@pytest.mark.parametrize(("steps", "told"), [(0, []), (20, list(range(1, 21))), (35, [10, 20, 30, 35])])
def test_priming_steps_are_told_one_by_one_up_to_twenty(golf: Golf, steps: int, told: list[int]) -> None:
    ran = golf(WARMUP_STEPS=str(steps), ITERATIONS="0")
    assert [int(step) for step in re.findall(rf"^warmup_step:(\d+)/{steps}$", ran.out, re.M)] == told


def test_no_steps_are_one_validation_and_an_export(golf: Golf) -> None:
    ran = golf(ITERATIONS="0")
    assert list(ran.evaluations) == [0] and ran.losses == {} and "stopping_early" not in ran.out
    assert ran.exact[0] == pytest.approx(math.log(274), abs=0.05)


def test_a_run_that_takes_all_its_steps_does_not_stop_early(golf: Golf) -> None:
    ran = golf(ITERATIONS="5")
    assert list(ran.evaluations) == [5] and max(ran.losses) == 5 and "stopping_early" not in ran.out


def test_a_cap_ends_the_run_with_the_step_in_which_it_is_reached(golf: Golf, step_clock: None) -> None:
    ran = golf(MAX_WALLCLOCK_SECONDS="0.45", ITERATIONS="100000", WARMDOWN_ITERS="3", VAL_LOSS_EVERY="1000")
    last = max(number for number, line in enumerate(ran.lines) if line.startswith("step:"))
    found = re.fullmatch(r"step:(\d+)/100000 val_loss:\S+ val_bpb:\S+ train_time:(\d+)ms step_avg:\S+ms", ran.lines[last])
    assert found is not None
    step, milliseconds = found.groups()
    assert ran.lines[last + 1] == f"stopping_early: wallclock_cap train_time:{milliseconds}ms step:{step}/100000"
    assert (step, milliseconds) == ("4", "500") and ran.value("max_wallclock_seconds") == "0.450"
    times = [int(found) for found in re.findall(r"train_loss:\S+ train_time:(\d+)ms", ran.out)]
    assert times == [125, 250, 375, 500]  # no earlier step had reached it


def test_the_training_data_announce_that_they_begin_again(golf: Golf) -> None:
    ran = golf(ITERATIONS="24", TRAIN_LOG_EVERY="1")  # 6,000 tokens, 520 in a step: the twelfth step is the first to end them
    found = re.findall(r"^note: the training data ended in step (\d+); starting epoch (\d+)$", ran.out, re.M)
    assert found == [("12", "2"), ("24", "3")]


# -- the file -------------------------------------------------------------------------------------------------------------------


def test_the_files_head_proves_what_ran_and_is_not_on_the_console(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    text = (tmp_path / "logs/toy.txt").read_text()
    head, versions, rest = text.split(f"{RULE}\n")
    for part in ("NUM_LAYERS=2\n", "  layers: 2", "class Golf(", "class Muon", "def learning_rate_scale("):
        assert part in head and part not in finished.out
    assert head.startswith("ingot ") and f"Running PyTorch {torch.__version__}" in versions and "Running Python 3." in versions
    assert rest == finished.out.partition("\n")[2]


def test_the_head_gives_the_values_of_all_variables_back(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    lines = (tmp_path / "logs/toy.txt").read_text().splitlines()[1:]
    named = dict(line.split("=", 1) for line in lines[: next(i for i, line in enumerate(lines) if "=" not in line)])
    again = {name: as_text(value) for name, value in read_variables(named).items() if value is not None}
    assert again == named and len(named) > 40


def test_a_second_run_of_a_name_appends_its_log_and_has_a_run_folder_of_its_own(golf: Golf, tmp_path: Path) -> None:
    golf()
    first = (tmp_path / "logs/toy.txt").read_text()
    golf(SEED="7")
    assert (tmp_path / "logs/toy.txt").read_text().startswith(first)
    assert "SEED=7" in (tmp_path / "logs/toy.txt").read_text()[len(first) :]
    assert "seed: 7" in (tmp_path / "logs/toy-2/config.yaml").read_text()


def test_without_a_name_a_run_draws_one(golf: Golf, tmp_path: Path) -> None:
    first = golf(RUN_ID="").lines[0]
    assert re.fullmatch(r"logs/[0-9a-f-]{36}\.txt", first) and (tmp_path / first).is_file()
    assert golf(RUN_ID="").lines[0] != first


def test_what_cannot_be_written_as_text_is_written_otherwise(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path / "log.txt")
    run_log.line("path \udcff", console=False)
    run_log.write()
    assert (tmp_path / "log.txt").read_text() == "path \\udcff\n"


def test_what_ends_a_run_stands_in_the_log_too(golf: Golf, tmp_path: Path) -> None:
    said = golf.refuses(1, MATRIX_LR="1e30", SCALAR_LR="1e30", TIED_EMBED_LR="1e30")
    assert "not finite" in said and (tmp_path / "logs/toy.txt").read_text().endswith(f"error: {said}\n")


@pytest.mark.parametrize(
    "wrong", [{"VOCAB_SIZE": "300"}, {"DATA_PATH": "nowhere"}, {"EVAL_ONLY_PATH": "nosuch.ptz"}, {"MODEL_DIM": "17"}]
)
def test_a_start_that_fails_leaves_no_log_and_no_folder(golf: Golf, tmp_path: Path, wrong: dict[str, str]) -> None:
    ran = run_here(golf.toys, **wrong)
    assert ran.code in (2, 3, 4) and not ran.out.startswith("step") and list(tmp_path.iterdir()) == []


def test_a_start_that_fails_leaves_the_logs_of_others_as_they_are(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*")), (tmp_path / "logs/toy.txt").read_bytes()
    golf.refuses(2, VOCAB_SIZE="300", RUN_ID="other")
    golf.refuses(2, VOCAB_SIZE="300")
    assert (sorted(tmp_path.rglob("*")), (tmp_path / "logs/toy.txt").read_bytes()) == before


# -- arguments ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_lists_every_variable_with_its_default_and_meaning_and_trains_nothing(golf: Golf, tmp_path: Path, word: str) -> None:
    ran = run_here(golf.toys, word)
    assert (ran.code, ran.err, list(tmp_path.iterdir())) == (0, "", [])
    for one in VARIABLES.values():
        assert f"\n  {one.name}={as_text(one.default) if one.default is not None else ''}" in ran.out and one.help in " ".join(
            ran.out.split()
        )


@pytest.mark.parametrize(
    ("word", "example"),
    [
        ("config.py", "ITERATIONS=100"),
        ("--iterations=5", "ITERATIONS=5"),
        ("ITERATIONS=7", "ITERATIONS=7"),
        ("--matrix-lr", "MATRIX_LR=VALUE"),
    ],
)
def test_any_other_argument_is_refused_with_the_variable_it_may_mean(golf: Golf, tmp_path: Path, word: str, example: str) -> None:
    ran = run_here(golf.toys, word)
    assert (ran.code, ran.out, list(tmp_path.iterdir())) == (2, "", [])
    assert ran.err == (
        f"train_gpt.py: error: train_gpt.py takes no arguments, but was given {word}; set variables before the command, as in "
        f"{example} python train_gpt.py; --help lists them\n"
    )


def test_the_script_hands_its_arguments_on(golf: Golf) -> None:
    program = [sys.executable, str(ROOT / "train_gpt.py"), "--help"]
    ended = subprocess.run(program, env=golf.environment(), capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.startswith("usage: ") and "step:" not in ended.stdout


def test_what_a_run_leaves_in_the_repository_is_not_offered_to_git() -> None:
    assert {"/logs/", "/records/", "/final_model.*"} <= set((ROOT / ".gitignore").read_text().splitlines())


# -- what is told is not what changes it ---------------------------------------------------------------------------------------


def test_how_often_a_run_is_primed_validated_and_logged_leaves_no_trace(golf: Golf) -> None:
    plain = golf(ITERATIONS="5")
    watched = golf(ITERATIONS="5", WARMUP_STEPS="3", VAL_LOSS_EVERY="1", TRAIN_LOG_EVERY="1")
    assert watched.losses == plain.losses and watched.exact == plain.exact


def test_the_first_losses_are_those_of_the_first_tokens_of_the_first_shard(golf: Golf, toys: Path, tmp_path: Path) -> None:
    data, given = tmp_path / "data", toys / "data/datasets/toy"
    data.mkdir()
    tokens = np.fromfile(given / "fineweb_train_000000.bin", "<u2")[512:].tolist()
    (data / "fineweb_val_0.bin").write_bytes((given / "fineweb_val_000000.bin").read_bytes())
    (data / "fineweb_train_1.bin").write_bytes(shard(tokens[1000:]))
    (data / "fineweb_train_0.bin").write_bytes(shard(tokens[: ROWS * 32 + 8]))  # made later, read first
    both = golf(DATA_PATH=str(data), ITERATIONS="2")
    (data / "fineweb_train_1.bin").unlink()
    assert golf(DATA_PATH=str(data), ITERATIONS="1").losses[1] == both.losses[1]


def test_a_gradient_that_is_no_number_ends_the_run_and_says_what_to_try(golf: Golf, tmp_path: Path) -> None:
    said = golf.refuses(1, QK_GAIN_INIT="1e30")
    assert re.match("the gradient is not finite at step [12] ", said) and "GRAD_CLIP_NORM" in said and "optimizer." not in said
    assert not (tmp_path / "final_model.pt").exists()


def test_the_bits_of_the_record_follow_from_its_loss() -> None:
    from ingot.eval.evaluator import Score

    tokens, size = 62_021_632, 151_080_363  # of the challenge's validation text
    score = Score(2.02522281 * tokens, tokens, size, float(size), "pieces")
    assert score.bits_per_byte == pytest.approx(1.19945102, abs=2e-8)


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log.txt").symlink_to(tmp_path / "mine")
    log = RunLog(tmp_path / "log.txt")
    log.line("a line")
    with pytest.raises(CheckpointError, match=r"log\.txt is a symbolic link"):
        log.write()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_walltime_that_is_no_number_is_a_note_and_not_the_end(golf):
    ran = golf(SLURM_JOB_END_TIME="tomorrow", ITERATIONS="1", EVAL_ONLY_PATH="")
    assert "note: SLURM_JOB_END_TIME=tomorrow in the environment is not a number of unix seconds" in ran.out
