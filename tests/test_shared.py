"""Values that lags share: the table that they make, and its derivatives by every one of torch's ways."""

import pytest
import torch

from lagwise.encodings.shared import Shared

# Value 3 belongs to no lag.
PLACE = torch.tensor([2, 0, 0, 1, 2, 4, 1, 2])


def case(dtype=torch.float64):
    torch.manual_seed(0)
    return Shared(PLACE, count=5, device="cpu"), torch.randn(3, 5).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_lag_has_its_value_and_each_value_the_gradients_of_its_lags(dtype):
    shared, weight = case(dtype)
    table = shared.table(weight)
    gradient = torch.randint(-8, 9, table.shape).to(dtype)
    (found,) = torch.autograd.grad(table, weight, gradient)
    for lag, place in enumerate(PLACE.tolist()):
        assert torch.equal(table[:, lag], weight[:, place])
    for place in range(5):
        assert torch.equal(found[:, place], gradient[:, place == PLACE].sum(1))


def test_an_infinite_value_stays_with_its_lags():
    shared, weight = case()
    table = shared.table(weight.detach().index_fill(1, torch.tensor(2), -torch.inf))
    assert torch.equal(table.isinf(), (PLACE == 2).expand(3, -1)) and not table.isnan().any()


def test_derivatives():
    shared, weight = case()
    assert torch.autograd.gradcheck(shared.table, weight) and torch.autograd.gradgradcheck(shared.table, weight)


# jacfwd warns about itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd])
def test_it_goes_through_the_transforms_of_torch(jacobian):
    shared, weight = case()
    weight = weight.detach()
    expected = torch.autograd.functional.jacobian(shared.table, weight)
    assert torch.equal(jacobian(shared.table)(weight), expected)
    assert torch.equal(torch.autograd.functional.jacobian(shared.table, weight, vectorize=True), expected)
    (gradient,) = torch.func.vjp(shared.table, weight)[1](torch.ones(3, 8, dtype=weight.dtype))
    assert torch.equal(gradient, expected.sum((0, 1)))
