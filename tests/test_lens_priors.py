"""Priors over lags: closed forms and hand-worked numbers."""

import math

import pytest
import torch
from oracle import make_encoding
from test_lens_parts import HEADS, TIME, filled, flat

import lagwise
from lagwise import AT5, T5, ALiBi, LagTable, Terms, lens


def test_the_prior_of_alibi_is_a_geometric_curve():
    found = lens.prior(ALiBi(heads=8), 50, causal=True)
    ratio = math.exp(-0.5)
    wanted = torch.tensor([(1 - ratio) * ratio**-n / (1 - ratio**50) for n in range(-49, 1)])
    torch.testing.assert_close(found.probability[0], wanted)
    assert found.lags.tolist() == list(range(-49, 1))
    assert found.ranking.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_the_prior_is_one_softmax_over_all_lags():
    bias = torch.tensor([[0.0, math.log(2.0), math.log(5.0)], [math.log(6.0), 0.0, 0.0]])
    found = lens.prior(Terms(bias=LagTable(bias, -1)), 2)
    torch.testing.assert_close(found.probability, torch.tensor([[1.0, 2.0, 5.0], [6.0, 1.0, 1.0]]) / 8)
    torch.testing.assert_close(found.peak, torch.tensor([0.625, 0.75]))
    assert found.peak_lag.tolist() == [1, -1]
    assert found.ranking.tolist() == [0, 1]


def test_a_constant_added_to_the_bias_changes_no_prior():
    encoding = filled(T5(heads=HEADS))
    terms = encoding.terms(-TIME, TIME, scale=1.0)
    one, other = lens.prior(terms, TIME), lens.prior(terms + flat(), TIME)
    torch.testing.assert_close(one.probability, other.probability)


def test_the_prior_asks_for_what_it_needs():
    with pytest.raises(ValueError, match="Rotary has none: take expected_logits"):
        lens.prior(lagwise.Rotary(head_dim=8), 5)
    with pytest.raises(ValueError, match="length must be at least 1, but is 0"):
        lens.prior(ALiBi(heads=2), 0)
    with pytest.raises(ValueError, match="scale must be given for XL"):
        lens.prior(make_encoding("xl"), 5)
    with pytest.raises(ValueError, match="AT5 is in training"):
        lens.prior(AT5(heads=2, dropout=0.5).train(), 5)
    halved, whole = (lens.prior(make_encoding("xl").eval(), 5, scale=scale) for scale in (0.5, 1.0))
    assert halved.bias.shape == whole.bias.shape
