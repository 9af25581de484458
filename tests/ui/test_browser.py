"""The page in a browser: it opens, follows a run that trains, compares, writes, and asks nothing of anybody else.

Needs Chromium (apt-get install chromium) and PyPI's playwright; INGOT_CHROMIUM names a browser that is not on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import Ingot, train_words
from ui_kit import line, make_run

pytestmark = pytest.mark.long

PATIENCE = 180_000  # milliseconds


class Seen:
    """A page, all that it asked for, and what went wrong in it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.page = browser.new_page(viewport={"width": 1300, "height": 900})
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda told: self.wrong.append(told.text) if told.type == "error" else None)
        self.address = address
        self.page.goto(address)

    def drawn(self, runs: int) -> None:
        self.page.locator(f"body[data-drawn='{runs}']").wait_for(timeout=PATIENCE)

    def tab(self, name: str) -> None:
        self.page.locator(f"#tabs button[data-tab={name}]").click()

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def is_sound(self) -> None:
        """Nothing went wrong, and nothing was asked of anybody but this server."""
        assert self.wrong == []
        assert self.asked and all(url.startswith(f"{self.address}/") for url in self.asked)


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens the page of `ingot ui` on a folder."""
    servers, pages = [], []

    def call(folder: Path) -> Seen:
        environment = {**os.environ, "INGOT_CACHE": str(tmp_path / "cache")}
        words = [sys.executable, "-m", "ingot", "ui", str(folder), "--port", "0"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        servers.append(server)
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        pages.append(Seen(browser, found[0]))
        pages[-1].token = server.stdout.readline().split()[-1]  # type: ignore[attr-defined]
        return pages[-1]

    yield call
    for seen in pages:
        seen.page.close()
    for server in servers:
        server.terminate()
        server.wait()


def test_an_empty_folder_says_what_to_do_and_a_run_that_begins_shows_up(shown: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    seen = shown(tmp_path / "runs")
    seen.page.get_by_text("There are no runs").wait_for(timeout=PATIENCE)
    make_run(tmp_path / "runs" / "first")
    seen.drawn(1)
    assert seen.text("#runs .name") == "first" and seen.text("#summary") == "1 run"
    seen.is_sound()


def test_new_lines_are_drawn_as_they_come_and_the_token_stops_the_run(shown: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", status="running")
    seen = shown(tmp_path / "runs")
    seen.drawn(1)
    for step in range(21, 26):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(step))
        seen.page.locator(f"#chart-loss[data-last='{step}']").wait_for(timeout=PATIENCE)
    seen.page.locator("#tiles .stop").click()
    seen.page.fill("#token", "wrong")
    seen.page.get_by_role("button", name="Save and stop").click()
    seen.page.get_by_text("Not stopped").wait_for(timeout=PATIENCE)
    assert not (run / "stop").exists()
    seen.wrong.clear()  # the browser's own line about the refusal
    seen.page.fill("#token", seen.token)
    seen.page.get_by_role("button", name="Save and stop").click()
    deadline = time.monotonic() + 300
    while not (run / "stop").exists():
        assert time.monotonic() < deadline
        seen.page.wait_for_timeout(50)
    seen.is_sound()


def test_a_chart_is_drawn_when_the_window_comes_to_it_and_has_what_came_before(shown: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    seen = shown(tmp_path / "runs")
    seen.page.set_viewport_size({"width": 600, "height": 500})  # one chart below the other
    run = make_run(tmp_path / "runs" / "a", status="running")
    seen.drawn(1)
    seen.page.locator("#chart-loss").scroll_into_view_if_needed()
    seen.page.locator("#chart-loss[data-last='20']").wait_for(timeout=PATIENCE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(21))
    seen.page.locator("#chart-loss[data-last='21']").wait_for(timeout=PATIENCE)
    assert seen.page.locator("#chart-rate canvas").count() == 0
    seen.page.locator("#chart-rate").scroll_into_view_if_needed()
    seen.page.locator("#chart-rate[data-last='21'] canvas").wait_for(timeout=PATIENCE)
    seen.is_sound()


def test_a_run_that_trains_is_followed_to_its_end(shown: Any, data: Path, ingot: Ingot, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    seen = shown(tmp_path / "runs")
    words = train_words(data, tmp_path / "runs" / "live", training__max_steps=60, tracking__log_every=1)
    program = ingot.start(*words)
    seen.page.locator("#runs .status.running, #runs .status.completed").wait_for(timeout=PATIENCE)
    seen.drawn(1)
    seen.page.locator("#chart-loss[data-last='60']").wait_for(timeout=PATIENCE)
    seen.page.locator("#runs .status.completed").wait_for(timeout=PATIENCE)
    assert program.end() == 0
    seen.page.locator("#tiles").get_by_text("artifact bytes").wait_for(timeout=PATIENCE)
    seen.is_sound()


def test_two_settings_and_three_seeds_are_compared_and_a_model_writes(shown: Any, reference: Path, tmp_path: Path) -> None:
    for name, section, setting, value in (
        ("seed-1", "training", "seed", 1),
        ("seed-2", "training", "seed", 2),
        ("seed-3", "training", "seed", 3),
        ("other", "optimizer", "floor", 0.3),
    ):
        shutil.copytree(reference, tmp_path / "runs" / name)
        config = yaml.safe_load((reference / "config.yaml").read_text())
        config[section][setting] = value
        (tmp_path / "runs" / name / "config.yaml").write_text(yaml.safe_dump(config))
    seen = shown(tmp_path / "runs")
    seen.drawn(4)
    seen.page.locator("#chart-loss[data-lines='2']").wait_for(timeout=PATIENCE)  # three seeds are one line with a band
    seen.page.get_by_label("seeds as a band").uncheck()
    seen.page.locator("#chart-loss[data-lines='4']").wait_for(timeout=PATIENCE)
    for axis in ("tokens", "elapsed_seconds", "flops", "artifact_bytes", "step"):
        seen.page.select_option("#axis", axis)
        seen.drawn(4)
    seen.tab("compare")
    seen.page.get_by_text("Runs that differ only in their seeds").wait_for(timeout=PATIENCE)
    told = seen.text("#tab")
    assert "optimizer.floor" in told and "0.3" in told and "training.seed" in told
    assert re.search(r"seed-\d, seed-\d, seed-\d\s+3", told)
    seen.tab("speed")
    seen.page.get_by_text("longest stalls").wait_for(timeout=PATIENCE)
    seen.tab("samples")
    seen.page.locator(".samples").wait_for(timeout=PATIENCE)
    seen.tab("playground")
    seen.page.fill("#prompt", "the")
    seen.page.fill("#open-token", seen.token)
    seen.page.locator("#write").click()
    seen.page.locator(".token").nth(20).wait_for(timeout=PATIENCE)
    seen.page.locator(".token").nth(10).hover()
    assert re.search(r"probability \d+\.\d\d%, \d+\.\d\d bits", seen.text(".result aside"))
    seen.page.locator("#said").get_by_text("bits per byte").wait_for(timeout=PATIENCE)
    seen.is_sound()
