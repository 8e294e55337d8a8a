"""What goes through the attention layers of models: taken apart and put together again, it is what they computed."""

import pytest
import torch
import transformers
from test_lens_parts import filled

import lagwise
import lagwise.hf
from lagwise import T5, lens
from lagwise.softmax import WATCHER


def test_nobody_watches_unless_asked():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="t5").eval()
    assert WATCHER.get() is None
    with lens.capture(encoder):
        assert WATCHER.get() is not None
        encoder(torch.randn(1, 4, 16))
    assert WATCHER.get() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())


def decoded(decoder: lagwise.nn.Decoder) -> tuple[list[lens.Captured], list[torch.Tensor]]:
    """Lets a decoder read random vectors, and returns its calls of attention and what each of them gave."""
    outputs: list[torch.Tensor] = []
    for layer in decoder._layers:
        assert layer.cross is not None
        for attends in (layer.attention, layer.cross):
            attends.out.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    with lens.capture(decoder) as calls:
        decoder(torch.randn(2, 7, 16), torch.randn(2, 5, 16), context_lengths=torch.tensor([5, 3]))
    return calls, outputs


def test_the_prior_of_packed_sequences_is_that_of_the_longest():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="t5").eval()
    filled(encoder.encoding)
    with lens.capture(encoder) as calls:
        encoder(torch.randn(1, 10, 16), cu_seqlens=torch.tensor([0, 4, 10]))
    found, wanted = calls[0].prior(), lens.prior(encoder.encoding, 6)
    assert torch.equal(found.lags, wanted.lags)
    torch.testing.assert_close(found.probability, wanted.probability)


@pytest.mark.parametrize("name", ["at5", "shaw", "rotary", "sine-spe", "xl"])
def test_what_a_stack_computed_is_rebuilt(name):
    decoder = lagwise.nn.Decoder(16, layers=2, heads=2, encoding=name, cross=True).eval()
    filled(decoder.encoding)
    calls, outputs = decoded(decoder)
    names = [f"layers.{number}.{kind}" for number in range(2) for kind in ("attention", "cross")]
    assert [call.layer for call in calls] == names
    assert [call.cross for call in calls] == [False, True] * 2
    assert all(call.call.key_mask is not None for call in calls if call.cross)
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
    assert [call.call.query_start for call in steps] == [0, 3]
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
    from lagwise.lab.experiment import make_config
    from lagwise.lab.loop import Session, Settings

    config = make_config("process-50", "at5", dim=16, heads=2, layers=1)
    session = Session(config, Settings(device="cpu"))
    batch = session.task.examples("test").batch([0, 1, 2])
    with torch.no_grad(), lens.capture(session.model.eval()) as calls:
        session.model(batch)
    assert [call.layer for call in calls] == ["encoder.layers.0.attention"]
    assert calls[0].prior().bias.shape == (2, 99)
    assert calls[0].q.shape[:3] == (3, 2, 50)


def test_what_cannot_be_captured_is_refused():
    with pytest.raises(ValueError, match=r"must call lagwise\.attention or"), lens.capture(tiny_bert()) as calls:
        assert calls == []
    one, other = (lagwise.nn.Encoder(16, layers=1, heads=2).eval() for _ in range(2))
    with lens.capture(one) as calls:
        other(torch.randn(1, 3, 16))
        one(torch.randn(1, 4, 16))
    assert [call.q.shape[2] for call in calls] == [4]


def test_a_hook_that_raises_before_ours_leaves_no_layer_running():
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2).eval()
    refusing = encoder.get_submodule("layers.0.attention").register_forward_pre_hook(lambda *_: 1 / 0)
    with lens.capture(encoder) as calls:
        with pytest.raises(ZeroDivisionError):
            encoder(torch.randn(1, 3, 16))
        refusing.remove()
        lagwise.nn.Encoder(16, layers=1, heads=2).eval()(torch.randn(1, 5, 16))
        encoder(torch.randn(1, 4, 16))
    assert [(call.layer, call.q.shape[2]) for call in calls] == [("layers.0.attention", 4)]
