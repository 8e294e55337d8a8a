"""The laws of `LagTable`, for any table and any lags."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lagwise import LagTable
from lagwise.lags import reachable_lags, visible_lags

settings.register_profile("lagwise", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("lagwise")


@st.composite
def tables(draw, channels=None, sloped=None):
    heads, lags = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 6))
    channels = draw(st.sampled_from([(), (1,), (4,)])) if channels is None else channels
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    values = torch.randn(heads, lags, *channels, generator=generator, dtype=torch.float64)
    sloped = draw(st.booleans()) if sloped is None else sloped
    slopes = (
        tuple(torch.randn(heads, generator=generator, dtype=torch.float64) for _ in range(2)) if sloped and not channels else None
    )
    return LagTable(values, draw(st.integers(-7, 7)), slopes)


LAGS = torch.arange(-20, 21)


def loop(table: LagTable, lag: int) -> torch.Tensor:
    """The definition, one lag at a time: [heads, *channels]."""
    inside = min(max(lag, table.first), table.last)
    value = table.values[:, inside - table.first]
    if table.slopes is not None and lag < table.first:
        value = value + table.slopes[0] * (lag - table.first)
    if table.slopes is not None and lag > table.last:
        value = value + table.slopes[1] * (lag - table.last)
    return value


@given(tables())
def test_at_is_the_definition(table):
    expected = torch.stack([loop(table, int(lag)) for lag in LAGS], dim=1)
    torch.testing.assert_close(table.at(LAGS), expected)


@given(tables(), st.integers(-15, 15), st.integers(0, 20))
def test_window_is_at(table, first, width):
    torch.testing.assert_close(table.window(first, first + width), table.at(torch.arange(first, first + width + 1)))


@given(tables(sloped=False))
def test_tails_are_constant(table):
    assert torch.equal(table.at(torch.tensor([table.first - 1000])), table.values[:, :1])
    assert torch.equal(table.at(torch.tensor([table.last + 1000])), table.values[:, -1:])


@given(tables(), st.integers(-12, 12), st.integers(0, 9))
def test_spanning_changes_nothing(table, first, width):
    wide = table.spanning(first, first + width)
    assert wide.first <= min(first, table.first) and wide.last >= max(first + width, table.last)
    torch.testing.assert_close(wide.at(LAGS), table.at(LAGS))


@given(tables(channels=()), tables(channels=()))
def test_a_sum_is_the_sum_of_the_functions(a, b):
    assume(a.heads == b.heads or 1 in (a.heads, b.heads))
    torch.testing.assert_close((a + b).at(LAGS), a.at(LAGS) + b.at(LAGS))


@given(tables(sloped=False, channels=(4,)), tables(sloped=False, channels=(1,)))
def test_a_product_is_the_product_of_the_functions(a, b):
    assume(a.heads == b.heads or 1 in (a.heads, b.heads))
    torch.testing.assert_close((a * b).at(LAGS), a.at(LAGS) * b.at(LAGS))


@given(tables(), st.integers(-15, 15), st.integers(0, 20))
def test_fold_is_the_transpose_of_window(table, first, width):
    values = table.values.requires_grad_()
    slopes = table.slopes and tuple(slope.requires_grad_() for slope in table.slopes)
    window = LagTable(values, table.first, slopes).window(first, first + width)
    incoming = torch.randn_like(window)
    wanted = [values, *(slopes or ())]
    found = torch.autograd.grad(window, wanted, incoming, allow_unused=True)
    expected = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    into = table.zeros(torch.float64)
    with torch.no_grad():
        table.fold(incoming.expand(table.heads, *incoming.shape[1:]), first, into)
    for actual, wished in zip([into.values, *(into.slopes or ())], expected, strict=True):
        torch.testing.assert_close(actual, wished)


@given(tables())
def test_constant_tables_are_known(table):
    assert table.constant == (table.values.shape[1] == 1 and table.slopes is None)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(-12, 12),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_visible_lags_are_those_of_all_pairs(queries, keys, start, causal, window):
    seen = {
        j - (start + i)
        for i in range(queries)
        for j in range(keys)
        if (not causal or j <= start + i) and (window is None or -window[0] <= j - (start + i) <= window[1])
    }
    first, last = visible_lags(queries, keys, query_start=start, causal=causal, window=window)
    assert (set(range(first, last + 1)) == seen) if seen else first > last
    low, high = reachable_lags(queries, keys, query_start=start, causal=causal, window=window)
    assert low <= high and seen <= set(range(low, high + 1))


def test_the_range_of_a_query_start_per_row_covers_all_that_is_allowed():
    first, last = reachable_lags(3, 10, query_start=torch.tensor([0, 10]))
    assert first <= 0 - 12 and last >= 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slopes_of_half_precision_are_exact_at_far_lags(dtype):
    slope = torch.tensor([0.0625], dtype=dtype)
    table = LagTable(torch.zeros(1, 3, dtype=dtype), -1, (slope, -slope))
    lags = torch.tensor([-10001, 0, 10001])
    expected = torch.tensor([[-625.0, 0.0, -625.0]])
    assert torch.equal(table.at(lags), expected)
    assert torch.equal(table.window(-10001, 10001)[:, lags + 10001], expected)
    assert torch.equal(table.spanning(-10001, 10001).at(lags), expected)
