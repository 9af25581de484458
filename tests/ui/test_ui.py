"""`ingot ui` as a browser knows it: what the server tells of runs, whom it answers, and what it never does."""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner
from ui_kit import Events, line, make_run
from web import Web

from ingot.cli.main import app
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import find_checkpoint, save_checkpoint

pytest.importorskip("uvicorn", reason="the extra ui is not installed")
pytest.importorskip("fastapi", reason="the extra ui is not installed")

TOKEN = "a-token"
ALLOWED = {"authorization": f"Bearer {TOKEN}"}


def numbers(packed):
    raw = base64.b64decode(packed)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


@pytest.fixture
def opened(tmp_path):
    """A function that serves folders; the servers end with the test."""
    from ingot.ui.watcher import Watcher
    from ingot.ui.web import make_app

    found = []

    def call(*folders, **options):
        app = make_app(Watcher(folders), TOKEN, **options)
        web = Web(app)
        found.append(web)
        return web

    yield call
    for web in found:
        web.close()


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "runs" / "old", when=1000.0, training__seed=1)
    make_run(tmp_path / "runs" / "group" / "new", when=2000.0, training__seed=2)
    return tmp_path / "runs"


def test_a_page_is_told_all_runs_with_their_numbers_newest_first(opened, folder):
    with Events(opened(folder)) as events:
        events.loaded(2)
        assert events.order == [events.runs["new"]["id"], events.runs["old"]["id"]]
        run = events.runs["new"]
        assert (run["status"], run["steps_left"], run["val_bpb"], run["lines"], run["damaged"]) == ("completed", 80, 2.5, 21, 0)
        assert run["percentiles"]["p50"] == pytest.approx(0.1, rel=0.01) and run["arm"] == events.runs["old"]["arm"]
        trained = next(bins for bins in events.bins if bins["id"] == run["id"] and bins["kind"] == "train")
        assert trained["from"] == 0 and numbers(trained["columns"]["step"]) == list(range(1, 21))
        assert numbers(trained["columns"]["loss"])[1] == 3.5
        judged = next(bins for bins in events.bins if bins["id"] == run["id"] and bins["kind"] == "evaluation")
        assert numbers(judged["columns"]["val_bpb"]) == [2.5] and numbers(judged["columns"]["tokens"]) == [2000.0]


def test_a_new_line_is_told_alone(opened, tmp_path):
    run = make_run(tmp_path / "runs" / "a", status="running")
    with Events(opened(run)) as events:
        events.loaded(1)
        events.bins.clear()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(21))
        events.until(lambda: bool(events.bins))
        assert [bins["from"] for bins in events.bins] == [20] and numbers(events.bins[0]["columns"]["step"]) == [21.0]


@pytest.mark.parametrize("before", [0, 1, 700, 768, 1500, 5000])
def test_a_thousand_further_lines_take_less_than_50_kilobytes(tmp_path, before):
    from ingot.ui.watcher import WatchedRun, _event

    run = make_run(tmp_path / "a", steps=max(1, before))
    watched = WatchedRun(run, "a")
    while watched.read():
        pass
    assert len(_event(watched.bin_messages())) > 100
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(line(step, loss=math.sin(step)) for step in range(before + 1, before + 1001))
    while watched.read():
        pass
    assert watched.look() and len(_event([*watched.bin_messages(), watched.message()])) < 50_000


def test_runs_that_begin_show_up_and_runs_that_are_removed_go(opened, tmp_path):
    (tmp_path / "runs").mkdir()
    with Events(opened(tmp_path / "runs")) as events:
        make_run(tmp_path / "runs" / "a")
        events.until(lambda: "a" in events.runs)
        shutil.rmtree(tmp_path / "runs" / "a")
        events.until(lambda: events.order == [])


def test_a_page_that_is_opened_later_is_told_the_same(opened, folder):
    web = opened(folder)
    with Events(web) as first, Events(web) as second:
        assert first.loaded(2).runs == second.loaded(2).runs


def test_a_page_may_turn_to_the_next_runs(opened, folder, monkeypatch):
    monkeypatch.setattr("ingot.ui.watcher.PAGE_RUNS", 1)
    monkeypatch.setattr("ingot.ui.web.KEEPALIVE_SECONDS", 1000.0)  # a page that is sent nothing is a failure, not a wait
    web = opened(folder)
    with Events(web) as events:
        events.loaded(1)
        assert web.ask("/api/page/1", method="POST") == (200, {"first": 1})
        assert set(events.loaded(2).runs) == {"new", "old"} and events.order == [events.runs["old"]["id"]]


def test_a_damaged_line_is_skipped_and_counted(opened, folder):
    with (folder / "old" / "metrics.jsonl").open("a") as file:
        file.write("{rubbish\n" + line(21))
    with Events(opened(folder)) as events:
        assert events.loaded(2).runs["old"]["damaged"] == 1 and events.runs["old"]["lines"] == 23


def test_names_of_any_bytes_and_files_of_others_do_not_end_the_reading(opened, folder):
    odd = make_run(folder / os.fsdecode(b"odd-\xff\n"), when=3000.0)
    (odd / "samples").mkdir()
    for name in ("step-100.txt", "step-100 (copy).txt", "step-\u00b2.txt"):
        (odd / "samples" / name).write_text("a sample")
    with Events(opened(folder)) as events:
        run = events.loaded(3).runs["odd-\\udcff\\n"]
        assert run["samples"] == [100] and run["path"].endswith(run["name"]) and run["status"] == "completed"


def test_other_hosts_and_pages_of_others_are_refused(opened, folder):
    web = opened(folder)
    host = web.address.removeprefix("http://")
    for path in ("/", "/page/page.js", "/api/events", "/api/settings?runs=a"):
        assert web.ask(path, host="evil.example")[0] == 421
        assert web.ask(path, host="127.0.0.1.evil.example:80")[0] == 421
        assert web.ask(path, origin="http://evil.example")[0] == 403
        assert web.ask(path, origin="null")[0] == 403
    assert web.open("/", origin=f"http://{host}").status == 200
    assert web.open("/", host="localhost:9999").status == 200  # through a tunnel


def test_nothing_but_the_page_and_the_given_runs_is_served(opened, folder, tmp_path):
    (tmp_path / "secret.txt").write_text("hidden words")
    samples = folder / "old" / "samples"
    samples.mkdir()
    (samples / "step-00000005.txt").symlink_to(tmp_path / "secret.txt")
    (samples / "step-00000006.txt").write_text("a sample")
    web = opened(folder / "old")
    with Events(web) as events:
        run = events.loaded(1).runs["old"]["id"]
        assert list(events.runs) == ["old"]
    assert web.ask(f"/api/runs/{run}/samples/6") == (200, {"step": 6, "text": "a sample"})
    for path in (
        "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/uPlot.LICENSE", "/../secret.txt", "/app.py",
        f"/api/runs/{run}/samples/5", f"/api/runs/{run}/samples/7", f"/api/runs/{run}/samples/..%2f..%2fstate.json",
        "/api/runs/../samples/6", "/api/runs/%2e%2e/samples/6", "/api/settings?runs=../new",
    ):  # fmt: skip
        status, told = web.ask(path)
        assert status in (404, 422) and "hidden" not in json.dumps(told), path


def test_looking_changes_nothing_in_a_run_folder(opened, folder):
    def tree():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}

    before, web = tree(), opened(folder)
    with Events(web) as events:
        runs = ",".join(run["id"] for run in events.loaded(2).runs.values())
    assert web.ask(f"/api/settings?runs={runs}")[0] == web.ask(f"/api/statistics?runs={runs}")[0] == 200
    assert tree() == before


def test_stopping_a_run_needs_the_token(opened, tmp_path):
    run = make_run(tmp_path / "a", status="running")
    web = opened(run)
    with Events(web) as events:
        path = f"/api/runs/{events.loaded(1).runs['a']['id']}/stop"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
            status, told = web.ask(path, method="POST", **headers)
            assert status == 401 and "token" in told["error"]["message"] and not (run / "stop").exists()
        assert web.ask(path, authorization=f"Bearer {TOKEN}")[0] == 405  # only by POST
        assert web.ask(path, method="POST", authorization=f"Bearer {TOKEN}") == (200, {"step": 20})
        assert (run / "stop").is_file()


def test_a_run_that_has_ended_is_not_stopped(opened, folder):
    web = opened(folder / "old")
    with Events(web) as events:
        run = events.loaded(1).runs["old"]["id"]
    status, told = web.ask(f"/api/runs/{run}/stop", method="POST", authorization=f"Bearer {TOKEN}")
    assert status == 409 and "is not running" in told["error"]["message"]


def test_settings_that_differ_are_told(opened, folder):
    make_run(folder / "wide", model__width=128, training__seed=1)
    web = opened(folder)
    with Events(web) as events:
        ids = {name: run["id"] for name, run in events.loaded(3).runs.items()}
        arms = {name: run["arm"] for name, run in events.runs.items()}
    assert arms["old"] == arms["new"] != arms["wide"]
    told = web.ask(f"/api/settings?runs={ids['old']},{ids['wide']}")[1]
    assert told == {"runs": [ids["old"], ids["wide"]], "rows": [["model.width", "96", "128"]]}
    alone = web.ask(f"/api/settings?runs={ids['wide']}")[1]["rows"]
    assert ["model.width", "128"] in alone and "optimizer.beta1" not in dict(alone)


def test_runs_of_several_seeds_are_one_arm_with_a_mean_and_a_spread(opened, folder):
    web = opened(folder)
    with Events(web) as events:
        ids = ",".join(run["id"] for run in events.loaded(2).runs.values())
    status, told = web.ask(f"/api/statistics?runs={ids}")
    assert (status, told) == (200, {"arms": [{"runs": "new, old", "n": 2, "mean": 2.5, "std": 0.0}], "tests": []})


def test_the_playground_writes_what_the_model_writes_with_each_tokens_score(opened, reference):
    from ingot.api import load

    expected = load(reference).generate("ab", tokens=8, temperature=0.5, seed=3, stop_at_end=True)
    web = opened(reference)
    with Events(web) as events:
        run = events.loaded(1).runs["reference"]["id"]
    status, about = web.ask(f"/api/runs/{run}/open", b"ab", **ALLOWED)
    assert status == 200 and about["checkpoint"] == "step-00000040" and about["context"] == 32  # a mark and two bytes
    asked = {"prompt": "ab", "max_tokens": 8, "temperature": 0.5, "seed": 3, "logprobs": 5, "echo": True}
    status, told = web.ask(f"/api/runs/{run}/completions", asked, **ALLOWED)
    assert status == 200
    choice = told["choices"][0]
    assert choice["text"] == expected
    assert len(choice["logprobs"]["tokens"]) == 1 + 2 + 8 and all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert all(len(top) == 5 for top in choice["logprobs"]["top_logprobs"][1:])
    with web.open(f"/api/runs/{run}/completions", {**asked, "max_tokens": 70, "echo": True, "stream": True}, **ALLOWED) as answer:
        parts = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    scores = [part["choices"][0]["logprobs"] for part in parts]
    assert sum(len(part["tokens"]) for part in scores) == 1 + 2 + 70  # twice what the model sees
    assert all(value < 0 for part in scores for value in part["token_logprobs"][1:])


def test_a_text_that_is_being_written_ends_with_an_error_when_another_model_is_opened(opened, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "runs" / "a")
    shutil.copytree(reference, tmp_path / "runs" / "b")
    web = opened(tmp_path / "runs")
    with Events(web) as events:
        a, b = (events.loaded(2).runs[name]["id"] for name in ("a", "b"))
    web.ask(f"/api/runs/{a}/open", b"", **ALLOWED)
    engine = web.app.state.playground._opened[1]
    write = engine.model.backend.generate

    def generate(rows, sampling):
        for number, token in enumerate(write(rows, sampling)):
            yield token
            while number == 10 and engine._arrived.empty():  # until it is told to close
                time.sleep(0.01)

    engine.model.backend.generate = generate
    asked = {"prompt": "a", "max_tokens": 20, "seed": 3, "stream": True}
    with web.open(f"/api/runs/{a}/completions", asked, **ALLOWED) as stream:
        assert stream.readline().startswith(b"data: ")
        assert web.ask(f"/api/runs/{b}/open", b"", **ALLOWED)[0] == 200
        assert b"the model was closed before" in stream.read()


def test_a_run_without_a_checkpoint_says_so_in_the_playground(opened, folder):
    web = opened(folder / "old")
    with Events(web) as events:
        run = events.loaded(1).runs["old"]["id"]
    status, told = web.ask(f"/api/runs/{run}/open", b"", **ALLOWED)
    assert status == 409 and "has no checkpoint yet" in told["error"]["message"]


def test_without_the_token_no_model_is_opened(opened, reference):
    web = opened(reference)
    with Events(web) as events:
        run = events.loaded(1).runs["reference"]["id"]
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path, body in (("open", b"ab"), ("completions", {"prompt": "ab", "max_tokens": 1})):
            status, told = web.ask(f"/api/runs/{run}/{path}", body, **headers)
            assert status == 401 and "token" in told["error"]["message"]
    assert web.app.state.playground._opened is None


@pytest.mark.parametrize("allowed", [False, True])
def test_the_code_of_a_custom_model_runs_only_if_the_server_allows_custom_models(opened, reference, tmp_path, allowed):
    shutil.copytree(reference, tmp_path / "run")
    code = f"open({str(tmp_path / 'ran')!r}, 'x')\nraise ValueError\n"
    (tmp_path / "run" / "model.py").write_text(code)
    saved = find_checkpoint(reference)
    config = {**saved.progress["config"], "model": {"family": "file", "file": "model.py"}}
    progress = {**saved.progress, "config": config, "model_file_sha256": hashlib.sha256(code.encode()).hexdigest()}
    save_checkpoint(tmp_path / "run" / "checkpoints", 41, {"model": list(saved.weights.values())}, progress)
    web = opened(tmp_path / "run", allow_custom_models=allowed)
    with Events(web) as events:
        run = events.loaded(1).runs["run"]["id"]
    status, told = web.ask(f"/api/runs/{run}/open", b"", **ALLOWED)
    assert (tmp_path / "ran").exists() == allowed
    assert (status, "--allow-custom-models" in told["error"]["message"]) == ((409, False) if allowed else (403, True))


def test_a_page_that_is_closed_is_forgotten(opened, folder):
    web = opened(folder / "old")
    with Events(web) as events:
        events.loaded(1)
    watcher = web.app.state.watcher
    deadline = time.monotonic() + 300
    while watcher.pages:  # the server finds out that the page is gone when it next says something
        (folder / "old" / "state.json").touch()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_server_ends_while_pages_are_open(opened, folder):
    web = opened(folder)
    web.server.config.timeout_graceful_shutdown = 600  # longer than the test waits: streams that do not end keep the server
    with Events(web) as told, Events(web) as untold:
        told.loaded(2)
        web.server.should_exit = True
        web.thread.join(300)
        has_ended = not web.thread.is_alive()
        web.server.force_exit = True
        tails = [page._answer.read()[-2:] for page in (told, untold)]
        assert has_ended and set(tails) <= {b"", b"\n", b"\n\n"}, tails  # and not cut off


def test_the_page_asks_nothing_of_anybody_else():
    from ingot.ui.web import MEDIA_TYPES, PAGE, POLICY

    files = [path for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES and not path.name.startswith("uPlot")]
    assert {"index.html", "page.js", "charts.js", "style.css"} <= {path.name for path in files}
    for path in files:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|['\"(]//|innerHTML|\beval\(", text), path.name
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY and "*" not in POLICY


def test_every_file_that_the_page_names_is_there():
    from ingot.ui.web import PAGE

    named = re.findall(r'(?:src|href)="/page/([^"]+)"', (PAGE / "index.html").read_text())
    named += [
        name for path in PAGE.glob("*.js") if path.name[0] != "u" for name in re.findall(r'from "\./([^"]+)"', path.read_text())
    ]
    assert len(set(named)) >= 9 and all((PAGE / name).is_file() for name in named)


def call(*words):
    return CliRunner().invoke(app, ["ui", *map(str, words)])


def test_without_the_extra_it_says_which_to_install(monkeypatch, folder):
    for name in ("uvicorn", "ingot.serve.app"):
        monkeypatch.setitem(sys.modules, name, None)
    error = call(folder).exception
    assert isinstance(error, ConfigError) and "pip install 'ingot-lm[ui]'" in str(error)


def test_the_page_is_served_without_torch():
    program = "import sys, ingot.ui.web; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_folder_that_is_not_there_is_told(tmp_path):
    error = call(tmp_path / "nowhere").exception
    assert isinstance(error, CheckpointError) and "nowhere" in str(error)


def test_the_extra_is_what_serve_needs_and_everybody_else_gets_nothing():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ui"] == project["optional-dependencies"]["serve"]
    assert not any(name.startswith(("fastapi", "uvicorn", "starlette")) for name in project["dependencies"])
