"""Names that cannot be: whichever verb is given one says so in one line that can be read, and makes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import DEMO, PATIENCE

from ingot.cli import main

TRAIN = ["train", "--recipe", "demo", *(f"--{name}={value}" for name, value in DEMO.items() if name != "model.family")]
# What reads the name that stands for {}, or writes to it.
READERS = [
    "train --config {}", "validate --config {}", "train {}", "train --resume {}", "status {}", "eval {}", "eval {run} --data {}",
    "generate {}", "generate {run} --prompts-file {}", "export {}", "import {} --output out",
    "data prepare --input {} --tokenizer byte --output out", "data prepare --input text.txt --tokenizer {} --output out",
    "data convert {} --to nanogpt --output out", "data verify {}", "data inspect {}", "config show --config {}",
]  # fmt: skip
SETTINGS = ["data.path", "data.tokenizer", "training.weights", "training.resume", "model.file", "data.already_read"]
WRITERS = ["export {run} --output {}", "init -o {}", "config docs -o {}", "data convert {data} --to nanogpt --output {}"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in, with a text; what waits longer than PATIENCE waits for ever."""

    def hung(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(PATIENCE)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> Callable[..., str]:
    """Run the command line, which must refuse what it was given in one readable line and leave nothing behind."""

    def call(words: list[str]) -> str:
        before = sorted(folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main.run(words)
        told = capsys.readouterr().err.splitlines()
        assert ended.value.code in (1, 2, 3, 4), told
        assert told and told[-1].startswith("ingot: error: ") and len(told[-1]) < 1100 and told[-1].isprintable(), told
        assert sorted(folder.rglob("*")) == before
        return told[-1]

    return call


def with_name(command: str, name: str, run: Path, data: Path) -> list[str]:
    known = {"{}": name, "{run}": str(run), "{data}": str(data)}
    return [known.get(word, word) for word in command.split()]


@pytest.mark.parametrize("command", READERS)
def test_a_pipe_as_input_is_refused(refused, folder, reference, data, command):
    os.mkfifo(folder / "pipe.txt")
    refused(with_name(command, "pipe.txt", reference, data))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_pipe_as_a_setting_is_refused(refused, folder, data, setting):
    os.mkfifo(folder / "pipe.jsonl")
    more = ["--data.sampling=pack"] if setting == "data.already_read" else []
    refused([*TRAIN, f"--data.path={data}", "--training.output_dir=out", *more, f"--{setting}=pipe.jsonl"])


def test_a_pipe_in_a_folder_of_texts_is_not_waited_for(refused, folder):
    (folder / "texts").mkdir()
    os.mkfifo(folder / "texts" / "pipe.txt")
    assert "no documents" in refused(["data", "prepare", "--input", "texts", "--tokenizer", "byte", "--output", "out"])


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "/".join(["x" * 200] * 30), "loop/x", "a\x1b[31mb"])
@pytest.mark.parametrize("setting", [*SETTINGS, "training.output_dir"])
def test_a_setting_with_an_impossible_name_is_refused(refused, folder, data, setting, name):
    if setting == "training.output_dir":
        if name in ("~nosuchuser/x", "a\x1b[31mb"):
            pytest.skip("a folder may have this name")
    elif setting == "data.tokenizer" and name == "loop/x":
        pytest.skip("it is a name on the hub, which is asked for it")
    (folder / "loop").symlink_to("loop")
    more = ["--data.sampling=pack"] if setting == "data.already_read" else []
    refused([*TRAIN, f"--data.path={data}", "--training.output_dir=out", *more, f"--{setting}={name}"])


@pytest.mark.parametrize("value", ['"a\\0b"', '"\\ud800"'], ids=["NUL", "half a character"])
@pytest.mark.parametrize("setting", [*SETTINGS, "training.output_dir", "training.device"])
def test_a_config_with_a_name_that_no_file_can_have_is_refused(refused, folder, setting, value):
    (folder / "c.yaml").write_text(f"base: demo\n{setting}: {value}\n")
    refused(["train", "--config", "c.yaml"])


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("name", ["/", "/dev/null/x", "loop/x", "x" * 300])
def test_an_output_that_cannot_be_is_refused(refused, folder, reference, data, command, name):
    (folder / "loop").symlink_to("loop")
    refused(with_name(command, name, reference, data))


@pytest.mark.parametrize("content", [b"\0" * 1_200_000, b"x" * 1_200_000 + b",b\n1,2\n"], ids=["zeros", "one long name"])
@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.yaml"])
def test_a_line_about_a_file_of_nonsense_can_be_read(refused, folder, name, content):
    (folder / name).write_bytes(content)
    command = "train --config {}" if name == "a.yaml" else "data prepare --input {} --tokenizer byte --output out"
    refused(with_name(command, name, folder, folder))


@pytest.mark.parametrize("command", ["train --config {}", "generate {run} --prompts-file {}"])
def test_nesting_of_any_depth_is_refused(refused, folder, reference, data, command):
    (folder / "deep").write_text("[" * 100_000)
    refused(with_name(command, "deep", reference, data))
