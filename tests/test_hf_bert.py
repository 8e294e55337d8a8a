"""BERT with relative positions: the numbers of transformers 4.57.6, every head class, checkpoints that go back and forth."""

import importlib.util
import io
import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from lagwise.hf.bert import FAMILIES, TYPES, UnusedEmbedding, from_pretrained_relative, restore_relative

HERE = Path(__file__).parent / "fixtures"
specification = importlib.util.spec_from_file_location("make_bert_relative", HERE / "make_bert_relative.py")
recipe = importlib.util.module_from_spec(specification)
specification.loader.exec_module(recipe)
STORED = json.loads((HERE / "bert_relative.json").read_text())

HEADS = (
    "BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering", "BertForTokenClassification",
    "BertForMultipleChoice", "BertForNextSentencePrediction", "BertForPreTraining", "BertLMHeadModel",
)  # fmt: skip


def config_of(kind: str, **options):
    return transformers.BertConfig(**{**recipe.SIZES, "position_embedding_type": kind, **options})


def plain(kind: str, head: str = "BertModel", **options):
    """Returns a model as transformers 5 makes it, without relative positions."""
    return getattr(transformers, head)(config_of(kind, **options)).eval()


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    lags, width = 2 * model.config.max_position_embeddings - 1, model.config.hidden_size // model.config.num_attention_heads
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("SelfAttention")]
    return {f"{name}.distance_embedding.weight": torch.randn(lags, width) for name in names}


def relative(kind: str, head: str = "BertModel", **options):
    """Returns a model with relative positions and random weights."""
    model = plain(kind, head, **options)
    restore_relative(model, tables_of(model))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model


@pytest.fixture(params=TYPES)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(kind, tmp_path) -> str:
    relative(kind).save_pretrained(tmp_path)
    return str(tmp_path)


def logits(model: nn.Module, tokens: torch.Tensor = recipe.TOKENS, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **options)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_outputs_are_those_of_transformers_4(kind, dtype, tolerance):
    model = relative(kind).to(dtype)
    recipe.fill(model)
    states, _ = recipe.outputs(model)
    torch.testing.assert_close(states, torch.tensor(STORED[kind]["states"], dtype=dtype), rtol=0, atol=tolerance)


def test_gradients_are_those_of_transformers_4(kind):
    model = relative(kind).double()
    recipe.fill(model)
    _, gradient = recipe.outputs(model)
    torch.testing.assert_close(gradient, torch.tensor(STORED[kind]["gradient"], dtype=torch.float64), rtol=0, atol=1e-6)


def test_gradient_reaches_every_table_and_no_absolute_position(kind):
    model = relative(kind).train()
    model(recipe.TOKENS).last_hidden_state.square().sum().backward()
    for layer in model.encoder.layer:
        assert layer.attention.self.distance_embedding.weight.grad.abs().sum() > 0
    assert model.embeddings.position_embeddings.weight.grad is None


@pytest.mark.parametrize("head", HEADS)
def test_every_head_loads_without_missing_or_unexpected_keys(kind, head, tmp_path):
    model = relative(kind, head)
    model.save_pretrained(tmp_path)
    loaded, report = from_pretrained_relative(tmp_path, output_loading_info=True)
    assert type(loaded) is getattr(transformers, head)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = recipe.TOKENS[:, None] if head == "BertForMultipleChoice" else recipe.TOKENS
    torch.testing.assert_close(logits(loaded, tokens), logits(model, tokens), rtol=0, atol=0)
    # The names of transformers 4, and the config that it reads.
    assert {name for name in loaded.state_dict() if "distance" in name} == set(tables_of(plain(kind, head)))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["position_embedding_type"] == kind and written["architectures"] == [head]


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_head_loads_the_body_of_another(kind, head, folder):
    model = from_pretrained_relative(folder, getattr(transformers, head))
    body = from_pretrained_relative(folder)
    torch.testing.assert_close(
        logits(model.bert, attention_mask=recipe.MASK), logits(body, attention_mask=recipe.MASK), rtol=0, atol=0
    )


def test_an_auto_class_finds_the_head(kind, folder):
    model = from_pretrained_relative(folder, transformers.AutoModelForSequenceClassification, num_labels=3)
    assert type(model) is transformers.BertForSequenceClassification
    assert logits(model).shape == (2, 3)


@pytest.mark.parametrize("head", ["BertModel", "BertForMaskedLM"])
def test_a_loaded_model_is_restored_from_a_state_dict_or_a_path(kind, folder, head):
    expected = from_pretrained_relative(folder)
    for source in (expected.state_dict(), folder):
        model = getattr(transformers, head).from_pretrained(folder).eval()
        body = getattr(model, "bert", model)
        assert (logits(body) - logits(expected)).abs().max() > 0.1
        assert restore_relative(model, source) is model
        torch.testing.assert_close(logits(body), logits(expected), rtol=0, atol=0)


def test_a_head_gives_its_tables_to_the_body(kind):
    head = relative(kind, "BertForMaskedLM")
    body = plain(kind)
    body.load_state_dict(head.bert.state_dict(), strict=False)
    restore_relative(body, head.state_dict())
    torch.testing.assert_close(logits(body), logits(head.bert), rtol=0, atol=0)


def test_restoring_twice_changes_nothing(kind):
    model = relative(kind)
    before = logits(model)
    restore_relative(model, model.state_dict())
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(kind, side):
    model = relative(kind)
    rows = [torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([8, 9, 10, 1]), torch.tensor([5])]
    length = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        tokens[number, where], mask[number, where] = row, 1
    batch = logits(model, tokens, attention_mask=mask)
    for number, row in enumerate(rows):
        torch.testing.assert_close(batch[number][mask[number].bool()], logits(model, row[None])[0], rtol=1e-5, atol=1e-5)


def test_absolute_positions_are_kept_but_not_added(kind):
    model = relative(kind)
    before = logits(model)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.add_(1.0)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert "embeddings.position_embeddings.weight" in model.state_dict()


def test_copies_and_pickles_have_their_own_tables(kind):
    model = relative(kind)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copy in (deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(logits(copy), logits(model), rtol=0, atol=0)
        with torch.no_grad():
            copy.encoder.layer[0].attention.self.distance_embedding.weight.mul_(3.0)
        assert (logits(copy) - logits(model)).abs().max() > 1e-3


def test_a_decoder_sees_relative_positions_and_its_cross_attention_none(kind, tmp_path):
    model = relative(kind, "BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model.save_pretrained(tmp_path)
    model = from_pretrained_relative(tmp_path)
    assert sum("distance_embedding" in name for name in model.state_dict()) == 2
    context = torch.randn(2, 5, 8)
    whole = logits(model, encoder_hidden_states=context, use_cache=False)
    with torch.no_grad():
        start = model(recipe.TOKENS[:, :4], encoder_hidden_states=context, use_cache=True)
        rest = model(
            recipe.TOKENS[:, 4:], encoder_hidden_states=context, past_key_values=start.past_key_values, use_cache=True
        ).logits
    torch.testing.assert_close(torch.cat([start.logits, rest], dim=1), whole, rtol=1e-5, atol=1e-5)


def test_generating_with_a_cache_equals_generating_without(kind):
    model = relative(kind, "BertLMHeadModel", is_decoder=True)
    tokens = recipe.TOKENS[:, :3]
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(tokens, use_cache=False, **options)
    for kept in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(tokens, use_cache=True, **kept, **options), expected)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        model.generate(tokens, **{**options, "max_new_tokens": 7})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_saves_and_loads(kind, family, tmp_path):
    sizes = {**recipe.SIZES, "position_embedding_type": kind, "pad_token_id": 0, "embedding_size": 8, "default_language": "en_XX"}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModel.from_config(config).eval()
    restore_relative(model, tables_of(model))
    before = logits(model)
    model.save_pretrained(tmp_path)
    loaded, report = from_pretrained_relative(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(loaded), before, rtol=0, atol=0)
    with torch.no_grad():
        loaded.embeddings.position_embeddings.weight.add_(1.0)
    torch.testing.assert_close(logits(loaded), before, rtol=0, atol=0)
    loaded(recipe.TOKENS)[0].square().sum().backward()
    assert all(layer.attention.self.distance_embedding.weight.grad.abs().sum() > 0 for layer in loaded.encoder.layer)


def test_precision_and_dtype_are_those_that_are_asked_for(kind, folder):
    model = from_pretrained_relative(folder, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    exact = from_pretrained_relative(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(model).float(), logits(exact), rtol=0.1, atol=0.2)


def test_gradient_checkpointing_changes_nothing(kind):
    model = relative(kind).train()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(recipe.TOKENS).last_hidden_state.square().sum().backward()
        gradients.append(model.encoder.layer[0].attention.self.distance_embedding.weight.grad.clone())
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_an_input_beyond_the_tables_is_refused(kind):
    model = relative(kind)
    assert logits(model, torch.ones(1, 8, dtype=torch.int64)).shape == (1, 8, 8)
    for options in ({}, {"token_type_ids": torch.zeros(1, 9, dtype=torch.int64)}):
        with pytest.raises(ValueError, match=r"at most 8 tokens.* but has 9"):
            model(torch.ones(1, 9, dtype=torch.int64), **options)
    with pytest.raises(ValueError, match=r"at most 8 tokens.* but has 9"):
        model(inputs_embeds=torch.ones(1, 9, 8))


def test_another_attention_is_refused(kind, folder):
    with pytest.raises(ValueError, match="attn_implementation must be 'lagwise', but is 'eager'"):
        from_pretrained_relative(folder, attn_implementation="eager")
    model = from_pretrained_relative(folder)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"call model.set_attn_implementation"):
        model(recipe.TOKENS)


def test_a_model_without_relative_positions_is_refused(tmp_path):
    model = plain("absolute")
    with pytest.raises(ValueError, match=r"position_embedding_type must be .* but is 'absolute'"):
        restore_relative(model, tables_of(model))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"position_embedding_type must be .* but is 'absolute'"):
        from_pretrained_relative(tmp_path)


def test_another_family_is_refused():
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11)
    with pytest.raises(ValueError, match="model_type is 't5'"):
        restore_relative(transformers.T5Model(config), {})


def test_a_checkpoint_that_lost_its_tables_is_refused(kind, folder, tmp_path):
    transformers.BertModel.from_pretrained(folder).save_pretrained(tmp_path / "lossy")
    with pytest.raises(ValueError, match="Take the original checkpoint"):
        from_pretrained_relative(tmp_path / "lossy")
    with pytest.raises(ValueError, match=r"has no encoder\.layer\.0\.attention\.self\.distance_embedding\.weight"):
        restore_relative(plain(kind), {})


def test_tables_of_another_shape_are_refused(kind):
    model = plain(kind)
    tables = {name: table[1:] for name, table in tables_of(model).items()}
    with pytest.raises(ValueError, match=r"must have shape \(15, 4\).* but has shape \(14, 4\)"):
        restore_relative(model, tables)
    # Nothing was changed.
    assert not isinstance(model.embeddings.position_embeddings, UnusedEmbedding)
    assert not any("distance_embedding" in name for name in model.state_dict())


def test_a_class_that_is_no_model_is_refused(folder, kind):
    with pytest.raises(ValueError, match="model_class must be a model or an auto class"):
        from_pretrained_relative(folder, nn.Linear)


def test_a_checkpoint_that_names_no_class_asks_for_one(folder, kind):
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["BertForNothing"]}))
    with pytest.raises(ValueError, match="model_class must be given"):
        from_pretrained_relative(folder)
