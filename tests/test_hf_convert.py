"""Models that were converted to relative positions: neutral starts, any length, checkpoints, training, wrong use."""

import io
import math
from copy import deepcopy
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers
from oracle import make_encoding
from safetensors.torch import load_file, save_file
from torch import nn

import lagwise
import lagwise.hf
import lagwise.lens
from lagwise import Favor
from lagwise.encodings.buckets import t5_bucket
from lagwise.hf.conversion import ConvertedAttention, FadedEmbedding

RELATIVE = [name for name, kind in lagwise.ENCODINGS.items() if not kind.absolute and not kind.linear_only]
NEUTRAL = [name for name in RELATIVE if make_encoding(name).make_neutral()]
LINEAR = ["none", "t5", "alibi", "rotary", "permute", "sine-spe", "conv-spe"]
FAMILIES = ["bert", "roberta", "distilbert", "electra", "gpt2"]
ENCODERS = FAMILIES[:-1]
LIMIT = 12
"""The tokens that each model has absolute positions for."""

TOKENS = dict(vocab_size=31, pad_token_id=0, bos_token_id=1, eos_token_id=2)
BERT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_position_embeddings=LIMIT,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
SIZES = {
    "bert": BERT,
    "roberta": {**BERT, "max_position_embeddings": LIMIT + 1},
    "electra": {**BERT, "embedding_size": 8},
    "distilbert": dict(
        dim=16, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=LIMIT, dropout=0.0, attention_dropout=0.0
    ),
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2, n_positions=LIMIT, n_inner=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
SHORT = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(3, 31, (2, 3 * LIMIT), generator=torch.Generator().manual_seed(2))


def plain(family: str = "bert", head: str = "AutoModel", **options):
    """Returns an unconverted model whose weights are large enough to see what attention does."""
    config = transformers.AutoConfig.for_model(family, **{**TOKENS, **SIZES[family], **options})
    model = getattr(transformers, head).from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def converted(name: str = "t5", family: str = "bert", head: str = "AutoModel", *, sizes=None, **options):
    """Returns a converted model whose new parameters are far from neutral."""
    model = lagwise.hf.convert(plain(family, head, **sizes or {}), name, **{"neutral": False, **options})
    with torch.no_grad():
        for layer in layers(model):
            for weight in layer.lagwise_encoding.parameters():
                weight.add_(0.5 * torch.randn_like(weight))
    return model


def layers(model: nn.Module) -> list[ConvertedAttention]:
    return [
        module for module in model.modules() if isinstance(module, ConvertedAttention) and hasattr(module, "lagwise_encoding")
    ]


def states(model: nn.Module, tokens: torch.Tensor = SHORT, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **options)[0]


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_an_encoding_that_is_neutral_changes_nothing_and_learns(encoding_name):
    encoding = make_encoding(encoding_name).double()
    before = {name: weight.clone() for name, weight in encoding.named_parameters()}
    if not encoding.make_neutral():
        assert all(torch.equal(weight, before[name]) for name, weight in encoding.named_parameters())
        return
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    embedded = encoding.embed(x, torch.arange(7))
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (embedded, embedded * 0.5, embedded**2))
    terms = None if encoding.absolute else encoding
    out = lagwise.attention(q, k, v, terms, impl="dense")
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (x, x * 0.5, x**2))
    same(out, lagwise.attention(q, k, v, impl="dense"), 1e-12)
    if list(encoding.parameters()):
        out.square().sum().backward()
        assert any(weight.grad.abs().max() > 1e-6 for weight in encoding.parameters())


def test_a_sum_is_neutral_if_both_parts_are():
    assert (make_encoding("t5") + make_encoding("shaw")).make_neutral()
    mixed = make_encoding("alibi") + make_encoding("t5")
    assert not mixed.make_neutral() and not mixed.right.weight.any()


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_neutral_start_computes_what_the_model_computed(family, name):
    model = plain(family).double()
    before = states(model)
    assert lagwise.hf.convert(model, name, absolute="keep") is model
    same(states(model), before, 1e-12)
    model.train()(SHORT)[0].square().sum().backward()
    for layer in layers(model):
        learned = list(layer.lagwise_encoding.parameters())
        assert not learned or any(weight.grad is not None and weight.grad.abs().max() > 0 for weight in learned)


@pytest.mark.parametrize("family", FAMILIES)
def test_removed_positions_are_those_of_a_table_of_zeros(family):
    model = plain(family)
    reference = deepcopy(model)
    table = next(module for name, module in reference.named_modules() if name.endswith(("position_embeddings", "wpe")))
    nn.init.zeros_(table.weight)
    lagwise.hf.convert(model, "t5")
    same(states(model), states(reference))
    embeds = torch.randn(2, 9, model.get_input_embeddings().embedding_dim)
    with torch.no_grad():
        same(model(inputs_embeds=embeds)[0], reference(inputs_embeds=embeds)[0])
    same(states(model, attention_mask=torch.ones_like(SHORT)), states(reference))


@pytest.mark.parametrize("name", ["none", "at5", "alibi", "rotary", "sine-spe", "huang4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_longer_than_the_table_and_padding_changes_nothing(family, name):
    model = converted(name, family)
    rows = [LONG[0], LONG[1, : LIMIT + 5], LONG[1, :4]]
    tokens, mask = torch.zeros(2, len(rows), LONG.shape[1], dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = row, 1
    batch = states(model, tokens, attention_mask=mask)
    for number, row in enumerate(rows):
        same(batch[number, : len(row)], states(model, row[None])[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_absolute_positions_that_are_kept_end_where_they_did(family):
    model = converted("t5", family, absolute="keep")
    assert states(model, LONG[:, :LIMIT]).shape[1] == LIMIT
    with pytest.raises(ValueError, match=rf"at most {LIMIT} tokens.* but has {LIMIT + 1}: .*absolute='remove'"):
        states(model, LONG[:, : LIMIT + 1])
    with pytest.raises(ValueError, match=rf"at most {LIMIT} tokens"):
        model(inputs_embeds=torch.zeros(1, LIMIT + 1, model.get_input_embeddings().embedding_dim))
    positions = torch.arange(LIMIT + 1)[None] % 5 + 1
    if family != "gpt2":
        assert states(model, LONG[:, : LIMIT + 1], position_ids=positions).shape[1] == LIMIT + 1


def test_padding_of_roberta_needs_no_position():
    model = converted("t5", "roberta", absolute="keep")
    tokens = torch.cat([LONG[:, :LIMIT], torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    same(states(model, tokens, attention_mask=tokens.ne(0))[:, :LIMIT], states(model, LONG[:, :LIMIT]))


@pytest.mark.parametrize("family", FAMILIES)
def test_absolute_positions_fade(family, tmp_path):
    model = plain(family)
    kept, removed = (states(lagwise.hf.convert(deepcopy(model), "t5", absolute=how)) for how in ("keep", "remove"))
    lagwise.hf.convert(model, "t5", absolute="fade")
    same(states(model), kept)
    lagwise.hf.fade(model, 0.5)
    between = states(model)
    assert min((between - kept).abs().max(), (between - removed).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="or fade them to 0"):
        states(model, LONG)
    model.save_pretrained(tmp_path)
    same(states(transformers.AutoModel.from_pretrained(tmp_path)), between, 0)
    lagwise.hf.fade(model, 0.0)
    same(states(model), removed)
    assert states(model, LONG).shape[1] == LONG.shape[1]


def test_huang4_is_that_of_its_equation():
    model = converted("huang4", "bert", max_lag=3, sizes=dict(num_hidden_layers=1))
    layer = layers(model)[0]
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        out = layer(x)[0]
        q, k, v = (part(x).view(2, 9, 2, 8).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
        lags = (torch.arange(9)[None] - torch.arange(9)[:, None]).clamp(-3, 3) + 3
        a = layer.lagwise_encoding.weight[0, lags]
        logits = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, a) + torch.einsum("bhjd,ijd->bhij", k, a)
        expected = ((logits / math.sqrt(8)).softmax(-1) @ v).transpose(1, 2).flatten(2)
    same(out, expected)


def test_t5_is_that_of_its_equation_in_gpt2():
    model = converted("t5", "gpt2", buckets=8, max_lag=16)
    layer = layers(model)[0]
    captured = {}
    layer.register_forward_hook(lambda module, inputs, output: captured.update(x=inputs[0], out=output[0]))
    states(model, LONG)
    with torch.no_grad():
        x, time = captured["x"], LONG.shape[1]
        q, k, v = (part.view(2, time, 2, 8).transpose(1, 2) for part in layer.c_attn(x).split(16, dim=2))
        lags = torch.arange(time)[None] - torch.arange(time)[:, None]
        bias = layer.lagwise_encoding.weight[:, t5_bucket(lags, 8, 16, True)]
        logits = (q @ k.mT / math.sqrt(8) + bias).masked_fill(lags > 0, -torch.inf)
        expected = layer.c_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    same(captured["out"], expected)


@pytest.mark.parametrize("name", ["t5", "rotary", "shaw", "sine-spe"])
def test_generating_with_a_cache_equals_generating_without(name):
    model = converted(name, "gpt2", "AutoModelForCausalLM")
    options = dict(max_new_tokens=LIMIT, do_sample=False, eos_token_id=None)
    expected = model.generate(SHORT, use_cache=False, **options)
    assert expected.shape[1] == 9 + LIMIT
    for kept in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(SHORT, use_cache=True, **kept, **options), expected)


def test_generating_beyond_kept_positions_is_refused():
    model = converted("t5", "gpt2", "AutoModelForCausalLM", absolute="keep")
    for kept in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with pytest.raises(ValueError, match=rf"at most {LIMIT} tokens.* but has {LIMIT + 1}"):
            model.generate(SHORT, max_new_tokens=9, do_sample=False, eos_token_id=None, **kept)


def test_a_bert_that_decodes_is_causal_and_its_cross_attention_has_no_positions():
    model = lagwise.hf.convert(plain("bert", "AutoModelForCausalLM", is_decoder=True, add_cross_attention=True), "t5")
    assert len(layers(model)) == 2 and all(layer.lagwise_encoding.causal for layer in layers(model))
    context = torch.randn(2, 5, 16)
    whole = states(model, LONG, encoder_hidden_states=context, use_cache=False)
    start = model(LONG[:, :20], encoder_hidden_states=context, use_cache=True)
    rest = states(model, LONG[:, 20:], encoder_hidden_states=context, past_key_values=start.past_key_values, use_cache=True)
    same(torch.cat([start.logits.detach(), rest], dim=1), whole)


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("name", RELATIVE)
def test_a_checkpoint_brings_back_the_converted_model(name, per_layer, tmp_path):
    model = converted(name, per_layer=per_layer)
    assert len(layers(model)) == (2 if per_layer else 1)
    model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    same(states(loaded, LONG), states(model, LONG), 0)
    assert not loaded.embeddings.position_embeddings.weight.requires_grad


def test_a_checkpoint_brings_back_fixed_codes(tmp_path):
    model = converted("sine-spe", fixed=True)
    expected = states(model.train(), LONG)
    model.save_pretrained(tmp_path)
    same(states(transformers.AutoModel.from_pretrained(tmp_path), LONG), expected, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_into_another_head_and_another_dtype(family, tmp_path):
    model = converted("t5", family)
    model.save_pretrained(tmp_path)
    head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    same(states(head.base_model, LONG), states(model, LONG), 0)
    head.save_pretrained(tmp_path / "head")
    same(states(transformers.AutoModel.from_pretrained(tmp_path / "head"), LONG), states(model, LONG), 0)
    half = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    same(states(half, LONG).float(), states(model, LONG), 0.5)


def heads_of(family: str) -> list[str]:
    module = getattr(transformers.models, family)
    modeling = getattr(module, f"modeling_{family}")
    base = next(kind for name, kind in vars(modeling).items() if name.lower() == f"{family}pretrainedmodel")
    return [name for name in modeling.__all__ if issubclass(getattr(modeling, name), base) and name != base.__name__]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_is_converted(family):
    names = heads_of(family)
    assert len(names) >= 6
    for name in names:
        model = getattr(transformers, name)(plain(family).config)
        assert len(layers(lagwise.hf.convert(model, "t5"))) == 2, name


def test_what_a_checkpoint_does_not_have_starts_neutral(tmp_path):
    model = converted("at5", attention="softmax", neutral=True, absolute="fade")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = {name for name in weights if "layer.1.attention.self.lagwise" in name or name.endswith("lagwise_factor")}
    save_file({name: x for name, x in weights.items() if name not in lost}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == lost
    table = layers(loaded)[1].lagwise_encoding.terms(-9, 9, scale=1.0).bias.values
    assert torch.equal(table, torch.zeros_like(table))
    assert loaded.embeddings.position_embeddings.lagwise_factor == 1.0
    slope = layers(loaded)[1].lagwise_encoding.slope
    assert slope.min() >= 1.0 and slope.max() <= 10.0


def test_a_config_alone_builds_a_converted_model_that_starts_neutral():
    config = lagwise.hf.convert(plain(), "shaw", absolute="keep").config
    model = transformers.AutoModel.from_config(config).eval()
    assert len(layers(model)) == 2 and not any(layer.lagwise_encoding.keys.any() for layer in layers(model))
    assert states(model).shape == (2, 9, 16)


def test_converting_again_replaces_the_first_conversion():
    model = converted("shaw", absolute="fade", per_layer=False)
    reference = lagwise.hf.convert(plain_copy(model), "t5", absolute="keep")
    lagwise.hf.convert(model, "t5", absolute="keep")
    assert model.state_dict().keys() == reference.state_dict().keys()
    assert model.config.lagwise == reference.config.lagwise
    same(states(model), states(reference), 0)
    lagwise.hf.convert(model, "none", attention="linear", feature_map="relu")
    assert not any("lagwise" in name for name in model.state_dict())
    lagwise.hf.convert(model, "t5", absolute="keep")
    same(states(model), states(reference), 0)
    assert all(weight.requires_grad for weight in model.parameters())


def plain_copy(model: nn.Module) -> nn.Module:
    copy = plain()
    copy.load_state_dict({name: x for name, x in model.state_dict().items() if "lagwise" not in name})
    return copy


@pytest.mark.parametrize("feature_map", [None, "relu", "elu"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_is_that_of_the_library_and_comes_back(name, feature_map, tmp_path):
    model = converted(name, attention="linear", feature_map=feature_map, sizes=dict(num_hidden_layers=1))
    layer = layers(model)[0]
    x = torch.randn(2, LONG.shape[1], 16)
    with torch.no_grad():
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
        seed = lagwise.noise.bits(torch.tensor(0), lagwise.noise.Stream.LAYER, 0)
        expected = lagwise.linear_attention(
            q, k, v, layer.lagwise_encoding, feature_map=layer.lagwise_feature_map, seed=seed, impl="dense"
        )
        same(layer(x)[0], expected.transpose(1, 2).flatten(2))
    model.save_pretrained(tmp_path)
    same(states(transformers.AutoModel.from_pretrained(tmp_path), LONG), states(model, LONG), 0)


@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_nothing_in_linear_attention(family):
    model = converted("t5", family, attention="linear")
    mask = torch.ones_like(LONG)
    mask[1, 14:] = 0
    batch = states(model, LONG, attention_mask=mask)
    same(batch[0], states(model, LONG[:1])[0])
    same(batch[1, :14], states(model, LONG[1:, :14])[0])


def test_projections_are_drawn_anew_and_each_layer_has_its_own():
    model = converted("t5", attention="linear")
    maps = [layer.lagwise_feature_map for layer in layers(model)]
    assert all(isinstance(phi, Favor) for phi in maps) and not torch.equal(maps[0].projection, maps[1].projection)
    before = [phi.projection.clone() for phi in maps]
    lagwise.hf.redraw(model)
    assert not any(torch.equal(phi.projection, old) for phi, old in zip(maps, before, strict=True))


@pytest.mark.parametrize("options", [{}, {"per_layer": False}, {"attention": "linear"}, {"absolute": "fade"}])
def test_copies_and_pickles_compute_the_same_with_weights_of_their_own(options):
    model = converted("t5", **options)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copy in (deepcopy(model), torch.load(file, weights_only=False)):
        same(states(copy), states(model), 0)
        with torch.no_grad():
            layers(copy)[0].lagwise_encoding.weight.mul_(-3.0)
        assert (states(copy) - states(model)).abs().max() > 1e-3


def test_one_encoding_for_all_layers_gets_the_gradients_of_all():
    model = converted("t5", per_layer=False)
    own, shared = layers(model), [module for module in model.modules() if isinstance(module, ConvertedAttention)]
    assert len(own) == 1 and len(shared) == 2 and sum("lagwise" in name for name in model.state_dict()) == 1
    apart = lagwise.hf.convert(deepcopy(model), "t5")
    for layer in layers(apart):
        layer.lagwise_encoding.load_state_dict(own[0].lagwise_encoding.state_dict())
    for each in (model, apart):
        each(SHORT)[0].square().sum().backward()
    same(own[0].lagwise_encoding.weight.grad, sum(layer.lagwise_encoding.weight.grad for layer in layers(apart)), 1e-3)


@pytest.mark.parametrize("options", [{}, {"attention": "linear"}])
@pytest.mark.parametrize("name", ["t5", "at5", "sine-spe"])
def test_autocast_computes_in_half_precision(name, options):
    model = converted(name, **options)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(SHORT)[0]
        out.float().square().sum().backward()
    same(out.detach().float(), states(model), 0.3)
    for layer in layers(model):
        assert all(weight.grad.isfinite().all() for weight in layer.lagwise_encoding.parameters())


def test_autocast_leaves_the_tables_alone():
    model = converted("xl").eval()
    with lagwise.lens.capture(model) as calls, torch.autocast("cpu", torch.bfloat16):
        model(SHORT)
    assert {table.values.dtype for call in calls for table in call.terms.tables().values()} == {torch.float32}


def test_gradient_checkpointing_changes_nothing():
    model = converted("sine-spe").train()
    gradients = []
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        model(SHORT)[0].square().sum().backward()
        gradients.append(layers(model)[0].lagwise_encoding.gate.grad.clone())
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def examples() -> list[dict[str, torch.Tensor]]:
    """Returns rows whose label is the order of their tokens: without positions all of them are the same."""
    orders = [torch.tensor([4, 5, 5, 6, 6]), torch.tensor([4, 6, 6, 5, 5])]
    return [dict(input_ids=orders[number % 2], labels=torch.tensor(number % 2)) for number in range(32)]


def trainer(model: nn.Module, folder: Path, steps: int, callbacks=()):
    """Returns a trainer whose callbacks are the given ones."""
    options = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3, lr_scheduler_type="constant",
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=options, train_dataset=examples(), callbacks=list(callbacks))


def losses(run) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "attention"), [("none", "softmax"), ("shaw", "softmax"), ("rotary", "linear")])
def test_the_trainer_learns_an_order_that_needs_positions(name, attention, tmp_path):
    model = lagwise.hf.convert(plain("bert", "AutoModelForSequenceClassification"), name, attention=attention)
    before = deepcopy(layers(model)[0].lagwise_encoding.state_dict())
    seen = losses(trainer(model, tmp_path, 80))
    assert min(seen[-4:]) > 0.65 if name == "none" else max(seen[-4:]) < 0.5
    assert not any(torch.equal(x, before[key]) for key, x in layers(model)[0].lagwise_encoding.state_dict().items())
    # Replicas of the model do not wait for a gradient that never comes.
    model.zero_grad()
    model(examples()[0]["input_ids"][None])[0].sum().backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_the_trainer_fades_absolute_positions(tmp_path):
    model = lagwise.hf.convert(plain("bert", "AutoModelForSequenceClassification"), "t5", absolute="fade")
    table = next(module for module in model.modules() if isinstance(module, FadedEmbedding))
    factors = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *args, **options):
            factors.append(float(table.lagwise_factor))

    run = trainer(model, tmp_path, 6, [lagwise.hf.FadeCallback(4), Watch()])
    run.train()
    assert factors == [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_lora_trains_saves_and_loads(tmp_path):
    base = lagwise.hf.convert(plain("bert", "AutoModelForSequenceClassification"), "shaw", per_layer=False)
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["lagwise_encoding"])
    model = peft.get_peft_model(deepcopy(base), settings)
    seen = losses(trainer(model, tmp_path / "runs", 50))
    assert max(seen[-4:]) < 0.9 * min(seen[:4])
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("lagwise_encoding" in name for name in learned) and not any("original_module" in name for name in learned)
    out = states(model.eval(), LONG)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base.eval(), str(tmp_path / "adapter")).eval()
    same(states(loaded, LONG), out)
    with loaded.disable_adapter():
        assert (states(loaded, LONG) - out).abs().max() > 1e-3


def test_accelerate_prepares_and_steps():
    model = converted("huang4")
    machine = accelerate.Accelerator(cpu=True)
    model, optimizer = machine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = layers(model)[0].lagwise_encoding.weight.clone()
    machine.backward(model(SHORT)[0].square().mean())
    optimizer.step()
    assert not torch.equal(layers(model)[0].lagwise_encoding.weight, before)


def test_another_attention_is_refused(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation must be 'lagwise'.* but is 'eager'"):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"call model.set_attn_implementation"):
        model(SHORT)


BAD = {
    "an encoding itself": (dict(encoding=lagwise.T5(heads=2)), "encoding must be the name of an encoding.* but is T5"),
    "an unknown name": (dict(encoding="t6"), "unknown encoding 't6': did you mean 't5'"),
    "an absolute encoding": (dict(encoding="sinusoidal"), "encoding must be relative.* but 'sinusoidal' is absolute"),
    "an unknown option": (dict(bucket=8), "unknown option 'bucket' for encoding 't5': did you mean 'buckets'"),
    "an option of the model": (dict(heads=8), "options must not have heads, which the model decides"),
    "a wrong option": (dict(buckets=3), "buckets must be at least 4"),
    "an option that no config holds": (dict(buckets=torch.int64), "options must be numbers, words and lists"),
    "absolute": (dict(absolute="drop"), "absolute must be one of remove, keep, fade, but is 'drop'"),
    "attention": (dict(attention="flash"), "attention must be one of softmax, linear, but is 'flash'"),
    "per_layer": (dict(per_layer="gate"), "per_layer must be True or False, but is 'gate'"),
    "a map without linear attention": (dict(feature_map="relu"), "feature_map belongs to linear attention"),
    "an unknown map": (dict(attention="linear", feature_map="gelu"), "feature_map must be the name of one.* but is 'gelu'"),
    "an encoding of linear attention alone": (dict(encoding="permute"), "pass attention='linear'"),
    "an encoding without a linear form": (dict(encoding="shaw", attention="linear"), "the encoding has a query table"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_use_is_refused_and_changes_nothing(options, message):
    model = plain()
    before = states(model)
    with pytest.raises(ValueError, match=message):
        lagwise.hf.convert(model, **{"encoding": "t5", **options})
    assert not hasattr(model.config, "lagwise") and not layers(model)
    same(states(model), before, 0)


def test_the_config_holds_the_one_name_of_an_encoding():
    assert lagwise.hf.convert(plain(), "Relative_Key_Query").config.lagwise["encoding"] == "huang4"


def test_models_off_the_list_are_refused():
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11)
    for model in (transformers.T5Model(config), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"model must be one of BERT, RoBERTa, DistilBERT, ELECTRA, GPT-2.* but is"):
            lagwise.hf.convert(model, "t5")
    with pytest.raises(ValueError, match="position_embedding_type is 'relative_key'"):
        lagwise.hf.convert(plain("bert", position_embedding_type="relative_key"), "t5")


def test_linear_attention_is_refused_with_dropout_and_in_causal_models():
    with pytest.raises(ValueError, match=r"must be 0 with attention='linear'.* but is 0.1: .*attention_probs_dropout_prob=0.0"):
        lagwise.hf.convert(plain(attention_probs_dropout_prob=0.1), "t5", attention="linear")
    with pytest.raises(ValueError, match=r"attention must be 'softmax' in a causal model.*GPT2Model"):
        lagwise.hf.convert(plain("gpt2"), "t5", attention="linear")
    model = converted("t5", attention="linear").train()
    layers(model)[1].dropout.p = 0.2
    with pytest.raises(ValueError, match=r"must be 0 with attention='linear'.* but is 0.2"):
        model(SHORT)


def test_fading_and_redrawing_need_something_to_fade_and_redraw():
    model = converted()
    with pytest.raises(ValueError, match="model must have positions that fade"):
        lagwise.hf.fade(model, 0.5)
    with pytest.raises(ValueError, match="model must have feature maps 'favor'"):
        lagwise.hf.redraw(model)
    with pytest.raises(ValueError, match="factor must be between 0 and 1, but is 2"):
        lagwise.hf.fade(model, 2)
    with pytest.raises(ValueError, match="steps must be at least 1, but is 0"):
        lagwise.hf.FadeCallback(0)
