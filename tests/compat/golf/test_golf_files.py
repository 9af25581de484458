"""The two files of a run: read by the original, scored again, never larger than allowed without a word, and never code."""

from __future__ import annotations

import io
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golf_toys import ROOT, Golf, Ran
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
from ingot.artifact.container import read_artifact
from ingot.backends.torch.state import model_records, record, tensor
from ingot.cli.main import call
from ingot.compat.golf.files import FORMAT, quantised, read_weights, state_dict
from ingot.errors import CheckpointError, ConfigError
from ingot.model.golf import Golf as Model
from ingot.model.settings import CONTROL
from ingot.runtime.tensors import TensorRecord

WIDE = {"MODEL_DIM": "256", "NUM_LAYERS": "1", "ITERATIONS": "2", "TRAIN_BATCH_TOKENS": "256"}  # has tensors of codes


def original_reader(path: Path) -> dict[str, torch.Tensor]:
    """The weights of final_model.int8.ptz, read as the layout is documented and without a line of ours."""
    contents = torch.load(io.BytesIO(zlib.decompress(path.read_bytes())), map_location="cpu")
    assert contents["__quant_format__"] == "int8_clean_per_row_v1"
    weights = {}
    for name, codes in contents["quantized"].items():
        dtype, scale = getattr(torch, contents["dtypes"][name]), contents["scales"][name]
        if contents.get("qmeta", {}).get(name, {}).get("scheme") == "per_row" or scale.ndim > 0:
            scale = scale.float().view(-1, *[1] * (codes.ndim - 1))
            weights[name] = (codes.float() * scale).to(dtype).contiguous()
        else:
            weights[name] = (codes.float() * float(scale)).to(dtype).contiguous()
    for name, value in contents["passthrough"].items():
        was = contents.get("passthrough_orig_dtypes", {}).get(name)
        weights[name] = value.to(getattr(torch, was)) if was else value
    return weights


def largest_error(folder: Path) -> float:
    """How far the quantised weights in a folder are from the live ones."""
    weights, live = original_reader(folder / "final_model.int8.ptz"), torch.load(folder / "final_model.pt", weights_only=True)
    return max(float((weights[name] - value).abs().max()) for name, value in live.items() if value.numel())


@pytest.mark.parametrize("name", ["final_model.pt", "final_model.int8.ptz"])
def test_a_file_is_imported_with_the_shape_of_its_tensors_and_writes(
    finished: Ran, toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copy(tmp_path / name, tmp_path / "any name")
    words = ["import", str(tmp_path / "any name"), "-o", str(tmp_path / "model.ingot")]
    with pytest.raises(ConfigError, match=r"does not contain a tokenizer; set --tokenizer to"):
        call(words)
    assert call([*words, "--tokenizer", str(toys / "data/tokenizers/toy.model")]) == 0
    told = capsys.readouterr()
    assert "golf: layers 2, heads 2, width 16, context 1024, vocab_size 274" in told.out
    assert "using golf's defaults: 1,024, 10,000 and 30" in told.err
    held, file = read_artifact(tmp_path / "model.ingot").tensors, read_weights((tmp_path / name).read_bytes(), "the file")
    assert {one: bytes(record.data) for one, record in held.items()} == {one: bytes(r.data) for one, r in file.items()}
    model = ingot.load(tmp_path / "model.ingot", device="cpu")
    found = model.evaluate(str(toys / "data/datasets/toy"), seq_len=32)
    scored = finished.exact[1] if name.endswith("ptz") else finished.evaluations[4][1]
    assert found.bits_per_byte == pytest.approx(scored, abs=1e-4) and model.generate("The cat", tokens=5)


def test_a_file_with_another_model_is_not_imported(finished: Ran, toys: Path, tmp_path: Path) -> None:
    words = ["import", str(tmp_path / "a.pt"), "-o", str(tmp_path / "b"), "--tokenizer", str(toys / "data/tokenizers/toy.model")]
    torch.save({"tok_emb.weight": torch.ones(4, 2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt does not contain golf's baseline model"):
        call(words)
    torch.save(torch.load(tmp_path / "final_model.pt") | {"mine": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt has a tensor mine that the model does not"):
        call(words)


def packed(*named: tuple[str, torch.Tensor], **how: Any) -> dict[str, Any]:
    """What the file holds for some tensors."""
    how = {"quantiser": "int8-golf", "control": CONTROL, "keep": CONTROL} | how
    data, _ = quantised([record(name, value) for name, value in named], **how)
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.fixture(scope="module")
def baseline() -> Model:
    """A model of the challenge's shape in the formats of a GPU."""
    torch.manual_seed(0)
    model = Model(1024, 1024)
    model.tok_emb.to(torch.bfloat16)
    return model


# -- what is inside -------------------------------------------------------------------------------------------------------------


def test_the_original_reads_what_a_run_wrote(golf: Golf, tmp_path: Path) -> None:
    golf(**WIDE)
    weights, live = original_reader(tmp_path / "final_model.int8.ptz"), torch.load(tmp_path / "final_model.pt", weights_only=True)
    assert weights.keys() == live.keys()
    assert {name: (value.dtype, value.shape) for name, value in weights.items()} == {
        name: (value.dtype, value.shape) for name, value in live.items()
    }
    assert largest_error(tmp_path) <= 0.5 / 127 + 1e-3  # half a step of the grid
    ours = read_weights((tmp_path / "final_model.int8.ptz").read_bytes(), "x.ptz")
    assert all(torch.equal(tensor(ours[name]), value) for name, value in weights.items()) and ours.keys() == weights.keys()


def test_the_baselines_files_have_the_sizes_they_are_known_for(baseline: Model) -> None:
    records = model_records(baseline)
    data, payload = quantised(records, "int8-golf", CONTROL, CONTROL)
    assert (payload, sum(len(item.data) for item in records)) == (17_178_912, 67_191_072)
    assert len(data) == pytest.approx(17_224_025, rel=1e-3)  # torch writes a few bytes more or less by its version
    assert len(state_dict(records)) == pytest.approx(67_224_983, rel=1e-3)


def test_the_layout_is_the_documented_one(baseline: Model) -> None:
    contents = packed(*baseline.state_dict().items())
    assert list(contents) == ["__quant_format__", "quantized", "scales", "dtypes", "passthrough", "qmeta"]
    assert contents["__quant_format__"] == FORMAT == "int8_clean_per_row_v1"
    matrices = {name for name, value in baseline.state_dict().items() if value.numel() > 65_536}
    assert len(matrices) == 55 and all(contents[part].keys() == matrices for part in ("quantized", "scales", "dtypes", "qmeta"))
    assert contents["dtypes"]["tok_emb.weight"] == "bfloat16" and contents["dtypes"]["blocks.0.mlp.fc.weight"] == "float32"
    assert contents["qmeta"]["tok_emb.weight"] == {"scheme": "per_row", "axis": 0}
    assert {value.dtype for value in contents["scales"].values()} == {torch.float16}
    assert {value.dtype for value in contents["passthrough"].values()} == {torch.float32}


def test_small_tensors_are_kept_as_fp16_with_their_format_unless_they_are_to_stay_fp32() -> None:
    one = torch.ones(2, 2)
    contents = packed(("w", one), ("b", one.bfloat16()), ("q_gain", one), ("n", torch.arange(4)))
    assert {name: value.dtype for name, value in contents["passthrough"].items()} == {
        "w": torch.float16, "b": torch.float16, "q_gain": torch.float32, "n": torch.int64,
    }  # fmt: skip
    assert contents["passthrough_orig_dtypes"] == {"w": "float32", "b": "bfloat16"} and "qmeta" not in contents


def test_a_tensor_of_another_rank_has_one_scale(tmp_path: Path) -> None:
    values = torch.randn(70, 10, 100, generator=torch.Generator().manual_seed(0))
    contents = packed(("t", values))
    assert contents["scales"]["t"].shape == () and contents["scales"]["t"].dtype == torch.float32 and "qmeta" not in contents
    (tmp_path / "t.ptz").write_bytes(zlib.compress(quantised([record("t", values)], "int8-golf", CONTROL, CONTROL)[0]))
    assert float((original_reader(tmp_path / "t.ptz")["t"] - values).abs().max()) < 0.05


def test_control_tensors_are_never_quantised_however_large() -> None:
    large = torch.randn(300, 300)
    contents = packed(("blocks.0.resid_mix", large), ("blocks.0.w", large))
    assert contents["quantized"].keys() == {"blocks.0.w"}
    assert torch.equal(contents["passthrough"]["blocks.0.resid_mix"], large)
    contents = packed(("blocks.0.resid_mix", large), keep=())
    assert contents["passthrough"]["blocks.0.resid_mix"].dtype == torch.float16
    assert packed(("blocks.0.resid_mix", large), control=(), keep=())["quantized"].keys() == {"blocks.0.resid_mix"}


def test_the_patterns_of_the_variables_decide(golf: Golf, tmp_path: Path) -> None:
    def formats() -> dict[str, torch.dtype]:
        contents = torch.load(io.BytesIO(zlib.decompress((tmp_path / "final_model.int8.ptz").read_bytes())), weights_only=True)
        return {name: value.dtype for part in ("quantized", "passthrough") for name, value in contents[part].items()}

    golf(**WIDE, CONTROL_TENSOR_NAME_PATTERNS="mlp,q_gain", INT8_KEEP_FLOAT_FP32_NAME_PATTERNS="mlp.fc")
    found = formats()
    assert found["blocks.0.mlp.fc.weight"] == torch.float32 and found["blocks.0.mlp.proj.weight"] == torch.float16
    assert found["tok_emb.weight"] == torch.int8 and found["blocks.0.attn.q_gain"] == torch.float16


def test_the_exact_rule_uses_the_whole_range_of_codes_and_the_scale_that_is_stored(golf: Golf, tmp_path: Path) -> None:
    errors = {}
    for rule in ("golf", "exact"):
        golf(**WIDE, INT8_RULE=rule)
        errors[rule] = largest_error(tmp_path)
    assert errors["exact"] < errors["golf"] / 2


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_bf16_embedding_is_kept_and_comes_back_in_bf16(golf: Golf, tmp_path: Path) -> None:
    golf(ITERATIONS="1", EMBED_DTYPE="bf16")
    assert torch.load(tmp_path / "final_model.pt", weights_only=True)["tok_emb.weight"].dtype == torch.bfloat16
    assert original_reader(tmp_path / "final_model.int8.ptz")["tok_emb.weight"].dtype == torch.bfloat16


# -- scored again ---------------------------------------------------------------------------------------------------------------


def test_a_file_scores_what_its_run_said_and_says_so_as_often_as_it_is_asked(golf: Golf, tmp_path: Path) -> None:
    run = golf(**WIDE)
    first, second = (golf(**WIDE, EVAL_ONLY_PATH="final_model.int8.ptz", RUN_ID=name) for name in "ab")
    assert first.exact == second.exact == run.exact
    assert first.value("model_params") == run.value("model_params")
    assert first.losses == {} and sorted(path.name for path in (tmp_path / "logs").glob("[ab]*")) == ["a.txt", "b.txt"]


def test_the_quantised_model_is_about_as_good_as_the_live_one(golf: Golf) -> None:
    run = golf(ITERATIONS="30", TRAIN_LOG_EVERY="0")
    assert run.exact[1] == pytest.approx(run.evaluations[30][1], abs=0.008)


def test_the_state_dict_scores_what_the_live_model_did_under_a_name_of_its_own(golf: Golf, finished: Ran) -> None:
    ran = golf(EVAL_ONLY_PATH="final_model.pt")
    (found,) = re.findall(r"^final_model_exact val_loss:(\S+) val_bpb:(\S+)$", ran.out, re.M)
    assert (round(float(found[0]), 4), round(float(found[1]), 4)) == finished.evaluations[4]
    assert "roundtrip" not in ran.out


@pytest.mark.parametrize("size", ["256", "777", "100000"])
def test_validation_does_not_depend_on_how_many_rows_are_read_at_once(golf: Golf, finished: Ran, size: str) -> None:
    found = golf(EVAL_ONLY_PATH="final_model.int8.ptz", VAL_BATCH_SIZE=size).exact
    assert found == pytest.approx(finished.exact, rel=1e-6)


def test_files_are_scored_while_a_run_holds_the_folder(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    from ingot.runs.state import RunLock

    with RunLock(tmp_path / "logs"):
        assert golf(EVAL_ONLY_PATH="final_model.int8.ptz").exact == finished.exact


def test_a_run_keeps_its_artifact_and_its_code_beside_its_log(finished: Ran, tmp_path: Path) -> None:
    kept = tmp_path / "logs/toy/artifact/final_model.int8.ptz"
    assert kept.read_bytes() == (tmp_path / "final_model.int8.ptz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final_model.int8.ptz", "final_model.pt", "logs"]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_the_imports_of_the_page_work_where_train_gpt_was_imported(finished: Ran, tmp_path: Path) -> None:
    (page,) = re.findall(r"^```python\n(import ingot\n.*?)^```", (ROOT / "docs/golf.md").read_text(), re.M | re.S)
    found: dict[str, Any] = {}
    exec(page.replace("logs/first", "logs/toy"), found)
    assert torch.load(io.BytesIO(found["content"]), weights_only=True)["__quant_format__"] == FORMAT
    assert (found["score"].loss, len(found["model"].blocks)) == (pytest.approx(finished.evaluations[4][0], abs=1e-4), 2)


# -- too large ------------------------------------------------------------------------------------------------------------------


def test_more_bytes_than_the_limit_are_an_error_with_what_would_fit(golf: Golf, finished: Ran) -> None:
    total = int(re.findall(r"^Total submission size int8\+zlib: (\d+) bytes$", finished.out, re.M)[0])
    assert "error:" not in golf(ARTIFACT_LIMIT_BYTES=str(total + 100)).out
    ran = golf(1, ARTIFACT_LIMIT_BYTES=str(total - 100))
    (said,) = re.findall(r"^error: (.*)$", ran.out, re.M)
    assert re.match(
        rf"\d+ bytes are \d+ more than ARTIFACT_LIMIT_BYTES={total - 100}; at 2\.\d+ bytes per parameter, about", said
    )
    fits = int(said.split("about ")[1].split(" ")[0].replace(",", ""))
    assert 7_000 < fits < 8_116 and ran.exact == finished.exact
    assert "the code alone exceeds the limit" in golf(1, ARTIFACT_LIMIT_BYTES="1000").out


# -- files of others ------------------------------------------------------------------------------------------------------------


def test_a_file_that_would_run_code_is_refused_and_runs_none(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    buffer = io.BytesIO()
    torch.save({"tok_emb.weight": Evil()}, buffer)
    for name, content in (("evil.ptz", zlib.compress(buffer.getvalue())), ("evil.pt", buffer.getvalue())):
        (tmp_path / name).write_bytes(content)
        assert golf.refuses(4, EVAL_ONLY_PATH=name).startswith(f"EVAL_ONLY_PATH={name} is damaged, or holds more than weights")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"NUM_LAYERS": "3"}, r"has no tensor blocks\.2\."),
        ({"NUM_LAYERS": "1"}, "has shape|that the model does not"),
        ({"MODEL_DIM": "32"}, r"has shape \[\S+, \S+\], but \[\S+, \S+\] in the model"),
        ({"TIE_EMBEDDINGS": "0"}, r"has no tensor lm_head\.weight"),
        ({"EVAL_ONLY_PATH": "nothing.ptz"}, r"nothing\.ptz cannot be read: No such file or directory"),
        ({"EVAL_ONLY_PATH": "logs"}, "logs cannot be read: Is a directory"),
    ],
)
def test_a_file_of_another_model_is_refused_with_the_tensor_that_does_not_fit(
    golf: Golf, finished: Ran, change: dict[str, str], said: str
) -> None:
    assert re.search(said, golf.refuses(4, **{"EVAL_ONLY_PATH": "final_model.int8.ptz"} | change))


def test_weights_that_are_no_numbers_are_no_score(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    weights = torch.load(tmp_path / "final_model.pt", weights_only=True)
    weights["tok_emb.weight"][0, 0] = float("nan")
    torch.save(weights, tmp_path / "final_model.pt")
    assert "the score is invalid" in golf.refuses(1, EVAL_ONLY_PATH="final_model.pt")


GOOD, _ = quantised([record("w", torch.randn(300, 300)), record("q_gain", torch.ones(4))], "int8-golf", CONTROL, CONTROL)


def altered(**changes: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(GOOD), weights_only=True), **changes}, buffer)
    return zlib.compress(buffer.getvalue())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK", b"hello", zlib.compress(GOOD)[:-9], zlib.compress(b"junk" * 99), altered(__quant_format__="int6"),
        altered(scales={}), altered(scales={"other": torch.ones(300)}), altered(quantized=[1]), altered(dtypes={"w": "float8"}),
        altered(dtypes={}), altered(scales={"w": torch.ones(7)}), altered(quantized={"w": "text"}), altered(passthrough=None),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_with_its_name(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^x\.ptz is "):
        read_weights(content, "x.ptz")


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.booleans())
def test_a_damaged_file_is_read_or_refused_and_never_anything_else(place: int, change: int, whole: bool) -> None:
    content = bytearray(GOOD if whole else zlib.compress(GOOD, 1))
    content[place % len(content)] ^= change
    try:
        found = read_weights(bytes(content) if not whole else zlib.compress(bytes(content), 1), "x.ptz")
        assert all(isinstance(one, TensorRecord) for one in found.values())
    except CheckpointError as error:
        assert str(error).startswith("x.ptz is ")


def saved(contents: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved({"w": torch.zeros(1).expand(10**6, 10**6)}), "a tensor is larger than its data in the file"),
        (zlib.compress(bytes(1 << 28), 1), "it is cut short"),
    ],
    ids=["a number repeated by strides", "zeros"],
)
def test_a_file_that_unfolds_into_a_huge_model_is_refused_before_memory_is_taken(data: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_weights(data, "x.ptz")
