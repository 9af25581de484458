"""`ingot export` and `ingot import`: the file, its size, its score, and what goes wrong with them."""

import json
import os
import re
import shutil

import pytest
import torch
from programs import said
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ingot as package
from ingot import api
from ingot.artifact.container import read_artifact, write_artifact
from ingot.backends.torch.state import model_records
from ingot.cli.main import app
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError, ConfigError, DataError, RunError
from ingot.inference.model import foreign_weights
from ingot.model.registry import build
from ingot.runs.checkpoints import find_checkpoint


@pytest.fixture
def call():
    """The verbs in this process, for what needs no other one."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def run(reference, tmp_path):
    """A copy of a run folder without its artifact."""
    copy = tmp_path / "run"
    shutil.copytree(reference, copy)
    shutil.rmtree(copy / "artifact")
    return copy


@pytest.fixture
def llama(tmp_path):
    """An artifact of the llama family, a fifth of the run's in size."""
    settings = {"family": "llama", "layers": 1, "heads": 2, "width": 32, "kv_heads": 1, "context": 16, "vocab_size": 260}
    weights = foreign_weights(tmp_path, model_records(build(settings)), settings, ByteTokenizer())
    write_artifact(tmp_path / "llama.ingot", weights.tensors.values(), weights.facts, "none", "none")
    return tmp_path / "llama.ingot"


def test_the_file_is_scored_by_another_process_and_agrees_with_the_checkpoint(ingot, run):
    told = json.loads(ingot("export", run, "--quantiser", "none", "--codec", "lzma", "--json").stdout)
    assert told["artifact"] == str(run / "artifact" / "model.ingot")
    assert told["bytes"] == (run / "artifact" / "model.ingot").stat().st_size
    assert told["val_bpb"] == pytest.approx(told["checkpoint_val_bpb"], abs=1e-6)
    assert told["checkpoint_val_bpb"] == pytest.approx(find_checkpoint(run).progress["val_bpb"], abs=1e-6)
    assert (told["quantiser"], told["codec"], told["fits"]) == ("none", "lzma", True)


@pytest.mark.parametrize("verb", ["generate", "eval", "export"])
def test_a_device_that_is_not_there_is_named_as_the_option_is_and_nothing_is_written(run, capsys, monkeypatch, verb):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = said(capsys, verb, run, "--device", "cuda", "--json")
    told = "--device=cuda requests GPU 0 (indices start at 0), but this machine has 0; use cpu"
    assert (code, err, json.loads(out)["error"]) == (2, f"ingot: error: {told}\n", told)
    assert not (run / "artifact").exists()


def test_a_file_over_the_limit_is_kept_scored_and_told_with_what_would_fit(ingot, run):
    """The checkpoint was never evaluated in its run, so its own score is computed too."""
    checkpoint, file = min((run / "checkpoints").iterdir()), run / "artifact" / "model.safetensors"
    program = ingot("export", checkpoint, "--quantiser", "none", "--codec", "none", "--limit", 600_000, code=1)
    assert file.stat().st_size > 600_000
    rows = dict(line.split(maxsplit=1) for line in program.stdout.splitlines() if line)
    assert rows["bytes"] == f"{file.stat().st_size:,} of 600,000"
    assert rows["before"] == rows["val_bpb"].partition(",")[0] + " (+0.0000)"
    over = file.stat().st_size - 600_000
    advice = program.stderr.splitlines()[-1].partition(f" {over:,} more than the limit of 600,000; ")[2]
    assert "--quantiser none --dtype fp16 --codec " in advice


@pytest.fixture
def asked(call, llama, tmp_path):
    """What an export of a small model says, with a limit of a part of its size and without a score."""

    def ask(share, *words):
        words = (*words, "--limit", int(share * llama.stat().st_size), "--no-score", "--json", "--force")
        result = call("export", llama, "--output", tmp_path / "out.ingot", *words)
        return json.loads(result.stdout) | {"error": result.exception}

    return ask


def test_the_way_that_is_said_to_fit_does(asked, llama):
    first = asked(0.32, "--quantiser", "none", "--codec", "none")
    way = first["would_fit"]
    second = asked(0.32, *way["options"].split())
    assert isinstance(first["error"], RunError)
    assert second["bytes"] == way["bytes"] <= 0.32 * llama.stat().st_size
    assert second["fits"]


def test_what_fits_is_the_least_lossy_way_whatever_was_asked(asked):
    for quantiser in ("none", "int8-golf"):
        way = asked(0.32, "--quantiser", quantiser, "--codec", "none")["would_fit"]["options"]
        assert way.startswith("--quantiser int8 ")
    found = asked(0.5, "--quantiser", "none", "--codec", "none")
    assert found["would_fit"]["options"].startswith("--quantiser none --dtype")


def test_a_limit_that_nothing_meets_names_the_smallest(asked):
    error = asked(0.01, "--codec", "zlib")["error"]
    assert isinstance(error, RunError)
    assert "the smallest file tried, with --quantiser int8" in str(error)


def test_json_of_an_export_over_its_limit_is_one_document(capsys, llama, tmp_path):
    words = ("--output", tmp_path / "b", "--codec", "zlib", "--limit", 30_000, "--no-score", "--json")
    for code, key in ((1, "fits"), (2, "error")):  # the second time the file is there, and nothing is made
        ended, out, err = said(capsys, "export", llama, *words)
        assert ended == code and key in json.loads(out) and "ingot: error: " in err


def test_the_limit_of_the_budget_counts_without_being_given(call, llama, tmp_path):
    found = read_artifact(llama)
    config = {**found.facts["config"], "budget": {"seconds": None, "artifact_bytes": 1000}}
    write_artifact(tmp_path / "a", found.tensors.values(), {**found.facts, "config": config}, "none", "none")
    result = call("export", tmp_path / "a", "--output", tmp_path / "b", "--codec", "zlib", "--no-score")
    assert "more than the limit of 1,000" in str(result.exception)


def test_a_run_is_exported_again_in_its_own_folder_and_no_other_file_is_replaced_unless_forced(call, run, tmp_path):
    words = ("export", run, "--codec", "zlib", "--no-score")
    assert call(*words).exit_code == 0
    before = (run / "artifact" / "model.ingot").read_bytes()
    assert call(*words, "--quantiser", "int8").exit_code == 0
    assert (run / "artifact" / "model.ingot").read_bytes() != before
    (run / "artifact" / "model.ingot").write_bytes(b"notes of the user")
    for more in ((), ("--output", tmp_path / "mine")):
        (tmp_path / "mine").write_bytes(before)
        result = call(*words, *more)
        assert isinstance(result.exception, ConfigError) and "exists; --force replaces it" in str(result.exception)
    assert (run / "artifact" / "model.ingot").read_bytes() == b"notes of the user" and (tmp_path / "mine").read_bytes() == before
    assert call(*words, "--force").exit_code == 0
    assert (run / "artifact" / "model.ingot").read_bytes() == before


def test_a_model_whose_data_is_elsewhere_asks_for_data(run, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    weights = find_checkpoint(run)
    facts = {**api.load(run, device="cpu").weights.facts}
    facts["config"] = {**facts["config"], "data": {**facts["config"]["data"], "path": "data/gone"}}
    write_artifact(tmp_path / "model.ingot", weights.weights.values(), facts, "none", "none")
    model = api.load(tmp_path / "model.ingot", device="cpu")
    with pytest.raises(DataError, match=r"data/gone.* --data DIR"):
        model.evaluate(rows=2)
    assert model.evaluate(str(data), rows=2).rows == 2


def test_the_tokenizer_can_stay_at_home(call, run, tmp_path):
    call("export", run, "--no-tokenizer", "--codec", "zlib", "--no-score", "--output", tmp_path / "a")
    facts = read_artifact(tmp_path / "a").facts
    assert facts["tokenizer"] is None
    assert facts["tokenizer_fingerprint"] == find_checkpoint(run).progress["tokenizer_fingerprint"]


def test_a_tokenizer_that_stayed_at_home_is_the_one_that_the_settings_name(call, run, tmp_path):
    facts = {**api.load(run, device="cpu").weights.facts, "tokenizer": None}
    section = {"path": "sample:shakespeare+bpe:2048", "tokenizer": "byte"}  # as of a model that was imported
    facts["config"] = {**facts["config"], "data": {**facts["config"]["data"], **section}}
    write_artifact(tmp_path / "model.ingot", find_checkpoint(run).weights.values(), facts, "none", "none")
    assert api.load(tmp_path / "model.ingot", device="cpu").tokenizer.kind == "byte"


def test_only_what_a_reader_needs_is_in_the_file(call, run, tmp_path):
    call("export", run, "--codec", "zlib", "--no-score", "--output", tmp_path / "a")
    assert set(read_artifact(tmp_path / "a").facts) == {
        *(
            "config",
            "tokenizer",
            "tokenizer_fingerprint",
            "vocab_size",
            "data_fingerprint",
            "model_file_sha256",
            "step",
            "val_bpb",
        ),
        *("version", "quantiser", "dtypes"),
    }


def test_one_checkpoint_and_another_artifact_can_be_exported(call, run, tmp_path):
    checkpoint = min((run / "checkpoints").iterdir())
    call("export", checkpoint, "--quantiser", "none", "--codec", "none", "--no-score", "--output", tmp_path / "a")
    call("export", tmp_path / "a", "--quantiser", "int8", "--codec", "zlib", "--no-score", "--output", tmp_path / "b")
    first, second = read_artifact(tmp_path / "a"), read_artifact(tmp_path / "b")
    assert first.facts["step"] == second.facts["step"] == int(checkpoint.name[5:])
    assert first.tensors.keys() == second.tensors.keys()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--quantiser", "int4"], r"unknown quantiser 'int4'; choose one of none, int8, int8-golf"),
        (["--codec", "rar"], r"'rar'.*zlib, lzma"),
        (["--dtype", "fp8"], r"unknown dtype 'fp8'"),
        (["--which", "worst"], r"choose latest or best"),
        (["--output", "nowhere/at/all"], r"the folder nowhere/at does not exist; create it first"),
        (["--output", "."], r"is a folder; give the name of a file in it"),
        (["--format", "huggingface", "--codec", "lzma"], r"is neither compressed nor scored"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(call, run, words, match):
    result = call("export", run, "--no-score", *words)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=match):
        raise result.exception
    assert not list((run / "artifact").glob("*"))


def test_what_is_no_file_is_never_replaced(call, run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    result = call("export", run, "--no-score", "--codec", "zlib", "--output", tmp_path / "pipe", "--force")
    assert "is not a file, so it is not replaced" in str(result.exception)
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_that_leads_nowhere_is_not_replaced(call, run, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for words in (["export", run, "--no-score", "--codec", "zlib"], ["import", run]):
        assert "link exists" in str(call(*words, "--output", tmp_path / "link").exception)
    assert (tmp_path / "link").is_symlink()


def test_a_file_that_lacks_a_tensor_is_not_loaded(run, tmp_path):
    checkpoint = find_checkpoint(run)
    kept = [record for name, record in checkpoint.weights.items() if "ln_f" not in name]
    write_artifact(tmp_path / "a", kept, checkpoint.progress, "int8", "zlib")
    with pytest.raises(CheckpointError, match=r"has no tensor transformer\.ln_f\.weight; it belongs to another model"):
        api.load(tmp_path / "a", device="cpu")


def test_a_folder_that_is_no_run_is_named(call, tmp_path):
    assert isinstance(call("export", tmp_path).exception, CheckpointError)


def test_an_artifact_belongs_to_no_run_and_needs_an_output(call, run):
    call("export", run, "--codec", "zlib", "--no-score")
    result = call("export", run / "artifact" / "model.ingot", "--no-score")
    assert "--output" in str(result.exception)


def test_a_damaged_artifact_is_refused_by_every_verb(ingot, call, run):
    call("export", run, "--codec", "lzma", "--no-score")
    file = run / "artifact" / "model.ingot"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    said = ingot("eval", "--artifact", file, code=4).stderr
    assert str(file) in said and "checksum" in said and said.count("\n") == 1
    assert isinstance(call("export", file, "--output", run / "b").exception, CheckpointError)


def test_a_model_goes_to_hugging_face_and_back(call, run, tmp_path):
    assert call("export", run, "--format", "huggingface").exit_code == 0
    folder = run / "artifact" / "huggingface"
    assert load_file(folder / "model.safetensors")["h.0.attn.c_attn.weight"].shape == (96, 288)
    told = json.loads(call("import", folder, "--output", tmp_path, "--json").stdout)
    assert told["artifact"] == str(tmp_path / "model.safetensors")
    assert (told["tokenizer"], told["model"]["layers"]) == ("byte", 2)
    here, there = find_checkpoint(run).weights, read_artifact(tmp_path / "model.safetensors").tensors
    assert all(bytes(there[name].data) == bytes(record.data) for name, record in here.items())
    how = {"tokens": 20, "temperature": 0.0, "device": "cpu"}
    assert api.generate(tmp_path / "model.safetensors", "a", **how) == api.generate(run, "a", **how)


def test_a_llama_goes_to_hugging_face_and_back(call, llama, tmp_path):
    assert call("export", llama, "--format", "huggingface", "--output", tmp_path / "hf").exit_code == 0
    told = json.loads(call("import", tmp_path / "hf", "--output", tmp_path, "--json").stdout)
    assert (told["tokenizer"], told["model"]["family"], told["model"]["kv_heads"]) == ("byte", "llama", 1)
    how = {"tokens": 12, "temperature": 0.0, "device": "cpu"}
    assert api.generate(tmp_path / "model.safetensors", "a", **how) == api.generate(llama, "a", **how)


def test_gguf_is_a_folder_with_a_modelfile(call, llama, run, tmp_path):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    assert call("export", llama, "--format", "gguf", "--dtype", "q8_0", "--output", tmp_path / "g").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["Modelfile", "model.gguf"]
    (tmp_path / ".a.gguf.export").mkdir()  # of the user
    assert call("export", llama, "--format", "gguf", "--output", tmp_path / "a.gguf").exit_code == 0
    assert (tmp_path / "a.gguf").read_bytes()[:4] == b"GGUF"
    assert [path.name for path in tmp_path.glob(".a*")] == [".a.gguf.export"]
    assert "unknown dtype 'q8_0'" in str(call("export", run, "--format", "huggingface", "--dtype", "q8_0").exception)
    told = json.loads(call("export", run, "--format", "gguf", "--json").stdout)
    assert told["artifact"] == str(run / "artifact" / "gguf")


def test_a_model_whose_name_is_not_utf_8_has_one_that_is_in_gguf(call, llama, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    call("export", llama.rename(tmp_path / os.fsdecode(b"a\xff")), "--format", "gguf", "--output", tmp_path / "g")
    assert gguf.GGUFReader(tmp_path / "g" / "model.gguf").fields["general.name"].contents() == "a\\udcff"


@pytest.fixture
def overlapping(data, tmp_path):
    """A run that is scored by rows that overlap."""
    sections = {
        "data": {"path": str(data), "seq_len": 32},
        "evaluation": {"stride": 8, "every": 0, "sample_tokens": 0},
        "budget": {"seconds": None},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 3, "tokens_per_step": 256, "device": "cpu"},
        "artifact": {"write": False},
        "model": {"family": "gpt2", "layers": 1, "width": 32, "heads": 2},
    }
    return package.train(recipe="demo", quiet=True, **sections).run_dir


@pytest.mark.parametrize(("layout", "name"), [("huggingface", "huggingface"), ("nanogpt", "ckpt.pt")])
def test_a_model_that_went_to_another_program_and_back_has_the_score_of_its_run(call, overlapping, data, tmp_path, layout, name):
    call("export", overlapping, "--format", layout)
    assert call("import", overlapping / "artifact" / name, "--output", tmp_path).exit_code == 0
    there, here = (api.load(path, device="cpu") for path in (tmp_path / "model.safetensors", overlapping))
    assert (there.weights.config.stride, here.weights.config.stride) == (8, 8)
    assert there.evaluate(str(data)).bits_per_byte == pytest.approx(here.evaluate().bits_per_byte, abs=1e-9)


def test_eval_says_by_which_rows_and_bytes_it_scored_and_takes_others(overlapping):
    def told(*words: object) -> dict[str, object]:
        result = CliRunner().invoke(app, ["eval", str(overlapping), "--device", "cpu", "--json", *map(str, words)])
        return json.loads(result.stdout) if result.exit_code == 0 else {"error": str(result.exception)}

    usual, far, short = told(), told("--stride", 32), told("--seq-len", 16)
    assert (usual["seq_len"], usual["stride"], usual["bytes_by"]) == (32, 8, "text")
    assert (far["seq_len"], far["stride"]) == (32, 32) and far["rows"] == -(-usual["rows"] // 4)
    assert (short["seq_len"], short["stride"]) == (16, 16) and short["tokens"] == usual["tokens"]
    assert len({usual["val_bpb"], far["val_bpb"], short["val_bpb"]}) == 3
    assert "from 1 to 32 tokens" in told("--stride", 33)["error"]
    assert "from 1 to 32 tokens" in told("--seq-len", 33)["error"]
    assert f"row lengths from 1 to 32 tokens, not {2**64:,}" in told("--seq-len", 2**64)["error"]
    plain = CliRunner().invoke(app, ["eval", str(overlapping), "--device", "cpu"]).stdout
    assert re.search(r"^rows +([\d,]+) of \1, 32 tokens long, 8 apart$", plain, re.M)
    assert re.search(r"^bytes +[\d,]+, of the text$", plain, re.M)


@pytest.mark.parametrize(
    ("layout", "ours"),
    [("huggingface", "config.json"), ("gguf", "model.gguf"), ("gpt-simple", "model/config.json")],
)
def test_a_forced_export_into_a_folder_keeps_the_files_that_it_does_not_write(call, llama, tmp_path, layout, ours):
    if layout == "gguf":
        pytest.importorskip("gguf")
    project = tmp_path / "project"
    (project / ours).parent.mkdir(parents=True)
    (project / "src").mkdir()
    for name in (ours, "src/main.js", "notes"):
        (project / name).write_text("of the user")
    words = ("export", llama, "--format", layout, "--output", project)
    assert isinstance(call(*words).exception, ConfigError) and (project / ours).read_text() == "of the user"
    told = call(*words, "--force", "--json")
    assert told.exit_code == 0 and (project / ours).read_bytes() != b"of the user"
    assert (project / "src" / "main.js").read_text() == (project / "notes").read_text() == "of the user"
    written = sum(path.stat().st_size for path in project.rglob("*") if path.is_file()) - 2 * len("of the user")
    assert json.loads(told.stdout)["bytes"] == written
    assert not list(tmp_path.rglob(".*"))


def test_an_import_does_not_replace_a_file_unless_forced(call, run, tmp_path):
    call("export", run, "--format", "huggingface")
    words = ("import", run / "artifact" / "huggingface", "--output", tmp_path / "a")
    assert call(*words).exit_code == 0
    assert "exists; --force replaces it" in str(call(*words).exception)
    assert call(*words, "--force").exit_code == 0


def test_an_imported_model_of_gpt2_s_ids_has_gpt2_s_tokenizer(call, tmp_path):
    width, rows = 8, 50257
    shapes = {"wte.weight": (rows, width), "wpe.weight": (16, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    block = {"ln_1": 1, "ln_2": 1, "attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}
    for name, factor in block.items():
        shapes[f"h.0.{name}.weight"] = (width,) if "ln" in name else (width, factor * width)
        shapes[f"h.0.{name}.bias"] = (factor * width,)
    shapes |= {"h.0.mlp.c_proj.weight": (4 * width, width), "h.0.mlp.c_proj.bias": (width,)}
    (tmp_path / "hf").mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "hf" / "model.safetensors")
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": width, "n_positions": 16, "vocab_size": rows}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert call("import", tmp_path / "hf", "--output", tmp_path / "a").exit_code == 0
    facts = read_artifact(tmp_path / "a").facts
    assert facts["tokenizer"] == {"kind": "gpt2"}
    assert facts["config"]["data"]["tokenizer"] == "gpt2"
    assert facts["config"]["model"]["context"] == 16


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("openai-community/gpt2", DataError, r"HF_HUB_OFFLINE is set .*; go online once, or give a folder with config\.json"),
        ("./nowhere", CheckpointError, r"./nowhere is not a folder"),
        ("a/b/c", CheckpointError, r"a/b/c is not a folder; give a folder with config\.json"),
    ],
)
def test_a_model_that_is_not_found_is_one_sentence(ingot, tmp_path, name, error, match):
    ingot.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    program = ingot("import", "--output", tmp_path / "a", name, code=error.exit_code)
    assert not (tmp_path / "a").exists()
    assert re.search(match, program.stderr)
    assert len(program.stderr.splitlines()) == 1
