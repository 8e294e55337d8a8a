"""Hugging Face models with attn_implementation="lagwise" against their own eager attention."""

import copy

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    padding_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import lagwise.hf
from lagwise.hf import Mask, interface, masks, t5
from lagwise.hf.masks import Band, band_of

T5_SIZES = dict(
    vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ROWS, TOKENS = 3, 24

FAMILIES = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
    "mt5": (transformers.MT5ForConditionalGeneration, transformers.MT5Config),
    "umt5": (transformers.UMT5ForConditionalGeneration, transformers.UMT5Config),
}


def t5_model(family="t5", kind=None, **sizes):
    default, config = FAMILIES[family]
    # From the start, because transformers 5.15 cannot change it later, and its UMT5 is not causal with sdpa.
    return filled((kind or default)(config(**{**T5_SIZES, **sizes}, attn_implementation="eager")))


def llama(**sizes):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **sizes)
    return filled(transformers.LlamaForCausalLM(config))


def mistral(window=5):
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window)
    return filled(transformers.MistralForCausalLM(config))


def bert(**sizes):
    return filled(transformers.BertModel(transformers.BertConfig(**SIZES, **sizes)))


def mpnet(**sizes):
    config = transformers.MPNetConfig(**SIZES, max_position_embeddings=160, **sizes)
    return filled(transformers.MPNetModel(config, add_pooling_layer=False))


def filled(model):
    """Returns the model ready for inference, with weights that make attention far from even."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()
            elif parameter.ndim == 2 and "embed" not in name and "shared" not in name:
                parameter.normal_(std=0.3)
    return model.eval()


def tokens(length=TOKENS):
    return torch.randint(2, 50, (ROWS, length))


def padding(side, length=TOKENS):
    """Returns a mask with a full row, and two padded ones on one side or on both."""
    mask = torch.ones(ROWS, length, dtype=torch.long)
    if side in ("right", "both"):
        mask[1, length - 7 :] = 0
    if side in ("left", "both"):
        mask[2, :5] = 0
    return mask


def with_each(model, call):
    """Returns what a call gives with eager attention and with ours, from the same random numbers."""
    results = []
    for implementation in ("eager", "lagwise"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        results.append(call(model))
    return results


def trained(loss):
    """Returns a call that gives the loss and the gradient of each parameter."""

    def call(model):
        model.zero_grad()
        value = loss(model)
        value.backward()
        return {"loss": value.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}

    return call


def assert_same(eager, ours, **limits):
    torch.testing.assert_close(ours, eager, **{"atol": 1e-5, "rtol": 1e-5, **limits})


@pytest.fixture
def calls(monkeypatch):
    """Records the arguments of each call of lagwise.attention that a model makes."""
    made = []

    def spy(*args, **options):
        made.append((args, options))
        return lagwise.attention(*args, **options)

    monkeypatch.setattr(interface, "attention", spy)
    return made


@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_t5_gives_the_outputs_and_gradients_of_eager(family, side, calls):
    model = t5_model(family)
    inputs = dict(input_ids=tokens(), attention_mask=padding(side), labels=tokens(11))
    assert_same(*with_each(model, lambda model: model(**inputs).logits.detach()))
    # Two layers of the encoder, and two of the decoder with two kinds of attention each.
    assert len(calls) == 6
    eager, ours = with_each(model, trained(lambda model: model(**inputs).loss))
    assert_same(eager, ours)
    assert all(
        ours[f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].any() for part in ("encoder", "decoder")
    )


def test_other_models_of_the_family():
    sizes, mask, labels = dict(T5_SIZES, attn_implementation="eager"), padding("both"), tokens(11)
    longt5 = filled(transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**sizes, local_radius=5)))
    pop2piano = filled(transformers.Pop2PianoForConditionalGeneration(transformers.Pop2PianoConfig(**sizes)))
    for model, inputs in ((longt5, {"input_ids": tokens()}), (pop2piano, {"inputs_embeds": torch.randn(ROWS, TOKENS, 32)})):
        loss = trained(lambda model, inputs=inputs: model(**inputs, attention_mask=mask, labels=labels).loss)
        assert_same(*with_each(model, loss))


@pytest.mark.parametrize("family, kind", [("t5", transformers.T5EncoderModel), ("umt5", transformers.UMT5EncoderModel)])
def test_t5_encoders_give_the_outputs_and_gradients_of_eager(family, kind):
    model, ids, mask = t5_model(family, kind), tokens(), padding("both")
    seen = mask.bool()
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].detach()))
    assert_same(*with_each(model, trained(lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].square().mean())))


def test_t5_with_more_tokens_than_the_dense_implementation_takes(calls):
    model = t5_model()
    inputs = dict(input_ids=tokens(150), labels=tokens(140))
    assert_same(*with_each(model, trained(lambda model: model(**inputs).loss)))
    (args, options) = calls[0]
    assert lagwise.which_impl(*args, **options).impl != "dense"


def test_t5_masks_decoder_padding():
    model, ids, inputs = t5_model(), tokens(), tokens(11)
    mask = padding("right", 11)

    def run(model):
        return model(ids, decoder_input_ids=inputs, decoder_attention_mask=mask).logits[mask.bool()].detach()

    assert_same(*with_each(model, run))


@pytest.mark.parametrize("how", [
    dict(do_sample=False), dict(num_beams=3), dict(do_sample=True), dict(do_sample=False, use_cache=False),
    dict(do_sample=False, cache_implementation="static"), dict(num_beams=2, cache_implementation="static"),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_t5_generates_what_eager_does(family, how):
    model, ids, mask = t5_model(family), tokens(), padding("both")
    options = dict(attention_mask=mask, max_new_tokens=9, min_new_tokens=9, output_logits=True, return_dict_in_generate=True)
    eager, ours = with_each(model, lambda model: model.generate(ids, **options, **how))
    assert torch.equal(eager.sequences, ours.sequences)
    assert_same(torch.stack(eager.logits), torch.stack(ours.logits), atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_t5_trains_under_gradient_checkpointing(reentrant):
    model, ids, labels = t5_model(), tokens(), tokens(11)
    model.train().set_attn_implementation("lagwise")
    loss = trained(lambda model: model(input_ids=ids, labels=labels, use_cache=False).loss)
    plain = loss(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(plain, loss(model))


def test_dropout_is_drawn_afresh_and_repeated_by_checkpointing(calls):
    model, ids, labels = t5_model(dropout_rate=0.3), tokens(), tokens(11)
    model.train().set_attn_implementation("lagwise")
    loss = trained(lambda model: model(input_ids=ids, labels=labels, use_cache=False).loss)
    torch.manual_seed(3)
    plain = loss(model)
    assert {options["dropout"] for _, options in calls} == {0.3}
    assert len({int(options["seed"]) for _, options in calls}) == len(calls)
    assert loss(model)["loss"] != plain["loss"]
    model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    assert_same(plain, loss(model))
    calls.clear()
    model.eval()(input_ids=ids, labels=labels)
    assert {options["dropout"] for _, options in calls} == {0.0}


class Shapes(TorchDispatchMode):
    """Collects the shapes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor)}
        return made


@pytest.mark.parametrize("family", FAMILIES)
def test_t5_makes_no_bias_of_pairs(family):
    model, ids, labels = t5_model(family), tokens(150), tokens(140)
    pairs = {(1, 4, 150, 150), (1, 4, 140, 140), (1, 4, 140, 150)}

    def shapes(model):
        with Shapes() as shapes:
            model(input_ids=ids, labels=labels, attention_mask=padding("right", 150)).loss.backward()
        return shapes.seen

    eager, ours = with_each(model, shapes)
    assert pairs <= eager
    # Nor anything else of that size.
    assert not any(shape[-2:] in {(150, 150), (140, 140), (140, 150)} for shape in ours)


def test_setting_the_implementation_reaches_the_stacks():
    model = t5_model()
    for name in ("lagwise", "sdpa", "lagwise", "eager"):
        model.set_attn_implementation(name)
        assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {name}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_implementations_keep_their_bias(family):
    model = t5_model(family)
    model.set_attn_implementation("sdpa")
    layer = model.decoder.block[0].layer
    assert layer[0].SelfAttention.compute_bias(5, 7).shape == (1, 4, 5, 7)
    model(input_ids=tokens(), labels=tokens(11))
    model.set_attn_implementation("lagwise")
    assert layer[0].SelfAttention.compute_bias(5, 7).ndim == 2
    assert layer[1].EncDecAttention.compute_bias(5, 7).shape == (4, 0)
    model(input_ids=tokens(), labels=tokens(11))
    assert not layer[1].EncDecAttention.has_relative_attention_bias
    t5.install()
    assert not hasattr(t5.T5Attention.compute_bias.__wrapped__, "__wrapped__")


def test_t5_in_half_precision_is_close():
    model, ids, labels = t5_model(), tokens(), tokens(11)

    def autocast(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    eager, ours = with_each(model, trained(autocast))
    assert_same(eager["loss"], ours["loss"], atol=0.05, rtol=0.02)
    exact = with_each(model, lambda model: model(input_ids=ids, labels=labels).logits.detach())[0]
    eager, ours = with_each(copy.deepcopy(model).bfloat16(), lambda model: model(input_ids=ids, labels=labels).logits.detach())
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm()


def test_t5_loads_with_the_implementation_and_saves(tmp_path):
    model, ids, labels = t5_model(), tokens(), tokens(11)
    model.save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="lagwise")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert_same(model(input_ids=ids, labels=labels).logits, loaded(input_ids=ids, labels=labels).logits)


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_t5_compiles(family):
    model, ids, labels = t5_model(family), tokens(), tokens(11)
    model.set_attn_implementation("lagwise")
    expected = trained(lambda model: model(input_ids=ids, labels=labels, use_cache=False).loss)(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = dict(input_ids=ids, attention_mask=padding("none"), labels=labels, use_cache=False)
    assert_same(expected, trained(lambda _: compiled(**inputs).loss)(model))


@pytest.mark.parametrize("make", [llama, mistral, bert])
def test_others_compile(make):
    model, ids, mask = make(), tokens(), padding("both")
    model.set_attn_implementation("lagwise")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    options = {} if make is bert else {"use_cache": False}
    assert_same(model(ids, attention_mask=mask, **options)[0], compiled(ids, attention_mask=mask, **options)[0])


def test_t5_generates_with_a_static_cache_and_compiled():
    model, ids = t5_model(), tokens()
    model.set_attn_implementation("lagwise")
    options = dict(attention_mask=padding("both"), max_new_tokens=5, do_sample=False, cache_implementation="static")
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(expected, model.generate(ids, **options))


@pytest.mark.parametrize("make", [llama, mistral, lambda: mistral(window=TOKENS + 9)])
@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
def test_decoders_give_the_outputs_and_gradients_of_eager(make, side, calls):
    model, ids, mask = make(), tokens(), padding(side)
    seen = mask.bool()
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask).logits[seen].detach()))
    assert len(calls) == 2
    # What a token of padding predicts is not defined: it may attend to nothing.
    labels = ids.masked_fill(~seen | ~seen.roll(1, 1), -100)
    assert_same(*with_each(model, trained(lambda model: model(ids, attention_mask=mask, labels=labels).loss)))


def test_decoders_without_a_mask():
    ids = tokens()
    for model in (llama(), mistral()):
        assert_same(*with_each(model, lambda model: model(ids).logits.detach()))


@pytest.mark.parametrize("how", [
    dict(), dict(num_beams=2), dict(cache_implementation="static"), dict(use_cache=False),
])  # fmt: skip
@pytest.mark.parametrize("make", [llama, mistral])
def test_decoders_generate_what_eager_does(make, how):
    model, ids, mask = make(), tokens(), padding("left")
    options = dict(attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True)
    eager, ours = with_each(model, lambda model: model.generate(ids, pad_token_id=0, **options, **how))
    assert torch.equal(eager.sequences, ours.sequences)
    assert_same(torch.stack(eager.logits), torch.stack(ours.logits), atol=1e-4)


def test_a_static_cache_hides_what_is_not_filled():
    model, ids = llama(), tokens()

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        first = model(ids[:, :10], past_key_values=cache).logits
        return torch.cat([first, model(ids[:, 10:], past_key_values=cache).logits], dim=1).detach()

    eager, ours = with_each(model, run)
    assert_same(eager, ours)
    assert_same(model(ids).logits, ours)


@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
def test_bert_gives_the_outputs_and_gradients_of_eager(side, calls):
    model, ids, mask = bert(), tokens(), padding(side)
    seen = mask.bool()
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].detach()))
    assert len(calls) == 2
    assert_same(*with_each(model, trained(lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].square().sum())))


def test_vit_gives_the_outputs_of_eager(calls):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    model = filled(transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)))
    images = torch.randn(ROWS, 3, 16, 16)
    assert_same(*with_each(model, lambda model: model(images).last_hidden_state.detach()))
    assert len(calls) == 2


def test_modernbert_has_windows_on_both_sides():
    config = transformers.ModernBertConfig(
        **SIZES, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=2, sep_token_id=3
    )
    model, ids, mask = filled(transformers.ModernBertModel(config)), tokens(), padding("both")
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask).last_hidden_state[mask.bool()].detach()))


@pytest.mark.parametrize("length", [TOKENS, 150])
@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
def test_mpnet_gives_the_outputs_and_gradients_of_eager(side, length, calls):
    model, ids, mask = mpnet(), tokens(length), padding(side, length)
    seen = mask.bool()
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].detach()))
    assert len(calls) == 2 and all(args[3].bias is not None for args, _ in calls)
    loss = trained(lambda model: model(ids, attention_mask=mask).last_hidden_state[seen].square().mean())
    assert_same(*with_each(model, loss))


def test_mpnet_loads_with_the_implementation_and_drops_weights(tmp_path, calls):
    model, ids = mpnet(attention_probs_dropout_prob=0.3), tokens()
    model.save_pretrained(tmp_path)
    loaded = transformers.MPNetModel.from_pretrained(tmp_path, attn_implementation="lagwise")
    assert_same(model(ids).last_hidden_state, loaded(ids).last_hidden_state)
    loaded.train()(ids)
    assert [options["dropout"] for _, options in calls] == [0.0, 0.0, 0.3, 0.3]
    with pytest.raises(ValueError, match="output_attentions asks for the attention weights"):
        loaded(ids, output_attentions=True)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
@pytest.mark.parametrize("make", [llama, mpnet])
def test_padding_on_the_right_of_long_sequences_becomes_lengths(make, side, calls, monkeypatch):
    monkeypatch.setattr(masks, "LONG", TOKENS)
    model, ids, mask = make(), tokens(), padding(side)
    seen = mask.bool()
    assert_same(*with_each(model, lambda model: model(ids, attention_mask=mask)[0][seen].detach()))
    loss = trained(lambda model: model(ids, attention_mask=mask)[0][seen].square().mean())
    assert_same(*with_each(model, loss))
    for _, options in calls:
        assert (options["lengths"] is None) == (side != "right")
        assert (options["key_mask"] is None) == (side in ("none", "right"))


def test_short_sequences_and_keys_of_others_keep_their_mask(monkeypatch):
    """Finding out costs short calls too much, and the far field takes lengths of a sequence's own keys alone."""
    given = padding("right").bool()

    def made(queries, keys, **options):
        return interface.make_mask(ROWS, queries, keys, attention_mask=given, **options)

    assert torch.equal(made(TOKENS, TOKENS).key_mask, given)
    monkeypatch.setattr(masks, "LONG", TOKENS)
    assert torch.equal(made(1, TOKENS).key_mask, given)
    # What the mask does not tell about is hidden, and comes last.
    for mask in (made(TOKENS, TOKENS), made(TOKENS + 3, TOKENS + 3, mask_function=bidirectional_mask_function)):
        assert mask.key_mask is None and torch.equal(mask.lengths, given.sum(1))


def test_a_mask_is_always_made():
    model = llama()
    model.set_attn_implementation("lagwise")
    made = create_causal_mask(model.config, torch.zeros(ROWS, TOKENS, 0), None, None)
    assert made == Mask(TOKENS, causal=True)
    assert made.to("cpu") == made.contiguous() == made


def test_terms_of_a_module_are_used():
    model, ids = bert(), tokens()
    encoding = lagwise.make("t5", heads=4)
    torch.nn.init.normal_(encoding.weight)
    model.set_attn_implementation("lagwise")
    before, asked = model(ids).last_hidden_state, []

    def terms(first, last, *, scale, seed):
        asked.append((first, last, scale, int(seed)))
        return encoding.terms(first, last, scale=scale, seed=seed)

    for layer in model.encoder.layer:
        layer.attention.self.lagwise_terms = terms
    state = torch.get_rng_state()
    assert (model(ids).last_hidden_state - before).abs().max() > 0.01
    assert asked == [(1 - TOKENS, TOKENS - 1, 8**-0.5, 0)] * 2
    assert torch.get_rng_state().equal(state)
    # The module carries what its config asks for.
    model.config.position_embedding_type = "relative_key"
    model(ids)


def test_a_relative_config_without_relative_positions_raises():
    model = bert(position_embedding_type="relative_key_query")
    model.set_attn_implementation("lagwise")
    cross = transformers.models.bert.modeling_bert.BertCrossAttention(model.config)
    interface.check_options(cross, {})
    with pytest.raises(ValueError, match=r"'relative_key_query', but BertSelfAttention .*from_pretrained_relative"):
        model(tokens())


def test_attention_weights_are_refused():
    model = t5_model()
    model.set_attn_implementation("lagwise")
    with pytest.raises(ValueError, match="output_attentions asks for the attention weights"):
        model(input_ids=tokens(), labels=tokens(), output_attentions=True)


@pytest.mark.parametrize("name, value", [("softcap", 30.0), ("s_aux", torch.zeros(4)), ("cu_seq_lens_q", torch.tensor([0, 9]))])
def test_keywords_that_are_not_honoured_raise(name, value):
    q = torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match=f"{name} .*attn_implementation='sdpa'"):
        interface.attention_forward(torch.nn.Identity(), q, q, q, None, **{name: value})


def test_foreign_masks_and_biases_raise():
    q, module = torch.randn(1, 4, 9, 8), torch.nn.Identity()
    with pytest.raises(ValueError, match=r"got a tensor of shape \(1, 1, 9, 9\)"):
        interface.attention_forward(module, q, q, q, torch.ones(1, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"Identity has made a tensor of shape \(1, 4, 9, 9\)"):
        interface.attention_forward(module, q, q, q, None, position_bias=torch.zeros(1, 4, 9, 9))
    with pytest.raises(ValueError, match="tells about 12"):
        interface.attention_forward(module, q, q, q, Mask(12))
    module.lagwise_terms = lambda first, last, *, scale, seed: lagwise.make("alibi", heads=4).terms(first, last, scale=scale)
    with pytest.raises(ValueError, match="is None for 2 queries and 9 keys"):
        interface.attention_forward(module, q[:, :, :2], q, q, None)


@pytest.mark.parametrize("function, band", [
    (causal_mask_function, Band(last=0)),
    (bidirectional_mask_function, Band()),
    (sliding_window_causal_mask_function(4), Band(-3, 0)),
    (sliding_window_bidirectional_mask_function(4), Band(-4, 4)),
    (lambda batch, head, query, key: (key < query + 3) & (key >= query - 2), Band(-2, 2)),
    (lambda batch, head, query, key: (query > key - 3) & (key >= 0), Band(last=2)),
])  # fmt: skip
def test_bands_are_read_from_mask_functions(function, band):
    assert band_of(function) == band
    made = interface.make_mask(1, 9, 9, mask_function=function)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    allowed = function(torch.tensor(0), torch.tensor(0), i, j).expand(9, 9)
    left, right = made.window or (9, 9)
    assert torch.equal(allowed, (j - i >= -left) & (j - i <= (0 if made.causal else right)))


@pytest.mark.parametrize("function", [
    chunked_causal_mask_function(4, torch.zeros(1)),
    or_masks(causal_mask_function, causal_mask_function),
    and_masks(causal_mask_function, packed_sequence_mask_function(torch.zeros(1, 9))),
    and_masks(causal_mask_function, padding_mask_function(torch.ones(1, 9))),
    lambda batch, head, query, key: key <= query + head,
    lambda batch, head, query, key: (key <= query) & (head == 0),
    lambda batch, head, query, key: (key <= query) & (key != query),
    lambda batch, head, query, key: key < 5,
    lambda batch, head, query, key: key <= query * 2,
    lambda batch, head, query, key: causal_mask_function(batch, head, query, key) or key < 3,
    lambda batch, head, query, key: key < query,
])  # fmt: skip
def test_masks_of_other_patterns_raise(function):
    with pytest.raises(ValueError, match=r"the model's mask must let through .*: load the model with"):
        interface.make_mask(1, 9, 9, mask_function=function)


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_mask_the_module_says_what_is_causal(causal, calls):
    q, module = torch.randn(1, 4, 9, 8), torch.nn.Identity()
    module.is_causal = causal
    out, weights = interface.attention_forward(module, q, q, q, None)
    assert weights is None and out.is_contiguous()
    assert torch.equal(out, lagwise.attention(q, q, q, causal=causal).transpose(1, 2))
    assert torch.equal(interface.attention_forward(module, q, q, q, None, is_causal=not causal)[0],
                       lagwise.attention(q, q, q, causal=not causal).transpose(1, 2))  # fmt: skip
    interface.attention_forward(module, q, q, q, None, sliding_window=3)
    assert calls[-1][1]["window"] == (2, 0 if causal else 2)


def test_keys_beyond_the_mask_do_not_exist():
    q = torch.randn(2, 4, 9, 8)
    out, _ = interface.attention_forward(torch.nn.Identity(), q, q, q, Mask(6))
    assert_same(lagwise.attention(q, q[:, :, :6], q[:, :, :6]).transpose(1, 2), out)
