import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ingot.artifact import quantise as room
from ingot.artifact.quantise import CONTROL, dequantise, quantise
from ingot.backends.torch.state import model_records, record, tensor
from ingot.errors import CheckpointError, ConfigError
from ingot.model.registry import build
from ingot.runtime.tensors import SCALE, TensorRecord, to_array, to_record


def stored(value, quantiser, name="w", **how):
    found, formats = quantise([record(name, torch.as_tensor(value))], quantiser, **how)
    return {r.name: r for r in found}, formats


def back(value, quantiser, name="w", **how):
    return tensor(dequantise(*stored(value, quantiser, name, **how))[name])


def row_in_a_matrix(values):
    """A matrix that golf quantises, whose first row begins with these values and is otherwise zeros."""
    matrix = torch.zeros(17, 4096)
    matrix[0, : len(values)] = torch.tensor(values)
    return matrix


def torch_golf(matrix):
    """The golf rule for a matrix, as its own words have it."""
    clip = torch.quantile(matrix.abs(), 99.99984 / 100.0, dim=1)
    clipped = torch.maximum(torch.minimum(matrix, clip[:, None]), -clip[:, None])
    scale = (clip / 127.0).clamp_min(1.0 / 127.0)
    return torch.clamp(torch.round(clipped / scale[:, None]), -127, 127).to(torch.int8), scale.to(torch.float16)


def torch_golf_whole(values):
    clip = float(torch.quantile(values.abs().flatten(), 99.99984 / 100.0))
    scale = torch.tensor(clip / 127.0 if clip > 0 else 1.0)
    return torch.clamp(torch.round(torch.clamp(values, -clip, clip) / scale), -127, 127).to(torch.int8), scale


# The rows of the golf rule, in a small form: quantiles of four numbers are taken between the two largest.


@pytest.mark.parametrize(
    ("row", "codes", "scale", "decoded"),
    [
        ([0, 1, 2, 4], [0, 32, 64, 127], 4 / 127, [0, 1.0078, 2.0156, 3.9998]),
        ([0.1, -0.1, 0.05, 0], [13, -13, 6, 0], 1 / 127, [0.10236, -0.10236, 0.04724, 0]),
        ([10, -10, 5, 1], [127, -127, 64, 13], 10 / 127, None),
        ([0, 0, 0, 0], [0, 0, 0, 0], 1 / 127, [0, 0, 0, 0]),
    ],
)
def test_golf_rows_have_the_codes_that_golf_gives_them(row, codes, scale, decoded):
    found, scales = room._golf(np.array([row], np.float32))
    assert found.tolist() == [codes]
    assert scales[0] == pytest.approx(scale, rel=1e-5)
    if decoded is not None:
        assert (found[0] * scales.astype(np.float16).astype(np.float32)).tolist() == pytest.approx(decoded, abs=1e-4)


def test_a_golf_scale_is_stored_as_float16_and_codes_are_made_with_the_exact_one():
    parts, _ = stored(row_in_a_matrix([10.0, -10.0, 5.0, 1.0]), "int8-golf")
    assert parts["w"].dtype == "I8"
    assert parts["w" + SCALE].dtype == "F16"
    assert tensor(parts["w" + SCALE])[1:].tolist() == [pytest.approx(1 / 127, rel=1e-3)] * 16


SHAPES = [(1, 1), (2, 3), (64, 65), (16, 512), (9, 1000), (8, 1024), (5, 3072), (3, 50257), (2, 262145)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "on a grid", "tiny", "large", "equal", "ramp", "one spike"])
def test_golf_codes_are_those_of_torch(shape, kind):
    generator = torch.Generator().manual_seed(sum(shape))
    normal = torch.randn(shape, generator=generator)
    matrix = {
        "normal": normal,
        "heavy tails": normal**5,
        "on a grid": (normal * 8).round() / 8,
        "tiny": normal * 1e-6,
        "large": normal * 1e4,
        "equal": torch.full(shape, -3.3),
        "ramp": torch.arange(normal.numel(), dtype=torch.float32).reshape(shape) / 7,
        "one spike": torch.where(torch.arange(shape[1]) == shape[1] // 2, 1e3, normal),
    }[kind]
    codes, scale = torch_golf(matrix)
    found, scales = room._golf(matrix.numpy())
    assert np.array_equal(found, codes.numpy())
    assert np.array_equal(scales.astype(np.float16), scale.numpy())


@settings(max_examples=60)
@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=st.floats(-1e3, 1e3, width=32)))
def test_golf_codes_are_those_of_torch_for_any_matrix(matrix):
    codes, scale = torch_golf(torch.from_numpy(matrix))
    found, scales = room._golf(matrix)
    assert np.array_equal(found, codes.numpy())
    assert np.array_equal(scales.astype(np.float16), scale.numpy())


@pytest.mark.parametrize("shape", [(70_000,), (3, 40, 600), (1, 1, 1, 65_537)])
def test_golf_gives_tensors_of_other_ranks_one_float32_scale(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 50
    codes, scale = torch_golf_whole(values)
    parts, _ = stored(values, "int8-golf")
    assert torch.equal(tensor(parts["w"]), codes)
    assert parts["w" + SCALE].shape == ()
    assert torch.equal(tensor(parts["w" + SCALE]), scale)
    assert torch.equal(back(values, "int8-golf"), codes * scale)


def test_a_tensor_of_zeros_has_the_scale_one():
    parts, _ = stored(torch.zeros(65_537), "int8-golf")
    assert tensor(parts["w" + SCALE]).item() == 1
    assert not tensor(parts["w"]).any()


def test_more_elements_than_torch_can_sort_are_quantised():
    values = np.zeros((1, (1 << 24) + 10), np.float32)
    values[0, :40] = np.arange(40)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.from_numpy(values[0]), 0.5)
    assert room._quantile(values)[0] == pytest.approx(np.quantile(values[0].astype(np.float64), room.GOLF_QUANTILE), rel=1e-6)


@pytest.mark.parametrize(("elements", "dtype"), [(65_536, "F16"), (65_537, "I8")])
def test_golf_keeps_65536_elements_as_floats_and_no_more(elements, dtype):
    parts, formats = stored(torch.ones(1, elements), "int8-golf")
    assert parts["w"].dtype == dtype
    assert formats == {"w": "F32"}


@pytest.mark.parametrize("word", CONTROL)
@pytest.mark.parametrize("quantiser", ["int8", "int8-golf"])
def test_small_control_tensors_stay_float32(word, quantiser):
    value = torch.full((8,), 1 / 3)
    parts, formats = stored(value, quantiser, f"blocks.0.{word}")
    assert formats == {}
    assert torch.equal(tensor(parts[f"blocks.0.{word}"]), value)


def test_the_words_that_keep_a_tensor_can_be_chosen():
    parts, _ = stored(torch.full((8,), 1 / 3), "int8-golf", "mine.scale", keep=["mine"])
    assert parts["mine.scale"].dtype == "F32"
    parts, _ = stored(torch.full((8,), 1 / 3), "int8-golf", "q_gain", keep=[])
    assert parts["q_gain"].dtype == "F16"


def test_a_large_control_tensor_is_quantised():
    assert stored(torch.ones(2, 40_000), "int8-golf", "q_gain")[0]["q_gain"].dtype == "I8"


@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool])
def test_tensors_that_are_no_floats_pass_unchanged(quantiser, dtype):
    value = (torch.arange(70_000) % 2).reshape(100, 700).to(dtype)
    parts, formats = stored(value, quantiser)
    assert list(parts) == ["w"]
    assert formats == {}
    assert torch.equal(back(value, quantiser), value)


@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(300, 300), (7,), (), (0, 4), (1, 70_000), (4, 5, 6)])
def test_every_tensor_comes_back_in_its_own_format_and_shape(quantiser, dtype, shape):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = back(value, quantiser)
    assert found.dtype == dtype
    assert found.shape == value.shape
    torch.testing.assert_close(found.float(), value.float(), atol=0.03, rtol=0.01)


@pytest.fixture(scope="module")
def golf_model():
    torch.manual_seed(0)
    model = build({"family": "golf", "vocab_size": 1024, "context": 64, "embedding_dtype": "bf16"})
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.05)
    return model


def test_the_default_golf_model_has_golf_s_payload(golf_model):
    records = model_records(golf_model)
    assert sum(np.prod(r.shape) for r in records) == 17_059_912
    found, formats = quantise(records, "int8-golf")
    sizes = {r.name: r.data.nbytes for r in found}
    assert sum(r.data.nbytes for r in found if r.dtype == "I8") == 17_039_360
    assert sum(n for name, n in sizes.items() if name.endswith(SCALE)) == 57_344
    assert sizes["skip_weights"] == 8_192
    assert sum(sizes.values()) == 17_178_912
    assert formats["tok_emb.weight"] == "BF16"
    assert set(formats) == {r.name for r in found if r.dtype == "I8"}


def test_every_matrix_of_the_golf_model_has_the_codes_of_torch(golf_model):
    found = {r.name: tensor(r) for r in quantise(model_records(golf_model), "int8-golf")[0]}
    for name, value in golf_model.state_dict().items():
        if value.numel() > 65_536:
            codes, scale = torch_golf(value.float())
            assert torch.equal(found[name], codes), name
            assert torch.equal(found[name + SCALE], scale), name


def test_int8_codes_are_the_nearest_to_what_is_decoded():
    w = torch.randn(50, 333, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 50)[:, None]
    parts, _ = stored(w, "int8")
    scale = tensor(parts["w" + SCALE]).float()[:, None]
    assert parts["w" + SCALE].dtype == "F32"
    assert tensor(parts["w"]).abs().amax(1).eq(127).all()
    assert ((back(w, "int8") - w).abs() <= scale * 0.5001).all()


def test_int8_scales_are_float16_where_that_holds_them():
    w = torch.randn(50, 333, generator=torch.Generator().manual_seed(2))
    parts, _ = stored(w, "int8")
    scale = tensor(parts["w" + SCALE])
    assert scale.dtype == torch.float16
    nearest = (w / scale.float()[:, None]).round().clamp(-127, 127)
    assert torch.equal(tensor(parts["w"]).float(), nearest)  # of the scale as it is stored, rounded to float16


def test_int8_loses_less_than_golf():
    w = torch.randn(400, 400, generator=torch.Generator().manual_seed(3)) * 0.02
    error = {quantiser: (back(w, quantiser) - w).square().mean().item() for quantiser in ("int8", "int8-golf")}
    assert error["int8"] < error["int8-golf"] / 100


@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e-3, 1.0, 1e6, 1e9, 1e30])
def test_int8_keeps_rows_of_any_size(size):
    w = torch.randn(4, 400, generator=torch.Generator().manual_seed(4)) * size
    torch.testing.assert_close(back(w, "int8") / size, w / size, atol=0.02, rtol=0)


def test_int8_keeps_a_row_of_zeros_between_others():
    w = torch.randn(4, 400, generator=torch.Generator().manual_seed(4))
    w[2] = 0
    assert not back(w, "int8")[2].any()


def test_int8_gives_every_slice_of_a_larger_rank_a_scale():
    parts, _ = stored(torch.randn(8, 5, 50), "int8")
    assert parts["w" + SCALE].shape == (8,)


def test_int8_keeps_vectors_and_small_tensors_as_floats():
    assert stored(torch.ones(5000), "int8")[0]["w"].dtype == "F16"
    assert stored(torch.ones(32, 32), "int8")[0]["w"].dtype == "F16"
    assert stored(torch.ones(32, 33), "int8")[0]["w"].dtype == "I8"


def test_large_matrices_are_worked_on_in_blocks_with_the_same_result(monkeypatch):
    w = torch.randn(300, 300, generator=torch.Generator().manual_seed(5))
    whole = {quantiser: back(w, quantiser) for quantiser in ("int8", "int8-golf")}
    monkeypatch.setattr(room, "BLOCK", 1000)
    assert all(torch.equal(back(w, quantiser), value) for quantiser, value in whole.items())


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "F16"), ("bf16", "BF16"), ("fp32", "F32")])
def test_without_a_quantiser_the_format_is_chosen(dtype, name):
    w = torch.randn(9, 9)
    parts, formats = stored(w, "none", dtype=dtype)
    assert parts["w"].dtype == name
    assert formats == ({} if name == "F32" else {"w": "F32"})
    assert torch.equal(back(w, "none", dtype=dtype), w.to(tensor(parts["w"]).dtype).float())


@pytest.mark.parametrize("value", [torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float16)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_tensor_is_never_stored_in_more_bytes_than_it_has(value, dtype):
    parts, formats = stored(value, "none", dtype=dtype)
    assert torch.equal(tensor(parts["w"]), value)
    assert formats == {}


@settings(max_examples=200)
@given(arrays(np.uint32, 8, elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_is_rounded_as_torch_rounds_it(bits):
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16()
    found = tensor(to_record("x", values, "BF16"))
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert same.all()


def test_bfloat16_is_read_as_torch_reads_it():
    values = torch.randn(1000).bfloat16()
    assert np.array_equal(to_array(record("x", values)), values.float().numpy())


@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
@pytest.mark.parametrize("shape", [(3,), (300, 300)])
def test_weights_that_are_no_numbers_are_refused_by_name(quantiser, shape):
    value = torch.zeros(shape)
    value[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"^h\.3\.weight contains values that are not finite"):
        stored(value, quantiser, "h.3.weight")


@pytest.mark.parametrize("quantiser", ["int8", "int8-golf"])
def test_an_infinite_weight_has_no_code(quantiser):
    value = torch.zeros(300, 300)
    value[5, 7] = -float("inf")
    with pytest.raises(CheckpointError, match=r"^h\.3\.weight contains values that are not finite"):
        stored(value, quantiser, "h.3.weight")


@pytest.mark.parametrize("quantiser", ["none", "int8", "int8-golf"])
def test_a_small_mask_with_infinities_is_kept(quantiser):
    mask = torch.tensor([0.0, -float("inf")])
    assert torch.equal(back(mask, quantiser), mask)


@pytest.mark.parametrize("quantiser", ["int8", "int8-golf"])
def test_a_small_tensor_that_float16_cannot_hold_stays_as_it_is(quantiser):
    value = torch.tensor([1e6, 1.0])
    assert torch.equal(back(value, quantiser), value)


def test_a_format_that_cannot_hold_the_weights_is_refused():
    with pytest.raises(CheckpointError, match=r"w contains values outside fp16's range; choose a wider dtype"):
        stored(torch.tensor([1e6]), "none", dtype="fp16")


@pytest.mark.parametrize(("quantiser", "dtype", "what"), [("int4", "fp32", "quantiser 'int4'"), ("none", "f8", "dtype 'f8'")])
def test_what_does_not_exist_is_refused_with_the_choices(quantiser, dtype, what):
    with pytest.raises(ConfigError, match=rf"unknown .*{what}; choose .*"):
        quantise([], quantiser, dtype)


def test_a_tensor_named_like_a_scale_is_refused():
    with pytest.raises(CheckpointError, match=r"w::scale cannot be stored"):
        stored(torch.ones(2), "none", "w::scale")


def part(name, dtype, shape, value=0):
    return TensorRecord(name, dtype, shape, to_record(name, np.full(shape, value), dtype).data)


HOSTILE = {
    "a scale without codes": ([part("w::scale", "F16", (2,))], {}),
    "a scale of floats": ([part("w", "F32", (2, 2)), part("w::scale", "F16", (2,))], {"w": "F32"}),
    "codes without a format": ([part("w", "I8", (2, 2)), part("w::scale", "F16", (2,))], {}),
    "codes without a scale": ([part("w", "I8", (2, 2))], {"w": "F32"}),
    "a scale for other rows": ([part("w", "I8", (2, 2)), part("w::scale", "F16", (3,))], {"w": "F32"}),
    "a scale per element": ([part("w", "I8", (2, 2)), part("w::scale", "F16", (2, 2))], {"w": "F32"}),
    "scales of integers": ([part("w", "I8", (2, 2)), part("w::scale", "I16", (2,))], {"w": "F32"}),
    "scales that are not numbers": ([part("w", "I8", (2, 2)), part("w::scale", "F16", (2,), np.nan)], {"w": "F32"}),
    "a format of integers": ([part("w", "F32", (2, 2))], {"w": "I64"}),
    "a format for integers": ([part("w", "I64", (2, 2))], {"w": "F32"}),
    "a format that is a list": ([part("w", "F32", (2, 2))], {"w": ["F32"]}),
    "a format for nothing": ([], {"w": "F32"}),
    "a format for a scale": ([part("w", "I8", (2, 2)), part("w::scale", "F16", (2,))], {"w": "F32", "w::scale": "F32"}),
    "a scale of a scale": (
        [part("w", "I8", (2, 2)), part("w::scale", "I8", (2,)), part("w::scale::scale", "F16", (2,))],
        {"w": "F32", "w::scale": "F16"},
    ),
}


@pytest.mark.parametrize(("parts", "formats"), HOSTILE.values(), ids=HOSTILE.keys())
def test_parts_that_do_not_fit_together_are_refused(parts, formats):
    with pytest.raises(ValueError, match=r"^(the scales in )?'w"):
        dequantise({part.name: part for part in parts}, formats)
