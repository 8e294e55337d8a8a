"""The laws of `Terms`: neutral, associative, additive; shift invariance; posterior = prior x likelihood."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_encoding, make_terms

import lagwise
from lagwise import LagTable, Terms

settings.register_profile("lagwise", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("lagwise")

SETS = st.sets(st.sampled_from(["bias", "gain", "query", "key", "value", "transform"])).map(sorted)


def random_terms(names, seed, max_lag):
    torch.manual_seed(seed)
    return make_terms(*names, heads=2, max_lag=max_lag).to(torch.float64)


def attend(terms, seed=0, **options):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    return lagwise.attention(q, k, v, terms, return_lse=True, impl="dense", **options)


def assert_same(a, b):
    for x, y in zip(attend(a), attend(b), strict=True):
        torch.testing.assert_close(x, y)


@given(SETS, st.integers(0, 99), st.integers(0, 4))
def test_no_terms_are_neutral(names, seed, max_lag):
    terms = random_terms(names, seed, max_lag)
    assert_same(terms + Terms(), terms)
    assert_same(Terms() + terms, terms)


@given(SETS, SETS, SETS, st.integers(0, 99))
def test_sums_are_associative(a, b, c, seed):
    a, b, c = (random_terms(names, seed + n, n) for n, names in enumerate((a, b, c)))
    assert_same((a + b) + c, a + (b + c))


@given(SETS, SETS, st.integers(0, 99))
def test_sums_of_encodings_are_sums_of_terms(a, b, seed):
    class Fixed(lagwise.Encoding):
        def __init__(self, fixed):
            super().__init__()
            self.fixed = fixed

        def terms(self, first, last, *, scale, seed=None):
            return self.fixed

    a, b = random_terms(a, seed, 1), random_terms(b, seed + 1, 3)
    assert_same(a + b, (Fixed(a) + Fixed(b)).terms(-8, 8, scale=1.0))


def test_a_bias_adds_to_the_logits_and_a_gain_multiplies():
    bias, gain = LagTable(torch.full((1, 1), 2.0), 0), LagTable(torch.full((1, 1, 1), 3.0), 0)
    both = Terms(bias=bias, gain=gain) + Terms(bias=bias, gain=gain)
    assert both.bias.values.item() == 4.0 and both.gain.values.item() == 9.0


def test_vectors_read_the_raw_q_and_k_beside_a_transform():
    """Otherwise Shaw and method 4 would not be relative under a rotation: moving all positions must change nothing."""
    terms = random_terms(["query", "key", "transform"], 0, 3)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))

    def moved(q, k, q_positions, k_positions):
        return terms.transform(q, k, q_positions + 1000, k_positions + 1000)

    here = lagwise.attention(q, k, v, terms, impl="dense")
    there = lagwise.attention(q, k, v, Terms(query=terms.query, key=terms.key, transform=moved), impl="dense")
    torch.testing.assert_close(here, there)


def test_transforms_chain_in_order():
    double = Terms(transform=lambda q, k, i, j: (2.0 * q, k))
    add = Terms(transform=lambda q, k, i, j: (q + 1.0, k))
    one = torch.ones(1, 1, 1, 1)
    assert (double + add).transform(one, one, one, one)[0].item() == 3.0
    assert (add + double).transform(one, one, one, one)[0].item() == 4.0


@given(st.integers(0, 99), st.integers(0, 30))
def test_attention_depends_on_lags_alone(seed, shift):
    """Padding both sequences on the left moves all positions and changes nothing."""
    torch.manual_seed(seed)
    terms = random_terms(["bias", "gain", "query", "key", "value", "transform"], seed, 3)
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    plain = lagwise.attention(q, k, v, terms, impl="blockwise")
    padded_k, padded_v = (torch.cat([torch.randn(1, 2, shift, 8, dtype=torch.float64), x], dim=2) for x in (k, v))
    mask = torch.arange(6 + shift)[None] >= shift
    moved = lagwise.attention(q, padded_k, padded_v, terms, query_start=shift, key_mask=mask, impl="blockwise")
    torch.testing.assert_close(plain, moved)


@pytest.mark.parametrize("shift", [1, 17])
def test_every_encoding_depends_on_lags_alone(relative_name, shift):
    encoding = make_encoding(relative_name).double()
    if relative_name in ("sine-spe", "conv-spe"):
        # A draw of the codes is not invariant, their expectation is.
        encoding = encoding.exact_terms(-40, 40, scale=8**-0.5)
    q, k, v = (torch.randn(1, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    plain = lagwise.attention(q, k, v, encoding, causal=True)
    padded_k, padded_v = (torch.cat([torch.randn(1, 4, shift, 8, dtype=torch.float64), x], dim=2) for x in (k, v))
    mask = torch.arange(6 + shift)[None] >= shift
    moved = lagwise.attention(q, padded_k, padded_v, encoding, causal=True, query_start=shift, key_mask=mask)
    torch.testing.assert_close(plain, moved)


@given(st.integers(0, 999), st.integers(0, 6), st.booleans())
def test_attention_is_the_posterior_of_prior_and_likelihood(seed, max_lag, causal):
    """The first paper's reading: softmax of the bias is a prior over positions, exp of the content product a likelihood."""
    bias = random_terms(["bias"], seed, max_lag)
    torch.manual_seed(seed)
    q, k = (torch.randn(1, 2, 7, 8, dtype=torch.float64) for _ in range(2))
    # The values are unit vectors, so that the output is the attention itself.
    v = torch.eye(7, dtype=torch.float64).expand(1, 2, 7, 7)
    posterior = lagwise.attention(q, k, v, bias, causal=causal)
    prior = lagwise.attention(torch.zeros_like(q), k, v, bias, causal=causal)
    likelihood = torch.exp(q @ k.mT * 8**-0.5)
    joint = prior * likelihood
    torch.testing.assert_close(posterior, joint / joint.sum(-1, keepdim=True))


@given(st.integers(0, 999), st.floats(-5, 5))
def test_a_constant_in_the_bias_changes_nothing_but_the_log_sum_exp(seed, constant):
    bias = random_terms(["bias"], seed, 3)
    moved = bias + Terms(bias=LagTable(torch.full((1, 1), constant, dtype=torch.float64), 0))
    (out, lse), (other, higher) = attend(bias), attend(moved)
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(lse + constant, higher)
