"""The profile of a step: what a kernel's name says, what a trace adds up to, and that the toy runs through the engine."""

import json
import sys

import pytest
import step_profile
from step_profile import CLASSES, SHAPES, busy, class_of


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x64_1x1x1_cga1x1x1", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "attention"),
        ("triton_tem_fused_flex_attention_backward_3", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "products"),
        ("triton_tem_fused_mm_2", "products"),
        ("aten::addmm", "products"),
        ("_sloped_product", "products"),
        ("_loss_of_row", "loss"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_tanh_0", "loss"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>", "optimizer"),
        ("triton_per_fused__fused_rms_norm__scaled_dot_product_cudnn_attention_backward_mul_add_11", "element-wise"),
        ("triton_poi_fused_mm_pow_relu_3", "element-wise"),
        ("Memcpy DtoD (Device -> Device)", "element-wise"),
    ],
)
def test_a_kernel_is_classed_by_what_it_computes(kernel, kind):
    assert class_of(kernel) == kind


def event(cat, name, ts, dur, **more):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **more}


def test_kernels_that_run_while_the_optimizer_steps_are_its_own():
    events = [
        event("cpu_op", "aten::mm", 0, 5000),
        event("kernel", "nvjet_tst", 0, 1000),
        event("gpu_user_annotation", "Optimizer.step#Muon.step", 2000, 2000),
        event("kernel", "nvjet_tst", 2500, 1000),
        event("kernel", "triton_poi_fused_add", 4000, 500),
    ]
    assert busy(events) == [
        ("products", "nvjet_tst", 1.0),
        ("optimizer", "nvjet_tst", 1.0),
        ("element-wise", "triton_poi_fused_add", 0.5),
    ]


def test_without_a_gpu_no_time_is_counted_twice():
    events = [
        event("cpu_op", "aten::linear", 0, 1000, tid=1),
        event("cpu_op", "aten::mm", 100, 700, tid=1),
        event("cpu_op", "aten::resolve_conj", 200, 100, tid=1),
        event("cpu_op", "aten::mul", 500, 300, tid=2),
    ]
    assert [(name, ms) for _, name, ms in busy(events)] == [
        ("aten::linear", 0.3), ("aten::mm", 0.6), ("aten::resolve_conj", 0.1), ("aten::mul", 0.3),
    ]  # fmt: skip


def test_the_shapes_are_those_that_are_tracked():
    rows = {name: (shape.config().rows_per_step, shape.config().data.seq_len) for name, shape in SHAPES.items()}
    assert rows == {
        "golf-393k": (96, 4096), "golf-131k": (32, 4096), "frontier": (64, 2048), "frontier-a": (128, 1024),
        "frontier-c": (32, 4096),
        "124m-64x1024": (64, 1024), "124m-12x1024": (12, 1024), "llama-64x1024": (64, 1024), "packed-64x1024": (64, 1024),
    }  # fmt: skip


def test_a_toy_is_profiled_through_the_engine(tmp_path, monkeypatch, capsys):
    results = tmp_path / "steps.jsonl"
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--toy", "--steps", "2", "--results", str(results)])
    step_profile.main()
    found = json.loads(results.read_text())
    assert found["ms"] > 0 and all(found["classes"][kind] > 0 and found["floors"][kind] > 0 for kind in CLASSES)
    assert "| element-wise |" in capsys.readouterr().out
