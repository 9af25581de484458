"""`--recipe auto`: what is chosen for which machine and which text, who goes before it, and what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.config.loading import load_config
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError
from ingot.plan.auto import CHOSEN, MOST_PASSES, Facts, choose, resolve_auto
from ingot.train.start import run

LAPTOP = Facts("cpu, 2 threads", False, 27e9, 90.0, 4_782_455, 257, True)
H200 = Facts("NVIDIA H200", True, 0.33 * 782e12, 300.0, 90_500_000, 8192, True)


def trained(facts):
    """The tokens that the choice plans with."""
    s = choose(facts).settings
    weights = 12 * s["model.layers"] * s["model.width"] ** 2 + facts.vocab_size * s["model.width"]
    return facts.rate * facts.seconds / (6 * weights), weights


@pytest.mark.parametrize("facts", [LAPTOP, H200, replace(LAPTOP, rate=3e9), replace(H200, seconds=3600.0, tokens=10**10)])
def test_a_budget_is_spent_on_about_twenty_tokens_for_each_weight(facts):
    tokens, weights = trained(facts)
    assert 8 < tokens / weights < 50
    batch = choose(facts).settings["training.tokens_per_step"]
    assert batch == 262_144 or 1200 < tokens / batch < 5000 or batch == 2048
    assert choose(facts).settings["training.max_steps"] is None


def test_a_faster_machine_and_a_longer_budget_get_a_larger_model():
    widths = [choose(replace(LAPTOP, rate=rate)).settings["model.width"] for rate in (1e9, 27e9, 300e9)]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert choose(replace(LAPTOP, seconds=9000.0)).settings["model.width"] > choose(LAPTOP).settings["model.width"]


def test_a_gpu_gets_long_rows_and_wide_heads_and_a_cpu_short_rows():
    gpu, cpu = choose(H200).settings, choose(LAPTOP).settings
    assert (gpu["data.seq_len"], cpu["data.seq_len"]) == (2048, 64)
    assert gpu["model.width"] // gpu["model.heads"] == 128 and cpu["model.width"] // cpu["model.heads"] == 32


def test_text_that_is_read_again_is_redrawn_where_documents_are_known():
    assert choose(H200).settings["data.sampling"] == "redraw"
    assert choose(replace(H200, has_documents=False)).settings["data.sampling"] == "shuffle"
    assert choose(replace(H200, tokens=10**11)).settings["data.sampling"] == "shuffle"


def test_little_text_gets_a_smaller_model_and_an_early_end_and_is_told_so():
    few = choose(replace(LAPTOP, tokens=30_000))
    steps, batch = few.settings["training.max_steps"], few.settings["training.tokens_per_step"]
    assert steps * batch <= MOST_PASSES * 30_000 and few.settings["model.width"] < choose(LAPTOP).settings["model.width"]
    assert "30,000 tokens are few" in few.reasons[2] and "ends before its 90 s" in few.reasons[2]


def test_three_lines_say_what_was_chosen_and_why():
    reasons = choose(LAPTOP).reasons
    assert [line.partition(":")[0] for line in reasons] == ["model", "batch", "data"]
    assert "27.0 GFLOP/s" in reasons[0] and "in rows of 64" in reasons[1] and "4,782,455 tokens, read" in reasons[2]


@pytest.fixture
def load(tmp_path):
    """What `ingot train --recipe auto` loads, on a small text, with settings of the user's."""
    text = "to be or not to be, that is the question\n" * 40
    write_dataset([("train", text)] * 5 + [("val", text)], tmp_path / "set", ByteTokenizer(), source={})
    always = {"data.path": str(tmp_path / "set"), "training.device": "cpu", "budget.seconds": 5, "training.threads": 1}

    def make(**given):
        words = {**always, **{name.replace("__", "."): value for name, value in given.items()}}
        return lambda measured: load_config("auto", overrides=words, environment={}, measured=measured)

    return make


def test_a_machine_is_measured_and_what_the_user_sets_goes_before(load, monkeypatch):
    monkeypatch.setattr("ingot.plan.auto.PROBE_SECONDS", 0.0)
    told: list[str] = []
    resolved = resolve_auto(load(model__width=96, training__tokens_per_step=512), 1, told.append)
    assert resolved.config.model.width == 96 and resolved.config.training.tokens_per_step == 512
    assert resolved.origins["model.layers"] == "recipe auto, measured" and resolved.origins["model.width"] == "command line"
    assert len(told) == 4 and "GFLOP/s" in told[0]
    assert told[3] == "set by you instead: model.width, training.tokens_per_step"


def test_a_run_goes_on_with_what_was_chosen_when_it_began(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.plan.auto.PROBE_SECONDS", 0.0)
    given = load(training__output_dir=str(tmp_path / "run"), training__max_steps=4, evaluation__every=0, artifact__write=False)
    first = resolve_auto(given, 1, lambda line: None)
    run(first)
    monkeypatch.setattr("ingot.plan.auto._facts", lambda *given: pytest.fail("it measured again"))
    again = resolve_auto(given, 1, lambda line: None)
    assert again.config == first.config
    assert {name for name, origin in again.origins.items() if "measured" in origin} == {*CHOSEN} - {
        "training.max_steps"
    }  # which is given


def test_what_cannot_be_planned_is_refused(load):
    with pytest.raises(ConfigError, match="--recipe auto measures one process"):
        resolve_auto(load(), 2, lambda line: None)
    with pytest.raises(ConfigError, match=r"plans for budget\.seconds, which is null"):
        resolve_auto(load(budget__seconds="null", training__max_steps=3), 1, lambda line: None)
