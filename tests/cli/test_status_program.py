"""`ingot status` and `ingot stop`, on runs that are going on, have ended, or are another host's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from programs import Ingot, checkpoints, one_line, state, train_words, write_state
from terminals import Terminal

from ingot.runs.state import Heartbeat, this_process
from ingot.runs.view import Run

ENDLESS = {"training__max_steps": 1_000_000, "training__save_every": 0, "training__save_seconds": 1000}


def test_a_run_is_seen_stopped_and_seen_again(ingot: Ingot, data, tmp_path):
    run = tmp_path / "runs" / "first"
    words = train_words(data, run, **ENDLESS, tracking__heartbeat_seconds=0.05)
    program = ingot.start(*words)
    program.said("step 5/")
    [seen] = json.loads(ingot("status", run, "--json").stdout)
    assert seen["status"] == "running" and seen["pid"] == program.process.pid and seen["stop_reason"] is None
    assert seen["steps_left"] == 1_000_000 - seen["step"] and seen["last_heard_seconds"] < 60
    asked = json.loads(ingot("stop", run, "--json").stdout)
    assert asked["run"] == str(run) and asked["signalled"] is False
    assert program.end() == 0 and "stop_file: saving and stopping" in program.stderr
    assert list(checkpoints(run)) == [state(run)["step"]] and not (run / "stop").exists()
    text = ingot("status", folder=tmp_path).stdout
    assert "runs/first" in text and "stopped (stop_file)" in text and "last heard" in text
    line = one_line(ingot("stop", run, code=1))
    assert "is not running: its status is stopped" in line


def test_force_also_signals_a_process_of_this_host(ingot: Ingot, data, tmp_path):
    program = ingot.start(*train_words(data, tmp_path / "run", **ENDLESS))
    program.said("step 5/")
    assert json.loads(ingot("stop", tmp_path / "run", "--force", "--json").stdout)["signalled"] is True
    assert program.end() == 0
    assert state(tmp_path / "run")["stop_reason"] in ("signal:SIGTERM", "stop_file")


def test_a_run_of_another_host_is_asked_by_the_file_and_never_signalled(ingot: Ingot, tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        run = write_state(tmp_path / "run", host="elsewhere", boot_id="other", pid=bystander.pid)
        line = one_line(ingot("stop", run, "--force", code=1))
        assert "runs on elsewhere" in line and "--force" in line
        assert json.loads((run / "stop").read_text())["host"] == this_process()[0]
        assert bystander.poll() is None
        bystander.communicate(b"\n")


def test_a_process_that_got_the_number_of_a_dead_run_later_is_not_taken_for_it(ingot: Ingot, tmp_path):
    run = write_state(tmp_path / "run", updated_at="2020-01-01T00:00:00+00:00", pid=os.getpid())
    assert json.loads(ingot("status", run, "--json").stdout)[0]["status"] == "crashed"
    assert "is not running: its status is crashed" in one_line(ingot("stop", run, "--force", code=1))


def test_another_hosts_run_is_told_by_when_it_was_last_heard(ingot: Ingot, tmp_path):
    run = write_state(tmp_path / "run", host="elsewhere", boot_id="other", heartbeat_seconds=1000.0, budget_seconds=90.0)
    [seen] = json.loads(ingot("status", run, "--json").stdout)
    assert (seen["status"], seen["host"], seen["budget_seconds_left"]) == ("running", "elsewhere", 90.0)
    text = ingot("status", run).stdout
    assert "s ago" in text and "90 s of training" in text and "on elsewhere" in text


def test_several_runs_are_a_table_and_folders_that_are_none_are_passed_over(ingot: Ingot, tmp_path):
    for name in ("a", "b"):
        write_state(tmp_path / "runs" / name, status="completed", step=7)
    (tmp_path / "runs" / "notes").mkdir()
    lines = ingot("status", folder=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "runs/a", "runs/b"]


def test_no_runs_and_a_folder_that_is_none_are_told(ingot: Ingot, tmp_path):
    assert "no runs in runs/" in one_line(ingot("status", folder=tmp_path, code=4))
    assert "is not a run folder" in one_line(ingot("status", tmp_path, code=4))
    assert "is not a run folder" in one_line(ingot("stop", tmp_path, code=4))


def test_looking_loads_neither_torch_nor_what_else_is_slow(tmp_path):
    run = write_state(tmp_path / "run", status="completed")
    program = (
        "import sys\nfrom ingot.cli.main import call\n"
        f"call(['status', {str(run)!r}, '--json'])\n"
        "assert not {'torch', 'numpy', 'yaml', 'ingot.config.schema'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_it_does_not_understand_itself_is_answered_as_every_verb_does(ingot: Ingot):
    assert "Keep showing the runs" in ingot("status", "--help").stdout
    assert "No such option: --wach" in one_line(ingot("status", "--wach", code=2))


def test_a_state_is_seen_whole_while_it_is_being_replaced(tmp_path):
    with Heartbeat(tmp_path, 0.0001, step=7, error="x" * 100_000):
        for _ in range(300):
            seen = Run.open(tmp_path).status().state
            assert (seen.step, len(seen.error or "")) == (7, 100_000)
            time.sleep(0.0005)


def test_watching_draws_in_one_place_until_the_run_has_ended(ingot: Ingot, tmp_path):
    run = write_state(tmp_path / "run", step=11)
    terminal = Terminal(["status", str(run), "--watch"], tmp_path, ingot.environment, 40)
    try:
        terminal.until(lambda screen: any(row.split() == ["step", "11"] for row in screen.rows), "showed the step")
        write_state(run, step=12)
        terminal.until(lambda screen: any(row.split() == ["step", "12"] for row in screen.rows), "showed the next step")
        write_state(run, step=13, status="stopped", stop_reason="walltime")
        assert terminal.end() == 0
    finally:
        terminal.close()
    rows = [row for row in terminal.screen.rows if row.strip()]
    assert sum(row.startswith("step") for row in rows) == 1 and terminal.screen.wrapped == 0 and terminal.screen.cursor_visible
    assert any("stopped (walltime)" in row for row in rows)


def test_ctrl_c_ends_the_watch_and_not_the_run(ingot: Ingot, tmp_path):
    run = write_state(tmp_path / "run", step=11)
    terminal = Terminal(["status", str(run), "--watch"], tmp_path, ingot.environment, 80)
    try:
        terminal.until(lambda screen: any(row.split() == ["step", "11"] for row in screen.rows), "showed the step")
        terminal.press_ctrl_c()
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert "Traceback" not in "\n".join(terminal.screen.rows) and terminal.screen.cursor_visible
    assert state(run)["status"] == "running" and not (run / "stop").exists()
