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
from ingot.compat.golf.files import is_golf, model_settings, npz, quantised, read_weights, swap_halves
from ingot.config.schema import Config
from ingot.errors import CheckpointError
from ingot.model.settings import CONTROL
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord, to_array, to_record

GOLDEN = ROOT / "tests/golden/mlx"
# The losses that the original has by its own files, in float32: nats per target of random tokens.
LOSSES = {"toy_a_mlx_model.npz": 10.845495223999023, "toy_a_mlx_model.int8.ptz": 10.844837188720703}
SHAPE = {"family": "golf", "layers": 2, "width": 128, "heads": 2, "kv_heads": 1, "mlp_multiple": 2, "vocab_size": 1024}


def loss(weights: dict[str, TensorRecord], device: str) -> float:
    """The loss of weights of the golden files' shape."""
    model = {**SHAPE, "tied": "lm_head.weight" not in weights, "embedding_dtype": "fp32"}
    config = Config(model=model, data={"seq_len": 128}, training={"device": device, "precision": "fp32", "max_steps": 1})
    backend = open_backend(config, 1024, Ranks())
    backend.load_weights(weights, "the test")
    windows = np.random.default_rng(0).integers(0, 1024, (8, 129)).astype(np.int32)
    return backend.score(np.stack([windows[:, :-1], windows[:, 1:]], axis=1)) / (8 * 128)


def original(name: str) -> dict[str, TensorRecord]:
    return read_weights((GOLDEN / name).read_bytes(), name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_originals_files_are_imported_with_the_shape_of_their_arrays(name: str) -> None:
    assert is_golf(GOLDEN / name)
    assert model_settings(original(name), GOLDEN / name) == {**SHAPE, "context": 1024, "tied": True}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("device", ["cpu", "mlx"])
def test_files_of_the_original_have_the_originals_loss(request: pytest.FixtureRequest, name: str, device: str) -> None:
    if device == "mlx":
        request.getfixturevalue("installed")
    assert loss(original(name), device) == pytest.approx(LOSSES[name], rel=1e-5)  # its norms add 1e-6, ours 1e-7
    unturned = {one.name: one for one in swap_halves(original(name).values())}
    assert abs(loss(unturned, device) - LOSSES[name]) > 0.01


def test_weights_written_and_read_again_have_the_same_loss() -> None:
    before = original("toy_a_mlx_model.npz")
    after = read_weights(npz(before.values()), "x.npz")
    assert loss(after, "cpu") == loss(before, "cpu")
    data, _ = quantised(before.values(), "int8-golf", CONTROL, CONTROL, mlx=True)
    small = read_weights(zlib.compress(data), "x.ptz")
    golden = original("toy_a_mlx_model.int8.ptz")
    assert small.keys() == golden.keys() == before.keys()
    assert all(bytes(small[name].data) == bytes(golden[name].data) for name in golden)  # the original's codes


def test_a_quantised_file_holds_what_the_originals_holds() -> None:
    def described(data: bytes) -> Any:
        found = pickle.loads(data)
        arrays = {key: found.pop(key) for key in ("quantized", "scales", "passthrough")}
        return found, {key: {name: (a.dtype.str, a.shape) for name, a in part.items()} for key, part in arrays.items()}

    weights = original("toy_a_mlx_model.npz").values()
    ours, payload = quantised(weights, "int8-golf", CONTROL, CONTROL, mlx=True)
    theirs = zlib.decompress((GOLDEN / "toy_a_mlx_model.int8.ptz").read_bytes())
    assert described(ours) == described(theirs) and payload == 596_496
    assert list(pickle.loads(ours)) == list(pickle.loads(theirs))
    assert abs(len(ours) - len(theirs)) < 200


def test_a_quantised_file_has_the_codes_of_the_other_scripts() -> None:

    weights = list(original("toy_a_mlx_model.npz").values())
    theirs = torch.load(io.BytesIO(quantised(swap_halves(weights), "int8-golf", CONTROL, CONTROL)[0]), weights_only=True)
    ours = pickle.loads(quantised(weights, "int8-golf", CONTROL, CONTROL, mlx=True)[0])
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
    assert said.startswith("EVAL_ONLY_PATH=half.npz ")
    assert mlx.refuses(4, EVAL_ONLY_PATH="none.npz") == "none.npz cannot be read: No such file or directory"


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
        (Calls(), "it refers to posix.system"),
        ({"__quant_format__": Calls()}, "it refers to posix.system"),
        (array([{}], "O"), "it refers to numpy"),
        (array(["text"], "<U4"), "it holds an array that is not of float32, float16 or int8"),
        (array([1.0], ">f4"), "its numbers are not little-endian"),
        ([1], "it is not a dict of weights"),
        ({"__quant_format__": "int6"}, "its format is 'int6'"),
        ({"quantized": {}}, "__quant_format__"),
    ],
)
def test_a_pickle_that_is_no_model_is_refused_and_runs_nothing(
    content: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        read_weights(zlib.compress(pickle.dumps(content, 5)), "x.ptz")
    assert said in str(refused.value) and str(refused.value).startswith("x.ptz ") and not list(tmp_path.iterdir())


def test_a_pickle_that_asks_for_all_the_memory_is_refused_with_a_reason() -> None:
    lies = b"\x80\x05\x8e" + (1 << 50).to_bytes(8, "little") + b"x."  # begins bytes of a petabyte
    with pytest.raises(CheckpointError, match=r"or it is damaged: MemoryError$"):
        read_weights(zlib.compress(lies), "x.ptz")


def test_an_npz_with_objects_or_of_another_program_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=array([{}], "O"), allow_pickle=True)
    np.savez(tmp_path / "numbers.npz", x=np.arange(3))
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as file:
        file.writestr("a.npy", "text")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(CheckpointError, match="is not a model that golf wrote"):
            read_weights(path.read_bytes(), path.name)


def swapped(values: np.ndarray, name: str) -> list[int]:
    """The first column of a weight after its halves were swapped, by heads of 4 rows."""
    shapes = {"tok_emb.weight": np.zeros((1, 8)), "blocks.0.attn.q_gain": np.zeros(2), name: values}
    weights = swap_halves(to_record(key, value, "F32") for key, value in shapes.items())
    twice = swap_halves(weights)
    assert bytes(twice[2].data) == bytes(to_record(name, values, "F32").data)
    return [int(value) for value in to_array(weights[2])[:, 0]]


def test_swapping_the_halves_of_heads_twice_gives_them_back() -> None:
    values = np.arange(8 * 3).reshape(8, 3)
    assert swapped(values, "blocks.0.attn.c_q.weight") == [6, 9, 0, 3, 18, 21, 12, 15]
    assert swapped(values, "blocks.0.attn.c_v.weight") == list(range(0, 24, 3))


def test_a_pickle_cannot_change_the_functions_that_later_files_are_read_with() -> None:
    change = b"\x80\x05cnumpy\ndtype\n}(Vname\nVvalue\nub."  # takes numpy.dtype and sets an attribute of it
    with pytest.raises(CheckpointError):
        read_weights(zlib.compress(change), "x.ptz")
    assert original("toy_a_mlx_model.int8.ptz")
