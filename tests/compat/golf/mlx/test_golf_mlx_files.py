"""The two files of train_gpt_mlx.py: the original's are read, ours are its kind, and none of them is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golf_mlx import MLXGolf
from golf_toys import ROOT, Ran
from numpy.typing import NDArray

from ingot.backends.open import open_backend
from ingot.compat.golf.files import pack
from ingot.compat.golf.importing import is_golf, read_model
from ingot.compat.golf.mlx_script import pickled, read_mlx, swap_halves, write_npz
from ingot.config.schema import Config
from ingot.errors import CheckpointError
from ingot.model.settings import CONTROL
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord, to_array, to_record

GOLDEN = ROOT / "tests/golden/mlx"
# The losses that the original has by its own files, in float32: nats per target of random tokens.
LOSSES = {"toy_a_mlx_model.npz": 10.845495223999023, "toy_a_mlx_model.int8.ptz": 10.844837188720703}
SHAPE = {"family": "golf", "layers": 2, "width": 128, "heads": 2, "kv_heads": 1, "mlp_multiple": 2, "vocab_size": 1024}
HEAD = SHAPE["width"] // SHAPE["heads"]  # type: ignore[operator]


def loss(weights: dict[str, TensorRecord], device: str) -> float:
    """The loss of weights of the golden files' shape."""
    model = {**SHAPE, "tied": "lm_head.weight" not in weights, "embedding_dtype": "fp32"}
    config = Config(model=model, data={"seq_len": 128}, training={"device": device, "precision": "fp32", "max_steps": 1})
    backend = open_backend(config, 1024, Ranks())
    backend.load_weights(weights, "the test")
    windows = np.random.default_rng(0).integers(0, 1024, (8, 129)).astype(np.int32)
    return backend.score(np.stack([windows[:, :-1], windows[:, 1:]], axis=1)) / (8 * 128)


def original(name: str) -> dict[str, TensorRecord]:
    return read_mlx((GOLDEN / name).read_bytes(), name, HEAD)


@pytest.mark.parametrize("name", LOSSES)
def test_the_originals_files_are_imported_with_the_shape_of_their_arrays(name: str) -> None:
    assert is_golf(GOLDEN / name)
    records, found = read_model(GOLDEN / name)
    assert found == {**SHAPE, "context": 1024, "tied": True}
    assert {one.name: bytes(one.data) for one in records} == {one.name: bytes(one.data) for one in original(name).values()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("device", ["cpu", "mlx"])
def test_files_of_the_original_have_the_originals_loss(request: pytest.FixtureRequest, name: str, device: str) -> None:
    if device == "mlx":
        request.getfixturevalue("installed")
    assert loss(original(name), device) == pytest.approx(LOSSES[name], rel=1e-5)  # its norms add 1e-6, ours 1e-7
    unturned = {one.name: one for one in swap_halves(original(name).values(), HEAD)}
    assert abs(loss(unturned, device) - LOSSES[name]) > 0.01


def test_weights_written_and_read_again_have_the_same_loss(tmp_path: Path) -> None:
    before = original("toy_a_mlx_model.npz")
    weights = swap_halves(before.values(), HEAD)
    size = write_npz(tmp_path / "x.npz", weights)
    after = read_mlx((tmp_path / "x.npz").read_bytes(), "x.npz", HEAD)
    assert size == (tmp_path / "x.npz").stat().st_size and loss(after, "cpu") == loss(before, "cpu")
    data, _ = pickled(weights, "int8-golf", CONTROL, CONTROL)
    small = read_mlx(zlib.compress(data), "x.ptz", HEAD)
    golden = original("toy_a_mlx_model.int8.ptz")
    assert small.keys() == golden.keys() == before.keys()
    assert all(bytes(small[name].data) == bytes(golden[name].data) for name in golden)  # the original's codes


def test_a_quantised_file_holds_what_the_originals_holds() -> None:
    def described(data: bytes) -> Any:
        found = pickle.loads(data)
        arrays = {key: found.pop(key) for key in ("quantized", "scales", "passthrough")}
        return found, {key: {name: (a.dtype.str, a.shape) for name, a in part.items()} for key, part in arrays.items()}

    weights = swap_halves(original("toy_a_mlx_model.npz").values(), HEAD)
    ours, payload = pickled(weights, "int8-golf", CONTROL, CONTROL)
    theirs = zlib.decompress((GOLDEN / "toy_a_mlx_model.int8.ptz").read_bytes())
    assert described(ours) == described(theirs) and payload == 596_496
    assert list(pickle.loads(ours)) == list(pickle.loads(theirs))
    assert abs(len(ours) - len(theirs)) < 200


def test_a_quantised_file_has_the_codes_of_the_other_scripts() -> None:
    import torch

    weights = list(original("toy_a_mlx_model.npz").values())
    theirs = torch.load(io.BytesIO(pack(weights, "int8-golf", CONTROL, CONTROL)[0]), weights_only=True)
    ours = pickle.loads(pickled(weights, "int8-golf", CONTROL, CONTROL)[0])
    for part in ("quantized", "scales", "passthrough"):
        assert all(np.array_equal(ours[part][name], value.numpy()) for name, value in theirs[part].items())


def test_an_embedding_in_bf16_is_float32_in_the_npz(mlx: MLXGolf) -> None:
    ran = mlx(EMBED_DTYPE="bf16", ITERATIONS="1", VAL_LOSS_EVERY="0")
    arrays = np.load("logs/toy_mlx_model.npz")
    assert {arrays[name].dtype.str for name in arrays.files} == {"<f4"} and "dtypes tok_emb:mlx.core.bfloat16 " in ran.out
    bits = arrays["tok_emb.weight"].view(np.uint32)
    assert not (bits & 0xFFFF).any() and bits.any()  # each is a number that bf16 has
    packed = pickle.loads(zlib.decompress(Path("logs/toy_mlx_model.int8.ptz").read_bytes()))
    assert packed["passthrough_orig_dtypes"]["tok_emb.weight"] == "bfloat16"


def test_mlx_reads_the_npz(mlx: MLXGolf, whole: tuple[Path, Ran]) -> None:
    import mlx.core as mx

    path = whole[0] / "logs/toy_mlx_model.npz"
    arrays, found = np.load(path), mx.load(str(path))
    assert found.keys() == set(arrays.files) and all(np.array_equal(np.array(found[name]), arrays[name]) for name in found)


def test_a_file_scores_what_its_run_said(mlx: MLXGolf, whole: tuple[Path, Ran]) -> None:
    for end, name in (("int8.ptz", "final_int8_zlib_roundtrip"), ("npz", "mlx_model")):
        lines = mlx(EVAL_ONLY_PATH=str(whole[0] / f"logs/toy_mlx_model.{end}"), RUN_ID=end).lines
        exact = float(lines[-1].removeprefix(f"{name}_exact val_loss:").split()[0])
        assert exact == pytest.approx(whole[1].exact[0] if end == "int8.ptz" else whole[1].evaluations[14][0], abs=6e-5)
        assert lines[-2].startswith(f"{name} val_loss:") and "val_progress:5/5" in lines


# -- what is refused ------------------------------------------------------------------------------------------------------------


def test_a_half_written_npz_is_refused_with_its_name(mlx: MLXGolf, whole: tuple[Path, Ran], tmp_path: Path) -> None:
    content = (whole[0] / "logs/toy_mlx_model.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(content[: len(content) // 2])
    said = mlx.refuses(4, EVAL_ONLY_PATH="half.npz")
    assert said.startswith("EVAL_ONLY_PATH=half.npz is not a model that train_gpt_mlx.py wrote, or it is damaged: ")
    assert mlx.refuses(4, EVAL_ONLY_PATH="none.npz") == "there is no file none.npz"


def test_a_pipe_or_a_device_is_refused_and_not_read_for_ever(mlx: MLXGolf, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/zero"):
        assert mlx.refuses(4, EVAL_ONLY_PATH=name) == f"{name} cannot be read: it is a pipe or a device, not a plain file"


def array(values: Any, dtype: str = "<f4") -> NDArray[Any]:
    return np.array(values, dtype)


class Calls:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch here",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Calls(), "it asks for posix.system"),
        ({"__quant_format__": Calls()}, "it asks for posix.system"),
        (array([{}], "O"), "it asks for numpy"),
        (array(["text"], "<U4"), "it holds an array that is not of weights"),
        (array([1.0], ">f4"), "its numbers are not little-endian"),
        ([1], "it holds no arrays by name"),
        ({"__quant_format__": "int6"}, "its format is 'int6' and not int8_clean_per_row_v1"),
        ({"quantized": {}}, "__quant_format__"),
    ],
)
def test_a_pickle_that_is_no_model_is_refused_and_runs_nothing(
    content: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        read_mlx(zlib.compress(pickle.dumps(content, 5)), "x.ptz", HEAD)
    assert said in str(refused.value) and str(refused.value).startswith("x.ptz ") and not list(tmp_path.iterdir())


def test_a_pickle_that_asks_for_all_the_memory_is_refused_with_a_reason() -> None:
    lies = b"\x80\x05\x8e" + (1 << 50).to_bytes(8, "little") + b"x."  # begins bytes of a petabyte
    with pytest.raises(CheckpointError, match=r"or it is damaged: MemoryError$"):
        read_mlx(zlib.compress(lies), "x.ptz", HEAD)


def test_a_pickle_cannot_change_the_functions_it_is_given() -> None:
    change = b"\x80\x05cnumpy\ndtype\n}(Vname\nVvalue\nub."  # takes numpy.dtype and sets an attribute of it
    with pytest.raises(CheckpointError, match="it changes a function"):
        read_mlx(zlib.compress(change), "x.ptz", HEAD)


def test_an_npz_with_objects_or_of_another_program_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=array([{}], "O"), allow_pickle=True)
    np.savez(tmp_path / "numbers.npz", x=np.arange(3))
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as file:
        file.writestr("a.npy", "text")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(CheckpointError, match="is not a model that train_gpt_mlx"):
            read_mlx(path.read_bytes(), path.name, HEAD)


def test_a_file_of_the_script_for_gpus_is_called_that_and_not_damaged() -> None:
    w = to_record("tok_emb.weight", np.ones((8, 4), np.float32), "F32")
    file = io.BytesIO()
    torch.save({"tok_emb.weight": torch.ones(8, 4)}, file)
    for content in (file.getvalue(), zlib.compress(pack([w], "int8-golf", CONTROL, ())[0])):
        with pytest.raises(CheckpointError) as refused:
            read_mlx(content, "EVAL_ONLY_PATH=x", HEAD)
        read = "which scores it; train_gpt_mlx.py reads its own _mlx_model.npz and _mlx_model.int8.ptz"
        assert str(refused.value) == f"EVAL_ONLY_PATH=x is a file of train_gpt.py, {read}"


def test_swapping_the_halves_of_heads_twice_gives_them_back() -> None:
    w = to_record("blocks.0.attn.c_q.weight", np.arange(8 * 3).reshape(8, 3), "F32")
    (swapped,) = swap_halves([w], 4)
    assert to_array(swapped)[:, 0].astype(int).tolist() == [6, 9, 0, 3, 18, 21, 12, 15]
    assert bytes(swap_halves([swapped], 4)[0].data) == bytes(w.data)
    (other,) = swap_halves([to_record("blocks.0.attn.c_v.weight", np.arange(24).reshape(8, 3), "F32")], 4)
    assert to_array(other)[:, 0].astype(int).tolist() == list(range(0, 24, 3))
