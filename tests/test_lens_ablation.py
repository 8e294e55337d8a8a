"""Priors of heads switched on one by one."""

import pytest
import torch
from test_lens_capture import tiny_t5
from test_lens_parts import filled

import lagwise
from lagwise import lens


def bias_free(encoder: lagwise.nn.Encoder, x: torch.Tensor) -> torch.Tensor:
    plain = lagwise.nn.Encoder(16, layers=2, heads=2).eval()
    plain.load_state_dict({name: value for name, value in encoder.state_dict().items() if "encoding" not in name})
    return plain(x)


@pytest.mark.parametrize("name", ["t5", "at5", "alibi"])
def test_all_priors_are_the_model_and_none_is_the_model_without_bias(name):
    encoder = lagwise.nn.Encoder(16, layers=2, heads=2, encoding=name).eval()
    filled(encoder.encoding)
    # The sum of squares would say nothing: the last layer normalises it.
    x, mixture = torch.randn(2, 2, 9, 16)
    found = lens.ablate(encoder, lambda: float((encoder(x) * mixture).sum()))
    assert len(found.values) == 3
    assert [head.layers for head in found.order] == [("layers.0.attention", "layers.1.attention")] * 2
    assert [head.head for head in found.order] == lens.prior(encoder.encoding, 9).ranking.tolist()
    assert found.values[0] == pytest.approx((bias_free(encoder, x) * mixture).sum().item(), rel=1e-4)
    assert found.values[-1] == pytest.approx((encoder(x) * mixture).sum().item(), rel=1e-4)
    assert found.values[0] != pytest.approx(found.values[-1], rel=1e-3)


def test_layers_with_priors_of_their_own_are_ranked_together():
    encoder = lagwise.nn.Encoder(16, layers=2, heads=2, encoding="t5", per_layer=True).eval()
    for layer in encoder._layers:
        assert layer.attention.encoding is not None
        filled(layer.attention.encoding)
    x = torch.randn(1, 6, 16)
    heads = lens.prior_heads(encoder, lambda: encoder(x))
    assert len({(head.layers, head.head) for head in heads}) == 4
    assert [head.peak for head in heads] == sorted(head.peak for head in heads)
    with lens.only_priors(encoder, [heads[2]]), lens.capture(encoder) as calls:
        encoder(x)
    kept = {(call.layer, head) for call in calls for head in range(2) if call.prior().bias[head].any()}
    assert kept == {(heads[2].layers[0], heads[2].head)}
    assert lens.ablate(encoder, lambda: float(encoder(x).sum()), order=heads[:1]).order == heads[:1]


def test_a_head_is_switched_alone():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="t5").eval()
    weight = filled(encoder.encoding).weight
    x = torch.randn(1, 6, 16)
    heads = lens.prior_heads(encoder, lambda: encoder(x))
    second = next(head for head in heads if head.head == 1)
    with lens.only_priors(encoder, [second]):
        found = encoder(x)
    with torch.no_grad():
        weight[0] = 0.0
    torch.testing.assert_close(found, encoder(x))


def test_the_priors_of_t5_are_switched():
    model = tiny_t5()
    tokens = torch.randint(2, 30, (1, 9))

    def evaluate() -> float:
        with torch.no_grad():
            return float(model(input_ids=tokens, labels=tokens).loss)

    found = lens.ablate(model, evaluate)
    whole = evaluate()
    # Encoder and decoder have a bias each, which their layers share.
    assert len(found.order) == 4 and {len(head.layers) for head in found.order} == {2}
    assert found.values[-1] == pytest.approx(whole, abs=1e-6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.zero_()
    assert found.values[0] == pytest.approx(evaluate(), abs=1e-6)


def test_a_model_without_a_bias_has_no_priors():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="rotary").eval()
    with pytest.raises(ValueError, match="model must have an encoding with a bias"):
        lens.ablate(encoder, lambda: float(encoder(torch.randn(1, 4, 16)).sum()))
