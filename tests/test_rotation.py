"""The rotation of channel pairs: its definition, its derivatives, its layout, and its kernel under Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch

import lagwise
from lagwise.call import Call
from lagwise.ops.lowering import token_positions
from lagwise.ops.rotation import turn

SHAPES = [((2, 3, 33, 8), False), ((1, 2, 5, 6), True), ((2, 1, 64, 64), False), ((3, 2, 1, 2), True)]


def case(shape, per_row, dtype=torch.float32, device="cpu"):
    """Returns a tensor and factors, the same for the batch or one for each of its rows."""
    batch, _, time, width = shape
    torch.manual_seed(0)
    x = torch.randn(shape).to(device, dtype)
    angles = torch.randn(*([batch, 1] if per_row else []), time, width // 2, dtype=torch.promote_types(dtype, torch.float32))
    return x, angles.cos().to(device), angles.sin().to(device)


def by_hand(x, cos, sin, interleaved):
    """Turns pair by pair."""
    out, half = torch.empty_like(x, dtype=torch.float64), x.shape[3] // 2
    for c in range(half):
        first, second = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
        a, b, along, across = (each.double() for each in (x[..., first], x[..., second], cos[..., c], sin[..., c]))
        out[..., first], out[..., second] = a * along - b * across, a * across + b * along
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("shape", "per_row"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_turns_pairs_and_rounds_once(shape, per_row, interleaved, dtype):
    x, cos, sin = case(shape, per_row, dtype)
    expected = by_hand(x, cos, sin, interleaved)
    found, _ = turn(x, x, (cos, sin), interleaved=interleaved)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6 if dtype != torch.float64 else 1e-15
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_its_derivatives_are_the_rotation_back(interleaved):
    x, cos, sin = case((2, 2, 5, 6), True, torch.float64)
    x.requires_grad_()

    k = torch.randn(2, 1, 3, 6, dtype=x.dtype, requires_grad=True)
    angles = torch.randn(3, 3, dtype=x.dtype)

    def apart(x, k):
        return turn(x, k, (cos, sin), (angles.cos(), angles.sin()), interleaved=interleaved)

    def alike(x):
        return turn(x, 2.0 * x, (cos, sin), interleaved=interleaved)

    for function, given in ((apart, (x, k)), (alike, (x,))):
        assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)
    turned = turn(x, x, (cos, sin), interleaved=interleaved)
    torch.testing.assert_close(turn(*turned, (cos, -sin), interleaved=interleaved)[1], x)
    torch.testing.assert_close(turn(*turned, (cos, sin), interleaved=interleaved, back=True)[1], x)


def test_one_of_the_results_may_be_left_unused():
    x, cos, sin = case((2, 2, 5, 6), False, torch.float64)
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    dq, dk = torch.autograd.grad(turn(q, k, (cos, sin), interleaved=True)[1].sum(), (q, k))
    assert not dq.any() and dk.any()


def test_it_is_an_operator_that_compilers_can_take():
    x, cos, sin = case((2, 2, 5, 6), False)
    q, k = x.clone().requires_grad_(), x[:, :1, :3].clone().requires_grad_()
    torch.library.opcheck(torch.ops.lagwise.turn.default, (q, x, cos, sin, None, None, True, False))
    torch.library.opcheck(torch.ops.lagwise.turn.default, (q, k, cos, sin, cos[:3], sin[:3], False, True))


def test_the_result_lies_in_memory_as_the_tensor_does():
    x, cos, sin = case((2, 33, 3, 8), False)
    x, cos, sin = x.transpose(1, 2), cos[:1].expand(33, -1), sin[:1].expand(33, -1)
    k = x[:, :1].contiguous()
    turned = turn(x, k, (cos, sin), interleaved=True)
    assert turned[0].stride() == x.stride() and turned[1].stride() == k.stride()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/test_gpu.py runs the kernel on it")
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("shape", "per_row"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_the_kernel_turns_as_torch_does(shape, per_row, interleaved, back):
    from lagwise.ops.kernels import channel_pairs

    x, cos, sin = case(shape, per_row)
    # Heads side by side in memory, as projections leave them; one with channels apart is copied.
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT):
        found = channel_pairs.turn(given, cos, sin, interleaved, back)
        expected, _ = turn(x, x, (cos, sin), interleaved=interleaved, back=back)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_queries_and_keys_of_one_sequence_share_their_angles():
    q = k = torch.randn(1, 2, 9, 8)
    rows, keys = token_positions(q, k, Call())
    assert rows is keys
    rows, keys = token_positions(q[:, :, :4], k, Call(query_start=5))
    assert rows.tolist() == [5, 6, 7, 8] and keys.tolist() == list(range(9))
    q, k = torch.randn(2, 1, 2, 9, 8, dtype=torch.float64)
    turned = lagwise.Rotary(head_dim=8).terms(-8, 8, scale=1.0).transform
    shared, apart = turned(q, k, keys, keys), turned(q, k, keys, keys.clone())
    assert all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))
