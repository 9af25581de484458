"""train_gpt_mlx.py: what its variables mean, its mistakes, and that a run that was stopped ends as one that was not."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golf_mlx import MLX, MLXGolf
from golf_toys import ROOT, Ran, markdown, variables

from ingot.compat.golf.mlx_script import Chunks, MLXScript, main, read_mlx_variables, translate_mlx
from ingot.compat.golf.pack import read_run
from ingot.compat.golf.variables import MLX_VARIABLES, VARIABLES
from ingot.data.loading.order import Sequential
from ingot.errors import CheckpointError, ConfigError
from ingot.runtime.devices import Device

CPU = Device("mlx", 0, "CPU", None, ("fp32", "bf16"))
METAL = Device("mlx", 0, "GPU", None, ("bf16", "fp32"))
FILES = ("logs/toy_mlx_model.npz", "logs/toy_mlx_model.int8.ptz")

# -- variables ------------------------------------------------------------------------------------------------------------------


def test_unset_variables_are_the_originals() -> None:
    config = translate_mlx(read_mlx_variables({}), METAL).config
    assert (config.training.tokens_per_step, config.training.micro_batch, config.data.spans) == (524_288, 8, 64)
    assert (config.evaluation.every, config.evaluation.micro_batch, config.data.seq_len) == (0, 64, 1024)
    assert (config.training.device, config.training.precision, config.training.compile) == ("mlx", "bf16", True)
    assert config.training.eager and config.training.loss_chunk is None
    on_cpu = translate_mlx(read_mlx_variables({}), CPU).config
    assert (on_cpu.training.precision, on_cpu.training.compile, on_cpu.model.embedding_dtype) == ("fp32", False, "fp32")


def test_variables_of_its_own_are_settings() -> None:
    given = {"GRAD_ACCUM_STEPS": "2", "MLX_MAX_MICROBATCH_TOKENS": "3000", "MLX_EAGER_EVAL": "0", "LOGIT_CHUNK_TOKENS": "512"}
    given |= {"TRAIN_MAX_SEQ_LEN": "512", "TRAIN_BATCH_TOKENS": "9000", "VAL_BATCH_SIZE": "2048"}
    config = translate_mlx(read_mlx_variables(given), CPU).config
    assert config.data.seq_len == 512 and config.training.tokens_per_step == 8192  # 4,500 tokens in a part are 8 rows
    assert (config.training.micro_batch, config.data.spans) == (5, [5, 3])
    assert not config.training.eager and config.training.loss_chunk == 512 and config.evaluation.micro_batch == 2
    assert read_mlx_variables({**given, "TRAIN_SEQ_LEN": "64"})["TRAIN_SEQ_LEN"] == 64


@pytest.mark.parametrize("most", [1, 40, 100, 160, 4096])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_tokens_are_read_chunk_by_chunk_each_with_one_more_than_it_trains_on(parts: int, most: int) -> None:
    length, batch = 20, 480
    given = {"GRAD_ACCUM_STEPS": parts, "MLX_MAX_MICROBATCH_TOKENS": most, "TRAIN_SEQ_LEN": length, "TRAIN_BATCH_TOKENS": batch}
    values = read_mlx_variables({}) | given
    config, script = translate_mlx(values, CPU).config, MLXScript()
    script.values, script.chunks = values, Chunks.of(values)
    starts, place = [], 0
    for _ in range(3 * parts):  # the parts of three steps
        left = batch // parts // length
        while left:
            rows = min(left, max(most // length, 1))
            starts += [place + row * length for row in range(rows)]
            place, left = place + rows * length + 1, left - rows
    order = Sequential(10**6, length, config.rows_per_step, config.data.spans)
    assert order.starts(np.arange(len(starts), dtype=np.uint64)).tolist() == starts
    assert script.epochs(3) + 1 == place  # of a data set of one token


def test_the_table_of_the_documentation_is_that_of_the_script() -> None:
    assert (
        markdown([one for one in MLX_VARIABLES.values() if one is not VARIABLES.get(one.name)])
        in (ROOT / "docs/mlx.md").read_text()
    )
    assert len(MLX_VARIABLES) > 45 and not {"ARTIFACT_LIMIT_BYTES", "MODEL_FILE"} & MLX_VARIABLES.keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"GRAD_ACCUM_STEPS": "0"}, "GRAD_ACCUM_STEPS=0 must be a whole number >= 1"),
        ({"MLX_MAX_MICROBATCH_TOKENS": "0"}, "MLX_MAX_MICROBATCH_TOKENS=0 must be a whole number >= 1"),
        (
            {"TRAIN_BATCH_TOKENS": "60"},
            "TRAIN_BATCH_TOKENS=60 divided by GRAD_ACCUM_STEPS=2 is less than one sequence of TRAIN_SEQ_LEN=32; give at least 64",
        ),
        (
            {"VAL_BATCH_SIZE": "63"},
            "VAL_BATCH_SIZE=63 divided by GRAD_ACCUM_STEPS=2 is less than one sequence of TRAIN_SEQ_LEN=32; give at least 64",
        ),
        ({"VOCAB_SIZE": "300"}, "VOCAB_SIZE=300 does not match the tokenizer's vocab_size=274"),
        ({"MLX_EAGER_EVAL": "yes"}, "MLX_EAGER_EVAL=yes must be 0 or 1"),
        ({"MODEL_FILE": "x.py"}, "MODEL_FILE=x.py is a torch model; train it with train_gpt.py"),
        ({"TOKENIZER_PATH": "x.json"}, "TOKENIZER_PATH=x.json must be a SentencePiece .model file"),
        ({"TRAIN_SEQ_LEN": "0"}, "TRAIN_SEQ_LEN=0 must be a whole number >= 1"),
        ({"NUM_LAYERS": "999999999999"}, "NUM_LAYERS=999999999999: must be at most 1000"),
        ({"MODEL_DIM": "17"}, "NUM_HEADS=2 does not divide MODEL_DIM=17; the nearest count that does is 1"),
        (
            {"RUN_ID": "a/b", "OUT_DIR": "out"},
            "RUN_ID=a/b names a file in out/; it may not be a path, have line breaks or exceed 200 bytes",
        ),
        (
            {"RUN_ID": "é" * 101},
            f"RUN_ID={'é' * 101} names a file in logs/; it may not be a path, have line breaks or exceed 200 bytes",
        ),
    ],
)
def test_a_mistake_names_the_variable_and_its_value(mlx: MLXGolf, given: dict[str, str], said: str) -> None:
    assert mlx.refuses(2, **given) == said


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "2", "RANK": "0"}, {"RANK": "1"}, {"WORLD_SIZE": "1"}])
def test_more_than_one_process_is_refused(mlx: MLXGolf, given: dict[str, str]) -> None:
    said = mlx.refuses(2, **given)
    assert "WORLD_SIZE" in said or "RANK" in said


def test_a_name_of_a_folder_that_the_disk_does_not_take_is_refused_in_a_sentence(mlx: MLXGolf) -> None:
    long = "x" * 300
    assert mlx.refuses(4, OUT_DIR=long).startswith(f"cannot write {long}: File name too long; ")


def test_a_mistake_in_train_max_seq_len_is_not_said_of_train_seq_len() -> None:
    with pytest.raises(ConfigError, match=r"^TRAIN_MAX_SEQ_LEN=0 must be a whole number >= 1$"):
        read_mlx_variables({"TRAIN_MAX_SEQ_LEN": "0"})
    assert read_mlx_variables({"TRAIN_MAX_SEQ_LEN": "9", "TRAIN_SEQ_LEN": "8"})["TRAIN_SEQ_LEN"] == 8


def test_help_lists_its_variables_whatever_else_is_asked(mlx: MLXGolf, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], ["--help", "--iterations=5"]):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert said.startswith("usage: [VARIABLE=value ...] python train_gpt_mlx.py\n") and "  MLX_EAGER_EVAL=1 " in said
        assert "MODEL_FILE" not in said and "torchrun" not in said


def test_a_manifest_refuses_another_tokenizer_and_more_shards(mlx: MLXGolf, listed_shards: Callable[..., Path]) -> None:
    data = listed_shards(tokenizer="fineweb_1024_bpe.model")
    said = mlx.refuses(3, DATA_PATH=str(data))
    assert said.startswith(f"DATA_PATH={data} was made with the tokenizer fineweb_1024_bpe.model according to ")
    assert re.search(r"not TOKENIZER_PATH=\S+/toy\.model$", said)
    said = mlx.refuses(3, DATA_PATH=str(listed_shards(files_train=1)))
    assert said.startswith(f"DATA_PATH={data} has 2 train shards, but ") and "manifest.json lists 1;" in said


def test_a_misspelled_variable_and_one_of_the_other_script_are_warned_about(mlx: MLXGolf) -> None:
    ran = mlx(ITERATIONS="0", MLX_MAX_MICROBATCH_TOKEN="64", ARTIFACT_LIMIT_BYTES="5")
    other, misspelled = (line.removeprefix("train_gpt_mlx.py: warning: ") for line in ran.err.splitlines())
    assert other.startswith("ARTIFACT_LIMIT_BYTES ") and "train_gpt.py" in other and "no effect" in other
    assert misspelled == "MLX_MAX_MICROBATCH_TOKEN=64 has no effect; did you mean MLX_MAX_MICROBATCH_TOKENS?"


def test_without_mlx_the_script_says_how_to_install_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['mlx.core'] = None; from ingot.compat.golf.mlx_script import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("train_gpt_mlx.py: error: ") and "pip install 'ingot-lm[mlx]'" in done.stderr


# -- what changes no loss -------------------------------------------------------------------------------------------------------


def test_what_saves_memory_and_what_is_told_change_no_loss(mlx: MLXGolf, whole: tuple[Path, Ran]) -> None:
    saving = mlx(LOGIT_CHUNK_TOKENS="48", MLX_EAGER_EVAL="0", WARMUP_STEPS="0", VAL_LOSS_EVERY="0", TRAIN_LOG_EVERY="1")
    assert len(saving.losses) == 14 and saving.losses == pytest.approx(whole[1].losses, abs=1e-4)  # of which four digits are told
    steps = [json.loads(line) for line in Path("logs/toy/metrics.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (whole[0] / "logs/toy/metrics.jsonl").read_text().splitlines()]
    ours, theirs = ([line["loss"] for line in lines if line["kind"] == "train"] for lines in (steps, before))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_an_untied_head_is_trained(mlx: MLXGolf) -> None:
    ran = mlx(TIE_EMBEDDINGS="0", ITERATIONS="3", VAL_LOSS_EVERY="0")
    assert " tie_embeddings:False" in ran.out and " embed_lr:0.6 matrix_lr:0.04 " in ran.out and " head_lr:0.008" in ran.out
    assert ran.exact[0] < 5.6 and "lm_head.weight" in np.load("logs/toy_mlx_model.npz").files


def test_smaller_chunks_need_less_memory(mlx: MLXGolf) -> None:
    import mlx.core as mx

    peaks = []
    for most in ("1024", "8192"):
        mx.reset_peak_memory()
        mlx(
            MLX_MAX_MICROBATCH_TOKENS=most, TRAIN_BATCH_TOKENS="8192", GRAD_ACCUM_STEPS="1", ITERATIONS="1", WARMUP_STEPS="0",
            VAL_LOSS_EVERY="0", VAL_BATCH_SIZE="32", RUN_ID=f"toy{most}",
        )  # fmt: skip
        peaks.append(mx.get_peak_memory())
    assert peaks[0] <= peaks[1] / 2


# -- a run goes on --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [
        "step:9/",
        pytest.param("warmup_step:1/", marks=pytest.mark.long),
        pytest.param("step:0/", marks=pytest.mark.long),
        pytest.param("val_progress:5", marks=pytest.mark.long),
        pytest.param("step:6/14 val_loss", marks=pytest.mark.long),
        pytest.param("step:13/", marks=pytest.mark.long),
    ],
)
def test_a_run_stopped_anywhere_ends_with_the_bytes_of_an_unbroken_one(
    mlx: MLXGolf, stop: None, whole: tuple[Path, Ran], tmp_path: Path, at: str
) -> None:
    first = mlx(STOP_AT=at)
    assert "final_" not in first.out and "note: stopped after step" in first.out
    second = mlx()
    assert first.losses | second.losses == whole[1].losses and second.exact == whole[1].exact
    assert (first.out + second.out).count("WARNING: starting epoch:2") == 1
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (whole[0] / name).read_bytes()


def test_a_killed_run_ends_with_the_bytes_of_an_unbroken_one(mlx: MLXGolf, whole: tuple[Path, Ran], tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "train_gpt_mlx.py")], env=mlx.environment(**MLX), stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        assert any(line.startswith("step:3/") for line in program.stdout)
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate()
    assert not (tmp_path / FILES[0]).exists()
    assert mlx().exact == whole[1].exact
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (whole[0] / name).read_bytes()


def test_a_run_does_not_go_on_with_other_chunks(mlx: MLXGolf, stop: None) -> None:
    mlx(STOP_AT="step:2/")
    said = mlx.refuses(4, MLX_MAX_MICROBATCH_TOKENS="64")
    assert "GRAD_ACCUM_STEPS and MLX_MAX_MICROBATCH_TOKENS was [5, 3] and is 8" in said


def test_runs_of_other_names_have_files_of_their_own(mlx: MLXGolf, whole: tuple[Path, Ran], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "logs", tmp_path / "out")
    mlx(OUT_DIR="out", RUN_ID="other", ITERATIONS="1", VAL_LOSS_EVERY="0")
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == sorted(
        [f"{name}{end}" for name in ("toy", "other") for end in ("", ".txt", "_mlx_model.npz", "_mlx_model.int8.ptz")]
    )
    assert not (tmp_path / "logs").exists()


def test_a_run_of_it_is_not_packed_as_a_submission(whole: tuple[Path, Ran]) -> None:
    with pytest.raises(CheckpointError, match=r"logs/toy is neither a run of train_gpt\.py"):
        read_run(whole[0] / "logs/toy")


def test_the_variables_of_a_toy_are_the_scripts(toys: Path) -> None:
    assert variables(toys, **MLX).keys() <= MLX_VARIABLES.keys()
