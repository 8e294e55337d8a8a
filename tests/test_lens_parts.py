"""Attention taken apart: scores that sum to logits, probabilities, and means by lag."""

import math

import pytest
import torch
from oracle import make_encoding

import lagwise
from lagwise import T5, ALiBi, LagTable, Terms, lens

HEADS, HEAD_DIM, TIME = 2, 8, 12


def tensors(batch: int = 2, heads: int = HEADS, time: int = TIME, dim: int = HEAD_DIM):
    return tuple(torch.randn(batch, heads, time, dim) for _ in range(3))


def flat(heads: int = HEADS, value: float = 0.7) -> Terms:
    return Terms(bias=LagTable(torch.full((heads, 1), value), 0))


def filled(encoding: lagwise.Encoding) -> lagwise.Encoding:
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding.eval()


def test_the_posterior_is_the_normalised_product(relative_name):
    encoding = make_encoding(relative_name).eval()
    heads, width = 4, 8
    q, k, v = tensors(heads=heads, dim=width)
    key_mask = torch.rand(2, TIME) > 0.3
    key_mask[:, 0] = True
    parts = lens.attention_parts(q, k, encoding, causal=True, key_mask=key_mask)
    product = parts.prior * parts.likelihood
    normalised = product / product.sum(-1, keepdim=True)
    torch.testing.assert_close(parts.posterior, normalised)
    terms = encoding.terms(1 - TIME, 0, scale=width**-0.5, seed=torch.tensor(0))
    out = lagwise.attention(q, k, v, terms, causal=True, key_mask=key_mask, impl="dense")
    if terms.value is None:
        torch.testing.assert_close(parts.posterior @ v, out, atol=2e-5, rtol=1e-4)
    assert not parts.posterior[~parts.visible[:, None].expand_as(parts.posterior)].any()
    for probability in (parts.prior, parts.likelihood, parts.posterior):
        torch.testing.assert_close(probability.sum(-1), torch.ones(2, heads, TIME))


def test_a_query_that_sees_nothing_has_zeros():
    q, k, _ = tensors(batch=1)
    parts = lens.attention_parts(q, k, ALiBi(heads=HEADS), key_mask=torch.zeros(1, TIME, dtype=torch.bool))
    for probability in (parts.prior, parts.likelihood, parts.posterior, parts.divergence()):
        assert not probability.any()


def test_packed_sequences_grouped_heads_and_positions_are_those_of_attention():
    q, k, v = tensors(batch=1, heads=4)
    k, v = k[:, ::2], v[:, ::2]
    for options in (
        dict(cu_seqlens=torch.tensor([0, 5, TIME])),
        dict(window=(3, 1)),
        dict(query_start=4, causal=True),
        dict(query_start=torch.tensor([4])),
    ):
        encoding = lagwise.Rotary(head_dim=HEAD_DIM) + filled(T5(heads=4))
        parts = lens.attention_parts(q, k, encoding, **options)
        out = lagwise.attention(q, k, v, encoding, **options)
        torch.testing.assert_close(parts.posterior @ v.repeat_interleave(2, dim=1), out, atol=1e-5, rtol=1e-4)


def test_a_flat_bias_gives_a_flat_prior_and_no_divergence_without_content():
    q, k, _ = tensors()
    parts = lens.attention_parts(torch.zeros_like(q), k, flat())
    torch.testing.assert_close(parts.prior, torch.full_like(parts.prior, 1 / TIME))
    torch.testing.assert_close(parts.divergence(), torch.zeros(2, HEADS, TIME))
    torch.testing.assert_close(lens.entropy(parts.prior), torch.full((2, HEADS, TIME), math.log(TIME)))


def test_the_divergence_is_the_one_of_the_probabilities():
    q, k, _ = tensors()
    parts = lens.attention_parts(q, k, filled(T5(heads=HEADS)))
    torch.testing.assert_close(parts.divergence(), lens.kl(parts.posterior, parts.prior), atol=1e-5, rtol=1e-4)
    assert (parts.divergence() > 0).all()


def test_the_divergence_survives_a_prior_that_is_too_small_for_a_number():
    steep = Terms(bias=LagTable(torch.zeros(1, 1), 0, (torch.tensor([200.0]), torch.tensor([-200.0]))))
    q = torch.ones(1, 1, 2, 1)
    k = torch.tensor([200.0, 0.0]).view(1, 1, 2, 1)
    parts = lens.attention_parts(q, k, steep, scale=1.0, causal=True)
    # Query 1 sees key 0 with 200 - 200 and key 1 with 0: half each, where the prior had exp(-200) and one.
    assert parts.prior[0, 0, 1, 0] == 0.0
    assert parts.divergence()[0, 0, 1].item() == pytest.approx(0.5 * (200.0 + math.log(0.5)) + 0.5 * math.log(0.5))


def test_expected_logits_sum_to_the_mean_logit_by_lag():
    encoding = filled(lagwise.HuangM4(heads=HEADS, head_dim=HEAD_DIM, max_lag=4))
    calls = []
    for time in (5, 9):
        q, k, _ = tensors(time=time)
        calls.append(lens.attention_parts(q, k, encoding, causal=True))
    found = lens.expected_logits(calls)
    assert set(found) == {"content", "query", "key", "logit"}
    total = found["content"].mean + found["query"].mean + found["key"].mean
    torch.testing.assert_close(found["logit"].mean, total, atol=1e-5, rtol=1e-5)
    assert found["logit"].lags.tolist() == list(range(-8, 1))
    # Two rows of five and of nine tokens: lag -n has 2 (5 - n) and 2 (9 - n) pairs.
    assert found["logit"].count.tolist() == [2 * max(5 - n, 0) + 2 * (9 - n) for n in range(8, -1, -1)]
    by_hand = torch.cat([call.final_score[:, 1].diagonal(offset=-2, dim1=1, dim2=2).flatten() for call in calls]).mean()
    assert found["logit"].mean[1, -3].item() == pytest.approx(by_hand.item(), abs=1e-5)


def test_the_expected_logit_of_a_bias_is_the_bias():
    encoding = filled(T5(heads=HEADS))
    q, k, _ = tensors()
    found = lens.expected_logits([lens.attention_parts(q, k, encoding)])["bias"]
    torch.testing.assert_close(found.mean.float(), lens.prior(encoding, TIME).bias)


def test_averages_need_calls_that_belong_together():
    q, k, _ = tensors()
    with pytest.raises(ValueError, match="at least one call"):
        lens.average_attention([])
    with pytest.raises(ValueError, match="at least one call"):
        lens.expected_logits([])
    with pytest.raises(ValueError, match="must have the same parts"):
        lens.expected_logits([lens.attention_parts(q, k), lens.attention_parts(q, k, flat())])
    with pytest.raises(ValueError, match="of the same heads, but have 2 and 1"):
        lens.average_attention([lens.attention_parts(q, k), lens.attention_parts(q[:, :1], k[:, :1])])
    none = torch.zeros(2, TIME, dtype=torch.bool)
    with pytest.raises(ValueError, match="leaves none"):
        lens.average_attention([lens.attention_parts(q, k, key_mask=none)])
