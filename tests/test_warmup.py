"""`lagwise warmup`: which calls it makes, what it says, and what it refuses where no kernels can be made."""

import contextlib
import threading

import pytest
import torch
from transformers import BertConfig, GPT2Config, T5Config
from typer.testing import CliRunner

import lagwise
import lagwise.hf
from lagwise import warming
from lagwise.encodings import options_of
from lagwise.hf import first_steps
from lagwise.lab.cli import app
from lagwise.ops.kernels import ahead
from lagwise.warming import Step, Warmed

CPU = torch.device("cpu")
SIZES = {"heads": 2, "head_dim": 8}

T5 = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=6, num_decoder_layers=5, num_heads=2)
BERT_SIZES = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 16}
BERT = BertConfig(vocab_size=20, max_position_embeddings=32, **BERT_SIZES)
OLD_BERT = BertConfig(vocab_size=20, position_embedding_type="relative_key", **BERT_SIZES)
GPT2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that takes steps as a GPU would."""
    kernels = ahead.Kernels({"a", "b"}, {"b", "c"})
    monkeypatch.setattr(warming, "check_gpu", lambda: None)
    monkeypatch.setattr(first_steps, "check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "counted_kernels", lambda: contextlib.nullcontext(kernels))


@pytest.fixture
def steps(gpu, monkeypatch):
    """Keeps steps instead of taking them."""
    kept = []

    def take_steps(steps, jobs, watch):
        kept.extend(steps)
        watch("", 0, len(steps))
        for count, each in enumerate(steps, 1):
            watch(each.words, count, len(steps))
        return Warmed(3, 4, 5.0)

    monkeypatch.setattr(warming, "take_steps", take_steps)
    monkeypatch.setattr(first_steps, "take_steps", take_steps)
    return kept


def invoke(*arguments):
    return CliRunner().invoke(app, ["warmup", *map(str, arguments)])


def words(output):
    return " ".join(output.split())


# Calls of an encoding


def test_there_is_a_call_for_each_length_type_and_kind(steps):
    found = lagwise.warmup("t5", **SIZES, times=[16, 9], dtypes=[torch.float16, torch.float32], padded=True, packed=True)
    assert found == Warmed(3, 4, 5.0)
    kinds = ["", " lengths", " cu_seqlens"]
    assert [each.words for each in steps] == [f"{d} T{t}{k}" for d in ("float16", "float32") for t in (16, 9) for k in kinds]


def test_inference_decodes_where_calls_are_causal(steps):
    lagwise.warmup("t5", **SIZES, times=[16], causal=True, padded=True, packed=True, training=False)
    lagwise.warmup("t5", **SIZES, times=[16], training=False)
    assert [each.words for each in steps] == [
        "bfloat16 T16 causal", "bfloat16 T16 causal decoding", "bfloat16 T16 causal lengths",
        "bfloat16 T16 causal lengths decoding", "bfloat16 T16 causal cu_seqlens", "bfloat16 T16",
    ]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["t5", "at5", "shaw", "huang4", "alibi", "rotary"])
def test_calls_are_those_that_were_asked_for(name, training, steps, monkeypatch):
    seen = []
    real = lagwise.attention

    def attention(q, k, v, encoding, **options):
        seen.append((q.shape, k.shape, q.dtype, {p.dtype for p in encoding.parameters()}, q.requires_grad, options))
        assert q.stride(1) < q.stride(2) or q.shape[2] == 1
        return real(q, k, v, encoding, **options)

    monkeypatch.setattr(warming, "attention", attention)
    lagwise.warmup(
        name, heads=4, key_heads=2, head_dim=16, times=[24], dtypes=[torch.float16], batch=3, causal=True, dropout=0.1,
        padded=True, packed=True, training=training, **({"max_lag": 20} if "max_lag" in options_of(name) else {}),
    )  # fmt: skip
    for each in steps:
        each.run(CPU)
    shapes = [(q, k) for q, k, *_ in seen]
    whole, one, keys = (3, 4, 24, 16), (3, 4, 1, 16), (3, 2, 24, 16)
    packed = ((1, 4, 24, 16), (1, 2, 24, 16))
    decoding = [] if training else [(one, keys)]
    assert shapes == [(whole, keys), *decoding, (whole, keys), *decoding, packed]
    for _, _, dtype, tables, learns, options in seen:
        assert dtype == torch.float16 and learns is training and options["causal"]
        assert tables <= {torch.float32 if training else torch.float16} and options["dropout"] == (0.1 if training else 0.0)
    assert [("lengths" in each[-1], "cu_seqlens" in each[-1]) for each in seen][-2:] == [(True, False), (False, True)]
    assert [each[-1]["query_start"] for each in seen][: 1 + len(decoding)] == [0, 23][: 1 + len(decoding)]


def test_gradients_are_asked_for_in_training_alone(steps):
    encoding = lagwise.make("t5", heads=2)
    lagwise.warmup(encoding, **SIZES, times=[9], dtypes=[torch.float32])
    lagwise.warmup(encoding, **SIZES, times=[9], dtypes=[torch.float32], training=False)
    trained, asked = (each.run.args[0] for each in steps)
    for each in steps:
        each.run(CPU)
    assert all(p.grad is not None for p in trained.parameters()) and all(p.grad is None for p in asked.parameters())
    # The encoding that was given is left alone.
    assert all(p.grad is None for p in encoding.parameters()) and encoding.training


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_weights_are_those_of_autocast_or_have_the_type_of_the_products(autocast, dtype, steps):
    lagwise.warmup("t5", **SIZES, times=[9], autocast=autocast)
    (step,) = steps
    step.run(CPU)
    assert {p.dtype for p in step.run.args[0].parameters()} == {dtype}


def test_bad_arguments_are_named():
    for options, message in (
        ({"times": [0]}, r"times\[0\] must be"),
        ({"batch": 0}, "batch must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"causal": 1}, "causal must be"),
        ({"training": None}, "training must be"),
    ):
        with pytest.raises(ValueError, match=message):
            lagwise.warmup("t5", **SIZES, **options)


def test_options_of_an_encoding_that_is_made_are_refused(gpu):
    with pytest.raises(ValueError, match="options must be left out"):
        lagwise.warmup(lagwise.make("t5", heads=2), **SIZES, max_lag=4)
    with pytest.raises(ValueError, match="absolute"):
        lagwise.warmup("sinusoidal", **SIZES, dim=16, times=[4])


# Steps


def test_steps_are_taken_at_the_same_time_and_counted(gpu):
    together, told = threading.Barrier(2, timeout=20), []
    steps = [Step("one", lambda device: together.wait()), Step("two", lambda device: together.wait())]
    found = warming.take_steps(steps, 2, lambda *event: told.append(event))
    # A kernel that was made by one of them may have been found by the other.
    assert found[:2] == (2, 1) and found.seconds > 0
    assert told[0] == ("", 0, 2) and {each[0] for each in told[1:]} == {"one", "two"}
    assert [each[1:] for each in told[1:]] == [(1, 2), (2, 2)]


def test_after_a_step_that_fails_no_other_is_begun(gpu):
    begun = []

    def fails(device):
        begun.append(device)
        raise ValueError("no such table")

    with pytest.raises(ValueError, match="no such table"):
        warming.take_steps([Step("one", fails)] * 50, 1, lambda *event: None)
    assert len(begun) < 50 and begun[0] == torch.device("cuda", 0)


# Models


@pytest.mark.parametrize(
    ("config", "encoding"),
    [(T5, None), (BERT, "huang4"), (BertConfig(**BERT_SIZES, position_embedding_type="relative_key"), None)],
)
def test_a_small_model_has_few_layers_and_our_attention(config, encoding):
    before = config.to_dict()
    model = first_steps.small_model(config, encoding)
    layers = [name for name, module in model.named_modules() if type(module).__name__ in ("T5Block", "BertLayer")]
    assert len(layers) == (4 if config is T5 else 2) and config.to_dict() == before
    assert all(
        part.config._attn_implementation == "lagwise" for part in model.modules() if hasattr(part, "set_attn_implementation")
    )
    if config is not T5:
        assert any(hasattr(module, "lagwise_terms") for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("config", "encoding"), [(T5, None), (BERT, "huang4"), (GPT2, "t5")])
def test_a_model_takes_steps_with_padding_and_without(config, encoding, training, steps, monkeypatch):
    calls = []
    real = lagwise.hf.interface.attention

    def attention(q, k, v, terms, **options):
        calls.append((q.shape[2], k.shape[2], options["key_mask"] is not None, options["causal"]))
        return real(q, k, v, terms, **options)

    monkeypatch.setattr(lagwise.hf.interface, "attention", attention)
    found = lagwise.hf.warmup(config, encoding, times=[12], training=training)
    assert found.made == 3 and [each.words for each in steps] == ["bfloat16 T12", "bfloat16 T12 padded"]
    for each in steps:
        each.run(CPU)
        model = each.run.args[0]
        weights = list(model.parameters())
        assert {weight.dtype for weight in weights} == {torch.float32 if training else torch.bfloat16}
        assert any(weight.grad is not None for weight in weights) is training
    generates = config is not BERT and not training
    assert {padded for _, _, padded, _ in calls} == {True, False}
    assert {(queries, keys) for queries, keys, _, _ in calls} <= {(12, 12), (1, 13), (1, 12)}
    assert any(queries == 1 for queries, *_ in calls) is generates


def test_lengths_that_a_model_has_no_positions_for_are_refused(gpu):
    with pytest.raises(ValueError, match="times must be at most 32, for which the model has positions, but 40 is among them"):
        lagwise.hf.warmup(BERT, times=[16, 40])
    with pytest.raises(ValueError, match="options of an encoding must be left out without one, but max_lag are given"):
        lagwise.hf.warmup(BERT, times=[16], max_lag=4)


# The command


def test_the_command_tells_what_it_did(steps):
    result = invoke("--encoding", "shaw", "--heads", 2, "--head-dim", 8, "--max-lag", 4, "--time", 16, "--time", 9)
    assert result.exit_code == 0, result.output
    assert "1 of 2: bfloat16 T16" in result.output and "2 of 2: bfloat16 T9" in result.output
    assert "3 kernels made, 4 found on disk, in 5.0 s" in result.output
    assert steps[0].run.args[0].max_lag == 4


def test_the_command_reads_a_folder(steps, tmp_path):
    T5.save_pretrained(tmp_path)
    result = invoke(tmp_path, "--time", 16, "--dtype", "float32", "--inference")
    assert result.exit_code == 0, result.output
    assert [each.words for each in steps] == ["float32 T16", "float32 T16 padded"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoding", "t5"], "--heads, --head-dim must be given without a model"),
        (["--heads", 2, "--head-dim", 8], "--encoding must be given without a model"),
        (["a-model", "--heads", 2, "--causal"], "--heads, --causal must be left out with a model"),
        (["--encoding", "t5", "--heads", 2, "--head-dim", 8, "--dtype", "int8"], "--dtype must be"),
        (["--encoding", "t6", "--heads", 2, "--head-dim", 8], "unknown encoding 't6'"),
    ],
)
def test_the_command_refuses_in_words(arguments, message, gpu):
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in words(result.output), result.output


@pytest.mark.parametrize("arguments", [["--encoding", "t5", "--heads", 2, "--head-dim", 8], ["MODEL", "--time", 8]])
def test_without_a_gpu_the_command_says_what_is_missing(arguments, monkeypatch, tmp_path):
    T5.save_pretrained(tmp_path)
    arguments = [tmp_path if each == "MODEL" else each for each in arguments]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke(*arguments)
    assert result.exit_code == 2 and "torch finds no CUDA device here" in words(result.output)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = invoke(*arguments)
    assert result.exit_code == 2 and "TRITON_INTERPRET must not be 1" in words(result.output)
    monkeypatch.setattr(warming, "HAS_TRITON", False)
    result = invoke(*arguments)
    assert result.exit_code == 2 and "Triton, which is not installed: pip install" in words(result.output)
