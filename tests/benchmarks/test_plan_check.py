"""The check of plans: all tables at toy size, and a file of results that a second call continues."""

import json
import sys

import plan_check
import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if dist.is_initialized():  # a sharded model on a single rank keeps its process group
        dist.destroy_process_group()


def check(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plan_check.py", "--toy", "--steps", "1", *map(str, words)])
    plan_check.main()


def test_every_row_is_measured_once_and_all_tables_are_printed(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    check(monkeypatch, "--results", results)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["shape"] for row in rows] == ["toy", "toy checkpointed", "toy fsdp", "toy offloaded"]
    assert all("error" not in row and row["gib"] > 0 and row["tokens_per_second"] > 0 for row in rows), rows
    printed = capsys.readouterr().out
    assert [printed.count(f"\n| {title} | ") for title in ("memory", "speed", "fsdp", "largest")] == [1] * 4
    assert printed.count("\n| toy, ") == 3

    def broken(name, *_):
        raise MemoryError(name)

    monkeypatch.setattr(plan_check, "measure", broken)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows if row["shape"] != "toy fsdp"))
    check(monkeypatch, "--results", results)
    assert "| toy fsdp | MemoryError: toy fsdp |" in capsys.readouterr().out
    assert [json.loads(line)["shape"] for line in results.read_text().splitlines()][3:] == ["toy fsdp"]
