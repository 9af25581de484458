"""Any number of ranks is the same run: the same rows, the same losses, the same score, one voice."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from forks import forks
from golf_toys import Golf, Ran, run_here, variables
from programs import PATIENCE

from ingot.console import entry

TRAINED = (2, 3)  # ranks that share the 16 rows of a step: 8 + 8, and 5 + 5 + 6
SCORED = (3,)  # and the 41 rows of validation


class Worlds:
    """The folders of runs by their number of ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, name: str) -> list[Ran]:
        """What every rank of a run printed."""
        outputs = sorted((self.root / name).glob("rank-*.out"), key=lambda path: int(path.stem[5:]))
        return [Ran(0, path.read_text(), "") for path in outputs]


@pytest.fixture(scope="module")
def alone(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """One rank."""
    folder = tmp_path_factory.mktemp("alone")
    with chdir(folder):
        return folder, run_here(toys, TRAIN_LOG_EVERY="1")


@pytest.fixture(scope="module")
def worlds(toys: Path, alone: tuple[Path, Ran], tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Trained by two and three ranks; what one rank trained, scored by three."""
    root = tmp_path_factory.mktemp("worlds")
    jobs: list[tuple[str, int, dict[str, str]]] = []
    for ranks in TRAINED:
        (root / f"train-{ranks}").mkdir()
        jobs.append((str(root / f"train-{ranks}"), ranks, variables(toys, TRAIN_LOG_EVERY="1")))
    for ranks in SCORED:
        shutil.copytree(alone[0], root / f"score-{ranks}")
        given = {"EVAL_ONLY_PATH": "final_model.int8.ptz", "VAL_BATCH_SIZE": str(600 * ranks)}
        jobs.append((str(root / f"score-{ranks}"), ranks, variables(toys, **given)))
    out, err, environment = root / "out", root / "err", Golf(toys).environment()
    words = [str(Path(__file__).with_name("golf_worlds.py")), json.dumps(jobs)]
    ended = forks(environment["PYTHONPATH"]).start(words, root, environment, (os.devnull, out, err))
    assert ended.wait(PATIENCE) == 0, err.read_text()
    assert json.loads(out.read_text()) == [[0] * ranks for _, ranks, _ in jobs], [
        path.read_text() for path in root.rglob("*.out")
    ]
    return Worlds(root)


@pytest.mark.parametrize("ranks", SCORED)
def test_the_score_is_the_same_for_any_number_of_ranks(worlds: Worlds, alone: tuple[Path, Ran], ranks: int) -> None:
    assert worlds[f"score-{ranks}"][0].exact == pytest.approx(alone[1].exact, rel=1e-6)


@pytest.mark.parametrize("ranks", TRAINED)
def test_the_losses_are_the_same_for_any_number_of_ranks(worlds: Worlds, alone: tuple[Path, Ran], ranks: int) -> None:
    first = worlds[f"train-{ranks}"][0]
    assert first.losses == pytest.approx(alone[1].losses, abs=2e-4) and len(first.losses) == 4
    assert first.exact == pytest.approx(alone[1].exact, abs=1e-4)


@pytest.mark.parametrize("ranks", TRAINED)
def test_all_ranks_hold_the_same_weights_at_the_end(worlds: Worlds, ranks: int) -> None:
    sums = [path.read_text() for path in (worlds.root / f"train-{ranks}").glob("*.sha256")]
    assert len(sums) == ranks and len(set(sums)) == 1


def test_only_the_first_rank_prints_and_writes(worlds: Worlds) -> None:
    for name in ("train-3", "score-3"):
        first, *others = worlds[name]
        assert first.out.startswith("logs/toy.txt\n") and [other.out for other in others] == ["", ""]
    left = sorted(path.name for path in (worlds.root / "train-3").iterdir() if not path.name.startswith("rank"))
    assert left == ["final_model.int8.ptz", "final_model.pt", "logs"]


@pytest.mark.parametrize(("ranks", "steps"), [(2, 4), (3, 3)])
def test_the_log_says_how_many_there_are(worlds: Worlds, ranks: int, steps: int) -> None:
    assert f"world_size:{ranks} grad_accum_steps:{steps}" in worlds[f"train-{ranks}"][0].lines


@pytest.mark.long
def test_torchrun_starts_it(golf: Golf, alone: tuple[Path, Ran]) -> None:
    ran = golf.program("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN_LOG_EVERY="1")
    assert ran.code == 0, ran.err
    assert ran.lines[0] == "logs/toy.txt" and "world_size:2 grad_accum_steps:4" in ran.lines
    assert ran.losses == pytest.approx(alone[1].losses, abs=2e-4) and len(ran.losses) == 4


def test_more_ranks_than_rows_are_refused(golf: Golf) -> None:
    said = golf.refuses(2, RANK="0", WORLD_SIZE="17")
    assert "17 ranks" in said and said.endswith("use fewer ranks or raise TRAIN_BATCH_TOKENS")


def test_what_every_rank_finds_wrong_the_first_one_says(golf: Golf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "PEER_WAIT_SECONDS", 0)
    assert golf(2, RANK="1", WORLD_SIZE="2", NUM_HEADS="3").err == ""
    said = golf.refuses(2, RANK="0", WORLD_SIZE="2", NUM_HEADS="3")
    assert said.startswith("NUM_HEADS=3 ") and "MODEL_DIM=16" in said and said.endswith(" 2")
