import math

import pytest
import torch
from torch import nn

from ingot.optim.muon import Muon, _iterate, _iterate_gram, orthogonalise

torch.set_num_threads(1)

SHAPES = [(32, 32), (96, 32), (32, 96), (64, 256), (256, 64), (1, 48), (48, 1)]


def matrices(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params, seed):
    for p, gradient in zip(params, matrices(*(p.shape for p in params), seed=seed), strict=True):
        p.grad = gradient.detach()


def bits(params, optimizer):
    return [p.detach().clone() for p in params], [optimizer.state[p]["momentum"].clone() for p in params]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's Muon asks CPUs for bf16 products
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_agree_with_torchs_muon(shape):
    (ours,), (theirs,) = matrices(shape), matrices(shape)
    mine = Muon([ours], lr=0.02, momentum=0.95, nesterov=True, iterations=5)
    reference = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, nesterov=True, ns_steps=5, weight_decay=0.0, adjust_lr_fn="original"
    )
    for step in range(4):
        before = ours.detach().clone(), theirs.detach().clone()
        give_gradients([ours, theirs], seed=step + 1)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
        update, expected = before[0] - ours.detach(), before[1] - theirs.detach()
        assert expected.norm() > 0
        assert (update - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_updated_together_are_updated_as_one_by_one(nesterov):
    shapes = [(48, 32), (32, 48), (48, 32), (32, 32), (32, 48), (48, 32)]
    together, alone = matrices(*shapes), matrices(*shapes)
    optimizers = [Muon(together, nesterov=nesterov), *(Muon([p], nesterov=nesterov) for p in alone)]
    for step in range(3):
        give_gradients(together, seed=step + 1)
        give_gradients(alone, seed=step + 1)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("iterations", [1, 5, 7])
def test_the_gathered_iteration_equals_the_plain_one(iterations):
    x = torch.randn(3, 48, 192, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(_iterate_gram(x, iterations), _iterate(x, iterations), atol=1e-5, rtol=0)


def test_five_iterations_bring_singular_values_near_one():
    x = torch.randn(1, 512, 1024, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(x, 5)[0])
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_directions_survive_orthogonalising():
    x = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.T @ orthogonalise(x[None])[0] @ v.T
    torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_matrix_gives_the_transposed_update(dtype):
    x = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(0))
    wide, tall = orthogonalise(x.mT.contiguous(), dtype=dtype), orthogonalise(x, dtype=dtype)
    torch.testing.assert_close(wide, tall.mT, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_the_size_of_a_gradient_does_not_matter(scale):
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalise(scale * x), orthogonalise(x), atol=1e-3, rtol=0)


def test_a_gradient_of_zeros_moves_nothing():
    params = matrices((16, 32))
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(16, 32)
    Muon(params).step()
    assert torch.equal(params[0], before)


def test_every_row_of_a_tall_matrix_moves_as_far_as_in_a_square_one():
    moved = {}
    for shape in [(256, 64), (64, 64), (64, 256)]:
        params = matrices(shape)
        before = params[0].detach().clone()
        give_gradients(params, seed=1)
        Muon(params, lr=1.0).step()
        moved[shape] = (params[0].detach() - before).square().sum(1).mean().sqrt().item()  # root mean square over rows
    assert moved[256, 64] == pytest.approx(moved[64, 64], rel=0.15)
    assert moved[64, 256] == pytest.approx(moved[64, 64], rel=0.15)


def test_without_momentum_history_does_not_matter():
    params, fresh = matrices((16, 32)), matrices((16, 32))
    optimizer = Muon(params, momentum=0.0)
    give_gradients(params, seed=1)
    optimizer.step()
    with torch.no_grad():
        params[0].copy_(fresh[0])
    give_gradients(params, seed=2)
    give_gradients(fresh, seed=2)
    optimizer.step()
    Muon(fresh, momentum=0.0).step()
    assert torch.equal(params[0], fresh[0])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_found_inf_leaves_weights_and_momentum_bit_for_bit(weight_decay, poison):
    params = matrices((16, 32), (16, 32), (32, 16))
    optimizer = Muon(params, weight_decay=weight_decay)
    give_gradients(params, seed=1)
    optimizer.step()
    before = bits(params, optimizer)
    give_gradients(params, seed=2)
    params[1].grad[3, 3] = poison
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    after = bits(params, optimizer)
    assert equal(before[0], after[0])
    assert equal(before[1], after[1])


def test_found_inf_in_the_first_step_leaves_everything_at_the_start():
    params = matrices((16, 32))
    before = params[0].detach().clone()
    optimizer = Muon(params)
    params[0].grad = torch.full((16, 32), math.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state[params[0]]["momentum"].any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_found_inf_of_zero_changes_nothing(weight_decay):
    told, untold = matrices((16, 32), (32, 16)), matrices((16, 32), (32, 16))
    one, other = Muon(told, weight_decay=weight_decay), Muon(untold, weight_decay=weight_decay)
    one.found_inf = torch.tensor(0.0)
    for step in range(3):
        for params, optimizer in ((told, one), (untold, other)):
            give_gradients(params, seed=step + 1)
            optimizer.step()
    for p, q in zip(told, untold, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert equal(bits(told, one)[1], bits(untold, other)[1])


def test_decay_shrinks_weights_by_the_learning_rate_times_it():
    plain, decayed = matrices((16, 32)), matrices((16, 32))
    start = plain[0].detach().clone()
    for params, weight_decay in ((plain, 0.0), (decayed, 0.5)):
        give_gradients(params, seed=1)
        Muon(params, lr=0.1, weight_decay=weight_decay).step()
    torch.testing.assert_close(plain[0] - decayed[0], 0.1 * 0.5 * start, atol=1e-6, rtol=0)


def test_a_parameter_without_gradient_is_left_alone():
    params = matrices((16, 32), (16, 32))
    before = params[1].detach().clone()
    give_gradients(params[:1], seed=1)
    optimizer = Muon(params, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("shape", [(8,), (2, 3, 4), ()])
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"belongs to AdamW"):
        Muon([nn.Parameter(torch.zeros(shape))])
