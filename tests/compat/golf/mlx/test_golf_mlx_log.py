"""The log of train_gpt_mlx.py, line by line as the original's, and that what it says is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from golf_mlx import MLXGolf
from golf_toys import Ran

from ingot.compat.golf.mlx_script import optimizer_tensors, read_mlx_variables

TIMES = r"train_time:\d+ms step_avg:\d+\.\d\dms"
LOSSES = r"val_loss:\d\.\d{4} val_bpb:\d\.\d{4}"
VALIDATED = ["val_progress:1/5", "val_progress:5/5"]
HEAD = [
    r"logs/toy\.txt",
    r"run_id:toy",
    r"mlx_version:\d+\.\d+\.\d+\S*",
    r"train_loader:shards pattern=/\S+/data/datasets/toy/fineweb_train_\*\.bin",
    r"val_loader:shards pattern=/\S+/data/datasets/toy/fineweb_val_\*\.bin tokens:1312",
    r"train_loader:dataset:toy train_shards:2",
    r"tokenizer_path:/\S+/toy\.model",
    r"model_params:8116 vocab_size:274 layers:2 dim:16 heads:2 kv_heads:1 seq_len:32 tie_embeddings:True",
    r"iterations:14 train_batch_tokens:512 grad_accum_steps:2 microbatch_tokens:256 microbatch_batch_size:8 val_batch_size:640 "
    r"warmup_steps:1 max_wallclock_seconds:0\.000",
    r"mlx_max_microbatch_tokens:160",
    r"optimizer:muon\+adam muon_matrix_params:12 scalar_params:9 embed_lr:0\.05 matrix_lr:0\.04 scalar_lr:0\.04 "
    r"muon_momentum:0\.95 muon_steps:5",
    r"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=/\S+/toy\.model",
    r"compute_dtype:mlx\.core\.(bfloat16|float32) compile:(True|False)",
    r"dtypes tok_emb:mlx\.core\.(bfloat16|float32) linear_weight:mlx\.core\.float32 skip_weights:mlx\.core\.float32",
    r"warmup_step:1/1",
]
END = [
    r"saved_model:logs/toy_mlx_model\.npz bytes:\d+",
    r"serialized_model_int8_zlib:\d+ bytes \(payload:\d+ raw_pickle:\d+ payload_ratio:\d\.\d\dx\)",
    *VALIDATED,
    rf"final_int8_zlib_roundtrip {LOSSES} eval_time:\d+ms",
    r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}",
]


def trained(first: int, last: int) -> list[str]:
    return [rf"step:{step}/14 train_loss:\d\.\d{{4}} {TIMES} tok_s:\d+" for step in range(first, last + 1)]


def validated(step: int) -> list[str]:
    return [*VALIDATED, rf"step:{step}/14 {LOSSES} {TIMES}"]


def test_a_run_prints_the_originals_lines_in_their_order(whole: tuple[Path, Ran]) -> None:
    steps = [*validated(0), *trained(1, 6), *validated(6), *trained(7, 11)]
    steps += [r"WARNING: starting epoch:2 dataset:toy train_shards:2", *trained(12, 12), *validated(12), *trained(13, 14)]
    forms, lines = [*HEAD, *steps, *validated(14), *END], whole[1].lines
    wrong = [(line, form) for line, form in zip(lines, forms, strict=True) if not re.fullmatch(form, line)]
    assert wrong == [] and whole[1].err == ""


def test_the_file_has_the_lines_and_at_its_top_what_ran(whole: tuple[Path, Ran]) -> None:
    head, versions, rest = (whole[0] / "logs/toy.txt").read_text().split("=" * 100 + "\n")
    assert rest == whole[1].out.partition("\n")[2]
    assert "GRAD_ACCUM_STEPS=2\n" in head and "def golf_block(" in head and "device: mlx" in head
    assert "Running Python 3." in versions and f"Running MLX {whole[1].value('mlx_version')}\n" in versions


def test_what_the_lines_say_is_true(whole: tuple[Path, Ran]) -> None:
    folder, ran = whole
    size = (folder / "logs/toy_mlx_model.int8.ptz").stat().st_size
    assert f"saved_model:logs/toy_mlx_model.npz bytes:{(folder / 'logs/toy_mlx_model.npz').stat().st_size}" in ran.lines
    assert f"\nserialized_model_int8_zlib:{size} bytes (" in ran.out
    assert (folder / "logs/toy/artifact/toy_mlx_model.int8.ptz").stat().st_size == size
    assert ran.evaluations[14][0] == pytest.approx(ran.exact[0], abs=1e-3)


def test_a_validation_of_one_batch_has_no_progress_and_one_of_many_every_25th(mlx: MLXGolf) -> None:
    assert "val_progress" not in mlx(ITERATIONS="0", VAL_BATCH_SIZE="16384").out
    found = re.findall(r"^val_progress:(\d+)/41$", mlx(ITERATIONS="0", VAL_BATCH_SIZE="64").out, re.M)
    assert found == 2 * ["1", "25", "41"]


def test_a_run_that_the_clock_ends_says_so(mlx: MLXGolf) -> None:
    lines = mlx(MAX_WALLCLOCK_SECONDS="0.05", ITERATIONS="100000", VAL_LOSS_EVERY="0").lines
    (place,) = (i for i, line in enumerate(lines) if line.startswith("stopping_early"))
    told = re.fullmatch(r"stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/100000", lines[place])
    assert told is not None and int(told[1]) >= 50
    assert lines[place - 1].startswith(f"step:{told[2]}/100000 val_loss:") and lines[place + 1].startswith("saved_model:")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (2, "train_loader:dataset:toy train_shards:2/2"),
        (
            80,
            "WARNING: train_loader:subset dataset:toy train_shards:2/80 new epochs will arrive sooner than the full dataset",
        ),
    ],
)
def test_the_shards_that_the_manifest_lists_are_told(
    mlx: MLXGolf, listed_shards: Callable[..., Path], listed: int, said: str
) -> None:
    assert mlx(ITERATIONS="0", DATA_PATH=str(listed_shards(files_train=listed))).lines[5] == said


def test_tensors_are_counted_by_who_trains_them() -> None:
    assert optimizer_tensors(read_mlx_variables({"NUM_LAYERS": "2"})) == (12, 9)
    assert optimizer_tensors(read_mlx_variables({"NUM_LAYERS": "2", "CONTROL_TENSOR_NAME_PATTERNS": "mlp.fc,q_gain"})) == (12, 9)
    assert optimizer_tensors(read_mlx_variables({"NUM_LAYERS": "1", "CONTROL_TENSOR_NAME_PATTERNS": "attn"})) == (3, 8)
