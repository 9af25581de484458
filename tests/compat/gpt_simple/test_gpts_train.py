"""`gpt-simple train` in this process: log lines, files, going on, and exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_program import Cli
from original import Original, write_config

from ingot.cli.main import run as run_ingot
from ingot.runs.folder import saved_steps

STEP = re.compile(
    r"Step\s+(\d+) \| Loss \d+\.\d{4} \| LR \d\.\d\de[-+]\d\d \| GradNorm \d+\.\d{3} \| \d+\.\d\ds/step \| "
    r"[\d,]+ tok/s \| Packing (\d+\.\d)%"
)
SUMMARY = """\
============================================================
GPT-SIMPLE TRAINING
============================================================
Dataset:              data
Output:               out
Devices:              1
Per-device batch size: 4
Gradient accumulation: 2
Effective batch size:  8
Max steps:            12
LR: 0.01  (warmup=2, decay=10)
============================================================
"""
TRAIN = ("train", "--config", "config.yaml", "--training.device", "cpu")


def newest(folder: Path) -> dict[str, object]:
    step, path = max(saved_steps(folder / "checkpoints").items())
    return {"step": step, **json.loads((path / "checkpoint.json").read_text())["progress"]}


def test_a_run_says_what_gpt_simple_says_on_stderr_and_leaves_its_files(cli: Cli, gpts: Path) -> None:
    said = cli(*TRAIN, "--training.logging_steps", 4, "--training.eval_steps", 6)
    lines = said.err.splitlines()
    assert said.out == ""
    assert said.err.startswith(SUMMARY)
    steps = [found for line in lines if (found := STEP.fullmatch(line))]
    assert [found[1] for found in steps] == ["4", "8", "12"]
    assert all(80 < float(found[2]) <= 100 for found in steps)
    assert "LR 1.00e-03" in steps[-1][0]  # the next step's, which would be the floor
    assert len([line for line in lines if re.fullmatch(r"Eval Loss: \d+\.\d{4}", line)]) == 2
    saved = [found.groups() for line in lines if (found := re.fullmatch(r"(.*) saved to (.*) \(step (\d+), \d+\.\d+s\)", line))]
    assert saved == [
        ("Checkpoint", "out/checkpoints/checkpoint-4", "4"),
        ("Checkpoint", "out/checkpoints/checkpoint-8", "8"),
        ("Checkpoint", "out/checkpoints/checkpoint-12", "12"),
        ("Final checkpoint", "out/checkpoints/final", "12"),
    ]
    assert "TRAINING COMPLETE!" in lines
    assert re.fullmatch(r"Training complete: 12 steps, final loss \d+\.\d{4}", lines[-1])
    assert {path.name for path in (gpts / "out").iterdir()} >= {"config.json", "tokenizer", ".run_state.json", "state.json"}


def test_quiet_leaves_warnings_and_verbose_adds_what_is_waited_for(cli: Cli) -> None:
    said = cli("-q", *TRAIN, "--training.max_steps", 4, "--training.save_steps", 9)
    assert [line.partition("=")[0] for line in said.err.splitlines()] == [
        "training.logging_steps",
        "training.eval_steps",
        "training.save_steps",
    ]
    assert "opening the data" in cli("-v", *TRAIN, "--training.max_steps", 4).err


def test_the_same_command_goes_on_and_a_finished_run_goes_on_with_more_steps(cli: Cli, gpts: Path) -> None:
    cli(*TRAIN)
    again = cli(*TRAIN)
    assert "Training already complete: step 12 of training.max_steps=12" in again.err
    said = cli(*TRAIN, "--training.max_steps", 16)
    assert "Resuming from step 12  (checkpoint: out/checkpoints/final)" in said.err
    assert newest(gpts / "out")["step"] == 16
    assert "Resuming from step 16" in cli(*TRAIN, "--training.max_steps", 20).err  # the newest, not the first `final`


def test_a_resume_keeps_the_batch_it_began_with_and_says_so(cli: Cli, gpts: Path) -> None:
    cli(*TRAIN, "--training.gradient_accumulation_steps", 4, "--training.max_steps", 4)
    said = cli(*TRAIN, "--training.gradient_accumulation_steps", 2, "--training.max_steps", 8)
    assert "keeps the 512 tokens per step" in said.err
    assert "Effective batch size:  16" in said.err
    assert newest(gpts / "out")["config"]["training"]["tokens_per_step"] == 512  # type: ignore[index]


def test_scratch_on_a_folder_with_a_run_is_refused_with_4_and_an_empty_folder_is_begun(cli: Cli) -> None:
    cli(*TRAIN, "--training.resume", "scratch", "--training.max_steps", 4)
    assert "training.resume" in cli("-q", *TRAIN, "--training.resume", "scratch", code=4).line


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ("--config", "missing.yaml"),
            2,
            "write one with `gpt-simple init -o missing.yaml`",
        ),
        (("--config", "config.yaml", "--training.max_stps", "3"), 2, "did you mean training.max_steps?"),
        (("--config", "config.yaml", "--training.max_steps", "2"), 2, "warmup_steps=2 must be less than training.max_steps=2"),
        (("--config", "config.yaml", "--data.path", "nowhere"), 3, "nowhere"),
        (("--config", "config.yaml", "--data.path", ""), 3, "data.path"),
        (("--nproc_per_node", "2"), 2, "the following arguments are required: --config"),
        (("--config", "config.yaml", "--training.resume", "nowhere"), 4, "nowhere"),
    ],
)
def test_a_mistake_is_one_line_with_the_exit_code_of_its_kind(words: tuple[str, ...], code: int, told: str, cli: Cli) -> None:
    assert told in cli("-q", "train", *words, code=code).line


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_a_config_json_of_somebody_elses_is_not_replaced(words: tuple[str, ...], cli: Cli, gpts: Path) -> None:
    (gpts / "out").mkdir()
    (gpts / "out/config.json").write_text('{"mine": 1}')
    refused = cli("-q", *TRAIN, *words, code=4).line
    assert "out holds config.json, " in refused and "choose another training.output_dir" in refused
    assert (gpts / "out/config.json").read_text() == '{"mine": 1}' and len(list((gpts / "out").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--training.resume", "scratch"), 4, "choose another training.output_dir or set training.resume=auto"),
        (("--training.resume", "nowhere"), 4, "name a checkpoint or a run folder, auto or scratch"),
        (("--training.resume", "out/checkpoints/checkpoint-8"), 4, "training.resume=out/checkpoints/step-00000008: "),
        (("--model.attention_mode", "flex"), 4, "model.attention_mode was causal and is sdpa_mask or flex; undo"),
        (("--model.activation", "gelu"), 4, "model.activation was swish and is gelu; undo"),
        (("--model.rope_scaling_type", "ntk"), 4, "model.rope_scaling_type was null and is ntk; undo"),
        (("--data.packing", "false"), 4, "data.packing was true and is false; undo"),
        (("--data.path", "nowhere"), 3, "if you have text, prepare it with: gpt-simple tokenize --input_dir DIR"),
        (("--training.mixed_precision", "fp16"), 2, "needs a GPU; on a CPU set it to no, or bf16"),
    ],
)
def test_an_error_names_the_keys_and_advises_what_they_take(
    words: tuple[str, ...], code: int, told: str, cli: Cli, our_copy: Path
) -> None:
    assert told in cli("-q", *TRAIN, "--training.max_steps", 14, *words, code=code).line


def test_a_config_is_not_replaced_by_the_record_of_its_run_and_a_record_is_not_a_config(cli: Cli, gpts: Path) -> None:
    (gpts / "out").mkdir()
    (gpts / "out/config.yaml").write_text(mine := (gpts / "config.yaml").read_text())
    told = cli("-q", "train", "--config", "out/config.yaml", code=2).line
    assert "out/config.yaml " in told and "give the config file another name or folder" in told
    assert (gpts / "out/config.yaml").read_text() == mine
    (gpts / "record.yaml").write_text("model: {family: golf}\nbudget: {seconds: 3}\n")
    told = cli("-q", "train", "--config", "record.yaml", code=2).line
    assert "unknown section budget (in record.yaml)" in told


def test_a_bucket_without_validation_and_a_damaged_index_are_named_with_3(cli: Cli, gpts: Path) -> None:
    (gpts / "data").unlink()
    shutil.copytree((gpts / "tok").resolve().parent / "data", gpts / "data")
    index = gpts / "data/train/web/part0.idx"
    index.write_bytes(b"GPTX" + index.read_bytes()[4:])
    assert "part0.idx" in cli("-q", *TRAIN, code=3).line
    shutil.rmtree(gpts / "data/val/web")
    assert "web" in cli("-q", *TRAIN, code=3).line


def test_what_python_gets_back_has_gpt_simples_fields(cli: Cli, gpts: Path) -> None:
    from ingot.compat import gpt_simple

    config = gpt_simple.Config.from_file("config.yaml")
    config.training.logging_steps = 4
    before = config.to_dict()
    result = gpt_simple.train(config=config)
    assert config.to_dict() == before  # so that the same Config trains again
    assert (result.total_steps, result.checkpoint_path) == (12, "out/checkpoints/final")
    assert result.total_tokens == newest(gpts / "out")["tokens"]
    assert 0 < result.final_loss < 6
    again = gpt_simple.train(config=config)
    assert (again.total_steps, again.checkpoint_path) == (12, "out/checkpoints/final")


def test_ingot_train_knows_such_a_file_and_says_so(gpts: Path, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_ingot([*TRAIN, "--training.max_steps", "4", "--json"])
    said = capfd.readouterr()
    assert not end.value.code
    assert "`gpt-simple train --config`" in said.err
    assert json.loads(said.out)["total_steps"] == 4
    write_config(gpts / "both.yaml", data={"seq_len": 32})
    with pytest.raises(SystemExit) as end:
        run_ingot(["train", "--config", "both.yaml"])
    assert end.value.code == 2
    assert "unknown key data.seq_len" in capfd.readouterr().err


def test_log_lines_have_the_form_of_the_originals(original: Original, cli: Cli, gpts: Path) -> None:
    write_config(gpts / "theirs.yaml", training={"logging_steps": 4, "max_steps": 4, "eval_steps": 4, "output_dir": "theirs"})
    [theirs] = original([["train", "--config", "theirs.yaml", "--skip-runtime-probe"]], gpts)
    ours = cli("train", "--config", "theirs.yaml", "--training.output_dir", "ours").err

    def forms(text: str) -> set[str]:
        """Lines of the log, with every number as 0."""
        kinds = r"(Step +\d.*|Eval Loss.*|\S* ?[cC]heckpoint saved to.*|Max steps.*|Effective batch.*|LR: .*warmup=.*|TRAINING.*)"
        found = [re.sub(r"[\d,.]+", "0", line).replace("theirs/", "ours/") for line in re.findall(kinds, text)]
        return {re.sub(r" +", " ", line).strip() for line in found}

    assert forms(ours) == forms(theirs["out"])


def test_a_rank_that_was_started_by_another_program_does_not_start_more(
    cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
    }.items():
        monkeypatch.setenv(name, value)
    cli(*TRAIN, "--nproc_per_node", 4, "--training.max_steps", 4)
    assert newest(gpts / "out")["config"]["training"]["tokens_per_step"] == 256  # type: ignore[index]
