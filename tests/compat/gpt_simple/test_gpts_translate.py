"""gpt-simple's keys as settings of ours: the batch, the schedule, the vocabulary, the buckets, and what a resume keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from original import BUCKETS, write_config

from ingot.compat.gpt_simple.config import DataConfig, GptSimpleConfig, ModelConfig, OptimizerConfig, TrainingConfig, read_config
from ingot.compat.gpt_simple.training import GptSimpleReporter
from ingot.compat.gpt_simple.translate import tokenizer_name, translate, warnings
from ingot.config.schema import Config as IngotConfig
from ingot.data.loading.order import DataExhausted
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import ConfigError
from ingot.optim.schedules import learning_rate_scale


def ours(world_size: int = 1, kept: int | None = None, **keys: Any) -> IngotConfig:
    """The settings for keys that are given by their names alone."""
    sections = {"model": ModelConfig(), "data": DataConfig(), "optimizer": OptimizerConfig(), "training": TrainingConfig()}
    for name, value in keys.items():
        section = next(one for one in sections if hasattr(sections[one], name))
        sections[section] = replace(sections[section], **{name: value})
    return translate(GptSimpleConfig(**sections), world_size, kept).config  # type: ignore[arg-type]


def test_the_default_run_is_the_124m_llama_with_packed_rows_read_once() -> None:
    c = ours()
    m, d, t = c.model, c.data, c.training
    assert (m.family, m.width, m.layers, m.heads, m.context, m.vocab_size) == ("llama", 768, 12, 12, 2048, 50304)
    assert (d.seq_len, d.sampling, d.epochs, d.seed, d.exhausted, d.overlap) == (2048, "pack", 1, 42, "halt", 0)
    assert (t.max_steps, t.micro_batch, t.seed, t.save_every, t.save_seconds, t.keep_last) == (1000, 4, 42, 1000, 0, 3)
    assert (t.compile, t.precision, t.gradient_checkpointing, t.walltime_reserve_seconds) == ("auto", "auto", "auto", 300)
    assert (c.evaluation.every, c.evaluation.rows, c.evaluation.final_rows, c.tracking.log_every) == (500, 400, 400, 10)
    assert not c.artifact.write


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 4 * 4 * 2048), (2, 2 * 4 * 4 * 2048), (3, 3 * 4 * 4 * 2048)])
def test_a_step_has_batch_times_accumulation_times_ranks_times_length(ranks: int, tokens: int) -> None:
    assert ours(ranks).training.tokens_per_step == tokens
    assert ours(ranks, kept=7 * 2048).training.tokens_per_step == 7 * 2048  # a run that goes on keeps its own


def test_the_learning_rate_rises_from_the_first_step_and_lands_on_its_floor() -> None:
    c = ours()
    rate = [c.optimizer.learning_rate * learning_rate_scale(c, step, 0.0) for step in range(1001)]
    assert rate[0] > 0
    assert rate[100] == pytest.approx(3e-4) == max(rate)
    assert rate[1000] == pytest.approx(3e-5)
    other = ours(gradient_accumulation_steps=1)  # the schedule counts steps, whatever is in them
    assert rate == [other.optimizer.learning_rate * learning_rate_scale(other, step, 0.0) for step in range(1001)]


def test_after_a_shorter_decay_the_learning_rate_stays_at_its_floor() -> None:
    c = ours(warmup_steps=4, decay_steps=8, max_steps=24)
    assert [learning_rate_scale(c, step, 0.0) for step in range(12, 24)] == pytest.approx([0.1] * 12)
    assert ours(warmup_steps=4, decay_steps=0).optimizer.decay_steps == 5  # straight to the floor


@pytest.mark.parametrize(
    ("keys", "setting", "value"),
    [
        ({"activation": "swish"}, "model.activation", "silu"),
        ({"mlp_type": "mlp"}, "model.mlp", "plain"),
        ({"rope_scaling_factor": 0.5}, "model.rope_factor", 1.0),
        ({"rope_scaling_factor": 4.0, "rope_scaling_type": "ntk"}, "model.rope_factor", 4.0),
        ({"max_length": 4096}, "model.context", 4096),
        ({"attention_mode": "flex"}, "data.document_mask", True),
        ({"packing": False}, "data.sampling", "document"),
        ({"format": "jsonl"}, "data.overlap", 256),
        ({"allow_bucket_exhaustion": True}, "data.exhausted", "renormalise"),
        ({"mixed_precision": "no"}, "training.precision", "fp32"),
        ({"mixed_precision": "bf16"}, "training.precision", "bf16"),
        ({"compile": False}, "training.compile", False),
        ({"resume": "scratch"}, "training.resume", "never"),
        ({"resume": "out/step"}, "training.resume", "out/step"),
        ({"keep_last_k": None}, "training.keep_last", None),
        ({"keep_milestone_every": 200}, "training.keep_every", 200),
        ({"max_eval_batches": 3}, "evaluation.rows", 12),
        ({"eval_steps": 300}, "evaluation.at_end", False),
        ({"num_workers": 7}, "training.micro_batch", 4),
        ({"wandb_project": "p", "wandb_run_name": "n"}, "tracking.wandb_run_name", "n"),
    ],
)
def test_a_key_becomes_its_setting(keys: dict[str, Any], setting: str, value: Any) -> None:
    section, name = setting.split(".")
    assert getattr(getattr(ours(**keys), section), name) == value


def test_compile_is_for_gpus_unless_a_file_asks_for_it(gpts: Path) -> None:
    file = write_config(gpts / "c.yaml", training={"compile": True})
    assert translate(read_config(file)).config.training.compile is True
    assert ours(compile=True).training.compile == "auto"


def test_a_run_there_without_a_name_is_called_by_its_time() -> None:
    assert str(ours(wandb_project="p").tracking.wandb_run_name).startswith("gpt_simple_20")


def test_buckets_have_equal_weights_unless_a_curriculum_gives_them_others(gpts: Path) -> None:
    keys: dict[str, Any] = {"path": "data", "tokenizer": "tok"}
    assert ours(**keys).data.mix == dict.fromkeys(BUCKETS, 1.0)
    phased = ours(**keys, curriculum=[{"duration_tokens": 5_000, "mix": {"web": 3, "books": 1}}]).data
    assert phased.mix == {}
    assert [(phase.tokens, phase.mix) for phase in phased.phases] == [(5000, {"web": 0.75, "books": 0.25})]


def test_the_embedding_has_a_row_for_a_pad_token_and_a_multiple_of_128(gpts: Path) -> None:
    def rows(tokenizer: Tokenizer) -> int | None:
        return translate(GptSimpleConfig(), tokenizer=tokenizer).config.model.vocab_size

    assert rows(open_tokenizer("gpt2")) == 50304  # 50,257 ids and one more
    assert rows(open_tokenizer("tok")) == 384
    full = open_tokenizer("tok")
    full.vocab_size, full.pad = 384, 3  # one that needs no other
    assert rows(full) == 384
    full.pad = None
    assert rows(full) == 512


def test_a_bare_name_is_a_tokenizer_of_the_hub_and_a_folder_is_itself(gpts: Path) -> None:
    names = ("gpt2", "gpt2-medium", "tok", "meta/name", "./missing")
    assert [tokenizer_name(name) for name in names] == ["gpt2", "hf:gpt2-medium", "tok", "meta/name", "./missing"]


def test_settings_without_a_key_are_taken_from_the_command_line_and_others_are_not(gpts: Path) -> None:
    file = write_config(gpts / "c.yaml")
    assert translate(read_config(file, {"training.device": "cpu"})).config.training.device == "cpu"
    with pytest.raises(ConfigError, match=r"unknown key data.seq_len .*; did you mean data.max_length\?"):
        read_config(file, {"data.seq_len": "3"})
    with pytest.raises(ConfigError, match=r"data.epochs is computed from gpt-simple's keys"):
        translate(read_config(file, {"data.epochs": "3"}))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"max_steps": 200}, ["training.eval_steps=500 is more", "training.save_steps=1000 is more"]),
        ({"logging_steps": 2000}, ["training.logging_steps=2000 is more"]),
        ({"max_length": 4096}, ["data.max_length=4096 is more than model.n_positions=2048"]),
        ({"decay_steps": 100}, ["its floor at step 200 and stays there for 800 more steps"]),
        ({"decay_steps": 5000}, ["decays until step 5100"]),
        ({}, []),
    ],
)
def test_what_is_probably_not_meant_is_told(keys: dict[str, Any], told: list[str]) -> None:
    lines: list[str] = []
    sections = {"model": ModelConfig(), "data": DataConfig(), "optimizer": OptimizerConfig(), "training": TrainingConfig()}
    for name, value in keys.items():
        section = next(one for one in sections if hasattr(sections[one], name))
        sections[section] = replace(sections[section], **{name: value})
    warnings(GptSimpleConfig(**sections), lines.append)  # type: ignore[arg-type]
    assert len(lines) == len(told) and all(words in line for words, line in zip(told, lines, strict=True))


def test_a_drained_bucket_is_told_with_the_flag_that_goes_on_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = GptSimpleReporter(GptSimpleConfig(), ours(), None)
    reporter.message(DataExhausted("web").told(1))
    told = capsys.readouterr().err
    assert "the bucket web is exhausted" in told and "add --allow-bucket-exhaustion" in told
    assert "data.exhausted" not in told  # a key that this cli refuses
