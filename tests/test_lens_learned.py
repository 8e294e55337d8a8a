"""What encodings learned, against their formulas."""

import math

import pytest
import torch
from test_lens_parts import HEADS

import lagwise
from lagwise import AT5, T5, ALiBi, lens


def test_at5_ranges_and_edges():
    encoding = AT5(heads=3, max_lag=100, reach=60)
    with torch.no_grad():
        encoding.slope.copy_(torch.tensor([[1.0, 2.0, -1.0], [3.0, 4.0, 0.0]]))
    wanted = torch.tensor([[60.0, 30.0, math.inf], [20.0, 15.0, math.inf]])
    torch.testing.assert_close(lens.dependency_ranges(encoding), wanted)
    edges = lens.bucket_edges(encoding, levels=4)
    assert edges.shape == (2, 3, 3)
    # f(n) = 1 - exp(-n / range) is one half at range ln 2.
    assert edges[0, 1, 1].item() == pytest.approx(30 * math.log(2))
    with pytest.raises(ValueError, match="encoding must be AT5"):
        lens.dependency_ranges(ALiBi(heads=2))  # pyright: ignore[reportArgumentType]


def test_t5_edges_are_the_published_ones():
    both = lens.bucket_edges(T5(heads=4))
    assert both.shape == (2, 1, 15)
    assert both[0].tolist() == both[1].tolist()
    causal = lens.bucket_edges(T5(heads=4, causal=True))
    assert causal[0, 0, 14:].tolist() == [15, 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    with pytest.raises(ValueError, match="encoding must be T5 or AT5"):
        lens.bucket_edges(ALiBi(heads=2))


def test_spe_kernels_are_gains_with_the_gate():
    encoding = lagwise.ConvSPE(heads=HEADS, head_dim=3, kernel_size=2)
    assert encoding.gate is not None
    with torch.no_grad():
        encoding.gate.fill_(0.0)
        encoding.taps.copy_(torch.tensor([1.0, 3.0]).expand_as(encoding.taps))
    lags, values = lens.spe_kernels(encoding, 4)
    # The filter [1, 3] with itself: 10 at lag 0, 3 beside it; half of that and half of one.
    assert lags.tolist() == list(range(-3, 4))
    torch.testing.assert_close(values[0, :, 0], torch.tensor([0.5, 0.5, 2.0, 5.5, 2.0, 0.5, 0.5]))
    with pytest.raises(ValueError, match="encoding must be stochastic"):
        lens.spe_kernels(ALiBi(heads=2), 4)  # pyright: ignore[reportArgumentType]
