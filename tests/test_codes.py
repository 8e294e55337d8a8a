"""Stochastic features: their definition, their gradients, chunks and grids, and the kernels under Triton's interpreter."""

import itertools
from copy import deepcopy

import pytest
import torch
from oracle import ROUNDINGS, compare

import lagwise
from lagwise import noise
from lagwise.lab.memory import peak_memory
from lagwise.noise import Stream
from lagwise.ops.spe.operators import features as features_of
from lagwise.ops.support import HAS_TRITON

SEED = torch.tensor(7)
SINE, CONV = ("sine-spe", {"sines": 3}), ("conv-spe", {"kernel_size": 5})
IMAGE, VOLUME = ("conv-spe", {"kernel_size": (2, 3), "grid": (4,)}), ("conv-spe", {"kernel_size": (2, 1, 3), "grid": (3, 4)})
KINDS = {"sine": SINE, "conv": CONV, "image": IMAGE, "volume": VOLUME}
kinds = pytest.mark.parametrize(("name", "options"), KINDS.values(), ids=KINDS)
gates = pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])


def made(name: str, *, heads: int = 2, head_dim: int = 3, realizations: int = 6, **options) -> lagwise.Encoding:
    """Makes an encoding whose parameters are all away from their first values."""
    encoding = lagwise.make(name, heads=heads, head_dim=head_dim, realizations=realizations, **options)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return encoding


def features(encoding, q, k, q_positions, k_positions, *, seed=SEED, impl="auto"):
    """Makes features at positions, or at consecutive ones from a number on."""
    if isinstance(q_positions, int):
        assert q_positions == k_positions
        return features_of(encoding.recipe(seed.to(q.device)), q, k, None, None, start=q_positions, impl=impl)
    return features_of(encoding.recipe(seed.to(q.device)), q, k, q_positions, k_positions, impl=impl)


def cell_of(position: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the coordinates of a cell of a grid that is read row by row."""
    cell = []
    for extent in reversed(grid):
        cell.insert(0, position % extent)
        position //= extent
    return (position, *cell)


@pytest.mark.parametrize(("name", "options"), [IMAGE, VOLUME], ids=["image", "volume"])
def test_on_a_grid_filters_meet_the_noise_of_the_cells(name, options):
    # Liutkus et al. (2021), section 2.2, with one axis of taps for each axis of the grid.
    encoding, x = made(name, gated=False, **options).double(), torch.eye(3, dtype=torch.float64).expand(1, 2, 3, 3)
    positions = torch.tensor([5, 6, 14])
    result = [y.detach() for y in features(encoding, x, x, positions, positions)]
    for side, head, d, r in itertools.product(range(2), range(2), range(3), range(6)):
        total, taps = 0.0, encoding.taps[side, head, d].detach()
        for tap in itertools.product(*(range(size) for size in taps.shape)):
            cell = [a + b for a, b in zip(cell_of(int(positions[d]), encoding.grid), tap, strict=True)]
            white = noise.binomial(SEED, Stream.CODE, head, d, *cell, size=r + 1, dtype=torch.float64)[r]
            total += float(taps[tap] * white)
        # Token d of x is channel d alone.
        assert float(result[side][0, head, d, r]) == pytest.approx(total / 6**0.5, rel=1e-12, abs=1e-12)


@gates
@kinds
def test_gradients_are_those_of_the_features(name, options, gated):
    encoding = made(name, gated=gated, **options).double()
    q, k = (torch.randn(2, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    positions = torch.arange(9)

    def call(q, k, *parameters):
        return features(encoding, q, k, positions, positions)

    assert torch.autograd.gradcheck(call, (q, k, *encoding.parameters()))


@gates
@kinds
def test_tokens_see_the_same_noise_alone_and_together(name, options, gated):
    encoding, x = made(name, gated=gated, **options), torch.randn(1, 2, 150, 3)
    positions = torch.arange(150) + 1000
    q, k = features(encoding, x, x, positions, positions)
    for start, end in ((0, 1), (37, 120), (149, 150)):
        part = x[:, :, start:end]
        some = features(encoding, part, part, positions[start:end], positions[start:end])
        torch.testing.assert_close(some[0], q[:, :, start:end], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(some[1], k[:, :, start:end], rtol=1e-5, atol=1e-6)
    # Positions that restart, as those of packed sequences, and positions of each row.
    packed = torch.cat([positions[:100], positions[:50]])
    restarted, _ = features(encoding, torch.cat([x[:, :, :100], x[:, :, :50]], dim=2), x, packed, positions)
    torch.testing.assert_close(restarted[:, :, 100:], q[:, :, :50], rtol=1e-5, atol=1e-6)
    rows, _ = features(
        encoding, torch.cat([x[:, :, :9], x[:, :, 60:69]]), x.expand(2, -1, -1, -1),
        torch.stack([positions[:9], positions[60:69]]), positions,
    )  # fmt: skip
    torch.testing.assert_close(rows[1], q[0, :, 60:69], rtol=1e-5, atol=1e-6)


@kinds
def test_the_noise_of_a_token_is_the_same_bit_for_bit_in_every_block(name, options):
    recipe = made(name, **options).recipe(SEED)
    whole = next(iter(recipe.blocks(torch.arange(3, 12))))
    alone = next(iter(recipe.blocks(torch.tensor([3]))))
    draws, first = (recipe.draws(block, 1, torch.float32) for block in (whole, alone))
    assert torch.equal(draws[..., : first.shape[-2], :], first)


@pytest.mark.parametrize(("name", "options"), [SINE, CONV], ids=["sine", "conv"])
def test_gates_of_other_numbers_have_other_noise_beside_the_same_codes(name, options):
    encoding, x, positions = made(name, **options), torch.randn(1, 2, 5, 3), torch.arange(5)
    other = deepcopy(encoding)
    other.gate_number = 1
    assert not torch.allclose(*(features(e, x, x, positions, positions)[0] for e in (encoding, other)))
    with torch.no_grad():
        encoding.gate.fill_(-200.0)
        other.gate.fill_(-200.0)
    assert torch.equal(*(features(e, x, x, positions, positions)[0] for e in (encoding, other)))


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [IMAGE, SINE, CONV], ids=["image", "sine", "conv"])
def test_products_average_to_the_kernel_wherever_the_pair_stands(name, options):
    """Translation invariance in distribution: two pairs of the same lag have the same mean, that of the kernel."""
    encoding = made(name, heads=1, head_dim=1, realizations=4096, gated=False, **options)
    x = torch.ones(1, 1, 1, 1)
    for first in (0, 26):
        # On the image the key is one row below and one column to the left.
        means = []
        for seed in range(8):
            q, _ = features(encoding, x, x, torch.tensor([first + 1]), torch.tensor([0]), seed=torch.tensor(seed))
            _, k = features(encoding, x, x, torch.tensor([0]), torch.tensor([first + 4]), seed=torch.tensor(seed))
            means.append(4096 * (q * k).flatten())
        products = torch.cat(means)
        if name == "conv-spe" and encoding.grid:
            exact = encoding.grid_kernel()[0, encoding.taps.shape[3] - 1, encoding.taps.shape[4] + 1, 0]
        else:
            exact = encoding.exact_terms(-9, 9, scale=1.0).gain.at(torch.tensor(3))[0].squeeze()
        error = products.std() / len(products) ** 0.5
        assert abs(float(products.mean() - exact)) < 5 * float(error)


def test_no_code_is_written_to_memory():
    """All codes of this call would take 134 MB for each side."""
    q, k = (torch.randn(1, 2, 2048, 64, requires_grad=True) for _ in range(2))
    for name, options in (("sine-spe", {}), ("conv-spe", {"kernel_size": 32})):
        encoding = lagwise.make(name, heads=2, head_dim=64, **options)

        def step(time, encoding=encoding):
            out = features(encoding, q[:, :, :time], k[:, :, :time], torch.arange(time), torch.arange(time))
            torch.autograd.grad(sum(x.sum() for x in out), [q, k, *encoding.parameters()])

        half, whole = (peak_memory(lambda time=time: step(time), torch.device("cpu")) for time in (1024, 2048))
        assert whole < 2.2 * half and whole < 80e6, name


def test_features_are_an_operator():
    for name, options in (SINE, CONV):
        recipe, x = made(name, **options).recipe(SEED), torch.randn(1, 2, 5, 3, requires_grad=True)
        parameters = [*(p.detach().requires_grad_() for p in recipe.parameters), None, None, None][:4]
        positions = torch.arange(5)
        torch.library.opcheck(
            torch.ops.lagwise.features.default,
            (x, x, *parameters, positions, positions, SEED, recipe.kind, 6, 0, 0, [], "torch"),
        )


def test_second_derivatives_are_refused():
    encoding, x = made(*SINE[:1], **SINE[1]), torch.randn(1, 2, 5, 3, requires_grad=True)
    q, _ = features(encoding, x, x, torch.arange(5), torch.arange(5))
    (gradient,) = torch.autograd.grad(q.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="stochastic features have no second derivative: use exact_terms"):
        gradient.sum().backward()


@pytest.mark.parametrize("sizes", [(5,), (5, 5, 5)])
def test_taps_have_one_size_per_axis(sizes):
    with pytest.raises(ValueError, match=r"kernel_size must have one number per axis, 2 with grid=\(4,\)"):
        lagwise.make("conv-spe", heads=1, head_dim=1, kernel_size=sizes, grid=(4,))


def test_a_grid_is_a_tuple_of_extents():
    with pytest.raises(
        ValueError, match=r"grid must be the extents of all axes but the first, \(columns,\) for an image, but is 4"
    ):
        lagwise.make("conv-spe", heads=1, head_dim=1, grid=4)
    with pytest.raises(ValueError, match="grid must be a whole number of at least 1, but is 0"):
        lagwise.make("conv-spe", heads=1, head_dim=1, grid=(0,))


def test_a_kernel_on_a_grid_is_no_function_of_one_lag():
    with pytest.raises(ValueError, match="see grid_kernel"):
        made(*IMAGE[:1], **IMAGE[1]).exact_terms(-3, 3, scale=1.0)


def assert_kernels_within_budget(encoding, q, k, q_positions, k_positions, weight=1.0) -> None:
    """Compares features and all gradients of the kernels with float64: twice the error of PyTorch in the dtype, plus rounding.

    The gradients that come in are random, times a weight.
    """
    douts = [(weight * torch.randn(*x.shape[:3], encoding.realizations, device=q.device)).to(q.dtype) for x in (q, k)]

    def call(impl: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        own = deepcopy(encoding).to(torch.promote_types(dtype, torch.float32))
        tensors = [x.detach().to(dtype).requires_grad_() for x in (q, k)]
        out = features(own, *tensors, q_positions, k_positions, impl=impl)
        found = torch.autograd.grad(out, [*tensors, *own.parameters()], [x.to(dtype) for x in douts])
        return dict(
            zip(["y q", "y k", "q", "k", *dict(own.named_parameters())], [*(y.detach() for y in out), *found], strict=True)
        )

    exact, low, actual = call("torch", torch.float64), call("torch", q.dtype), call("triton", q.dtype)
    for name, x in exact.items():
        assert actual[name].dtype == low[name].dtype and x.any()
        unit = ROUNDINGS * float(torch.finfo(actual[name].dtype).eps) * float(x.abs().max())
        compare(name, actual[name], x, low[name], unit, None)


# Each line of a grid is a run of its own, for which the interpreter takes its time.
FEW = {"heads": 1, "head_dim": 2}

CALLS = {
    "sine": (("sine-spe", {"sines": 3}), {"batch": 3, "time": 37}),
    "ungated, many sines": (("sine-spe", {"sines": 10, "gated": False}), {"realizations": 20}),
    "one sine, half precision": (("sine-spe", {"sines": 1}), {"dtype": torch.float16}),
    "sine, a million on": (("sine-spe", {"sines": 4}), {"start": 1_000_000}),
    "sine, before the start": (("sine-spe", {"sines": 4}), {"start": -9}),
    "sine, rows of their own": (("sine-spe", {"sines": 4}), {"batch": 2, "starts": [3, 77]}),
    "sine, consecutive": (("sine-spe", {"sines": 3}), {"batch": 5, "time": 37, "start": 1_000_000, "consecutive": True}),
    "sine, one token": (("sine-spe", {"sines": 3, "gated": False}), {"batch": 9, "time": 1, "start": 5, "consecutive": True}),
    "conv": (("conv-spe", {"kernel_size": 5}), {"batch": 3, "time": 37}),
    "ungated conv, wide": (("conv-spe", {"kernel_size": 70, "gated": False}), {"time": 9, "realizations": 20}),
    "one tap, half precision": (("conv-spe", {"kernel_size": 1}), {"dtype": torch.float16}),
    "conv, before the start": (("conv-spe", {"kernel_size": 3}), {"start": -9}),
    "conv, packed": (("conv-spe", {"kernel_size": 3}), {"packed": 8}),
    "conv, rows of their own": (("conv-spe", {"kernel_size": 4}), {"batch": 2, "starts": [3, 77]}),
    "conv, more rows than a block": (("conv-spe", {"kernel_size": 3}), {"batch": 9, "time": 5, "realizations": 70}),
    "conv, consecutive": (("conv-spe", {"kernel_size": 5}), {"batch": 3, "time": 70, "start": 100, "consecutive": True}),
    "conv, three blocks": (("conv-spe", {"kernel_size": 128, "gated": False}), {"time": 130, "consecutive": True}),
    "conv, one tap, pieces": (("conv-spe", {"kernel_size": 1}), {**FEW, "time": 300, "start": 9, "consecutive": True}),
    "conv, too many taps to keep": (("conv-spe", {"kernel_size": 220}), {**FEW, "time": 20, "consecutive": True}),
    "conv, rows in turns": (("conv-spe", {"kernel_size": 66}), {**FEW, "batch": 35, "time": 3, "consecutive": True}),
    "conv, four channels": (
        ("conv-spe", {"kernel_size": 3}),
        {"heads": 1, "head_dim": 4, "realizations": 20, "consecutive": True},
    ),
    "conv, channels in turns": (
        ("conv-spe", {"kernel_size": 3}),
        {"heads": 1, "head_dim": 20, "realizations": 200, "time": 5, "consecutive": True},
    ),
    "another gate": (("conv-spe", {"kernel_size": 3}), {"gate_number": 2}),
    "image": (("conv-spe", {"kernel_size": (2, 3), "grid": (5,)}), {**FEW, "batch": 2, "time": 13}),
    "image, one line": (("conv-spe", {"kernel_size": (2, 70), "grid": (100,), "gated": False}), {**FEW, "start": 40}),
    "image, before the start": (("conv-spe", {"kernel_size": (2, 3), "grid": (7,)}), {**FEW, "start": -9}),
    "image, rows of their own": (
        ("conv-spe", {"kernel_size": (2, 2), "grid": (4,)}),
        {**FEW, "batch": 2, "time": 9, "starts": [3, 77]},
    ),
    "volume": (("conv-spe", {"kernel_size": (2, 2, 2), "grid": (2, 3)}), {**FEW, "batch": 2, "time": 11}),
    "volume, before the start": (("conv-spe", {"kernel_size": (1, 2, 3), "grid": (2, 3)}), {**FEW, "start": -5, "time": 8}),
}


def kernel_call(
    kind, *, batch=1, time=21, realizations=8, dtype=torch.float32, start=0, starts=None, packed=0, gate_number=0,
    heads=2, head_dim=3, device="cpu", consecutive=False,
):  # fmt: skip
    """Makes an encoding, tensors with strides and positions for a call of the kernels."""
    name, options = kind
    encoding = made(name, heads=heads, head_dim=head_dim, realizations=realizations, **options).to(device)
    encoding.gate_number = gate_number
    q, k = (torch.randn(batch, time, heads, head_dim, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    if consecutive:
        return encoding, q, k, start, start
    positions = start + torch.arange(time, device=device)
    if starts is not None:
        positions = positions + torch.tensor(starts, device=device)[:, None]
    if packed:
        positions[packed:] -= packed
    return encoding, q, k, positions, start + torch.arange(time, device=device)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernels_are_within_the_budget(call):
    kind, options = call
    assert_kernels_within_budget(*kernel_call(kind, **options))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@kinds
def test_kernels_that_know_of_consecutive_positions_find_what_others_find(name, options):
    encoding, q, k, *_ = kernel_call((name, options), batch=2, time=9, **FEW)
    positions = 40 + torch.arange(9)
    known, found = (features(encoding, q, k, *given, impl="triton") for given in ((40, 40), (positions, positions)))
    for a, b in zip(known, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("size", [1e-12, 1e5])
@pytest.mark.parametrize("consecutive", [False, True])
def test_kernels_are_within_the_budget_for_filters_of_every_size(consecutive, size):
    encoding, *others = kernel_call(("conv-spe", {"kernel_size": 5, "gated": False}), time=9, consecutive=consecutive)
    with torch.no_grad():
        encoding.taps *= size
    assert_kernels_within_budget(encoding, *others)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("size", [1e-30, 1e-37, 1e-41])
@pytest.mark.parametrize(("name", "options"), [SINE, CONV], ids=["sine", "conv"])
def test_kernels_are_within_the_budget_where_a_token_has_next_to_no_gradient(name, options, size):
    # A key that hardly counts in the causal attention of random features has gradients of exp(-80) and less.
    weight = torch.tensor([1.0, size, 0.0, 1.0])[:, None]
    assert_kernels_within_budget(*kernel_call((name, options), time=4), weight=weight)
