"""`ingot compare`: two arms of finished runs, by what their folders say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from experiments_kit import said, write_finished

from ingot.errors import CheckpointError, ConfigError
from ingot.experiments import compare as seeds
from ingot.experiments.compare import compare
from ingot.experiments.statistics import welch
from ingot.experiments.sweep import summarise

A, B = (1.20, 1.21, 1.19), (1.10, 1.12, 1.11)


def arm(folder: Path, scores, **known) -> list[Path]:
    return [write_finished(folder / f"seed-{seed}", score, seed, **known) for seed, score in enumerate(scores, 1)]


@pytest.fixture
def sides(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    return arm(tmp_path / "a", A), arm(tmp_path / "b", B, settings={"data.sampling": "redraw"})


def test_two_arms_are_compared_by_their_folders(sides):
    found = compare(*sides)
    assert (found.a.mean, found.b.mean) == (pytest.approx(1.2), pytest.approx(1.11))
    assert (found.a.std, found.b.std) == (pytest.approx(0.01), pytest.approx(0.01))
    assert found.test == welch(A, B) and found.test.p < 0.01 and found.more == (0, 0)
    assert found.differing == {"data.sampling": ("shuffle", "redraw")}


def test_each_run_is_read_once_in_however_many_pairs_of_arms_it_stands(tmp_path, monkeypatch):
    read, paths = seeds.read_scored, []

    def count(path, score):
        paths.append(path)
        return read(path, score)

    monkeypatch.setattr(seeds, "read_scored", count)
    arms = [
        seeds.SeedGroup(tuple(seeds.SeedRun(path.name, path, {}, None) for path in arm(tmp_path / str(width), A)), 3, 1.2, 0.01)
        for width in range(3)
    ]
    (tmp_path / "2" / "seed-1" / "result.json").unlink()
    said = [words for _, _, words in seeds.tested(arms)]
    assert "p = 1 " in said[0] and all("is not complete" in words for words in said[1:]) and len(said) == 3
    assert len(set(paths)) == 7 and paths.count(tmp_path / "0" / "seed-1") == 1  # of the arm that cannot be read, the first run


def test_the_verb_says_mean_spread_and_p(sides, capsys):
    code, out, err = said(capsys, "compare", *sides[0], "--", *sides[1])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split()[:4] == ["A", "3", "1.20000", "0.01000"] and lines[2].split()[:4] == ["B", "3", "1.11000", "0.01000"]
    assert "B - A  -0.09000 (-7.50%), p = " in out and "B is lower" in out
    assert "differ in data.sampling: shuffle and redraw" in out


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_same_as_json(sides, capsys, order):
    words = [*sides[0], "--", *sides[1]]
    told = json.loads(said(capsys, "compare", *(["--json", *words] if order == "before" else [*words, "--json"]))[1])
    assert told["a"]["n"] == told["b"]["n"] == 3 and told["difference"] == pytest.approx(-0.09)
    assert told["p"] == welch(A, B).p and told["more_seeds"] == [0, 0]
    assert [one["seed"] for one in told["b"]["runs"]] == [1, 2, 3]


def test_arms_within_their_noise_need_more_seeds(tmp_path, capsys):
    a, b = arm(tmp_path / "a", A), arm(tmp_path / "b", (1.19, 1.20))
    found = compare(a, b)
    assert found.test.p > 0.01 and found.more is not None
    assert found.more[0] + 3 == found.more[1] + 2 > 3  # sides of three and of two seeds
    out = said(capsys, "compare", *a, "--", *b)[1]
    assert f"{found.more[0]} more seeds of A and {found.more[1]} of B are needed for p < 0.01" in out


def test_equal_means_are_said_to_need_no_more_seeds(tmp_path, capsys):
    out = said(capsys, "compare", *arm(tmp_path / "a", (1.0, 2.0)), "--", *arm(tmp_path / "b", (2.0, 1.0)))[1]
    assert "no practical number of seeds would separate A and B" in out


def test_another_score_is_compared_where_it_is_asked_for(tmp_path):
    sides = [arm(tmp_path / name, A, artifact_bpb=bpb) for name, bpb in (("a", 1.5), ("b", 1.6))]
    assert compare(*sides, "artifact_bpb").difference == pytest.approx(0.1)
    with pytest.raises(CheckpointError, match=r"has no val_loss; it has val_bpb and artifact_bpb"):
        compare(*sides, "val_loss")


def test_one_seed_on_a_side_is_refused(sides, capsys):
    with pytest.raises(ConfigError, match=r"has only .*seed-1: .*at least two seeds on each side"):
        compare(sides[0], sides[1][:1])
    assert said(capsys, "compare", sides[0][0], "--", sides[1][0])[0] == 2


def test_one_group_is_refused_with_the_way_to_write_two(sides, capsys):
    code, _, err = said(capsys, "compare", *sides[0])
    assert code == 2 and "ingot compare a b -- c d" in err and err.count("\n") == 1


def test_runs_on_different_data_are_refused(sides, tmp_path):
    other = arm(tmp_path / "c", B, data_fingerprint="e" * 64, bytes=999, settings={"data.path": "data/other"})
    with pytest.raises(ConfigError, match=r"scored on different data, sample:shakespeare\+bpe:2048 .* and data/other"):
        compare(sides[0], other)


def test_one_text_in_other_tokens_compares_by_bytes_and_not_by_tokens(sides, tmp_path):
    other = arm(tmp_path / "c", B, data_fingerprint="e" * 64, val_loss=3.0)
    assert compare(sides[0], other).difference == pytest.approx(-0.09)
    both = [arm(tmp_path / name, A, val_loss=3.0, data_fingerprint=name * 64) for name in ("d", "e")]
    with pytest.raises(ConfigError, match="val_loss on different texts"):
        compare(*both, "val_loss")


def test_runs_that_are_not_one_arm_are_refused_on_one_side(sides):
    with pytest.raises(ConfigError, match=r"differ in a setting: data\.sampling is shuffle and redraw"):
        compare([sides[0][0], sides[1][1]], sides[1])


def test_the_same_seed_or_the_same_run_twice_is_refused(sides, tmp_path):
    twin = write_finished(tmp_path / "twin", 1.2, 1)
    with pytest.raises(ConfigError, match=r"have the same seeds \(training\.seed=1, data\.seed=1\)"):
        compare([sides[0][0], twin], sides[1])
    with pytest.raises(ConfigError, match="have the same seeds"):
        compare([sides[0][0], sides[0][0]], sides[1])
    with pytest.raises(ConfigError, match=r"is given on both sides, .*independent"):
        compare(sides[0], [sides[0][1], sides[0][0]])


def test_a_score_of_an_earlier_step_is_refused(sides, tmp_path):
    stale = [write_finished(tmp_path / str(seed), 1.2, seed, total_steps=29, val_step=20) for seed in (8, 9)]
    with pytest.raises(CheckpointError, match=r"step 20, .*step 29; .*evaluation\.at_end=true"):
        compare(sides[0], stale)


@pytest.mark.parametrize("score", [1e308, -1e308, 10**400, float("nan"), "1.2"])
def test_a_score_that_is_no_score_of_a_text_is_one_line(sides, tmp_path, capsys, score):
    absurd = arm(tmp_path / "absurd", (score, score))
    code, _, err = said(capsys, "compare", *sides[0], "--", *absurd)
    assert code == 4 and "has no val_bpb; it has no score" in err and err.count("\n") == 1
    [group] = seeds.over_seeds([seeds.SeedRun(path.name, path, {}, score) for path in absurd])
    assert (group.n, group.mean) == (0, None)
    trials = [SimpleNamespace(arm="absurd", seed=number, folder=path) for number, path in enumerate(absurd)]
    assert summarise(trials, "val_bpb")[0].mean is None


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_a_run_that_is_not_complete_is_refused(sides, tmp_path, status):
    cut = write_finished(tmp_path / "cut", 1.2, 9, status=status)
    with pytest.raises(CheckpointError, match=rf"cut is not complete: its status is {status}; finish it with: ingot train"):
        compare([*sides[0], cut], sides[1])


def test_scores_of_a_part_of_the_text_are_told(tmp_path):
    found = compare(arm(tmp_path / "a", A, val_rows=3), arm(tmp_path / "b", B, val_rows=4))
    assert found.notes and "(by 3 of 7 rows and by 4 of 7 rows)" in found.notes[0]


def test_a_part_of_the_text_beside_the_whole_is_told_of_both(tmp_path):
    found = compare(arm(tmp_path / "a", A, val_rows=3), arm(tmp_path / "b", B))
    assert "(by 3 of 7 rows and by all rows)" in found.notes[0]


def test_bytes_that_were_counted_in_different_ways_do_not_compare(sides, tmp_path):
    pieces = arm(tmp_path / "c", B, bytes=990, settings={"evaluation.bytes": "pieces"})
    with pytest.raises(ConfigError, match=r"evaluation\.bytes=text and pieces\).* val_bpb is not comparable"):
        compare(sides[0], pieces)
    equal = arm(tmp_path / "d", B, settings={"evaluation.bytes": "pieces"})
    assert compare(sides[0], equal).difference == pytest.approx(-0.09)


def test_a_side_of_many_seeds_does_not_make_one_of_few_seem_enough(tmp_path, capsys):
    many = [1.085 + 0.0067 * (-1) ** number for number in range(10)]
    found = compare(arm(tmp_path / "a", [1.0, 1.01]), arm(tmp_path / "b", many))
    assert found.test.p > 0.01 and found.more is not None and found.more[0] > 0 and found.more[1] == 0


def test_sliding_scores_are_named_and_a_side_that_saw_more_before_its_tokens_is_told(tmp_path):
    slid = arm(tmp_path / "a", A, val_stride=32)
    both = compare(slid, arm(tmp_path / "b", B, val_stride=32))
    assert both.notes == ("rows overlap (sliding by 32), so scores are lower than they would be without overlap",)
    mixed = compare(slid, arm(tmp_path / "c", B))
    assert mixed.notes[0].startswith("rows overlap differently (sliding by 32 and no overlap), so one side has more")


def test_a_run_of_an_earlier_version_is_known_by_its_data_path(tmp_path):
    sides = [arm(tmp_path / name, A, data_fingerprint=None) for name in ("a", "b")]
    assert compare(*sides).difference == pytest.approx(0)


def test_a_folder_that_is_no_run_is_one_line(sides, tmp_path, capsys):
    code, _, err = said(capsys, "compare", tmp_path, tmp_path, "--", *sides[1])
    assert code == 4 and "is not a run folder" in err and err.count("\n") == 1


def test_torch_is_not_needed(sides, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert said(capsys, "compare", *sides[0], "--", *sides[1])[0] == 0
