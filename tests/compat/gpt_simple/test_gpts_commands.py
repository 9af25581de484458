"""The other commands of `gpt-simple`: help, validate, tokenize, generate and batch-generate."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from cli_program import Cli
from original import write_config

COMMANDS = ("init", "tokenize", "train", "status", "stop", "validate", "generate", "batch-generate")


def test_help_names_all_eight_commands_and_no_command_is_asking_for_it(cli: Cli) -> None:
    said = cli("--help").out
    assert all(re.search(rf"^    {command}\s", said, re.M) for command in COMMANDS)
    assert cli().out == said
    assert "--master_addr" in cli("train", "--help").out


def test_the_console_script_is_this_program() -> None:
    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["gpt-simple"].partition(":")
    assert callable(getattr(import_module(module), name)) and module == "ingot.compat.gpt_simple.main"


def test_help_and_validate_need_no_torch(gpts: Path) -> None:
    write_config(gpts / "config.yaml")
    program = (
        "import sys; from ingot.compat.gpt_simple.main import main\n"
        "for words in (['--help'], ['train', '--help'], ['init'], ['validate', '--config', 'config.yaml']):\n"
        "    assert main(words) == 0, words\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_validate_ends_with_0_2_and_1_and_strict_takes_warnings_for_errors(cli: Cli, gpts: Path) -> None:
    clean = cli("validate", "--config", "config.yaml")
    assert "Data" in clean.out and clean.out.endswith("0 errors, 0 over budget, 0 warnings, 0 notes\n")
    clamped = ("validate", "--config", "config.yaml", "--data.num_workers", 9)
    assert "[!] data.num_workers.will_clamp" in cli(*clamped, code=2).out
    cli(*clamped, "--strict", code=1)
    missing = cli("validate", "--config", "config.yaml", "--data.path", "nowhere", "--json", code=1)
    assert [finding["code"] for finding in json.loads(missing.out)["findings"]] == ["data.path.missing"]
    assert "did you mean training.max_steps?" in cli("validate", "--config", "config.yaml", "--training.max_stps", 3, code=1).line


def test_validate_and_train_see_that_the_data_end_before_the_run_does(cli: Cli) -> None:
    long = ("--config", "config.yaml", "--training.max_steps", 5000, "--optimizer.warmup_steps", 2)
    said = cli("validate", *long, "--json", code=None)
    found = {finding["code"]: finding["severity"] for finding in json.loads(said.out)["findings"]}
    assert any(code.startswith(("data.", "training.")) for code in found)
    assert said.code != 0
    told = [cli("validate", *long, code=None).out, cli("train", *long).err]
    assert all("lower training.max_steps or add data: the run" in text and "raise data.epochs" not in text for text in told)


def test_a_damaged_bucket_is_not_said_to_be_missing_from_a_mix_that_nobody_wrote(cli: Cli, gpts: Path) -> None:
    data = (gpts / "data").resolve()
    (gpts / "data").unlink()
    shutil.copytree(data, gpts / "data")
    (gpts / "data/train/web/part0.idx").write_bytes(b"GPTX")
    said = cli("validate", "--config", "config.yaml", "--json", code=1)
    assert [one["code"] for one in json.loads(said.out)["findings"]] == ["data.train.web.idx_error"]


def test_a_run_and_its_newest_checkpoint_are_one_model(cli: Cli, our_copy: Path) -> None:
    models = [{"output_dir": "out"}, {"checkpoint": "out/checkpoints/step-00000012"}]
    (our_copy / "in.jsonl").write_text("".join(json.dumps({"prompt": "a", "model": model}) + "\n" for model in models))
    plan = cli("batch-generate", "--input", "in.jsonl", "--dry-run").err
    assert "step-00000012 as bf16: 2 prompts, requested as out, out/checkpoints/step-00000012\n" in plan


def test_a_curriculum_that_does_not_fit_is_refused_with_3_unless_it_is_allowed(cli: Cli, gpts: Path) -> None:
    phases = [{"duration_tokens": 1_000_000, "mix": {"web": 1.0}}]
    write_config(gpts / "phases.yaml", data={"curriculum": phases})
    codes = [one["code"] for one in json.loads(cli("validate", "--config", "phases.yaml", "--json", code=1).out)["findings"]]
    assert "curriculum.shortfall.web" in codes and "training.budget_mismatch" in codes
    cli("-q", "train", "--config", "phases.yaml", code=3)
    allowed = ("--allow-bucket-exhaustion", "--allow-budget-mismatch")
    cli("validate", "--config", "phases.yaml", *allowed, code=2)


def test_lines_are_trained_on_as_they_are_and_tokenized(cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(gpts / "cache"))
    for split, lines in (("train", 40), ("val", 4)):
        (gpts / "raw" / split / "web").mkdir(parents=True)
        (gpts / "raw" / split / "web/a.jsonl").write_text(
            "".join(json.dumps({"text": f"{number} is a number and so is {number**3}"}) + "\n" for number in range(lines))
        )
        words = ("--input_dir", f"raw/{split}/web", "--output_dir", f"made/{split}/web", "--tokenizer_path", "tok")
        said = cli("tokenize", *words, "--max_length", 32, "--overlap_size", 4, "--min_text_length", 5)
        assert f"a.jsonl: {lines} documents" in said.err
    few = ("--config", "config.yaml", "--training.max_steps", 3)
    cli("-q", "train", *few, "--data.path", "made")
    cli("-q", "train", *few, "--data.path", "raw", "--data.format", "jsonl", "--training.output_dir", "raw-out")


@pytest.mark.parametrize("given", [(), ("--overlap_size", 9)])
def test_windows_overlap_by_half_of_one_at_most_and_a_line_says_so(given: tuple[object, ...], cli: Cli, gpts: Path) -> None:
    (gpts / "raw").mkdir()
    (gpts / "raw/a.jsonl").write_text(json.dumps({"text": "some words " * 40}) + "\n")
    words = ("tokenize", "--input_dir", "raw", "--tokenizer_path", "tok", "--output_dir")
    said = cli(*words, "short", "--max_length", 16, *given)
    assert f"--overlap_size {given[1] if given else 256} " in said.err and "windows share 8 tokens" in said.err
    quiet = cli(*words, "half", "--max_length", 16, "--overlap_size", 8)
    assert "more than half" not in quiet.err
    assert (gpts / "short/a.idx").read_bytes() == (gpts / "half/a.idx").read_bytes()


def test_texts_are_lines_of_json_on_stdout_and_nothing_else_is(cli: Cli, gpts: Path) -> None:
    cli("-q", "train", "--config", "config.yaml", "--training.max_steps", 4)
    greedy = ("--greedy", "--max-new-tokens", 4, "--dtype", "fp32", "--device", "cpu")
    said = cli("generate", "--output-dir", "out", "--prompt", "00001", *greedy)
    [record] = [json.loads(line) for line in said.out.splitlines()]
    assert record["prompt"] == "00001" and record["generation"]["do_sample"] is False
    (gpts / "asked.jsonl").write_text('{"prompt": "00001", "id": 7}\n{"prompt": "b", "model": {"output_dir": "out"}}\n')
    said = cli("batch-generate", "--input", "asked.jsonl", "--checkpoint", "out/checkpoints/final", *greedy)
    first, second = [json.loads(line) for line in said.out.splitlines()]
    assert (first["id"], first["completion"], second["prompt"]) == (7, record["completion"], "b")


def test_bad_requests_are_told_together_and_nothing_is_opened(cli: Cli, gpts: Path) -> None:
    wrong = [
        {"prompt": 3},
        {"prompt": "a", "generation": {"temperature": -1}},
        {"prompt": "a", "generation": {"top_p": 2}},
        {"prompt": "a", "model": {"chekpoint": "x"}},
        {"prompt": "a", "generation": {"max_new_tokens": 0}},
    ]
    (gpts / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in wrong))
    said = cli("batch-generate", "--input", "asked.jsonl", "--output-dir", "out", code=2)
    assert all(any(line.startswith(f"asked.jsonl:{number}:") for line in said.err.splitlines()) for number in range(1, 6))
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("generate", "--prompt", "a"), "--checkpoint --output-dir is required"),
        (("generate", "--output-dir", "out", "--prompt", "a", "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
        (("status", "--outputdir", "x"), "unexpected '--outputdir'"),
        (("init", "--preset", "huge"), "--preset: invalid choice: 'huge'"),
        (("train", "--nproc_per_node", "two"), "--nproc_per_node: invalid int value: 'two'"),
        (("trian",), "invalid choice: 'trian'"),
    ],
)
def test_a_wrong_word_is_one_line_with_exit_code_2(words: tuple[str, ...], told: str, cli: Cli) -> None:
    assert told in cli(*words, code=2).line
