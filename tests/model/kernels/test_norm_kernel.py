"""A branch added to the stream, and the sum's norm: the kernels where they can run, and the operation around them everywhere."""

import pytest
import torch

from ingot.model.kernels import norm
from ingot.model.norms import LayerNorm, RMSNorm

torch.set_num_threads(1)
KINDS = {
    "layer norm": lambda width: LayerNorm(width),
    "layer norm without a bias": lambda width: LayerNorm(width, bias=False),
    "rms norm": lambda width: RMSNorm(width, 1e-5),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def module_of(kind, width, fused, device="cpu"):
    torch.manual_seed(0)
    module = KINDS[kind](width)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.fused_norm = fused
    return module.to(device)


def outcome(
    kind,
    fused,
    rows=(3, 7),
    width=20,
    dtype=torch.float32,
    branched=True,
    summed=True,
    device="cpu",
    branch_dtype=None,
    form=None,
):
    """The sum and its norm, and the gradients for both inputs and all parameters; `summed`: the sum has a gradient too."""
    module = module_of(kind, width, fused, device)
    torch.manual_seed(1)
    x, branch, d_total, dy = torch.randn(4, *rows, width).unbind()
    x = (x + 0.5).to(device, dtype).requires_grad_()
    branch = branch.to(device, branch_dtype or dtype).requires_grad_() if branched else None
    total, y = (form or (lambda *given: given[0](*given[1:])))(module, x, branch)
    leaves = [leaf for leaf in (x, branch, *module.parameters()) if leaf is not None]
    outputs, grads = [y], [dy.to(y)]
    if summed:
        outputs.append(total), grads.append(d_total.to(total))
    return total.detach(), y.detach(), *torch.autograd.grad(outputs, leaves, grads)


@kinds
@pytest.mark.parametrize(("branched", "summed"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_operation_gives_what_the_plain_form_gives(kind, branched, summed):
    for width in (20, 3, 33):
        found, expected = (outcome(kind, fused, width=width, branched=branched, summed=summed) for fused in (True, False))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


@kinds
def test_a_sum_whose_norm_nobody_reads_hands_its_gradient_on(kind):
    module = module_of(kind, 20, fused=True)
    x, branch = torch.randn(2, 5, 20).requires_grad_(), torch.randn(2, 5, 20).bfloat16().requires_grad_()
    total, _ = module(x, branch)
    dy = torch.randn(2, 5, 20)
    found = torch.autograd.grad(total, (x, branch), dy)
    assert torch.equal(found[0], dy) and torch.equal(found[1], dy.bfloat16())


def test_without_gradients_it_is_torch_s_own():
    module, x = module_of("layer norm", 20, fused=True), torch.randn(2, 5, 20)
    with torch.no_grad():
        total, y = module(x, x)
    assert torch.equal(total, x + x) and torch.equal(y, torch.nn.LayerNorm.forward(module, x + x))


@kinds
def test_it_is_a_part_of_a_compiled_graph(kind):
    def form(module, x, branch):
        return torch.compile(module, fullgraph=True, backend="aot_eager")(x, branch)

    for summed in (True, False):
        compiled, plain = (outcome(kind, True, summed=summed, form=one) for one in (form, None))
        assert all(map(torch.equal, compiled, plain))


@kinds
def test_under_autocast_the_norm_is_in_its_format_and_gradients_as_near_as_the_plain_ones(kind):
    exact = outcome(kind, False)
    with torch.autocast("cpu", torch.bfloat16):
        mine, usual = (outcome(kind, fused, branch_dtype=torch.bfloat16) for fused in (True, False))
    assert (mine[0].dtype, mine[1].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(mine[0], usual[0])
    for found, other, truth in zip(mine[1:], usual[1:], exact[1:], strict=True):
        assert found.dtype == other.dtype or found is mine[1]
        # The plain norm leaves its rounding to the layer that follows, so the usual error here is that of the branch alone.
        assert 0 < (found - truth).norm() <= 1.5 * (other - truth).norm() + 4e-3 * truth.norm()


@kinds
def test_a_stream_of_16_bits_stays_one_and_is_normalised_as_exactly_as_by_torch(kind):
    exact, mine, usual = (
        outcome(kind, fused, dtype=dtype)
        for fused, dtype in ((False, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16))
    )
    assert torch.equal(mine[0], usual[0])
    for found, other, truth in zip(mine[1:4], usual[1:4], exact[1:4], strict=True):
        assert found.dtype == torch.bfloat16 and 0 < (found - truth).norm() <= 1.5 * (other - truth).norm()


@kinds
def test_only_the_sum_and_two_numbers_a_row_wait_for_the_backward_pass(kind):
    kept, module, x = [], module_of(kind, 20, fused=True), torch.randn(3, 7, 20, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        module(x, torch.randn(3, 7, 20))
    assert sorted(kept) == sorted([(21, 20), (20,), (21,), (0,) if kind == "rms norm" else (21,)])


def given(rows, width, dtype, kind, branched, device):
    module = module_of(kind, width, fused=True)
    torch.manual_seed(rows)
    x, branch, d_total, dy = torch.randn(4, rows, width).unbind()
    weight, bias = module.weight.detach(), None if getattr(module, "bias", None) is None else module.bias.detach()
    narrow = torch.float16 if dtype == torch.float32 else dtype  # of the branch
    tensors = [(x + 0.5).to(dtype), branch.to(narrow) if branched else None, weight, bias, dy.to(narrow), d_total.to(dtype)]
    return tensors, [None if one is None else one.to(device) for one in tensors], narrow


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_give_what_the_operation_gives_on_a_cpu(device, kind, dtype):
    from ingot.model.kernels.triton_norm import Cut, add_norm, add_norm_backward

    centred = kind != "rms norm"
    for rows, width, cut, branched, summed in [
        (1, 3, None, True, True), (37, 48, None, True, True), (5, 768, None, True, False), (40, 33, None, False, True),
        (9, 1100, None, False, False), (13, 200, Cut(2, 2, 1, 2), True, True), (8, 96, Cut(4, 4, 2, 1), True, True),
    ]:  # fmt: skip
        (x, branch, weight, bias, dy, d_total), there, narrow = given(rows, width, dtype, kind, branched, device)
        settings = 1e-5, centred, narrow
        found, expected = add_norm(*there[:4], *settings, cut), norm._add_norm._init_fn(x, branch, weight, bias, *settings)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            near = 2e-3 if mine.dtype == torch.float16 else 1e-5
            torch.testing.assert_close(mine.cpu(), theirs, atol=near, rtol=near)
        total = expected[0] if branched else x
        arguments = dy, d_total if summed else None, total, weight, *expected[2:]
        moved = [None if one is None else one.to(device) for one in arguments]
        form = bias is not None, narrow if branched and narrow != dtype else None
        back, wanted = add_norm_backward(*moved, *form, cut), norm._add_norm_backward._init_fn(*arguments, *form)
        for mine, theirs in zip(back, wanted, strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            near = 4e-3 if mine.dtype == torch.float16 else 2e-5
            torch.testing.assert_close(mine.cpu(), theirs, atol=near, rtol=near)


def test_rows_that_no_program_holds_are_left_to_the_library(device):
    from ingot.model.kernels.triton_norm import WIDEST, backward_cut, fits, forward_cut

    assert fits(torch.zeros(2, WIDEST)) and not fits(torch.zeros(2, WIDEST + 1)) and not fits(torch.zeros(0, 8))
    assert all(cut.warps == 8 and cut.programs == 1 for cut in (forward_cut(WIDEST), backward_cut(WIDEST)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@kinds
@pytest.mark.parametrize(
    ("rows", "width"), [(1000, 96), (4096, 768), (5000, 768), (300, 1023), (700, 2048), (33, 8192), (8, 9000)]
)
def test_on_a_gpu_the_operation_is_as_near_as_the_plain_form(kind, rows, width):
    for branched, summed in ((True, True), (True, False), (False, True)):
        shape = {"rows": (rows,), "width": width, "branched": branched, "summed": summed, "device": "cuda"}
        exact = outcome(kind, False, **shape)
        with torch.autocast("cuda", torch.bfloat16):
            mine, usual, again = (outcome(kind, fused, branch_dtype=torch.bfloat16, **shape) for fused in (True, False, True))
        assert all(map(torch.equal, mine, again)) and torch.equal(mine[0], usual[0])
        for found, other, truth in zip(mine, usual, exact, strict=True):
            assert (found - truth).norm() <= 1.5 * (other - truth).norm() + 4e-3 * truth.norm()
