"""AT5's bias: its kernels under Triton's interpreter and its operator, against torch's own functions in float64."""

import pytest
import torch
from oracle import INTERPRETED

from lagwise.ops import soft_buckets
from lagwise.ops.soft_buckets import BIAS, Weights, by_torch

pytestmark = [INTERPRETED, pytest.mark.usefixtures("poisoned")]

LAGS = [(-40, 40), (-3, 70), (-70, 2), (-33, 0), (1, 9), (5, 5), (0, 0), (-9, -4), (0, 1)]


def case(directions=2, heads=3, a=5, b=3, device="cpu", dtype=torch.float32):
    """Returns a slope, one head's of which is negative, and weights."""
    torch.manual_seed(0)
    shapes = [(1, a), (1, a), (a, b), (1, b), (b, 1), (1, 1)]
    slope = 10.0 * torch.rand(directions, heads)
    slope[:, 0] = -1.0
    drawn = [slope, *(torch.randn(directions, heads, *shape) for shape in shapes)]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def expected(parameters, *arguments):
    """Returns the bias and its gradients, for the gradient 1, 2, ... that `found` takes too."""
    exact = [x.detach().double().requires_grad_() for x in parameters]
    out = by_torch(exact[0], Weights(*exact[1:]), *arguments)
    return [out, *torch.autograd.grad(out, exact, direction(out))]


def direction(out):
    """Returns the gradient of a bias with which to compare."""
    return torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape) / out.numel() - 0.4


def found(parameters, *arguments):
    out = BIAS(*parameters, *arguments)[0]
    return [out, *torch.autograd.grad(out, parameters, direction(out))]


def check(parameters, *arguments, budget=2e-6):
    """Compares within a part of the largest number of each tensor."""
    for exact, actual in zip(expected(parameters, *arguments), found(parameters, *arguments), strict=True):
        assert actual.shape == exact.shape and actual.is_contiguous()
        torch.testing.assert_close(actual.double(), exact, rtol=0.0, atol=budget * max(1.0, exact.abs().max().item()))


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("lags", LAGS, ids=str)
def test_kernels_compute_the_formula(lags, activation):
    check(case(), *lags, 20.0, activation)


@pytest.mark.parametrize("widths", [(1, 1), (32, 4), (33, 8)], ids=str)
def test_any_width_of_layers(widths):
    check(case(a=widths[0], b=widths[1], heads=1), -17, 20, 20.0, "relu")


def test_one_direction():
    check(case(directions=1), -40, 0, 20.0, "relu")


def test_shares_of_the_lags_add_up(monkeypatch):
    """Many heads leave one program for all lags of each, few heads have several."""
    from lagwise.ops.kernels import soft_buckets as kernels

    for programs in (1, 12, 1000):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        check(case(), -130, 70, 20.0, "sigmoid")


def test_small_distances_lose_no_digits():
    """Where 1 - exp(x) would lose half of them: the MLP here is 1000 times the bucket."""
    parameters = case(heads=1, a=1, b=1)
    for x, value in zip(parameters, (1e-4, 10.0, 0.0, 10.0, 0.0, 10.0, 0.0), strict=True):
        torch.nn.init.constant_(x, value)
    out = BIAS(*parameters, -3, 3, 512.0, "relu")[0]
    exact = expected(parameters, -3, 3, 512.0, "relu")[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=0.0)


def test_it_is_an_operator_that_compilers_can_take():
    torch.library.opcheck(torch.ops.lagwise.soft_buckets.default, (*case(), -9, 9, 20.0, "relu"))


def test_gradients_of_gradients_are_those_of_the_formula():
    parameters = case(heads=2)

    def penalty(function):
        (slope,) = torch.autograd.grad(function().square().sum(), parameters[:1], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), parameters[:4])

    actual = penalty(lambda: BIAS(*parameters, -9, 9, 20.0, "sigmoid")[0])
    wanted = penalty(lambda: by_torch(parameters[0], Weights(*parameters[1:]), -9, 9, 20.0, "sigmoid"))
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_a_cpu_has_no_kernel():
    slope, *weights = case()
    assert not soft_buckets.has_kernel(slope, Weights(*weights))
