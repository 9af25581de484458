from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import train_words

from ingot.console.launch import _free_port, launch
from ingot.errors import ConfigError, RunError
from ingot.runs.state import read_state

LAUNCH = """
import sys
from ingot.console.launch import launch
sys.exit(launch(2, sys.argv[3:], command=[sys.executable, "-S", "-c", sys.argv[1]], grace_seconds=float(sys.argv[2])))
"""
NODE = """
import sys
from ingot.console.launch import launch
program, node, port, *argv = sys.argv[1:]
command = [sys.executable, "-S", "-c", program]
sys.exit(launch(2, argv, nnodes=2, node_rank=int(node), master_port=int(port), command=command))
"""
# A rank that writes down every signal it gets and ends as training does: the first saves (0), SIGINT after it ends at once (130).
WRITE_SIGNALS = """
import os, pathlib, signal, sys, time
notes = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
seen = []
def note(number, frame):
    seen.append(signal.Signals(number).name)
    notes.write_text(f"{os.getpid()} {' '.join(seen)}")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
notes.write_text(f"{os.getpid()}")
while len(seen) < int(sys.argv[2]):
    time.sleep(0.01)
sys.exit(130 if len(seen) > 1 else 0)
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def notes(folder: Path) -> list[list[str]]:
    """What ranks 0 and 1 wrote down: process id, then signals; empty until they are ready."""
    return [(folder / rank).read_text().split() if (folder / rank).exists() else [] for rank in "01"]


@pytest.fixture
def launcher() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a launcher of two ranks in a process of its own, as a shell would."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: object, grace: float = 30, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", LAUNCH, program, str(grace), *map(str, arguments)], **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_every_rank_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + '/' + os.environ['RANK'], 'w'))"
    assert launch(2, [str(tmp_path)], command=python(program)) == 0
    ranks = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert int(rank["OMP_NUM_THREADS"]) >= 1
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]


def test_ranks_are_counted_over_all_nodes(tmp_path: Path) -> None:
    """Two launchers, each a machine of its own as far as torchrun can tell."""
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + '/' + os.environ['RANK'], 'w'))"
    port = _free_port()
    words = [[sys.executable, "-c", NODE, program, str(node), str(port), str(tmp_path)] for node in (0, 1)]
    nodes = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "7"}) for command in words]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    ranks = [json.loads((tmp_path / rank).read_text()) for rank in "0123"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["OMP_NUM_THREADS"]) == ("4", "2", "7")
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("127.0.0.1", str(port))


def test_the_ranks_run_ingot_itself_and_no_stray_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a stray file of the working folder was imported')\n")
    monkeypatch.chdir(tmp_path)
    assert launch(2, ["recipes", "show", "demo"]) == 0
    assert capfd.readouterr().out.count("name: muon") == 2


def test_ranks_meet_at_the_chosen_port(tmp_path: Path) -> None:
    program = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    socket.create_server(address).accept()[0].sendall(b"hello")
else:
    for attempt in range(1000):
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert peer.recv(5) == b"hello"
"""
    assert launch(2, [], command=python(program)) == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"nproc": 0}, "--nproc-per-node must be .* not 0 "),
        ({"nproc": 1, "nnodes": 2, "node_rank": 2, "master_port": 1234}, "--node-rank 0 to 1, not .* 2$"),
        ({"nproc": 1, "nnodes": 2}, "--master-port"),
        ({"nproc": 1, "master_port": 70000}, "--master-port 70000"),
    ],
)
def test_a_launch_that_cannot_be_is_a_config_error(options: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        launch(argv=[], command=["false"], **options)


def test_a_command_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(RunError, match="no-such-program"):
        launch(2, [], command=["/no-such-program"])


def test_the_first_failure_is_the_answer_and_ends_the_others(tmp_path: Path) -> None:
    program = """
import os, pathlib, signal, sys, time
def end(number, frame):
    sys.exit(9)
signal.signal(signal.SIGTERM, end)
ready = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    ready.touch()
    time.sleep(1000)
while not ready.exists():
    time.sleep(0.01)
sys.exit(3)
"""
    assert launch(2, [str(tmp_path / "ready")], command=python(program), grace_seconds=1000) == 3


def test_a_rank_that_does_not_answer_is_killed_with_its_children_after_the_grace(tmp_path: Path, alive) -> None:
    program = """
import os, pathlib, signal, subprocess, sys, time
ready = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    ready.with_suffix(".part").write_text(str(child.pid))
    ready.with_suffix(".part").rename(ready)
    time.sleep(1000)
while not ready.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert launch(2, [str(tmp_path / "pid")], command=python(program), grace_seconds=0.2) == 1
    eventually(lambda: not alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, launcher, number: signal.Signals) -> None:
    process = launcher(WRITE_SIGNALS, tmp_path, 1)
    eventually(lambda: all(notes(tmp_path)))
    process.send_signal(number)
    assert process.wait(timeout=300) == 0
    assert [seen[1:] for seen in notes(tmp_path)] == [[number.name]] * 2


def test_a_second_signal_is_a_second_signal_for_every_rank(tmp_path: Path, launcher) -> None:
    process = launcher(WRITE_SIGNALS, tmp_path, 2)
    for count in (1, 2):
        eventually(lambda count=count: all(len(seen) == count for seen in notes(tmp_path)))
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert all(seen[1:3] == ["SIGINT", "SIGINT"] for seen in notes(tmp_path))


def test_one_key_press_on_a_terminal_is_one_signal_for_every_rank(tmp_path: Path, launcher) -> None:
    keyboard, terminal = pty.openpty()
    own_terminal = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", own_terminal, sys.executable, "-c", LAUNCH, WRITE_SIGNALS, "30", str(tmp_path), "1"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    try:
        eventually(lambda: all(notes(tmp_path)))
        os.write(keyboard, b"\x03")
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
        os.close(terminal)
    assert [seen[1:] for seen in notes(tmp_path)] == [["SIGINT"]] * 2


def test_a_launcher_under_nohup_ignores_the_hangup(tmp_path: Path, launcher) -> None:
    process = launcher(WRITE_SIGNALS, tmp_path, 1, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    eventually(lambda: all(notes(tmp_path)))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0
    assert [seen[1:] for seen in notes(tmp_path)] == [["SIGTERM"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_ranks_do_not_outlive_a_launcher_killed_with_sigkill(tmp_path: Path, launcher, alive) -> None:
    process = launcher(WRITE_SIGNALS, tmp_path, 1)
    eventually(lambda: all(notes(tmp_path)))
    pids = [int(seen[0]) for seen in notes(tmp_path)]
    process.kill()
    process.wait()
    eventually(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_ranks_of_torchrun_do_not_outlive_its_agent_either(tmp_path: Path, data: Path, alive) -> None:
    agent = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'ingot', *sys.argv[1:]])"
    words = train_words(data, tmp_path / "run", training__max_steps=10**6)
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    process = subprocess.Popen([sys.executable, "-c", agent, *words], env=environment, stderr=subprocess.DEVNULL)
    eventually(lambda: (state := read_state(tmp_path / "run")) is not None and state.step > 0)
    process.kill()
    process.wait()
    eventually(lambda: not alive(read_state(tmp_path / "run").pid))


def test_the_callers_signal_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch(1, [], command=["true"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
