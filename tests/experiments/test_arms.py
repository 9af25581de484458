"""The arms of a sweep: what is varied, in which order, and what is refused before a run starts."""

from __future__ import annotations

import re
from contextlib import ExitStack

import numpy as np
import pytest
from toy_tokenizers import toy_sentencepiece

from ingot.config.loading import load_config
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.store.shards import TokenWriter
from ingot.data.tokenizers import CharTokenizer
from ingot.errors import ConfigError, DataError
from ingot.experiments.sweep import make_arms, plan_trials, read_seeds


def names(*vary, file=None):
    return list(make_arms(vary, file))


def test_values_of_several_settings_are_combined_each_with_each():
    arms = make_arms(["optimizer.learning_rate=0.01,0.02", "data.sampling=shuffle,redraw"])
    assert list(arms) == [
        "learning_rate=0.01,sampling=shuffle", "learning_rate=0.01,sampling=redraw",
        "learning_rate=0.02,sampling=shuffle", "learning_rate=0.02,sampling=redraw",
    ]  # fmt: skip
    assert arms["learning_rate=0.01,sampling=redraw"] == {"optimizer.learning_rate": "0.01", "data.sampling": "redraw"}


def test_settings_of_one_name_are_told_apart_by_their_sections():
    assert names("evaluation.rows=4,8", "evaluation.every=1") == ["rows=4,every=1", "rows=8,every=1"]
    assert names("model.width=4", "other.width=8") == ["model.width=4,other.width=8"]


def test_values_with_commas_or_slashes_make_a_list_and_a_name_for_a_folder():
    assert names("data.path=data/a,data/b") == ["path=data-a", "path=data-b"]
    assert list(make_arms(["data.spans=[[1, 2], 3]"]).values()) == [{"data.spans": ["1", "2"]}, {"data.spans": "3"}]


def test_a_file_names_arms_and_what_they_set(tmp_path, resolve):
    (tmp_path / "arms.yaml").write_text("plain:\nwide:\n  model: {width: 32}\n  data.sampling: redraw\n")
    arms = make_arms([], tmp_path / "arms.yaml")
    assert list(arms) == ["plain", "wide"]
    trials = plan_trials(arms, [1], tmp_path / "out", resolve)
    assert [(trial.config.model.width, trial.config.data.sampling) for trial in trials] == [(16, "shuffle"), (32, "redraw")]
    assert names("model.layers=1,2", file=tmp_path / "arms.yaml")[0] == "plain,layers=1"


def test_arms_take_turns_seed_by_seed(tmp_path, resolve):
    trials = plan_trials(make_arms(["model.layers=1,2"]), [5, 6], tmp_path, resolve)
    assert [(trial.arm, trial.seed) for trial in trials] == [("layers=1", 5), ("layers=2", 5), ("layers=1", 6), ("layers=2", 6)]
    assert {(trial.config.training.seed, trial.config.data.seed) for trial in trials} == {(5, 5), (6, 6)}
    assert trials[3].folder == tmp_path / "layers=2" / "seed-6"


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ([], "there is nothing to sweep: give --vary"),
        (["model.layers"], "has no values"),
        (["model.layers="], "has no values"),
        (["model.layers=[]"], "has no values"),
        (["model.layers=1,2,1"], "two arms have the name layers=1; remove the duplicate"),
        (["data.path=data/w1,data-w1"], "two arms have the name path=data-w1; .* --arms FILE"),
        (["model.layers=1", "model.layers=2"], "is given twice"),
        (["data.seed=1,2"], r"data\.seed cannot be set here; give --seeds instead"),
        (["training.output_dir=a,b"], "cannot be set here; give --output instead"),
    ],
)
def test_a_grid_without_arms_is_refused(vary, said):
    with pytest.raises(ConfigError, match=said):
        make_arms(vary)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "defines no arms"),
        ("- a\n- b\n", "defines no arms"),
        ("a: 3\n", "the arm a needs settings below it"),
        ("a/b: {}\n", "is not a valid name of an arm"),
        (".: {}\n", "is not a valid name of an arm"),
        ("..: {}\n", "is not a valid name of an arm; use letters, .* but not only dots"),
        ("a:\n  training: {seed: 3}\n", r"training\.seed cannot be set here"),
    ],
)
def test_a_file_without_arms_is_refused(tmp_path, text, said):
    (tmp_path / "arms.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        make_arms([], tmp_path / "arms.yaml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_arms([], tmp_path / "none.yaml")
    (tmp_path / "arms.yaml").write_bytes(b"\xc1\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        make_arms([], tmp_path / "arms.yaml")


def test_seeds_are_numbers_each_of_its_own():
    assert read_seeds("1, 2,30") == [1, 2, 30]
    for text, said in (
        ("1,x", "is not a list of numbers"),
        ("", "is not a list of numbers"),
        ("-1", "is not"),
        ("4,4", "a seed twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_seeds(text)


def test_a_mistake_of_one_arm_is_told_with_its_name_before_anything_starts(tmp_path, resolve):
    with pytest.raises(ConfigError, match=r"arm heads=3: .*model\.width"):
        plan_trials(make_arms(["model.heads=2,3"]), [1], tmp_path / "out", resolve)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("data.samplin=shuffle", r"unknown setting data\.samplin \(sweep\); did you mean data\.sampling\?"),
        ("data.sampling=redrew", r"data\.sampling=redrew \(sweep\): must be"),
    ],
)
def test_a_mistake_of_an_arm_is_looked_for_where_arms_are_given(vary, said, tmp_path, resolve):
    with pytest.raises(ConfigError, match=said):
        plan_trials(make_arms([vary]), [1], tmp_path / "out", resolve)


def test_arms_on_different_data_are_refused(tmp_path, resolve, data, other_data):
    with pytest.raises(ConfigError, match=r"the arms path=.*set and path=.*other use different data"):
        plan_trials(make_arms([f"data.path={data},{other_data}"]), [1], tmp_path, resolve)
    with pytest.raises(DataError, match="arm path=nowhere: no data at nowhere"):
        plan_trials(make_arms([f"data.path={data},nowhere"]), [1], tmp_path, resolve)


def test_an_arm_on_tokens_without_a_tokenizer_is_told_by_its_name_and_once(tmp_path, resolve):
    with ExitStack() as files:
        for split in ("train", "val"):
            writer = TokenWriter(tmp_path / f"fineweb_{split}_000000.bin", files, header=True)
            writer.append(np.arange(100, dtype=np.uint16))
            writer.close()
    with pytest.raises(DataError) as found:
        plan_trials(make_arms([f"data.path={tmp_path}", "training.max_steps=2"]), [1], tmp_path / "out", resolve)
    assert re.sub(r"arm \S+:", "arm A:", str(found.value)) == (
        f"arm A: {tmp_path} holds tokens but does not name their tokenizer; set data.tokenizer to it"
    )
    assert found.value.render(str.upper).endswith("set DATA.TOKENIZER to it")  # which a front end may call otherwise


def test_one_text_in_other_tokens_may_be_an_arm(tmp_path, resolve):
    text = [("train", "abcabc" * 90), ("val", "abcab" * 30)]
    write_dataset(text, tmp_path / "chars", CharTokenizer("abc"), source={})
    write_dataset(text, tmp_path / "more", CharTokenizer("abcd"), source={})
    arms = make_arms([f"data.path={tmp_path / 'chars'},{tmp_path / 'more'}"])
    assert len(plan_trials(arms, [1], tmp_path / "out", resolve)) == 2


def test_losses_of_other_tokens_do_not_compare(tmp_path, resolve):
    text = [("train", "abcabc" * 90), ("val", "abcab" * 30)]
    write_dataset(text, tmp_path / "chars", CharTokenizer("abc"), source={})
    write_dataset(text, tmp_path / "more", CharTokenizer("abcd"), source={})
    arms = make_arms([f"data.path={tmp_path / 'chars'},{tmp_path / 'more'}"])
    with pytest.raises(ConfigError, match=r"have different tokens, .*val_loss is not comparable .*val_bpb is"):
        plan_trials(arms, [1], tmp_path / "out", resolve, "val_loss")


def test_bytes_that_are_counted_in_different_ways_do_not_compare(tmp_path, resolve):
    for name, text in ("plain", "to be"), ("folded", "to  be"):  # SentencePiece keeps one space of two
        write_dataset([("train", text * 40), ("val", text * 9)], tmp_path / name, toy_sentencepiece(), source={})
    plain, folded = (make_arms(["evaluation.bytes=text,pieces", f"data.path={tmp_path / name}"]) for name in ("plain", "folded"))
    assert len(plan_trials(plain, [1], tmp_path / "out", resolve)) == 2  # as many bytes of either
    with pytest.raises(ConfigError, match=r"count bytes in different ways \(evaluation\.bytes\), so their val_bpb"):
        plan_trials(folded, [1], tmp_path / "out", resolve)
    assert len(plan_trials(folded, [1], tmp_path / "out", resolve, "val_loss")) == 2


def test_some_rows_of_other_tokens_are_another_text(tmp_path, resolve):
    text = [("train", "abcabc" * 90), ("val", "abcab" * 30)]
    for name, letters in ("chars", "abc"), ("more", "abcd"):
        write_dataset(text, tmp_path / name, CharTokenizer(letters), source={})
    arms = make_arms([f"data.path={tmp_path / 'chars'},{tmp_path / 'more'}", "evaluation.final_rows=3"])
    with pytest.raises(ConfigError, match=r"the rows of evaluation\.final_rows cover different texts"):
        plan_trials(arms, [1], tmp_path / "out", resolve)


def test_pieces_of_two_tokenizers_are_different_bytes(tmp_path, resolve):
    for name, tokenizer in ("chars", CharTokenizer("to be")), ("pieces", toy_sentencepiece()):
        write_dataset([("train", "to  be" * 40), ("val", "to  be" * 9)], tmp_path / name, tokenizer, source={})
    arms = make_arms([f"data.path={tmp_path / 'chars'},{tmp_path / 'pieces'}", "evaluation.bytes=pieces"])
    with pytest.raises(ConfigError, match="count bytes in different ways"):
        plan_trials(arms, [1], tmp_path / "out", resolve)


@pytest.mark.parametrize(
    ("settings", "score", "lacking"),
    [
        ({"artifact.write": True, "artifact.score": False}, "artifact_bpb", "artifact.score"),
        ({}, "artifact_bpb", "artifact.write"),
        ({"evaluation.at_end": False}, "val_bpb", "evaluation.at_end"),
        ({"evaluation.at_end": False, "evaluation.every": 1}, "val_bpb", "evaluation.at_end"),
    ],
)
def test_arms_that_would_have_no_score_are_refused_before_they_train(tmp_path, resolve, settings, score, lacking):
    with pytest.raises(ConfigError, match=f"arm plain would have no {score} of its last step, because {lacking} is false"):
        plan_trials({"plain": settings}, [1], tmp_path / "out", resolve, score)


def test_an_arm_without_data_is_advised_the_tokenizer_of_its_recipe(tmp_path):
    arms = make_arms(["model.layers=1,2"])
    with pytest.raises(DataError, match="--tokenizer gpt2"):
        plan_trials(arms, [1], tmp_path / "out", lambda settings: load_config("speedrun/124m", environment={}, sweep=settings))


def test_a_folder_with_a_run_of_other_settings_is_refused(tmp_path, resolve):
    arms = make_arms(["model.layers=1,2"])
    [trial, _] = plan_trials(arms, [1], tmp_path, resolve)
    trial.folder.mkdir(parents=True)
    (trial.folder / "config.yaml").write_text("base: demo\n")
    with pytest.raises(
        ConfigError, match=r"seed-1 holds a run with different settings: .* was .* and is now .*; choose another --output"
    ):
        plan_trials(arms, [1], tmp_path, resolve)
