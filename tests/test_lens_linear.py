"""Linear attention taken apart: its weights are a prior times a likelihood, and those that are no probabilities are refused."""

from typing import Any

import pytest
import torch
from oracle import make_encoding
from test_lens_capture import decoded
from test_lens_page import facts
from test_lens_parts import filled, tensors
from typer.testing import CliRunner

import lagwise
from lagwise import FeatureMap, lens, linear_attention
from lagwise.call import Call
from lagwise.lab.cli import app
from lagwise.lab.experiment import make_config
from lagwise.lab.look import linear_notes
from lagwise.lab.loop import Settings
from lagwise.lab.run import train

HEADS, TIME = 4, 12
MAPS = ("favor", "relu", "elu")
NAMES = ("t5", "at5", "t5-free", "at5-free", "alibi", "kerple", "sandwich", "sine-spe", "conv-spe", "permute", "t5 + sine-spe")


def encoding_of(name: str) -> lagwise.Encoding:
    found = [make_encoding(each) for each in name.split(" + ")]
    return sum(found[1:], found[0]).eval()


def weights(q: torch.Tensor, k: torch.Tensor, encoding: lagwise.Encoding | None, **options) -> torch.Tensor:
    """Returns the weights of the specification: its outputs where each value is its key's place."""
    places = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    return linear_attention(q, k, places, encoding, impl="dense", **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("name", ["none", *NAMES])
def test_the_posterior_is_the_weights_of_the_specification(name, feature_map, causal):
    encoding = None if name == "none" else encoding_of(name)
    q, k, _ = tensors(heads=HEADS)
    key_mask = torch.rand(2, TIME) > 0.3
    key_mask[:, 0] = True
    options: dict[str, Any] = dict(feature_map=feature_map, causal=causal, key_mask=key_mask)
    parts = lens.attention_parts(q, k, encoding, **options)
    wanted = weights(q, k, encoding, **options)
    torch.testing.assert_close(parts.posterior, wanted, atol=2e-6, rtol=1e-4)
    product = parts.prior * parts.likelihood
    torch.testing.assert_close(parts.posterior, product / product.sum(-1, keepdim=True), atol=2e-6, rtol=1e-4)
    for probability in (parts.prior, parts.likelihood, parts.posterior):
        torch.testing.assert_close(probability.sum(-1), torch.ones(2, HEADS, TIME))


def test_the_context_score_is_the_logarithm_of_the_product_of_features():
    q, k, _ = tensors(heads=HEADS)
    bias = make_encoding("t5")
    parts = lens.attention_parts(q, k, bias, feature_map="relu")
    torch.testing.assert_close(parts.context_score, ((q.relu() + 1e-3) @ (k.relu() + 1e-3).mT).log())
    torch.testing.assert_close(parts.prior_score[0, :, 5], lens.prior(bias, TIME).bias[:, TIME - 6 : 2 * TIME - 6])


def test_packed_sequences_and_grouped_heads_are_those_of_linear_attention():
    q, k, _ = tensors(batch=1, heads=HEADS)
    k, ends = k[:, ::2], torch.tensor([0, 5, TIME])
    for name in ("permute", "sine-spe", "t5"):
        encoding = encoding_of(name)
        parts = lens.attention_parts(q, k, encoding, feature_map="relu", causal=True, cu_seqlens=ends)
        wanted = weights(q, k, encoding, feature_map="relu", causal=True, cu_seqlens=ends)
        torch.testing.assert_close(parts.posterior, wanted, atol=2e-6, rtol=1e-4)


class Signed(FeatureMap):
    def queries(self, x):
        return x


class Squares(FeatureMap):
    def queries(self, x):
        return x.square()


def test_weights_that_are_no_probabilities_are_refused():
    q, k, _ = tensors(heads=HEADS)
    for rotary in (make_encoding("rotary"), make_encoding("rotary") + make_encoding("t5")):
        with pytest.raises(ValueError, match="weights may be negative and do not sum to one"):
            lens.attention_parts(q, k, rotary, feature_map="relu")
    with pytest.raises(ValueError, match="feature_map must make features that are not negative"):
        lens.attention_parts(q, k, feature_map=Signed())
    with pytest.raises(ValueError, match="window and query_start must be left out with a feature_map"):
        lens.attention_parts(q, k, feature_map="relu", window=(3, 3))
    with pytest.raises(ValueError, match="which does not factor into features"):
        lens.attention_parts(q, k, make_encoding("shaw"), feature_map="relu")
    with pytest.raises(ValueError, match="pass its feature_map"):
        lens.attention_parts(q, k, make_encoding("permute"))


def test_a_weight_of_zero_has_no_finite_score():
    q, k = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    q[0, 0, 0] = torch.tensor([2.0, 0.0])
    parts = lens.attention_parts(q, k, feature_map=Squares())
    assert parts.context_score[0, 0].tolist() == [[pytest.approx(1.3863, abs=1e-4), -torch.inf], [-torch.inf, -torch.inf]]
    # The second query is orthogonal to all keys, of which linear attention makes zeros.
    assert parts.posterior[0, 0].tolist() == weights(q, k, None, feature_map=Squares())[0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert parts.divergence()[0, 0].tolist() == [pytest.approx(0.6931, abs=1e-4), 0.0]
    call = lens.Captured("layer", False, q, k, k, lagwise.Terms(), Call(), Squares())
    with pytest.raises(ValueError, match="layer has some that are 0"):
        linear_notes([call])


@pytest.mark.parametrize(
    ("name", "feature_map"), [("alibi", "favor"), ("sine-spe", "relu"), ("permute", "elu"), ("none", "favor")]
)
def test_what_a_stack_computed_is_rebuilt(name, feature_map):
    options: dict[str, Any] = dict(layers=2, heads=2, encoding=name, attention="linear", feature_map=feature_map)
    decoder = lagwise.nn.Decoder(16, cross=True, **options).eval()
    calls, outputs = decoded(decoder)
    # What is drawn later is not what was computed.
    decoder.redraw()
    assert [call.cross for call in calls] == [False, True] * 2
    for call, out in zip(calls, outputs, strict=True):
        rebuilt = linear_attention(call.q, call.k, call.v, call.terms, **call.options)
        torch.testing.assert_close(rebuilt.transpose(1, 2).flatten(2), out, atol=1e-5, rtol=1e-4)
        again = (call.parts().posterior @ call.v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-4)


def test_the_start_of_a_sequence_is_captured_and_a_state_is_refused():
    decoder = lagwise.nn.Decoder(16, layers=1, heads=2, encoding="t5", attention="linear", feature_map="relu").eval()
    x, cache = torch.randn(1, 5, 16), decoder.new_cache()
    with lens.capture(decoder) as calls:
        decoder(x, cache=cache)
    with lens.capture(decoder) as whole:
        decoder(x)
    torch.testing.assert_close(calls[0].parts().posterior, whole[0].parts().posterior)
    with pytest.raises(ValueError, match=r"layers\.0\.attention does: run it without a cache"), lens.capture(decoder):
        decoder(x[:, :1], cache=cache)
    # Those of other models pass by.
    other = lagwise.nn.Encoder(16, layers=1, heads=2).eval()
    with lens.capture(other) as calls:
        decoder(x[:, :1], cache=cache)
        other(x)
    assert len(calls) == 1
    crossing = lagwise.nn.Decoder(16, layers=1, heads=2, cross=True, attention="linear", feature_map="relu").eval()
    with pytest.raises(ValueError, match=r"layers\.0\.cross does: run it without a cache"), lens.capture(crossing):
        crossing(x, x, cache=crossing.new_cache())


def test_priors_are_switched():
    options: dict[str, Any] = dict(layers=1, heads=2, attention="linear", feature_map="relu")
    encoder = lagwise.nn.Encoder(16, encoding="t5", **options).eval()
    filled(encoder.encoding)
    x, mixture = torch.randn(2, 2, 9, 16)
    found = lens.ablate(encoder, lambda: float((encoder(x) * mixture).sum()))
    plain = lagwise.nn.Encoder(16, **options).eval()
    plain.load_state_dict({name: value for name, value in encoder.state_dict().items() if "encoding" not in name})
    assert found.values[0] == pytest.approx((plain(x) * mixture).sum().item(), rel=1e-4)
    assert found.values[-1] == pytest.approx((encoder(x) * mixture).sum().item(), rel=1e-6)
    assert found.values[0] != pytest.approx(found.values[-1], rel=1e-2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "cache"))


SIZES = {"train": 8, "validation": 4, "test": 4, "shortest": 5, "longest": 30}


@pytest.mark.parametrize(
    ("name", "feature_map"),
    [
        ("sinusoidal", "favor"),
        ("sine-spe", "relu"),
        ("conv-spe", "favor"),
        ("t5", "elu"),
        ("permute", "relu"),
        ("rotary", "relu"),
        ("rotary", "favor"),
    ],
)
def test_the_command_looks_at_a_run(name, feature_map, tmp_path, cache):
    config = make_config(
        "listops", name, steps=1, dim=16, layers=1, heads=2, hidden=16, batch=2, attention="linear", feature_map=feature_map,
        task_options=SIZES,
    )  # fmt: skip
    train(config, tmp_path / "run", Settings(device="cpu"))
    out = tmp_path / "page.html"
    more = ["--ablate"] if name == "t5" else []
    ended = CliRunner().invoke(app, ["lens", str(tmp_path / "run"), "--device", "cpu", "--out", str(out), *more])
    if (name, feature_map) == ("rotary", "relu"):
        assert ended.exit_code == 2 and "Rotary turns features in the numerator alone" in " ".join(ended.output.split())
        return
    assert ended.exit_code == 0, ended.output
    assert "Attention is linear" in out.read_text()
    found = facts(out.read_text())
    (layer,) = found["layers"]
    assert layer["bias"] == (name == "t5") and layer["tokens"] == len(found["tokens"])
    assert found["tokens"][0] == "[first]" and found["tokens"][1] in ("[MIN", "[MAX", "[MED", "[SM")
    assert name != "t5" or len(found["ablation"]["values"]) == 3
