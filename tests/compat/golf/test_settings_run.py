"""Runs of `ingot train` with the frontier family as a submission: its one file trains as they did and scores their artifact."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golf_toys import bare, forked

import ingot
from ingot.compat.golf.by_settings import main
from ingot.compat.golf.pack import check_sources, pack, packed_code, read_run, readme, summarise
from ingot.config.loading import load_config
from ingot.errors import CheckpointError, ConfigError
from ingot.train.start import run

TOY: dict[str, Any] = {
    "model.layers": 2, "model.heads": 2, "model.kv_heads": 1, "model.width": 16, "model.window": 6, "model.pattern": "SL",
    "data.seq_len": 32, "training.tokens_per_step": 64, "training.max_steps": 4, "training.device": "cpu", "training.threads": 1,
    "training.stages": [{"share": 0.5, "seq_len": 16}, {"share": 0.5, "seq_len": 32}], "budget.seconds": None,
    "budget.artifact_bytes": 18_500, "artifact.score": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ by their seed. Their artifacts are scored here, as a process of its own would do at their end."""
    folder, found = tmp_path_factory.mktemp("frontier"), []
    for seed in (1, 2):
        where = {"data.path": str(toys / "data/datasets/toy"), "data.tokenizer": str(toys / "data/tokenizers/toy.model")}
        one = {"training.seed": seed, "data.seed": seed, "training.output_dir": str(folder / f"seed{seed}")}
        result = run(load_config("golf/frontier", python={**TOY, **where, **one}, environment={}))
        assert result.artifact_path is not None
        bpb = ingot.load(result.artifact_path, device="cpu").evaluate().bits_per_byte
        told = json.loads((result.run_dir / "result.json").read_text())
        (result.run_dir / "result.json").write_text(json.dumps({**told, "artifact_bpb": bpb}))
        found.append(result.run_dir)
    return found


@pytest.fixture
def change(runs: list[Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the second run whose result.json says something else."""

    def changed(**told: Any) -> Path:
        shutil.copytree(runs[1], tmp_path / "run")
        path = tmp_path / "run" / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
        return tmp_path / "run"

    return changed


def where(toys: Path) -> dict[str, str]:
    return {"DATA_PATH": str(toys / "data/datasets/toy"), "TOKENIZER_PATH": str(toys / "data/tokenizers/toy.model")}


def score_of(run: Path) -> float:
    return float(json.loads((run / "result.json").read_text())["artifact_bpb"])


@pytest.fixture(scope="module")
def submission(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "toy"
    pack(runs, folder, name="Frontier")
    return folder


def test_a_submission_tells_its_settings_and_counts_the_code_it_has(submission: Path, runs: list[Path]) -> None:
    told, code = json.loads((submission / "submission.json").read_text()), (submission / "train_gpt.py").stat().st_size
    artifacts = [path.stat().st_size for path in submission.glob("*.ingot")]
    assert (told["seeds"], told["bytes_code"], told["bytes_total"]) == ([1, 2], code, code + max(artifacts))
    assert told["val_bpb"] == pytest.approx(sum(map(score_of, runs)) / 2) and len(artifacts) == 2
    page = (submission / "README.md").read_text()
    assert "| model.width | 512 | 16 |" in page and "EVAL_ONLY_PATH=model.ingot python train_gpt.py" in page


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \S+  loss (\S+)", text)]


def test_its_one_file_trains_as_the_runs_did_beside_a_finished_run_of_its_name(
    submission: Path, runs: list[Path], toys: Path, tmp_path: Path
) -> None:
    shutil.copy(submission / "train_gpt.py", tmp_path)
    shutil.copytree(runs[1], tmp_path / "logs/again")
    code, shown = forked(tmp_path, SEED="2", RUN_ID="again", **where(toys), INGOT_TRAINING__DEVICE="cpu")
    assert code == 0, shown
    assert losses(shown) == losses((runs[1] / "log.txt").read_text()) and len(losses(shown)) == 4
    again = ingot.load(tmp_path / "logs/again-2/artifact/model.ingot", device="cpu")
    assert again.evaluate().bits_per_byte == score_of(runs[1])


def test_its_one_file_scores_its_artifact_where_nothing_of_ours_is_installed(
    submission: Path, runs: list[Path], toys: Path
) -> None:
    ended = bare(submission, EVAL_ONLY_PATH="model.ingot", **where(toys))
    assert ended.returncode == 0, ended.stderr
    assert f"val_bpb:{min(map(score_of, runs)):.8f}" in ended.stdout.splitlines()[-1]


@pytest.mark.long
def test_its_one_file_ends_with_the_score_of_its_artifact(submission: Path, runs: list[Path], toys: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(submission / "train_gpt.py", tmp_path / "alone")
    ended = bare(tmp_path / "alone", SEED="2", **where(toys), INGOT_TRAINING__DEVICE="cpu", INGOT_ARTIFACT__SCORE="true")
    assert ended.returncode == 0, ended.stderr
    assert f" val_bpb:{score_of(runs[1]):.8f}\n" in ended.stdout


def test_the_file_of_the_recipe_leaves_its_artifact_the_room_it_may_have() -> None:
    config = load_config("golf/frontier", environment={}).config
    assert config.budget.artifact_bytes is not None
    assert len(packed_code(config)) + config.budget.artifact_bytes <= 16_000_000


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"DATA_PATH": "nope"}, 3, "nope"),
        ({"DATA_PATH": "nope", "EVAL_ONLY_PATH": "model.ingot"}, 3, "nope"),
        ({"EVAL_ONLY_PATH": "nope.ingot"}, 4, "there is no artifact nope.ingot"),
        ({"SEED": "abc"}, 2, "SEED=abc"),
        ({"INGOT_MODEL__LAYERS": "abc"}, 2, "model.layers=abc"),
        ({"MAX_WALLCLOCK_SECONDS": "abc"}, 2, "MAX_WALLCLOCK_SECONDS=abc"),
        ({"RUN_ID": "../oops"}, 2, "RUN_ID=../oops"),
    ],
)
def test_its_one_file_tells_mistakes_by_its_variables(
    submission: Path, toys: Path, tmp_path: Path, given: dict[str, str], code: int, said: str
) -> None:
    for name in ("train_gpt.py", "model.ingot"):
        shutil.copy(submission / name, tmp_path)
    ended, shown = forked(tmp_path, **where(toys) | {"INGOT_TRAINING__DEVICE": "cpu"} | given)
    assert ended == code and shown.startswith("train_gpt.py: error: ") and said in shown, shown
    assert not (tmp_path / "logs").exists()


def test_an_argument_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed=3"]) == ConfigError.exit_code
    assert "takes no arguments; set variables before the command: DATA_PATH" in capsys.readouterr().err


def test_what_a_submission_leaves_to_its_reader_is_not_in_its_file(runs: list[Path]) -> None:
    code = read_run(runs[0]).code.decode()
    assert '"INGOT_MODEL__WIDTH": "16"' in code and not re.search("DATA__PATH|TRAINING__SEED|TRAINING__OUTPUT_DIR", code)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"artifact_bpb": None}, "has no score of its artifact"),
        ({"artifact_rows": 3}, "was scored on a part of the validation split"),
        ({"artifact_bytes": 3}, "the file was modified"),
        ({"checkpoint_path": None}, "has no checkpoint of its last step"),
    ],
)
def test_runs_that_are_not_fit_for_a_submission_are_refused(change: Callable[..., Path], told: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_run(change(**told))


def test_a_run_of_another_version_or_of_a_commit_with_other_sources_is_refused(tmp_path: Path) -> None:
    sources, commits = tmp_path / "src", []

    def git(*command: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    sources.mkdir()
    git("init", "-q")
    for name in ("src/a.py", "src/b.py", "c.md"):
        (tmp_path / name).write_text(name)
        git("add", "-A")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "HEAD"))
    for commit in (
        *commits[1:],
        None,
        "1" * 40,
    ):  # the last changes no source; others are unknown here
        check_sources(tmp_path, {"git_commit": commit}, sources)
    with pytest.raises(CheckpointError, match=commits[0][:12]):
        check_sources(tmp_path, {"git_commit": commits[0]}, sources)
    with pytest.raises(CheckpointError, match=r"run by ingot 0\.0\.1"):
        check_sources(tmp_path, {"made_by": "ingot 0.0.1"}, sources)


def test_runs_on_several_devices_are_scored_again_by_one_process(runs: list[Path]) -> None:
    run = replace(read_run(runs[0]), ranks=2)
    page = readme([run], run, {"name": "x", "blurb": "", **summarise([run], 1.0)})
    assert re.search(
        r"SEED=1 torchrun .*--nproc_per_node=2 train_gpt\.py\n.*EVAL_ONLY_PATH=model\.ingot python train_gpt\.py", page
    )


def test_a_run_of_the_script_and_one_by_settings_are_not_packed_together(
    runs: list[Path], once_finished: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be packed together: they are runs of .*train"):
        pack([runs[0], once_finished[0] / "logs" / "toy"], tmp_path / "out", name="x")
