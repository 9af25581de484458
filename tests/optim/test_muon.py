import copy
import math

import pytest
import torch
from torch import nn

from ingot.config.schema import OptimizerSection
from ingot.optim.muon import Muon, equal_rows, normalise_neurons

torch.set_num_threads(1)

SHAPES = [(32, 32), (96, 32), (32, 96), (64, 256), (256, 64), (1, 48), (48, 1)]
OPTIONS = [
    {"nesterov": False},
    {"coefficients": "polar-express"},
    {"coefficients": "polar-express", "iterations": 4, "weight_decay": 0.1},
    {"normalise_rows": True},
    {"precision": "bf16"},
    {"precision": "bf16", "coefficients": "polar-express", "normalise_rows": True, "weight_decay": 0.1},
]
NORMUON = [
    {"beta2": 0.9},
    {"beta2": 0.95, "cautious": True, "weight_decay": 0.1, "coefficients": "polar-express"},
]
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 products says so


def make(params, compiled=False, **options) -> Muon:
    """Muon as a run makes it, with these settings changed."""
    named = {"lr": "learning_rate"}
    settings = OptimizerSection(**{f"muon_{named.get(name, name)}": value for name, value in options.items()})
    return Muon(params, settings, compiled)


def matrices(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params, seed):
    for p, gradient in zip(params, matrices(*(p.shape for p in params), seed=seed), strict=True):
        p.grad = gradient.detach()


def bits(params, optimizer):
    return [p.detach().clone() for p in params], [value.clone() for p in params for value in optimizer.state[p].values()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_updates_agree_with_torchs_muon(shape):
    (ours,), (theirs,) = matrices(shape), matrices(shape)
    mine = make([ours], lr=0.02, momentum=0.95, nesterov=True, iterations=5)
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


@pytest.mark.parametrize("options", [{}, *OPTIONS, *NORMUON])
def test_matrices_updated_together_are_updated_as_one_by_one(options):
    shapes = [(48, 32), (32, 48), (48, 32), (32, 32), (32, 48), (48, 32), (16, 48)]
    together, alone = matrices(*shapes), matrices(*shapes)
    optimizers = [make(together, **options), *(make([p], **options) for p in alone)]
    for step in range(3):
        give_gradients(together, seed=step + 1)
        give_gradients(alone, seed=step + 1)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_a_transposed_gradient_gives_the_transposed_direction(options):
    options = {**options, "normalise_rows": False}  # rows are not columns
    (wide,), (tall,) = matrices((32, 96)), matrices((32, 96))
    tall = nn.Parameter(tall.detach().T.contiguous())
    give_gradients([wide], seed=1)
    tall.grad = wide.grad.T.contiguous()
    before = wide.detach().clone()
    for p, lr in ((wide, math.sqrt(3)), (tall, 1.0)):  # a tall one is scaled up by the root of rows / columns
        make([p], lr=lr, **{**options, "weight_decay": 0.0}).step()
    torch.testing.assert_close(tall - before.T, (wide - before).T, atol=2e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, *OPTIONS, *NORMUON])
def test_a_state_put_back_continues_bit_for_bit(options):
    straight, resumed = matrices((16, 48), (48, 16)), matrices((16, 48), (48, 16))
    for params in (straight, resumed):
        optimizer = make(params, **options)
        for step in range(4):
            if params is resumed and step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(params, **options)
                optimizer.load_state_dict(saved)
            give_gradients(params, seed=step + 1)
            optimizer.step()
    assert equal(straight, resumed)


def test_momentum_may_change_between_steps():
    changed, fixed = matrices((16, 32)), matrices((16, 32))
    moving, still = make(changed, momentum=0.5, nesterov=False), make(fixed, momentum=0.9, nesterov=False)
    for params, optimizer in ((changed, moving), (fixed, still)):
        for step in range(2):
            optimizer.param_groups[0]["momentum"] = 0.9
            give_gradients(params, seed=step + 1)
            optimizer.step()
    assert equal(changed, fixed)
    first, second = (matrices((16, 32), seed=seed)[0].detach() for seed in (1, 2))
    torch.testing.assert_close(moving.state[changed[0]]["momentum"], 0.9 * first + second)


def test_rows_of_equal_length_keep_the_length_of_the_whole():
    x = torch.randn(3, 64, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 64)[:, None]
    rows = equal_rows(x)
    torch.testing.assert_close(rows.norm(dim=(1, 2)), x.norm(dim=(1, 2)))
    lengths = rows.norm(dim=2)
    torch.testing.assert_close(lengths, lengths[:, :1].expand_as(lengths))
    torch.testing.assert_close(torch.cosine_similarity(rows, x, dim=2), torch.ones(3, 64))


def test_a_row_of_zeros_stays_zero_and_a_matrix_of_zeros_too():
    x = torch.zeros(2, 4, 3)
    x[0, 1:] = torch.tensor([[3.0, 0, 0], [0, 4, 0], [0, 0, 12]])
    rows = equal_rows(x)
    torch.testing.assert_close(rows[0].norm(dim=1), torch.tensor([0.0, 1, 1, 1]) * 13 / math.sqrt(3))
    assert not rows[1].any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_equal_rows_every_neuron_of_a_tall_matrix_learns_equally_fast(precision):
    def lengths(**options):
        params = matrices((256, 32))
        before = params[0].detach().clone()
        give_gradients(params, seed=1)
        params[0].grad[:128] *= 0.05
        make(params, lr=1.0, precision=precision, **options).step()
        return (params[0].detach() - before).norm(dim=1)

    plain, equalled = lengths(), lengths(normalise_rows=True)
    assert plain.max() > 10 * plain.min()
    torch.testing.assert_close(equalled, equalled.mean().expand_as(equalled), rtol=1e-4, atol=0)
    torch.testing.assert_close(equalled.norm(), plain.norm(), rtol=1e-4, atol=0)


def test_precision_decides_the_arithmetic():
    updates = {}
    for precision in ("auto", "fp32", "bf16"):
        params = matrices((32, 48))
        before = params[0].detach().clone()
        give_gradients(params, seed=1)
        make(params, lr=1.0, precision=precision).step()
        updates[precision] = params[0].detach() - before
    assert torch.equal(updates["auto"], updates["fp32"])  # on a CPU
    off = (updates["bf16"] - updates["fp32"]).norm() / updates["fp32"].norm()
    assert 1e-4 < off < 0.05


def test_the_update_of_a_matrix_twice_as_tall_has_root_two_times_the_singular_values():
    largest = {}
    for shape in [(512, 512), (1024, 512)]:
        params = matrices(shape)
        before = params[0].detach().clone()
        # All singular values equal, so that both shapes are lifted alike.
        params[0].grad = torch.linalg.qr(torch.randn(shape, generator=torch.Generator().manual_seed(1)))[0]
        make(params, lr=1.0).step()
        largest[shape] = torch.linalg.matrix_norm(params[0].detach() - before, ord=2).item()
    assert largest[1024, 512] / largest[512, 512] == pytest.approx(math.sqrt(2), rel=1e-3)


def test_a_gradient_of_zeros_moves_nothing():
    params = matrices((16, 32))
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(16, 32)
    make(params).step()
    assert torch.equal(params[0], before)


def test_every_row_of_a_tall_matrix_moves_as_far_as_in_a_square_one():
    moved = {}
    for shape in [(256, 64), (64, 64), (64, 256)]:
        params = matrices(shape)
        before = params[0].detach().clone()
        give_gradients(params, seed=1)
        make(params, lr=1.0).step()
        moved[shape] = (params[0].detach() - before).square().sum(1).mean().sqrt().item()  # root mean square over rows
    assert moved[256, 64] == pytest.approx(moved[64, 64], rel=0.15)
    assert moved[64, 256] == pytest.approx(moved[64, 64], rel=0.15)


def test_without_momentum_history_does_not_matter():
    params, fresh = matrices((16, 32)), matrices((16, 32))
    optimizer = make(params, momentum=0.0)
    give_gradients(params, seed=1)
    optimizer.step()
    with torch.no_grad():
        params[0].copy_(fresh[0])
    give_gradients(params, seed=2)
    give_gradients(fresh, seed=2)
    optimizer.step()
    make(fresh, momentum=0.0).step()
    assert torch.equal(params[0], fresh[0])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, *OPTIONS, *NORMUON])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_found_inf_leaves_weights_and_momentum_bit_for_bit(options, poison):
    params = matrices((16, 32), (16, 32), (32, 16))
    optimizer = make(params, **options)
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
    optimizer = make(params)
    params[0].grad = torch.full((16, 32), math.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state[params[0]]["momentum"].any()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, *OPTIONS, *NORMUON])
def test_a_found_inf_of_zero_changes_nothing(options):
    told, untold = matrices((16, 32), (32, 16)), matrices((16, 32), (32, 16))
    one, other = make(told, **options), make(untold, **options)
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
        make(params, lr=0.1, weight_decay=weight_decay).step()
    torch.testing.assert_close(plain[0] - decayed[0], 0.1 * 0.5 * start, atol=1e-6, rtol=0)


def test_a_parameter_without_gradient_is_left_alone():
    params = matrices((16, 32), (16, 32))
    before = params[1].detach().clone()
    give_gradients(params[:1], seed=1)
    optimizer = make(params, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("shape", [(8,), (2, 3, 4), ()])
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"must use AdamW"):
        make([nn.Parameter(torch.zeros(shape))])


def test_normuon_divides_rows_by_their_running_root_mean_square_and_keeps_the_length_of_the_whole():
    tall, squares = matrices((2, 24, 8))[0].detach(), torch.zeros(2, 24, 1)
    tall[:, 3] *= 50
    for _ in range(200):  # the running mean comes to the rows' own
        even, squares = normalise_neurons(tall, squares, 0.9)
    torch.testing.assert_close(squares, tall.square().mean(-1, keepdim=True))
    torch.testing.assert_close(even.norm(dim=(1, 2)), tall.norm(dim=(1, 2)))
    rows = even.norm(dim=2)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))
    wide, _ = normalise_neurons(tall.mT, torch.zeros(2, 1, 24), 0.9)
    torch.testing.assert_close(wide.mT, normalise_neurons(tall, torch.zeros(2, 24, 1), 0.9)[0])


def test_normuon_remembers_rows_that_were_long():
    update, squares = torch.ones(1, 4, 4), torch.ones(1, 4, 1)
    squares[0, 0] = 100.0
    even, after = normalise_neurons(update, squares, 0.5)
    assert even[0, 0, 0] < 0.5 * even[0, 1, 0]
    assert after[0, 0] == pytest.approx(50.5)


def test_cautious_decay_shrinks_only_what_the_update_brings_nearer_to_zero():
    plain, cautious = matrices((16, 32)), matrices((16, 32))
    start = plain[0].detach().clone()
    for params, options in ((plain, {}), (cautious, {"weight_decay": 0.5, "cautious": True})):
        give_gradients(params, seed=1)
        make(params, lr=0.1, **options).step()
    towards_zero = (start - plain[0].detach()) * start >= 0
    assert 0.2 < towards_zero.float().mean() < 0.8
    torch.testing.assert_close(plain[0] - cautious[0], 0.1 * 0.5 * start * towards_zero, atol=1e-6, rtol=0)


def test_a_run_that_takes_normuon_up_begins_with_no_squares():
    params = matrices((16, 32))
    give_gradients(params, seed=1)
    optimizer = make(params)
    optimizer.step()
    optimizer.param_groups[0]["beta2"] = 0.9
    optimizer.step()
    assert optimizer.state[params[0]]["squares"].shape == (1, 32)


@pytest.mark.long
def test_a_compiled_step_is_the_plain_one_and_needs_one_graph_whatever_the_rates():
    plain, compiled = matrices((16, 48)), matrices((16, 48))
    optimizers = [make(plain, **NORMUON[1]), make(compiled, compiled=True, **NORMUON[1])]
    torch._dynamo.utils.counters.clear()
    for step in range(5):
        for params, optimizer in zip((plain, compiled), optimizers, strict=True):
            give_gradients(params, seed=step + 1)
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.param_groups[0] |= {"lr": 0.1 / (step + 1), "momentum": 0.8 + step / 100, "weight_decay": 0.4 - step / 10}
            optimizer.step()
    torch.testing.assert_close(plain[0], compiled[0], atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("options", [{}, NORMUON[1]])
def test_what_is_remembered_of_one_shape_stays_in_one_tensor(options):
    params = matrices((8, 16), (16, 8), (8, 16), (8, 16))
    optimizer = make(params, **options)
    places = []
    for step in range(3):
        give_gradients(params, seed=step)
        optimizer.step()
        places.append([value.data_ptr() for p in params for value in optimizer.state[p].values()])
    assert places[0] == places[1] == places[2]
    stacks = {optimizer.state[p]["momentum"].untyped_storage().data_ptr() for p in params}
    assert len(stacks) == 2


@pytest.mark.parametrize("options", [{}, NORMUON[1]])
def test_a_state_that_was_put_back_goes_on_as_if_it_had_stayed(options):
    stayed, moved = (matrices((8, 16), (16, 8), (8, 16)) for _ in range(2))
    one, other = make(stayed, **options), make(moved, **options)
    for step in range(4):
        for params, optimizer in ((stayed, one), (moved, other)):
            give_gradients(params, seed=step)
            optimizer.step()
        if step == 1:  # as a checkpoint is loaded: tensors of their own
            kept = {p: {key: value.clone() for key, value in state.items()} for p, state in other.state.items()}
            other.state.clear()
            other.state.update(kept)
    assert equal(bits(stayed, one)[0], bits(moved, other)[0]) and equal(bits(stayed, one)[1], bits(moved, other)[1])


def test_matrices_without_a_gradient_for_a_while_keep_their_own_memory():
    together, apart = (matrices((8, 16), (8, 16), (8, 16)) for _ in range(2))
    one, others = make(together), [make([p]) for p in apart]
    for step, absent in enumerate([None, 0, 1, None, 0]):
        for params in (together, apart):
            give_gradients(params, seed=step)
            if absent is not None:
                params[absent].grad = None
        one.step()
        for number, optimizer in enumerate(others):
            if number != absent:
                optimizer.step()
    for p, q, optimizer in zip(together, apart, others, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
        torch.testing.assert_close(one.state[p]["momentum"], optimizer.state[q]["momentum"], atol=1e-6, rtol=0)
