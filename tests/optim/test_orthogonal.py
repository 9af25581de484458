import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ingot.optim.muon import iterate, iterate_gathered, nearest_to_one, orthogonalise, polar_express, polynomials

torch.set_num_threads(1)

SETS = ["newton-schulz", "polar-express"]
# Polar Express as published for five iterations, with its safety factor.
PUBLISHED = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 products says so


def after(steps, low, high=1.0):
    """The smallest and the largest of what singular values low .. high become, in exact arithmetic."""
    x = np.geomspace(low, high, 20_001)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    return x.min(), x.max()


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_values(values, columns, seed=0):
    """A matrix with these singular values, in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(values)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, rows, generator=generator, dtype=torch.float64))[0]
    return (u * values.double()) @ v.T


AWKWARD = {
    "falling": torch.logspace(0, -6, 48),
    "half of them zero": (torch.arange(48) < 24).float(),
    "rank one": (torch.arange(48) < 1).float(),
    "one large": torch.cat([torch.ones(1), torch.full((47,), 1e-4)]),
}


@pytest.mark.parametrize(
    ("steps", "low", "ends"), [(polynomials("newton-schulz", 5), 0.003, (0.68, 1.20)), (PUBLISHED, 0.001, (0.86, 1.14))]
)
def test_the_known_sets_are_as_good_as_known(steps, low, ends):
    assert after(steps, low) == pytest.approx(ends, abs=0.005)


def test_five_iterations_of_polar_express_are_as_good_as_the_published_ones():
    low, high = after(polar_express(5), 0.001)
    published = after(PUBLISHED, 0.001)
    assert published[0] <= low <= 1 <= high <= published[1]


@pytest.mark.parametrize("iterations", range(1, 9))
def test_every_number_of_iterations_has_a_set_that_lands_near_one(iterations):
    steps = polar_express(iterations)
    assert len(steps) == iterations
    low, high = after(steps, 0.001 * 4 ** max(0, 5 - iterations))
    off = {6: 2e-3, 7: 1e-6, 8: 1e-6}.get(iterations, 0.155)
    assert 1 - off < low < high < 1 + off


@pytest.mark.parametrize("iterations", [*range(1, 9), 20, 300])
def test_smaller_values_are_lifted_and_never_thrown_beyond(iterations):
    steps = polar_express(iterations)
    low, high = after(steps, 1e-9)
    assert low > 0
    assert high < 1.16
    slope = float(np.prod([a for a, _, _ in steps[:8]]))
    assert after(steps, 1e-9, 1e-9)[0] >= 0.99 * slope * 1e-9


@pytest.mark.parametrize("iterations", range(2, 9))
def test_rounding_above_the_interval_does_no_harm(iterations):
    assert after(polar_express(iterations), 1.0, 1.01)[1] < 1.16


@given(st.floats(1e-4, 0.9999), st.floats(0.5, 2.0))
@example(0.9900351715509753, 0.8818916851767669)
def test_the_best_polynomial_misses_one_by_what_it_says(part, high):
    low = part * high
    (a, b, c), error = nearest_to_one(low, high)
    x = np.linspace(low, high, 2001)
    assert np.abs(a * x + b * x**3 + c * x**5 - 1).max() == pytest.approx(error, rel=1e-3, abs=1e-9)


@given(st.floats(0.01, 0.9), st.tuples(*[st.floats(-0.01, 0.01)] * 3))
def test_no_neighbour_of_the_best_polynomial_is_better(low, change):
    best, error = nearest_to_one(low, 1.0)
    a, b, c = (v + d for v, d in zip(best, change, strict=True))
    x = np.linspace(low, 1.0, 2001)
    assert np.abs(a * x + b * x**3 + c * x**5 - 1).max() >= error - 1e-6


@pytest.mark.parametrize(("coefficients", "ends"), [("newton-schulz", (0.6, 1.3)), ("polar-express", (0.86, 1.14))])
def test_five_iterations_bring_the_singular_values_of_a_random_matrix_near_one(coefficients, ends):
    values = torch.linalg.svdvals(orthogonalise(random(1, 512, 1024), polynomials(coefficients, 5))[0])
    assert ends[0] < values.min()
    assert values.max() < ends[1]


@pytest.mark.parametrize("iterations", range(3, 9))
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 0.15), (torch.bfloat16, 0.25)])
def test_values_that_a_set_is_made_for_come_near_one_in_real_arithmetic(iterations, dtype, off):
    low = 0.001 * 4 ** max(0, 5 - iterations)
    x = with_values(torch.logspace(0, np.log10(4 * low), 32), 64)  # their norm is below four
    values = torch.linalg.svdvals(orthogonalise(x.float()[None], polar_express(iterations), dtype)[0])
    assert 1 - off < values.min()
    assert values.max() < 1 + off


@pytest.mark.parametrize("coefficients", SETS)
def test_directions_survive_orthogonalising(coefficients):
    x = random(40, 60)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.T @ orthogonalise(x[None], polynomials(coefficients, 5))[0] @ v.T
    torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 96, 32), (2, 40, 32)])
def test_a_transposed_matrix_gives_the_transposed_result(coefficients, dtype, shape):
    x, steps = random(*shape), polynomials(coefficients, 5)
    wide, tall = orthogonalise(x.mT.contiguous(), steps, dtype), orthogonalise(x, steps, dtype)
    torch.testing.assert_close(wide, tall.mT, atol=1e-5, rtol=0)


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("iterations", [1, 2, 4, 5, 6, 8, 12])
def test_the_gathered_iteration_equals_the_plain_one(coefficients, iterations):
    x = random(3, 48, 192)
    x = x / x.norm(dim=(1, 2), keepdim=True)
    steps = polynomials(coefficients, iterations)
    torch.testing.assert_close(iterate_gathered(x, steps), iterate(x, steps), atol=2e-5, rtol=0)


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("iterations", [3, 5, 6, 8, 10])
@pytest.mark.parametrize("case", AWKWARD)
def test_the_gathered_iteration_holds_where_singular_values_are_tiny(coefficients, iterations, case):
    x = with_values(AWKWARD[case], 192)
    x, steps = (x / x.norm())[None], polynomials(coefficients, iterations)
    exact = iterate(x, steps)
    off = (iterate_gathered(x.float(), steps).double() - exact).norm() / exact.norm()
    assert off < 0.03


def test_gathering_everything_at_once_is_what_diverges():
    x = with_values(AWKWARD["rank one"], 192)
    x, steps = (x / x.norm())[None], polynomials("newton-schulz", 10)
    exact = iterate(x, steps)
    off = (iterate_gathered(x.float(), steps, at_once=10).double() - exact).norm() / exact.norm()
    assert not off < 1


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_the_size_of_a_matrix_does_not_matter(coefficients, scale):
    x, steps = random(1, 32, 64), polynomials(coefficients, 5)
    torch.testing.assert_close(orthogonalise(scale * x, steps), orthogonalise(x, steps), atol=1e-3, rtol=0)


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 7), (2, 7, 1)])
def test_a_vector_comes_out_with_a_length_near_one(coefficients, shape):
    x = orthogonalise(random(*shape), polynomials(coefficients, 5))
    assert ((x.norm(dim=(1, 2)) - 1).abs() < 0.35).all()


def test_no_iterations_only_normalise():
    x = random(2, 16, 64)
    torch.testing.assert_close(orthogonalise(x, ()), x / x.norm(dim=(1, 2), keepdim=True))
