"""`gpt-simple batch-generate`: requests that name their own model and sampling, answered as JSON lines in their order."""

import json

import pytest

from ingot import api
from ingot.compat.gpt_simple.main import main


@pytest.fixture
def call(capsys):
    """Run the command in this process and return its exit code, stdout and stderr."""

    def words(*given):
        code = main([str(word) for word in given])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return words


@pytest.fixture
def lines(call):
    """Return the objects on stdout of a command that succeeds."""

    def words(*given):
        code, out, err = call(*given)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return words


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GREEDY = ("--greedy", "--max-new-tokens", 8, "--dtype", "fp32", "--device", "cpu")


def test_all_problems_of_a_batch_are_told_together_before_a_model_is_opened(call, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load", None)
    file = written(
        tmp_path / "r.jsonl",
        {"prompt": 5},
        {"prompt": "a", "model": {"checkpoint": "x", "output_dir": "y"}},
        {"prompt": "a", "generation": {"temperature": -1, "top_p": 2}},
        {"prompt": "a", "model": {"dtype": "int4"}},
        {"prompt": "a", "generation": {"max_tokens": 3}},
        {"prompt": "fine"},
    )
    code, out, err = call("batch-generate", "--input", file, "--output-dir", reference)
    assert (code, out) == (2, "")
    told = err.splitlines()
    assert len(told) == 7 and "6 problems" in told[-1]
    for number, part in [
        (1, "prompt is missing or is not UTF-8 text"),
        (2, "both checkpoint and output_dir"),
        (3, "generation.temperature must be a number of 0 or more, not -1"),
        (3, "generation.top_p must be"),
        (4, "model.dtype must be one of"),
        (5, "generation.max_tokens is unknown"),
    ]:
        assert any(line.startswith(f"{file}:{number}: ") and part in line for line in told)


def test_models_that_are_not_there_are_told_together_too(call, tmp_path):
    file = written(tmp_path / "r.jsonl", *({"prompt": "a", "model": {"output_dir": str(tmp_path / name)}} for name in "xy"))
    code, _, err = call("batch-generate", "--input", file, "--dry-run")
    assert code == 2
    assert f"model {tmp_path / 'x'}: there is no checkpoint" in err and f"model {tmp_path / 'y'}: there is no checkpoint" in err


def test_references_to_one_model_open_it_once_and_the_order_is_kept(lines, call, reference, tmp_path, monkeypatch):
    newest = max((reference / "checkpoints").iterdir())
    oldest = min((reference / "checkpoints").iterdir())
    monkeypatch.setenv("WHERE", str(reference.parent))
    by = [
        {"output_dir": str(reference)},
        {"checkpoint": str(oldest)},
        {"checkpoint": f"$WHERE/{reference.name}/checkpoints/{newest.name}"},
    ]
    file = written(tmp_path / "r.jsonl", *({"prompt": f"{n} ", "id": n, "model": by[n % 3]} for n in range(6)))
    opened, load = [], api.load
    monkeypatch.setattr(api, "load", lambda path, **options: opened.append(path) or load(path, **options))
    found = lines("batch-generate", "--input", file, *GREEDY)
    assert [one["id"] for one in found] == list(range(6))
    assert opened == [newest.resolve(), oldest.resolve()]
    for one in found:
        path = oldest if one["id"] % 3 == 1 else newest
        [alone] = lines("generate", "--checkpoint", path, "--prompt", one["prompt"], *GREEDY)
        assert one["completion"] == alone["completion"]


def test_a_dry_run_says_what_would_be_done_and_opens_nothing(call, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load", None)
    file = written(tmp_path / "r.jsonl", {"prompt": "a"}, {"prompt": "b"})
    code, out, err = call("batch-generate", "--input", file, "--output-dir", reference, "--dry-run")
    assert code == 0 and out == "" and "2 prompts for 1 models; no problems" in err
    assert " as bf16: 2 prompts, requested as " in err


def test_a_record_has_its_own_seed_and_draws_what_it_would_alone(lines, reference, tmp_path):
    file = written(tmp_path / "r.jsonl", *({"prompt": "a b c", "generation": {"seed": seed}} for seed in (4, 9, 4)))
    words = ("--max-new-tokens", 12, "--temperature", 2, "--top-k", 0, "--top-p", 1, "--dtype", "fp32", "--device", "cpu")
    found = lines("batch-generate", "--input", file, "--output-dir", reference, *words)
    assert found[0]["completion"] == found[2]["completion"] != found[1]["completion"]
    [alone] = lines("generate", "--output-dir", reference, "--prompt", "a b c", "--seed", 9, *words)
    assert alone["completion"] == found[1]["completion"]


def test_what_fails_while_it_is_written_is_the_error_of_its_line(call, reference, tmp_path, monkeypatch):
    from ingot.errors import RunError
    from ingot.inference.model import LoadedModel

    plain = LoadedModel.generate_batch

    def fails(model, prompts, options, seeds):
        if "bad" in prompts:
            raise RunError("this one cannot be")
        return plain(model, prompts, options, seeds)

    monkeypatch.setattr(LoadedModel, "generate_batch", fails)
    file = written(tmp_path / "r.jsonl", {"prompt": "a"}, {"prompt": "bad"}, {"prompt": "b"})
    code, out, err = call("batch-generate", "--input", file, "--output-dir", reference, *GREEDY)
    first, bad, last = map(json.loads, out.splitlines())
    assert code == 0 and "1 of 3 requests failed" in err
    assert bad["error"] == "this one cannot be" and "completion" not in bad
    assert "completion" in first and "completion" in last
