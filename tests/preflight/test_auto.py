"""`--recipe auto`: what is chosen for which machine and which text, who goes before it, and what is said."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from ingot.config.loading import Sources
from ingot.data.loading.data_path import open_dataset
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError
from ingot.preflight.auto import CHOSEN, MOST_PASSES, Facts, choose, choose_tokenizer, resolve_auto
from ingot.preflight.validate import validate
from ingot.train.start import run

LAPTOP = Facts("cpu, 2 threads", False, 37e9, 90.0, 1_790_000, 2048, True, 4_782_417, "bpe:2048")
H200 = Facts("NVIDIA H200", True, 0.33 * 782e12, 300.0, 90_500_000, 8192, True, 321_000_000)


def trained(facts):
    """The tokens that the choice plans with."""
    s = choose(facts)[0]
    weights = 12 * s["model.layers"] * s["model.width"] ** 2 + facts.vocab_size * s["model.width"]
    return facts.rate * facts.seconds / (6 * weights), weights


@pytest.mark.parametrize(
    "facts", [LAPTOP, H200, replace(LAPTOP, rate=3e9, vocab_size=512), replace(H200, seconds=3600.0, tokens=10**10)]
)
def test_a_budget_is_spent_on_about_five_tokens_for_each_weight(facts):
    tokens, weights = trained(facts)
    assert 1.5 < tokens / weights < 16
    batch = choose(facts)[0]["training.tokens_per_step"]
    assert batch == 262_144 or 1200 < tokens / batch < 5000 or batch == 2048
    assert choose(facts)[0]["training.max_steps"] is None


def test_a_faster_machine_and_a_longer_budget_get_a_larger_model():
    widths = [choose(replace(LAPTOP, rate=rate))[0]["model.width"] for rate in (1e9, 37e9, 300e9)]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert choose(replace(LAPTOP, seconds=9000.0))[0]["model.width"] > choose(LAPTOP)[0]["model.width"]


def test_a_gpu_gets_long_rows_and_wide_heads_and_a_cpu_short_rows():
    gpu, cpu = choose(H200)[0], choose(LAPTOP)[0]
    assert (gpu["data.seq_len"], cpu["data.seq_len"]) == (2048, 64)
    assert gpu["model.width"] // gpu["model.heads"] == 128 and cpu["model.width"] // cpu["model.heads"] == 32


def test_text_that_is_read_again_is_redrawn_where_documents_are_known():
    assert choose(H200)[0]["data.sampling"] == "redraw"
    assert choose(replace(H200, has_documents=False))[0]["data.sampling"] == "shuffle"
    assert choose(replace(H200, tokens=10**11))[0]["data.sampling"] == "shuffle"


def test_little_text_gets_a_smaller_model_and_an_early_end_and_is_told_so():
    few = choose(replace(LAPTOP, tokens=30_000, bytes=30_000, vocab_size=260, tokenizer="byte"))
    steps, batch = few[0]["training.max_steps"], few[0]["training.tokens_per_step"]
    assert steps * batch <= MOST_PASSES * 30_000 and few[0]["model.width"] < choose(LAPTOP)[0]["model.width"]
    assert batch < choose(LAPTOP)[0]["training.tokens_per_step"] and few[0]["optimizer.muon_weight_decay"] == 1.0
    assert "30,000 bytes are 30,000 tokens (bytes: too little text to train a BPE), read 8.0 times" in few[1][2]
    assert "more than 8 passes over so little data" in few[1][2] and "ends before its 90 s" in few[1][2]
    assert "weight decay is stronger" in few[1][2]


def test_three_lines_say_what_was_chosen_and_why():
    reasons = choose(LAPTOP)[1]
    assert [line.partition(":")[0] for line in reasons] == ["model", "batch", "data"]
    assert "37.0 GFLOP/s" in reasons[0] and "in rows of 64" in reasons[1]
    assert "4,782,417 bytes are 1,790,000 tokens (a BPE with 2,048 ids), read" in reasons[2]
    assert choose(replace(LAPTOP, tokenizer=None))[1][2].startswith("data: 1,790,000 tokens, read")


def test_the_vocabulary_grows_with_the_budget_and_the_text():
    laptop, h200 = LAPTOP.rate * LAPTOP.seconds, H200.rate * H200.seconds
    assert choose_tokenizer(laptop, 5_000_000) == "bpe:2048" and choose_tokenizer(h200, 321_000_000) == "bpe:8192"
    assert choose_tokenizer(laptop, 30_000) == "byte" and choose_tokenizer(laptop, 1_100_000) == "bpe:1024"
    assert choose_tokenizer(laptop / 1000, 5_000_000) == "bpe:1024"


@pytest.fixture
def load(tmp_path):
    """What `ingot train --recipe auto` loads, on a small text, with settings of the user's."""
    text = "to be or not to be, that is the question\n" * 40
    write_dataset([("train", text)] * 5 + [("val", text)], tmp_path / "set", ByteTokenizer(), source={})
    always = {"data.path": str(tmp_path / "set"), "training.device": "cpu", "budget.seconds": 5, "training.threads": 1}

    def make(**given):
        words = {**always, **{name.replace("__", "."): value for name, value in given.items()}}
        return Sources("auto", overrides=words, environment={})

    return make


def test_a_machine_is_measured_and_what_the_user_sets_goes_before(load, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    told: list[str] = []
    resolved = resolve_auto(load(model__width=96, training__tokens_per_step=512), 1, told.append)
    assert resolved.config.model.width == 96 and resolved.config.training.tokens_per_step == 512
    assert resolved.origins["model.layers"] == "recipe auto, measured" and resolved.origins["model.width"] == "command line"
    assert len(told) == 4 and "GFLOP/s" in told[0]
    assert told[3] == "overridden by your settings: model.width, training.tokens_per_step"


def test_a_run_goes_on_with_what_was_chosen_when_it_began(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    given = load(training__output_dir=str(tmp_path / "run"), training__max_steps=4, evaluation__every=0, artifact__write=False)
    first = resolve_auto(given, 1, lambda line: None)
    run(first)
    monkeypatch.setattr("ingot.preflight.auto._facts", lambda *given: pytest.fail("it measured again"))
    again = resolve_auto(given, 1, lambda line: None)
    assert again.config == first.config
    assert {name for name, origin in again.origins.items() if "measured" in origin} == {*CHOSEN} - {
        "training.max_steps"
    }  # which is given


def test_a_run_that_begins_anew_is_measured_anew(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    given = load(training__output_dir=str(tmp_path / "run"), training__max_steps=1, evaluation__every=0, artifact__write=False)
    run(resolve_auto(given, 1, lambda line: None))
    told: list[str] = []
    resolve_auto(given, 1, told.append, fresh=True)
    assert "GFLOP/s" in told[0]


@pytest.mark.parametrize(
    "own",
    [{"model__width": 100}, {"model__heads": 3}, {"data__seq_len": 16}, {"data__seq_len": 100}, {"model__layers": 1}],
)
def test_what_is_chosen_goes_with_what_the_user_sets(load, monkeypatch, own):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    (name, value), told = next(iter(own.items())), []
    resolved = resolve_auto(load(**own), 1, told.append)
    section, _, key = name.partition("__")
    assert getattr(getattr(resolved.config, section), key) == value and told[3] == f"overridden by your settings: {section}.{key}"
    if key == "layers":
        assert told[0].startswith("model: 1 layers x ")


@pytest.mark.parametrize("facts", [LAPTOP, H200])
def test_every_width_can_be_cut_into_its_heads(facts):
    for rate in range(6, 18):
        settings = choose(replace(facts, rate=10.0**rate, tokens=10**12))[0]
        for width in (settings["model.width"], 416, 448, 100, 34):
            heads = choose(facts, {"model.width": width})[0]["model.heads"]
            assert width % (2 * heads) == 0


def test_text_without_a_tokenizer_gets_one_and_a_given_one_stays(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    words = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows"
    lines = [{"text": " ".join(random.Random(number).choices(words.split(), k=300))} for number in range(400)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: list[str] = []
    resolved = resolve_auto(load(data__path=str(tmp_path / "mine.jsonl")), 1, told.append)
    assert resolved.config.data.tokenizer == "bpe:512" and resolved.origins["data.tokenizer"] == "recipe auto, measured"
    assert "a BPE with" in told[2]
    resolved = resolve_auto(load(data__path=str(tmp_path / "mine.jsonl"), data__tokenizer="byte"), 1, told.append)
    assert resolved.config.data.tokenizer == "byte" and resolved.origins["data.tokenizer"] == "command line"


def test_a_text_file_is_data_and_gets_a_vocabulary_learned_from_it(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("".join(f"{random.Random(i).random()} is number {i}.\n\n" for i in range(16_000)))
    resolved = resolve_auto(load(data__path=str(tmp_path / "book.txt")), 1, lambda line: None)
    assert resolved.config.data.tokenizer == "bpe:512"
    assert {finding.code: finding.severity for finding in validate(resolved.config, thorough=False).findings} == {
        "data.format.jsonl": "info"
    }
    dataset = open_dataset(resolved.config.data.path, "bpe:512")
    assert dataset.tokenizer.vocab_size > 300 and dataset.split("val").tokens > 1000


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_groups_of_the_recipe_are_left_out_for_a_family_that_does_not_have_them(load, tmp_path, monkeypatch, family):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    given = load(
        model__family=family, training__output_dir=str(tmp_path / "run"), training__max_steps=2, evaluation__every=0,
        artifact__write=False,
    )  # fmt: skip
    resolved = resolve_auto(given, 1, lambda line: None)
    assert resolved.config.model.family == family and resolved.config.optimizer.groups == []
    assert run(resolved).total_steps == 2
    assert resolve_auto(given, 1, lambda line: None).config == resolved.config
    groups = '[{name: own, match: "*.attn.*"}]'
    assert (
        len(resolve_auto(load(model__family=family, optimizer__groups=groups), 1, lambda line: None).config.optimizer.groups) == 1
    )


def test_what_cannot_be_planned_is_refused(load):
    with pytest.raises(ConfigError, match="--recipe auto supports only one rank"):
        resolve_auto(load(), 2, lambda line: None)
    with pytest.raises(ConfigError, match=r"needs a time budget, but budget\.seconds is null"):
        resolve_auto(load(budget__seconds="null", training__max_steps=3), 1, lambda line: None)


def test_the_threads_of_the_probe_are_not_those_of_the_run(load, monkeypatch):
    monkeypatch.setattr("ingot.preflight.auto.PROBE_SECONDS", 0.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        resolve_auto(load(training__threads=1), 1, lambda line: None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
