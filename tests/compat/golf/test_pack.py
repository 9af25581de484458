"""A submission: what is in it, what is refused, and that it stands on its own."""

from __future__ import annotations

import errno
import io
import json
import math
import random
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from golf_toys import bare, forked
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.compat.golf.main import Script, run_script
from ingot.compat.golf.pack import pack, read_run
from ingot.errors import CheckpointError, ConfigError

SEEDS = (1337, 1338, 1339)
TOY = {
    "ITERATIONS": "4", "VAL_LOSS_EVERY": "0", "TRAIN_BATCH_TOKENS": "512", "TRAIN_SEQ_LEN": "32", "VAL_BATCH_SIZE": "2048",
    "NUM_LAYERS": "3", "MODEL_DIM": "32", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "WARMUP_STEPS": "0",
    "MAX_WALLCLOCK_SECONDS": "0", "VOCAB_SIZE": "300",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and three finished runs."""
    folder = tmp_path_factory.mktemp("golf")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvwy", k=draw.randint(2, 8))) for _ in range(200)]
    text = [" ".join(draw.choices(words, k=50)) for _ in range(60)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, model_type="bpe", vocab_size=300, byte_fallback=True,
        add_dummy_prefix=False, pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2,
    )  # fmt: skip
    (folder / "toy.model").write_bytes(model.getvalue())
    ids = [np.array([1, *one], "<u2") for one in sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode(text)]
    (folder / "data").mkdir()
    for split, documents in (("train", ids[10:]), ("val", ids[:10])):
        tokens = np.concatenate(documents)
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, len(tokens)
        (folder / "data" / f"fineweb_{split}_000000.bin").write_bytes(head.tobytes() + tokens.tobytes())
    with chdir(folder):
        for seed in SEEDS:
            assert run_script(Script(), {**TOY, **where(folder), "SEED": str(seed), "RUN_ID": f"toy{seed}"}) == 0
    return folder


def where(folder: Path) -> dict[str, str]:
    return {"DATA_PATH": str(folder / "data"), "TOKENIZER_PATH": str(folder / "toy.model")}


@pytest.fixture
def logs(world: Path, tmp_path: Path) -> Path:
    """A copy of the three runs, to be damaged."""
    shutil.copytree(world / "logs", tmp_path / "logs")
    return tmp_path / "logs"


@pytest.fixture
def edit(logs: Path) -> Callable[..., None]:
    """Changes what a run says of its export, or the value of a variable."""

    def change(run: str, **told: object) -> None:
        path = logs / run / "result.json"
        result = json.loads(path.read_text())
        for name, value in told.items():
            (result["export"] if name in result["export"] else result["export"]["variables"])[name] = value
        path.write_text(json.dumps(result))

    return change


@pytest.fixture(scope="module")
def submission(world: Path) -> Path:
    pack(
        [world / "logs" / f"toy{seed}" for seed in SEEDS],
        world / "records" / "toy",
        name="Toy",
        author="A. Uthor",
        github_id="au",
        blurb="Small.",
    )
    return world / "records" / "toy"


def exact(text: str) -> str:
    return text[text.index("final_int8_zlib_roundtrip_exact") :].split("\n")[0]


def test_a_submission_holds_page_numbers_code_logs_and_artifacts(submission: Path) -> None:
    assert sorted(path.name for path in submission.iterdir() if path.is_file()) == sorted(
        ["README.md", "submission.json", "train_gpt.py", "final_model.int8.ptz", *(f"train_seed{seed}.log" for seed in SEEDS)]
        + [f"final_model_seed{seed}.int8.ptz" for seed in SEEDS if seed != best_seed(submission)]
    )


def best_seed(submission: Path) -> int:
    results = json.loads((submission / "submission.json").read_text())["seed_results"]
    return int(min(results, key=lambda seed: results[seed]["val_bpb"]))


def test_its_numbers_are_those_of_the_logs(submission: Path) -> None:
    told = json.loads((submission / "submission.json").read_text())
    logs = {seed: (submission / f"train_seed{seed}.log").read_text() for seed in SEEDS}
    scores = {seed: float(exact(log).rpartition(":")[2]) for seed, log in logs.items()}
    mean = sum(scores.values()) / 3
    assert {seed: told["seed_results"][str(seed)]["val_bpb"] for seed in SEEDS} == scores
    assert (told["author"], told["github_id"], told["name"], told["blurb"]) == ("A. Uthor", "au", "Toy", "Small.")
    assert told["seeds"] == list(SEEDS) and told["val_bpb"] == told["mean"] == pytest.approx(mean)
    assert told["std"] == pytest.approx(math.sqrt(sum((score - mean) ** 2 for score in scores.values()) / 2))
    assert told["bytes_code"] == (submission / "train_gpt.py").stat().st_size
    sizes = [path.stat().st_size for path in submission.glob("*.ptz")]
    assert told["bytes_total"] == max(sizes) + told["bytes_code"] and f"Code size: {told['bytes_code']} bytes" in logs[1337]
    assert told["p"] > 0.9 and told["reference"] == 1.2244 and told["torch"] and told["hardware"].startswith("1 x cpu")


def test_its_page_shows_what_differs_from_the_baseline_and_how_to_run_it(submission: Path) -> None:
    page = (submission / "README.md").read_text()
    assert "| NUM_LAYERS | 9 | 3 |" in page and "| MODEL_DIM | 512 | 32 |" in page and "MATRIX_LR" not in page
    assert f"SEED={best_seed(submission)} python train_gpt.py" in page
    assert "EVAL_ONLY_PATH=final_model.int8.ptz python train_gpt.py" in page


def test_its_code_scores_its_artifact(world: Path, submission: Path) -> None:
    code, shown = forked(submission, EVAL_ONLY_PATH="final_model.int8.ptz", **where(world))
    (submission / "forked.out").unlink()
    assert code == 0, shown
    assert exact(shown) == exact((submission / f"train_seed{best_seed(submission)}.log").read_text())


def test_its_code_trains_as_the_run_did_where_nothing_of_ours_is_installed(world: Path, submission: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(submission / "train_gpt.py", tmp_path / "alone")
    ended = bare(tmp_path / "alone", SEED="1338", RUN_ID="again", **where(world))
    assert ended.returncode == 0, ended.stderr
    log = (submission / "train_seed1338.log").read_text()
    assert results(ended.stdout) == results(log)
    again = read_run(tmp_path / "alone" / "logs" / "again")
    assert again.code == (submission / "train_gpt.py").read_bytes()


def results(text: str) -> list[list[str]]:
    """Losses, scores and sizes in a log, without the times beside them."""
    lines = [line.split() for line in text.split("\n") if line.startswith(("step:", "Code", "Serialized", "Total", "final_"))]
    return [[word for word in line if not word.startswith(("train_time:", "step_avg:", "eval_time:"))] for line in lines]


def test_one_run_makes_a_submission_without_a_spread(logs: Path, tmp_path: Path) -> None:
    told = pack([logs / "toy1337"], tmp_path / "one", name="One")
    assert told["std"] is None and told["p"] is None and told["seeds"] == [1337]
    assert "(seed 1337)" in (tmp_path / "one" / "README.md").read_text()


def test_a_run_brings_its_own_log(logs: Path) -> None:
    assert [read_run(logs / f"toy{seed}").log for seed in SEEDS] == [(logs / f"toy{seed}.txt").read_text() for seed in SEEDS]


def test_a_run_that_was_stopped_and_went_on_brings_both_parts_of_its_log(logs: Path, world: Path, tmp_path: Path) -> None:
    """Two sessions: the first ends at step 2 of what the second then takes to 4."""
    with chdir(tmp_path):
        variables = {**TOY, **where(world), "RUN_ID": "parts", "ITERATIONS": "2"}
        assert run_script(Script(), variables) == 0
        state = tmp_path / "logs" / "parts" / "state.json"
        state.write_text(state.read_text().replace("completed", "stopped"))
        with pytest.raises(CheckpointError, match="is not finished: its status is stopped"):
            read_run(tmp_path / "logs" / "parts")
        assert run_script(Script(), variables | {"ITERATIONS": "4"}) == 0
    run = read_run(tmp_path / "logs" / "parts")
    assert run.log == (tmp_path / "logs" / "parts.txt").read_text() and run.result["total_steps"] == 4
    assert "step:1/2 " in run.log and "step:4/4 " in run.log and run.log.count("model_params:") == 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"NUM_LAYERS": "4"}, "NUM_LAYERS is 3 and 4"),
        ({"MATRIX_LR": "0.02"}, "MATRIX_LR is 0.04 and 0.02"),
        ({"dataset": "other"}, "their data is data and other"),
        ({"ranks": 2}, "their ranks are 1 and 2"),
        ({"SEED": "1337"}, "have the same seed, SEED=1337"),
    ],
)
def test_runs_that_differ_by_more_than_the_seed_are_refused(
    logs: Path, tmp_path: Path, edit: Callable[..., None], told: dict[str, object], said: str
) -> None:
    edit("toy1338", **told)
    with pytest.raises(ConfigError, match=said):
        pack([logs / "toy1337", logs / "toy1338"], tmp_path / "out", name="x")
    assert not (tmp_path / "out").exists()


def test_runs_of_different_code_are_refused(logs: Path, tmp_path: Path) -> None:
    code = logs / "toy1338" / "train_gpt.py"
    code.write_bytes(code.read_bytes().replace(b"Trains and scores", b"Scores and trains"))
    with pytest.raises(ConfigError, match="different code"):
        pack([logs / "toy1337", logs / "toy1338"], tmp_path / "out", name="x")


def test_more_bytes_than_the_limit_are_refused_with_what_would_fit(logs: Path, tmp_path: Path, edit: Callable[..., None]) -> None:
    run = read_run(logs / "toy1337")
    edit("toy1337", ARTIFACT_LIMIT_BYTES=str(run.total_bytes - 1))
    with pytest.raises(ConfigError, match=r"1 more than the limit of .* would fit"):
        pack([logs / "toy1337"], tmp_path / "out", name="x")
    edit("toy1337", ARTIFACT_LIMIT_BYTES=str(run.total_bytes))
    pack([logs / "toy1337"], tmp_path / "out", name="x")


def test_files_of_a_submission_that_is_there_are_replaced_only_if_forced_and_other_files_stay(logs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    pack([logs / "toy1337"], output, name="first")
    with pytest.raises(ConfigError, match="--force"):
        pack([logs / "toy1337"], output, name="second")
    (output / "notes").write_text("of the user")
    pack([logs / "toy1337"], output, name="third", force=True)
    assert json.loads((output / "submission.json").read_text())["name"] == "third"
    assert (output / "notes").read_text() == "of the user"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_submission_stays_if_the_new_one_cannot_be_written(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, replace = tmp_path / "out", Path.replace
    pack([logs / "toy1337"], output, name="first")

    def refuse(self: Path, target: Path) -> Path:
        if target.parent == output:
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
        pack([logs / "toy1337"], output, name="second", force=True)
    assert json.loads((output / "submission.json").read_text())["name"] == "first"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_verb_prints_a_table_or_json(logs: Path, tmp_path: Path) -> None:
    words = ["golf", "pack", str(logs / "toy1337"), str(logs / "toy1338"), "--author", "A", "--reference", "99"]
    shown = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "a"), "--name", "Name"], catch_exceptions=False)
    assert shown.exit_code == 0 and "p " in shown.stdout and str(tmp_path / "a") in shown.stdout
    printed = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "b"), "--json"], catch_exceptions=False)
    told = json.loads(printed.stdout)
    assert told["output"] == str(tmp_path / "b") and told["name"] == "toy1337" and told["p"] < 0.01


@pytest.mark.parametrize("file", ["result.json", "environment.json", "train_gpt.py", "artifact/final_model.int8.ptz"])
@pytest.mark.parametrize("content", [None, "[]"])
def test_a_run_whose_files_are_missing_or_not_its_own_is_refused(logs: Path, file: str, content: str | None) -> None:
    path = logs / "toy1337" / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match="toy1337"):
        read_run(logs / "toy1337")


def test_what_is_no_run_is_refused(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("step:1/1 val_loss:1.0\n")
    other = json.loads((logs / "toy1338" / "result.json").read_text()) | {"export": {}}
    (logs / "toy1338" / "result.json").write_text(json.dumps(other))
    for path in (tmp_path / "nothing", tmp_path / "notes.txt", logs / "toy1338" / "artifact", logs / "toy1338"):
        with pytest.raises(CheckpointError, match="run"):
            read_run(path)
