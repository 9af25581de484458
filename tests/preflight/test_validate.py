"""Every finding is triggered by the least that is wrong, and nothing else is found then."""

import json
import os
import shutil
import struct

import pytest
from bucket_files import write_pair

from ingot.backends.torch.build import build_model
from ingot.backends.torch.state import model_records
from ingot.config.loading import load_config
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError
from ingot.preflight.data_checks import Finding, Findings, RunData
from ingot.preflight.validate import check_before_training, check_resume, report_lines, report_record, validate
from ingot.runs.checkpoints import save_checkpoint
from ingot.train.resume import facts_of


def codes(config, *args, **options):
    return {finding.code: finding.severity for finding in validate(config, *args, **options).findings}


def test_a_sound_run_has_no_findings_and_leaves_nothing_behind(config, folder, tmp_path):
    report = validate(config())
    assert report.findings == [] and report.findings.exit_code() == 0
    assert not (tmp_path / "run").exists()
    assert report.data.tokens() == 1840 and report.total_tokens == 1280


def test_no_ranks(config):
    assert codes(config(), 0) == {"preflight.world_size": "error"}


def test_more_ranks_than_rows(config):
    assert codes(config(), 5) == {"training.ranks": "error"}


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:", "cuda:01"])
def test_a_device_that_there_cannot_be(config, device):
    assert codes(config(training__device=device)) == {"training.device_unknown": "error"}
    assert codes(config(training__device="cuda:1")) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__device": "cpu", "training__precision": "fp16"}, "training.precision=fp16 needs a GPU"),
        ({"training__precision": "fp16"}, "training.precision=fp16 is not supported by training.device=mlx"),
        ({"training__deterministic": True}, "training.deterministic=true needs torch"),
        ({"training__threads": 1}, "training.threads=1 needs torch"),
    ],
)
def test_settings_that_the_device_does_not_take(config, changes, said):
    (finding,) = validate(config(**{"training__device": "mlx", **changes})).findings
    assert finding.code == ("runtime.no_cuda" if "training__precision" in changes else "training.device_unsupported")
    assert finding.render().startswith(said)


def test_several_ranks_on_a_device_that_runs_in_one_process(config):
    assert codes(config(training__device="mlx")) == {}
    assert codes(config(training__device="mlx"), 2) == {"training.device_unsupported": "error"}


@pytest.mark.parametrize("content", [None, "class Model(:", "\0"])
def test_a_model_of_ones_own_that_is_not_there_or_is_not_python(tmp_path, content):
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    given = {"data.path": "sample:shakespeare", "data.tokenizer": "byte", "model.file": str(tmp_path / "mine.py")}
    given |= {"training.max_steps": 4, "training.output_dir": str(tmp_path / "run")}
    found = codes(load_config(python=given, environment={}).config)
    assert found["model.file_unusable"] == "error"


def test_a_tokenizer_that_cannot_be_opened(config, tmp_path):
    found = codes(config(data__tokenizer=str(tmp_path / "none.json")))
    assert found == {"tokenizer.load_failed": "error", "model.vocab_unknown": "warning"}


def test_no_path(config):
    assert codes(config(data__path="")) == {"data.path.empty": "error"}


def test_a_path_that_is_not_there(config, tmp_path):
    assert codes(config(data__path=str(tmp_path / "none"))) == {"data.path.missing": "error"}


def test_a_folder_without_data(config, tmp_path):
    (tmp_path / "empty").mkdir()
    assert codes(config(data__path=str(tmp_path / "empty"))) == {"data.train.missing": "error"}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_that_is_missing(config, folder, split):
    shutil.rmtree(folder / split)
    assert codes(config()) == {f"data.{split}.missing": "error"}


def test_no_buckets(config, folder):
    shutil.rmtree(folder / "train")
    (folder / "train").mkdir()
    assert codes(config()) == {"data.buckets.empty": "error"}


def test_a_bucket_without_validation(config, folder):
    shutil.rmtree(folder / "val" / "web")
    assert codes(config()) == {"data.val.web.missing": "error"}


def test_buckets_without_files_are_all_told(config, folder):
    for bucket in ("train/web", "val/books"):
        shutil.rmtree(folder / bucket)
        (folder / bucket).mkdir()
    assert codes(config()) == {"data.train.web.no_shards": "error", "data.val.books.no_shards": "error"}


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"GPTX" + b[4:], lambda b: b[:4] + struct.pack("<I", 2) + b[8:], lambda b: b[:-1], None],
    ids=["magic", "version", "short", "missing"],
)
def test_a_damaged_index_is_named(config, folder, damage):
    path = folder / "train" / "web" / "0.idx"
    contents = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(contents))
    report = validate(config())
    assert {one.code: one.severity for one in report.findings} == {"data.train.web.idx_error": "error"}
    assert str(path) in report.findings[0].render()


def test_json_lines_are_a_note_and_are_not_prepared(config, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "json" / split / "web").mkdir(parents=True)
        (tmp_path / "json" / split / "web" / "a.jsonl").write_text('{"text": "abc"}\n')
    before = sorted(tmp_path.rglob("*"))
    assert codes(config(data__path=str(tmp_path / "json"))) == {"data.format.jsonl": "info"}
    assert sorted(tmp_path.rglob("*")) == before


PHASES = [{"tokens": 640, "mix": {"web": 3, "books": 1}}, {"tokens": 640, "mix": {"web": 1, "books": 3}}]


def test_phases_that_fit_have_no_findings(config):
    assert codes(config(data__phases=PHASES, data__epochs=1)) == {}


def test_unknown_and_unused_buckets(config):
    assert codes(config(data__mix={"web": 1, "wiki": 1})) == {"curriculum.unknown_buckets": "error"}
    assert codes(config(data__mix={"web": 1})) == {"curriculum.unused_buckets": "info"}


@pytest.mark.parametrize(("exhausted", "severity"), [("halt", "budget"), ("renormalise", "warning")])
def test_a_bucket_of_which_phases_want_more_than_there_is(config, exhausted, severity):
    phases = [{"tokens": 1280, "mix": {"web": 3, "books": 1}}]
    found = codes(config(data__phases=phases, data__epochs=1, data__exhausted=exhausted))
    assert found == {"curriculum.shortfall.web": severity}
    assert codes(config(data__phases=phases, data__epochs=2, data__exhausted=exhausted)) == {}
    assert codes(config(data__phases=phases, data__exhausted=exhausted)) == {}  # read again and again


@pytest.mark.parametrize(("steps", "told"), [(20, False), (19, False), (21, False), (18, True), (22, True)])
def test_steps_that_do_not_fit_the_phases(config, steps, told):
    asked = config(data__phases=PHASES, training__max_steps=steps)
    assert codes(asked) == ({"training.budget_mismatch": "warning"} if told else {})
    assert codes(asked, allow_mismatch=False) == ({"training.budget_mismatch": "budget"} if told else {})


def test_data_shorter_than_the_plan_without_phases(config):
    assert codes(config(data__epochs=1, training__max_steps=28)) == {}
    [finding] = validate(config(data__epochs=1, training__max_steps=500)).findings
    assert (finding.code, finding.severity) == ("data.shorter_than_plan", "warning")
    assert "at about step 28" in finding.render()
    assert codes(config(training__max_steps=500)) == {"data.repeated": "info"}


def test_gpt2_on_bytes_is_warned_about_its_idle_rows_and_its_passes():
    asked = load_config(recipe="gpt2", python={"data": {"path": "sample:shakespeare"}}, environment={}).config
    told = {finding.code: finding.render() for finding in validate(asked).findings if finding.severity == "warning"}
    assert told["model.idle_rows"] == (
        "model.vocab_size=50,304, but the data has 260 ids: 50,044 rows of the embedding are never used; "
        "set model.vocab_size=null or prepare the text with --tokenizer gpt2"
    )
    assert told["data.repeated"].endswith(" times; lower training.max_steps or prepare more text")
    timed = asked.model_copy(update={"budget": asked.budget.model_copy(update={"seconds": 60.0})})
    assert codes(timed)["data.repeated"] == "info"


@pytest.mark.parametrize("recipe", ["demo", "shakespeare-char"])
def test_recipes_for_their_data_are_not_warned_about_their_vocabulary_or_their_passes(recipe):
    found = codes(load_config(recipe=recipe, environment={}).config, thorough=False)
    assert "model.idle_rows" not in found and found.get("data.repeated") != "warning"


def test_the_bucket_that_ends_first_decides_how_long_a_mix_lasts(config, folder, document):
    write_pair(folder / "train" / "web" / "0.bin", [document] * 5)
    asked = {"data__epochs": 1, "data__mix": {"web": 1, "books": 1}}
    assert codes(config(**asked)) == {"data.shorter_than_plan": "warning"}
    assert codes(config(**asked, data__exhausted="renormalise", training__max_steps=17)) == {}


def test_what_gpt_simple_says_of_files_and_loader_processes(config, folder):
    assert codes(config(), 4, workers=4) == {"data.shards.fewer_than_world": "info"}
    assert codes(config(), 1, workers=4) == {"data.num_workers.will_clamp": "warning"}
    assert codes(config(), 1, workers=1) == {}


def test_data_of_another_tokenizer(config):
    [finding] = validate(config(data__tokenizer="gpt2")).findings
    assert (finding.code, finding.severity) == ("data.tokenizer_mismatch", "error")
    assert codes(config(data__tokenizer=None)) == {"data.tokenizer_unknown": "error", "model.vocab_unknown": "warning"}


def test_data_that_cannot_be_read(config, tmp_path):
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "dataset.json").write_text("{}")
    found = codes(config(data__path=str(tmp_path / "prepared")))
    assert found == {"data.unreadable": "error"}


def test_rows_longer_than_the_text(config):
    found = codes(config(data__sampling="shuffle", data__seq_len=2048, training__tokens_per_step=2048, training__max_steps=1))
    assert found == {"data.unusable": "error", "data.repeated": "info"}


def test_an_output_folder_below_a_file(config, tmp_path):
    (tmp_path / "file").write_text("")
    assert codes(config(training__output_dir=str(tmp_path / "file" / "run"))) == {"output.not_writable": "error"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_output_folder_that_is_not_ours(config, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert codes(config(training__output_dir=str(tmp_path / "closed" / "run"))) == {"output.not_writable": "error"}


def test_a_model_larger_than_the_memory(config):
    [finding] = validate(config(model__width=65536, model__layers=200, model__heads=16)).findings
    assert (finding.code, finding.severity) == ("model.memory", "error")


def test_a_model_whose_state_fits_and_whose_rows_may_not_is_warned_about(config, monkeypatch):
    needed = validate(config()).memory
    monkeypatch.setattr("ingot.preflight.validate.host_bytes", lambda: needed - 1)
    assert codes(config()) == {"model.memory": "warning"}
    monkeypatch.setattr("ingot.preflight.validate.host_bytes", lambda: needed)
    assert codes(config()) == {}


def test_a_session_without_time(config):
    reserved = config(training__max_runtime_seconds=10, training__walltime_reserve_seconds=20)
    assert codes(reserved) == {"training.walltime": "error"}


@pytest.fixture
def saved(config, tmp_path):
    """A checkpoint of the run at step 5."""
    facts = facts_of(config(), validate(config()).data.dataset)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return save_checkpoint(tmp_path / "run" / "checkpoints", 5, {"model": []}, {**facts, "tokens": 320, "loss": 2.0})


def test_a_run_that_goes_on_has_no_findings(config, saved):
    report = validate(config())
    assert report.findings == [] and report.resume == {"path": str(saved), "step": 5, "tokens": 320}


def test_a_resume_with_another_model(config, saved):
    [finding] = validate(config(model__width=32)).findings
    assert (finding.code, finding.severity) == ("resume.arch_drift", "error")
    assert "model.width was 16 and is 32" in finding.render()
    assert "n_embd was 16" in finding.render(lambda path: {"model.width": "n_embd"}.get(path, path))


def test_a_resume_with_other_settings(config, saved):
    assert codes(config(optimizer__learning_rate=1e-3)) == {"resume.config_drift": "info"}
    assert codes(config(training__seed=7)) == {"resume.run_changed": "error"}


def test_a_resume_on_other_data(config, folder, document, saved):
    write_pair(folder / "train" / "web" / "1.bin", [document])
    assert codes(config()) == {"resume.run_changed": "error"}


def test_a_checkpoint_that_cannot_be_read(config, saved):
    (saved / "checkpoint.json").write_text("{")
    assert codes(config()) == {"resume.trainer_state_unreadable": "error"}


@pytest.mark.parametrize("path", ["/", "/tmp/.."])
def test_the_root_of_the_disk_is_no_run_folder(config, path):
    assert codes(config(training__output_dir=path)) == {"output.not_writable": "error"}


def test_a_folder_that_holds_a_run_and_must_not_be_continued(config, saved):
    assert codes(config(training__resume="never")) == {"resume.resolve_failed": "error"}


def test_a_resume_from_a_folder_that_is_not_there_or_is_no_checkpoint(config, tmp_path, saved):
    assert codes(config(training__resume=str(tmp_path / "none"))) == {"resume.path_missing": "error"}
    (tmp_path / "other").mkdir()
    assert codes(config(training__resume=str(tmp_path / "other"))) == {"resume.no_trainer_state": "error"}
    (tmp_path / "other" / "trainer_state.json").write_text("{")
    elsewhere = {"training__output_dir": str(tmp_path / "next")}
    assert codes(config(training__resume=str(tmp_path / "other"), **elsewhere)) == {"resume.trainer_state_unreadable": "error"}
    assert codes(config(training__resume=str(saved), **elsewhere)) == {"resume.config_drift": "info"}


def test_a_resume_in_a_folder_with_another_run_is_found_as_training_would_refuse_it(config, tmp_path, saved):
    shutil.copytree(saved, other := tmp_path / "other" / "checkpoints" / saved.name)
    [finding] = validate(config(training__resume=str(other))).findings
    assert (finding.code, finding.severity) == ("resume.resolve_failed", "error")
    assert "holds another run (newest checkpoint: step 5)" in finding.render()


@pytest.mark.parametrize(
    ("severities", "plain", "strict"),
    [([], 0, 0), (["info"], 0, 0), (["info", "warning"], 2, 1), (["warning", "budget"], 1, 1), (["error"], 1, 1)],
    ids=str,
)
def test_exit_codes(severities, plain, strict):
    findings = Findings(Finding("x", severity, IngotError()) for severity in severities)
    assert (findings.exit_code(), findings.exit_code(strict=True)) == (plain, strict)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("data.path.missing", DataError),
        ("curriculum.shortfall.web", DataError),
        ("resume.arch_drift", CheckpointError),
        ("output.not_writable", ConfigError),
        ("tokenizer.load_failed", ConfigError),
    ],
)
def test_a_run_is_refused_with_the_exit_code_of_its_first_finding(code, kind):
    with pytest.raises(kind):
        Findings(
            Finding(*kind, IngotError()) for kind in (("model.vocab_unknown", "warning"), (code, "error"), ("data.x", "error"))
        ).refuse()


def test_an_error_that_is_refused_as_another_kind_still_says_where_it_came_up():
    damaged = DataError("this is damaged", advice="get another {x}").within("{a}.json")
    with pytest.raises(ConfigError, match=r"^\{a\}\.json: this is damaged; get another \{x\}$"):
        Findings([Finding("tokenizer.load_failed", "error", damaged)]).refuse()


def test_training_says_the_warnings_and_gets_the_open_data(config):
    said = []
    dataset = check_before_training(config(data__epochs=1, training__max_steps=500), 1, said.append)
    assert dataset.split("train").tokens == 1840
    assert len(said) == 1 and said[0].startswith("data.shorter_than_plan: ")


def test_the_report_names_every_section_and_finding(config, folder, saved):
    report = validate(config(data__phases=PHASES, data__epochs=1, training__max_steps=30))
    lines = report_lines(report)
    assert [line for line in lines if line and not line.startswith(" ")][:-1] == [
        "Model", "Data", "Curriculum", "Training plan", "Output", "Resume",
    ]  # fmt: skip
    assert any(line.startswith("  [!] training.budget_mismatch: a run of training.max_steps steps reads 1.92K") for line in lines)
    record = json.loads(json.dumps(report_record(report, strict=True)))
    assert record["exit_code"] == 1 and record["findings"][0]["code"] == "training.budget_mismatch"
    assert record["data"]["splits"]["train"]["web"] == {"files": 1, "tokens": 920, "documents": 20}


def test_a_checkpoint_that_may_not_be_read_keeps_a_run_from_starting(config, saved, open_folder, as_nobody):
    shutil.copytree(saved.parent.parent, open_folder / "run")
    shutil.copytree(saved, open_folder / "run/checkpoints/step-00000001")  # an older one, to which the run must not go back
    (open_folder / "run/checkpoints" / saved.name / "checkpoint.json").chmod(0)
    findings = Findings()
    with as_nobody():
        check_resume(config(), open_folder / "run", RunData(""), findings)
    assert [(finding.code, finding.blocks) for finding in findings] == [("resume.trainer_state_unreadable", True)]


@pytest.fixture
def weights(config, tmp_path):
    """A checkpoint with the weights of a model of the run's settings, elsewhere."""
    dataset = validate(config()).data.dataset
    (tmp_path / "base" / "checkpoints").mkdir(parents=True)
    records = list(model_records(build_model(config(), dataset.tokenizer.vocab_size)))
    return save_checkpoint(tmp_path / "base" / "checkpoints", 5, {"model": records}, facts_of(config(), dataset))


def test_weights_that_fit_have_no_findings(config, weights):
    assert codes(config(training__weights=str(weights))) == {}
    assert codes(config(training__weights=str(weights.parents[1]), model__rope_base=5.0)) == {}  # which decides no shape


def test_weights_that_are_missing_or_damaged_or_of_another_model_are_found(config, weights, tmp_path):
    def said(**changes):
        [finding] = validate(config(**{"training__weights": str(weights), **changes})).findings
        assert (finding.code, finding.severity) == ("resume.weights_unusable", "error")
        return finding.render()

    assert "does not fit this model; set model.width=16" in said(model__width=32)
    assert "model.family=llama" in said(model__family="gpt2")
    assert "there is no checkpoint in" in said(training__weights=str(tmp_path / "nowhere"))
    (tmp_path / "model.ingot").write_bytes(b"something else")
    assert "model.ingot" in said(training__weights=str(tmp_path / "model.ingot"))
    (weights / "model.safetensors").write_bytes(b"x" * (weights / "model.safetensors").stat().st_size)
    assert "model.safetensors" in said()


def test_a_run_that_goes_on_needs_no_weights(config, saved):
    assert codes(config(training__weights="nowhere")) == {"resume.config_drift": "info"}
