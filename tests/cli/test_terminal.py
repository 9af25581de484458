"""What a user sees on a terminal: a line that moves from the first moment, never wraps, and leaves nothing after."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from programs import Ingot, train_words
from terminals import Screen, Terminal

from ingot.data.store.shards import HEADER_INTS, MAGIC, VERSION

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from hub_server import HubServer, serving

BAR = re.compile(r"[━─]{4,}")
SLOW = {"training.max_steps": 100_000, "training.save_every": 0}  # ends only when it is told to

Open = Callable[..., Terminal]


@pytest.fixture
def terminal(ingot: Ingot, tmp_path: Path) -> Iterator[Open]:
    """Start `ingot` in a terminal of so many columns; it ends with the test."""
    started: list[Terminal] = []

    def start(*words: object, columns: int = 80, fresh: bool = False, **environment: str) -> Terminal:
        started.append(Terminal([*map(str, words)], tmp_path, {**ingot.environment, **environment}, columns, fresh=fresh))
        return started[-1]

    yield start
    for program in started:
        program.close()


def bars(screen: Screen) -> list[str]:
    """Every progress line that was ever shown."""
    return [row for row in screen.shown if BAR.search(row)]


def with_words(lines: list[str], *words: str) -> bool:
    return any(all(word in line for word in words) for line in lines)


def is_clean(screen: Screen) -> bool:
    """Whether the terminal is as a shell wants it: the cursor visible, at the start of a row, and no bar left."""
    return (
        screen.cursor_visible and screen.column == 0 and screen.rows[screen.row] == "" and not any(map(BAR.search, screen.rows))
    )


@pytest.mark.parametrize("columns", [80, 160])
def test_training_shows_what_is_waited_for_and_what_is_left_on_a_cpu_too(terminal: Open, data, tmp_path, columns):
    settings = {"evaluation.every": 20, "evaluation.sample_tokens": 8, "artifact.score": "true"}
    program = terminal(*train_words(data, tmp_path / "run", **settings), columns=columns, fresh=columns == 80)
    assert program.end() == 0
    screen = program.screen
    shown = bars(screen)
    assert screen.shown[0].startswith("starting")  # before torch has loaded
    assert with_words(shown, "training", "loss", "%") and with_words(shown, "training", "steps left")
    assert with_words(shown, "evaluating", "rows", "steps left")
    assert with_words(shown, "scoring the artifact", "rows") and not with_words(shown, "scoring", "left")
    assert with_words(screen.shown, "saving") and with_words(screen.shown, "exporting")
    assert with_words(shown, "tok/s") == (columns == 160)  # the least important goes first
    assert all(len(line) < columns for line in shown)
    assert is_clean(screen)


def test_a_budget_in_seconds_is_counted_down_in_seconds(terminal: Open, data, tmp_path):
    settings = {**SLOW, "budget.seconds": 100_000, "training.max_steps": "null"}
    program = terminal(*train_words(data, tmp_path / "run", **settings))
    program.until(lambda screen: with_words(bars(screen), "training", "left"), "counted down")
    program.press_ctrl_c()
    assert program.end() == 0
    assert not with_words(bars(program.screen), "steps left")


def test_a_terminal_that_is_resized_keeps_one_whole_line(terminal: Open, data, tmp_path):
    settings = {**SLOW, "training.max_steps": 4_000}  # 40 columns have room for the percent alone, which shall move
    program = terminal(*train_words(data, tmp_path / "run", **settings), columns=160)
    program.shows("tok/s")
    for columns in (80, 40, 120):
        program.resize(columns)
        before = len(program.screen.shown)
        program.until(lambda screen, before=before: len(screen.shown) > before + 4, f"drew at {columns} columns")
        assert len(program.screen.shown[-1]) < columns
        assert sum(row.startswith("training") for row in program.screen.rows) <= 1, "\n".join(program.screen.rows)
    program.press_ctrl_c()
    assert program.end() == 0
    assert is_clean(program.screen)


def test_ctrl_c_saves_says_so_on_a_line_of_its_own_and_leaves_the_terminal_clean(terminal: Open, data, tmp_path):
    program = terminal(*train_words(data, tmp_path / "run", **SLOW))
    program.shows("loss")
    program.press_ctrl_c()
    assert program.end() == 0
    assert "SIGINT: saving and stopping; send SIGINT again to end at once" in program.screen.rows
    assert any(row.startswith("Resume with: ingot train") for row in program.screen.rows)
    assert is_clean(program.screen)


def test_a_second_ctrl_c_leaves_the_terminal_clean_too(terminal: Open, data, tmp_path):
    program = terminal(*train_words(data, tmp_path / "run", **{**SLOW, "training.tokens_per_step": 262_144}))
    program.shows("training")
    program.press_ctrl_c()
    program.until(lambda screen: any(row.startswith("SIGINT") for row in screen.rows), "heard the first")
    program.press_ctrl_c()
    assert program.end() == 130
    assert is_clean(program.screen)


def test_preparing_shows_how_far_it_is(terminal: Open, shared, data, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((shared / "text.txt").read_text() * 40)
    program = terminal("data", "prepare", "--input", text, "--tokenizer", "byte", "--output", tmp_path / "out")
    assert program.end() == 0
    shown = bars(program.screen)
    assert with_words(shown, "preparing", "%", "MB") and all(len(line) < 80 for line in shown)
    assert is_clean(program.screen)


def test_evaluating_shows_how_far_it_is(terminal: Open, reference):
    program = terminal("eval", reference, "--device", "cpu")
    assert program.end() == 0
    assert with_words(bars(program.screen), "evaluating", "%", "rows")
    assert with_words(program.screen.shown, "loading")
    assert is_clean(program.screen)


def test_exporting_shows_how_far_it_and_its_scoring_are(terminal: Open, reference, tmp_path):
    program = terminal("export", reference, "--device", "cpu", "-o", tmp_path / "model.ingot", "--codec", "zlib")
    assert program.end() == 0
    shown = bars(program.screen)
    assert with_words(shown, "compressing", "%", "MB") and with_words(shown, "scoring the artifact", "rows")
    assert is_clean(program.screen)


REPO, SETS = "owner/golf", "datasets/fineweb10B_sp1024"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A hub that has two shards for training, one for validation and a tokenizer."""

    def shard(tokens: int) -> bytes:
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = MAGIC, VERSION, tokens
        return header.tobytes() + np.arange(tokens, dtype="<u2").tobytes()

    stats = {"files_train": 2, "files_val": 1, "tokens_train": 2000, "tokens_val": 1000}
    listed = {
        "datasets": [{"name": "fineweb10B_sp1024", "tokenizer_name": "t", "stats": stats}],
        "tokenizers": [{"name": "t", "model_path": "tokenizers/t.model"}],
    }
    files = {f"{SETS}/fineweb_train_{i:06d}.bin": shard(1000) for i in range(2)}
    files |= {f"{SETS}/fineweb_val_000000.bin": shard(1000), "tokenizers/t.model": b"model" * 9}
    files["manifest.json"] = json.dumps(listed).encode()
    with serving() as server:
        server.commit(REPO, {f"datasets/{name}": content for name, content in files.items()})
        yield server


def download_words(tmp_path: Path) -> list[object]:
    return ["data", "download", "--repo", REPO, "--train-shards", 2, "--output", tmp_path / "out"]


def test_downloading_shows_how_far_it_is(terminal: Open, hub: HubServer, tmp_path):
    program = terminal(*download_words(tmp_path), HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "hub"))
    assert program.end() == 0, "\n".join(program.screen.rows)
    assert with_words(program.screen.shown, "asking the hub")
    assert with_words(bars(program.screen), "of 4 files", "MB")
    assert is_clean(program.screen)


def test_ctrl_c_in_the_middle_of_a_download_is_one_line_and_a_clean_terminal(terminal: Open, hub: HubServer, tmp_path):
    hub.fail("fineweb_val_000000.bin", pause=threading.Event())
    program = terminal(*download_words(tmp_path), HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "hub"))
    program.shows("of 4 files")
    program.press_ctrl_c()
    assert program.end() == 130
    assert [row for row in program.screen.rows if row] == ["ingot: error: interrupted"]
    assert is_clean(program.screen)
