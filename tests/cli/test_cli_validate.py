"""`ingot validate`: what it prints and how it ends; `ingot train` refuses by the same findings."""

import json
import subprocess
import sys

import pytest

RUN = ("--recipe", "demo", "--training.device", "cpu", "--training.max_steps", "3", "--budget.seconds", "null")


def test_a_sound_run_is_exit_code_0_and_nothing_is_made(call, data, tmp_path):
    code, out, _ = call("validate", *RUN, "--data.path", data, "--training.output_dir", tmp_path / "run")
    assert code == 0 and out.splitlines()[-1] == "0 errors, 0 over budget, 0 warnings, 0 notes"
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_2_and_1_with_strict(call, data):
    words = ("validate", *RUN, "--data.path", data, "--data.epochs", 1, "--training.max_steps", 10_000)
    code, out, _ = call(*words)
    assert code == 2 and "[!] data.shorter_than_plan: " in out
    assert call(*words, "--strict")[0] == 1


def test_errors_are_1_and_told_together_also_as_json(call, tmp_path):
    (tmp_path / "file").write_text("")
    words = ("validate", *RUN, "--data.path", tmp_path / "none", "--training.output_dir", tmp_path / "file" / "run", "--json")
    code, out, _ = call(*words)
    record = json.loads(out)
    assert code == record["exit_code"] == 1
    assert [one["code"] for one in record["findings"]] == ["data.path.missing", "output.not_writable", "model.vocab_unknown"]


def test_a_config_that_cannot_be_read_is_1(call):
    code, _, err = call("validate", "--recipe", "demo", "--model.wdth", 3)
    assert code == 1 and "model.wdth" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--data.path", "none"), 3),
        (("--data.mix.web", "1"), 3),
        (("--training.output_dir", "file/run"), 2),
        (("--data.tokenizer", "none.json"), 2),
        (("--training.resume", "none"), 4),
    ],
    ids=str,
)
def test_training_refuses_with_the_exit_code_of_the_finding_and_makes_nothing(call, data, tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    found, out, err = call("train", *RUN, "--data.path", data, "--training.output_dir", "run", *words)
    assert found == code and out == "" and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_probe_takes_a_step_and_leaves_nothing(call, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("validate", *RUN, "--data.path", data, "--probe", "--json")
    record = json.loads(out)
    assert code == 0 and {"device", "precision", "step", "loss", "memory"} == record["runtime"].keys()
    assert float(record["runtime"]["loss"]) == pytest.approx(5.56, abs=0.2)  # the logarithm of 260 ids
    assert list(tmp_path.iterdir()) == []


def test_a_probe_says_what_failed(call, data, tmp_path):
    (tmp_path / "model.py").write_text(
        "from ingot.model.gpt2 import GPT2\n\nclass Model(GPT2):\n"
        "    def forward(self, tokens, targets=None):\n        raise MemoryError('no room')\n"
    )
    own = ("--model.family", "file", "--model.file", tmp_path / "model.py", "--data.path", data)
    code, out, _ = call("validate", *RUN, *own, "--probe", "--json")
    assert code == 1 and [one["code"] for one in json.loads(out)["findings"]] == ["runtime.probe.oom"]
    (tmp_path / "model.py").write_text((tmp_path / "model.py").read_text().replace("MemoryError", "ValueError"))
    code, out, _ = call("validate", *RUN, *own, "--probe", "--json")
    assert code == 1 and [one["code"] for one in json.loads(out)["findings"]] == ["runtime.probe.failed"]


def test_precision_and_device_that_are_not_here(call, data):
    words = ("validate", *RUN, "--data.path", data, "--probe", "--json")
    code, out, _ = call(*words, "--training.precision", "fp16")
    assert code == 1 and [one["code"] for one in json.loads(out)["findings"]] == ["runtime.no_cuda"]


@pytest.mark.long
def test_a_probe_that_fails_on_one_rank_fails_on_all(data, tmp_path):
    (tmp_path / "model.py").write_text(
        "import os\nfrom ingot.model.gpt2 import GPT2\n\nclass Model(GPT2):\n"
        "    def forward(self, tokens, targets=None):\n"
        "        if os.environ['RANK'] == '1':\n            raise MemoryError('no room')\n"
        "        return super().forward(tokens, targets)\n"
    )
    own = ("--model.family", "file", "--model.file", tmp_path / "model.py", "--data.path", data)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ingot"]
    words = ["validate", *RUN, *own, "--world-size", "2", "--probe", "--json"]
    ended = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    [finding] = json.loads(ended.stdout)["findings"]
    assert finding["code"] == "runtime.probe.failed" and finding["message"] == "a trial step failed on another rank"
