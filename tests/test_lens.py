"""The lens: hand-worked numbers, closed forms, and models taken apart and put together again."""

import json
import math

import pytest
import torch
import transformers
from oracle import make_encoding

import lagwise
import lagwise.hf
from lagwise import AT5, T5, ALiBi, LagTable, Terms, lens
from lagwise.attention import WATCHER

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


# The prior


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


# Parts of attention


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


# Numbers


def test_effective_ranges_of_hand_worked_curves():
    lags = torch.arange(-3, 4)
    probability = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0]])
    assert lens.effective_range(probability, lags, (0.5, 1.0)).tolist() == [[0, 2], [0, 3]]
    assert lens.effective_size(probability, (0.5, 1.0)).tolist() == [[1, 1], [1, 2]]
    with pytest.raises(ValueError, match=r"shares must be above 0 and at most 1, but are \(90,\)"):
        lens.effective_range(probability, lags, (90,))


def test_a_toeplitz_map_is_invariant_and_another_is_not():
    lags = torch.arange(9) - torch.arange(9)[:, None]
    toeplitz = torch.randn(17)[lags + 8]
    assert lens.translation_invariance(toeplitz).item() == pytest.approx(0.0, abs=1e-12)
    assert lens.translation_invariance(torch.full((5, 5), 1 / 3)).item() == 0.0
    # Of [[0, 2], [2, 4]] the main diagonal has variance 4, the others none; the total variance is 2.
    assert lens.translation_invariance(torch.tensor([[0.0, 2.0], [2.0, 4.0]])).item() == pytest.approx(2 * 4 / (4 * 2))
    # With the lower triangle alone: the diagonal 0, 4 and the corner 2, of total variance 8 / 3.
    visible = torch.ones(2, 2, dtype=torch.bool).tril()
    maps = torch.tensor([[[0.0, 99.0], [2.0, 4.0]], [[1.0, 7.0], [2.0, 1.0]]])
    torch.testing.assert_close(lens.translation_invariance(maps, visible), torch.tensor([1.0, 0.0]).double())


def test_monotonicity_counts_inversions():
    near = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 2.0], [1.0, 2.0, 3.0]])
    assert lens.monotonicity_violation(torch.stack([near, -near])).tolist() == [0.0, 1.0]
    # Causal rows [5], [1, 2], [3, 1, 2]: of 1 + 3 pairs, (3, 1) and (3, 2) are wrong.
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    rows = torch.tensor([[5.0, 0.0, 9.0], [1.0, 2.0, 9.0], [3.0, 1.0, 2.0]])
    assert lens.monotonicity_violation(rows, visible).item() == 0.5
    # One query at position 2: all keys are past.
    assert lens.monotonicity_violation(torch.tensor([[1.0, 2.0, 3.0]]), query_start=2).item() == 0.0
    assert math.isnan(lens.monotonicity_violation(torch.ones(1, 1)).item())


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


# Capture


def test_nobody_watches_unless_asked():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="t5").eval()
    assert WATCHER.get() is None
    with lens.capture(encoder):
        assert WATCHER.get() is not None
        encoder(torch.randn(1, 4, 16))
    assert WATCHER.get() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())


@pytest.mark.parametrize("name", ["at5", "shaw", "rotary", "sine-spe", "xl"])
def test_what_a_stack_computed_is_rebuilt(name):
    decoder = lagwise.nn.Decoder(16, layers=2, heads=2, encoding=name, cross=True).eval()
    filled(decoder.encoding)
    outputs: list[torch.Tensor] = []
    for layer in decoder._layers:
        assert layer.cross is not None
        for attends in (layer.attention, layer.cross):
            attends.out.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    x, context, lengths = torch.randn(2, 7, 16), torch.randn(2, 5, 16), torch.tensor([5, 3])
    with lens.capture(decoder) as calls:
        decoder(x, context, context_lengths=lengths)
    names = [f"layers.{number}.{kind}" for number in range(2) for kind in ("attention", "cross")]
    assert [call.layer for call in calls] == names
    assert [call.cross for call in calls] == [False, True] * 2
    assert all(call.key_mask is not None for call in calls if call.cross)
    for call, out in zip(calls, outputs, strict=True):
        rebuilt = lagwise.attention(call.q, call.k, call.v, call.terms, **call.options, impl="dense")
        torch.testing.assert_close(rebuilt.transpose(1, 2).flatten(2), out, atol=1e-5, rtol=1e-4)
        if call.terms.value is None:
            again = (call.parts().posterior @ call.v).transpose(1, 2).flatten(2)
            torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-4)


def test_captured_tensors_hold_no_graph():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="shaw")
    with lens.capture(encoder) as calls:
        loss = encoder(torch.randn(1, 4, 16)).sum()
    loss.backward()
    (call,) = calls
    tables = [table.values for table in call.terms.tables().values()]
    assert tables and not any(x.requires_grad for x in (call.q, call.k, call.v, *tables))


def test_the_steps_of_a_cache_are_captured_one_by_one():
    decoder = lagwise.nn.Decoder(16, layers=1, heads=2, encoding="rotary").eval()
    x, cache = torch.randn(1, 4, 16), decoder.new_cache()
    with lens.capture(decoder) as whole:
        decoder(x)
    with lens.capture(decoder) as steps:
        decoder(x[:, :3], cache=cache)
        decoder(x[:, 3:], cache=cache)
    assert [call.query_start for call in steps] == [0, 3]
    torch.testing.assert_close(steps[1].parts().posterior, whole[0].parts().posterior[:, :, 3:], atol=1e-5, rtol=1e-4)


def tiny_t5():
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        attn_implementation="lagwise",
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()
    return model


def test_what_t5_computed_is_rebuilt():
    model = tiny_t5()
    outputs: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("Attention.o"):
            module.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    tokens, mask = torch.randint(2, 30, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    with torch.no_grad(), lens.capture(model) as calls:
        model(input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens[:, :6])
    assert [call.cross for call in calls] == [False, False, False, True, False, True]
    assert [call.causal for call in calls if not call.cross] == [False, False, True, True]
    assert calls[0].layer == "encoder.block.0.layer.0.SelfAttention"
    for call, out in zip(calls, outputs, strict=True):
        again = (call.parts().posterior @ call.v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-4)
    weight = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    twin = T5.from_weight(weight, max_lag=20)
    torch.testing.assert_close(calls[0].prior().probability, lens.prior(twin, 9).probability)


def tiny_bert(**options):
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, **options,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


@pytest.mark.parametrize("kind", ["converted", "relative", "mpnet"])
def test_what_an_encoder_of_transformers_computed_is_rebuilt(kind):
    if kind == "converted":
        model = lagwise.hf.convert(tiny_bert(), "at5", neutral=False)
    elif kind == "relative":
        names = [f"encoder.layer.{number}.attention.self.distance_embedding.weight" for number in range(2)]
        model = tiny_bert(position_embedding_type="relative_key_query")
        model = lagwise.hf.restore_relative(model, {name: torch.randn(31, 8) for name in names})
    else:
        config = transformers.MPNetConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
        model = transformers.MPNetModel(config, add_pooling_layer=False).eval()
        model.set_attn_implementation("lagwise")
    outputs: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("attention.self"):
            module.register_forward_hook(lambda _, inputs, out: outputs.append(out[0]))
        elif name.endswith("attention.attn.o"):
            module.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:] = 0
    with torch.no_grad(), lens.capture(model) as calls:
        model(torch.randint(2, 30, (2, 9)), attention_mask=mask)
    assert len(calls) == 2 and not any(call.cross for call in calls)
    for call, out in zip(calls, outputs, strict=True):
        again = (call.parts().posterior @ call.v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-4)


def test_a_model_of_a_run_is_captured():
    from lagwise.train.loop import Session, Settings, make_config

    config = make_config("process-50", "at5", dim=16, heads=2, layers=1)
    session = Session(config, Settings(device="cpu"))
    batch = session.task.examples("test").batch([0, 1, 2])
    with torch.no_grad(), lens.capture(session.model.eval()) as calls:
        session.model(batch)
    assert [call.layer for call in calls] == ["encoder.layers.0.attention"]
    assert calls[0].prior().bias.shape == (2, 99)
    assert calls[0].q.shape[:3] == (3, 2, 50)


def test_what_cannot_be_captured_is_refused():
    linear = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="alibi", attention="linear")
    with pytest.raises(ValueError, match="feature maps of linear attention"), lens.capture(linear):
        pass
    with pytest.raises(ValueError, match=r"must call lagwise\.attention while it is watched"), lens.capture(tiny_bert()) as calls:
        assert calls == []
    one, other = (lagwise.nn.Encoder(16, layers=1, heads=2).eval() for _ in range(2))
    with lens.capture(one) as calls:
        other(torch.randn(1, 3, 16))
        one(torch.randn(1, 4, 16))
    assert [call.q.shape[2] for call in calls] == [4]


# Ablation


def bias_free(encoder: lagwise.nn.Encoder, x: torch.Tensor) -> torch.Tensor:
    plain = lagwise.nn.Encoder(16, layers=2, heads=2).eval()
    plain.load_state_dict({name: value for name, value in encoder.state_dict().items() if "encoding" not in name})
    return plain(x)


@pytest.mark.parametrize("name", ["t5", "at5", "alibi"])
def test_all_priors_are_the_model_and_none_is_the_model_without_bias(name):
    encoder = lagwise.nn.Encoder(16, layers=2, heads=2, encoding=name).eval()
    filled(encoder.encoding)
    x = torch.randn(2, 9, 16)
    found = lens.ablate(encoder, lambda: float(encoder(x).square().sum()))
    assert len(found.values) == 3
    assert [head.layers for head in found.order] == [("layers.0.attention", "layers.1.attention")] * 2
    assert [head.head for head in found.order] == lens.prior(encoder.encoding, 9).ranking.tolist()
    assert found.values[0] == pytest.approx(bias_free(encoder, x).square().sum().item(), rel=1e-5)
    assert found.values[-1] == pytest.approx(encoder(x).square().sum().item(), rel=1e-6)


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


# Results of runs


def test_extrapolation_tells_values_and_refusals():
    result = {
        "test": {"loss": 0.5, "accuracy": 0.9},
        "lengths": {"400": {"loss": 0.8, "accuracy": 0.6}, "100": {"loss": 0.6, "accuracy": 0.8}, "999": {"refused": "too long"}},
    }
    found = lens.extrapolation(result, "accuracy")
    assert found.lengths.tolist() == [100, 400]
    torch.testing.assert_close(found.values, torch.tensor([0.8, 0.6]).double())
    assert found.trained == 0.9 and found.refused == {999: "too long"}
    with pytest.raises(ValueError, match="metric must be one of loss, accuracy, but is 'f1'"):
        lens.extrapolation(result, "f1")
    with pytest.raises(ValueError, match="has none: run with --lengths"):
        lens.extrapolation({**result, "lengths": {}}, "loss")


def test_losses_by_position_are_the_latest(tmp_path):
    with pytest.raises(ValueError, match="has no losses by position"):
        lens.losses_by_position(tmp_path)
    lines = [
        {"split": "test", "length": None, "loss": 1.0, "loss_by_position": [[0, 2.0, 5]]},
        {"split": "test", "length": None, "loss": 1.0, "loss_by_position": [[0, 3.0, 5], [8, 1.5, 4]]},
        {"split": "test", "length": 64, "refused": "too long"},
        {"split": "validation", "length": 64, "loss": 1.0, "loss_by_position": [[0, 9.0, 1]]},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = lens.losses_by_position(tmp_path)
    assert list(found) == [None]
    assert found[None].positions.tolist() == [0, 8] and found[None].nats.tolist() == [3.0, 1.5]


def test_styles_by_quarter_are_rows_of_pieces(tmp_path):
    for number, style in enumerate([{"time-pitch": [0.1, 0.2, 0.3, 0.4], "onset-drum": [1, 1, 1, 1]}, {"time-pitch": [0.5] * 4}]):
        (tmp_path / f"piece-{number}.json").write_text(json.dumps({"style_by_quarter": style}))
    found = lens.styles_by_quarter(sorted(tmp_path.glob("*.json")))
    assert found["time-pitch"].shape == (2, 4) and found["onset-drum"].shape == (1, 4)
    with pytest.raises(ValueError, match="generated from a prompt"):
        lens.styles_by_quarter([])
