"""Every argument of every public call refuses what it cannot use, in words that name it, what was given and what is expected.

`GOOD` has a right call of each. A row of `BAD` has a call, an argument of it, values that this cannot have, and what is expected.
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beartype import BeartypeConf
from beartype.door import is_bearable
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lagwise
from lagwise import FeatureTransform, LagTable, Terms, linear, nn
from lagwise.errors import shown

QUICKLY = settings(deadline=None, max_examples=150, derandomize=True)

BATCH, HEADS, TIME, WIDTH = 2, 2, 6, 4
DIM = HEADS * WIDTH


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


Q = zeros(BATCH, HEADS, TIME, WIDTH)
X = zeros(BATCH, TIME, DIM)
TENSORS = dict(q=Q, k=Q, v=Q)
SIZES = dict(heads=HEADS, head_dim=WIDTH)
LAGS = dict(first=-4, last=4, scale=1.0)
POSITIONS = torch.arange(TIME)
STATE = linear.prefill(Q, Q, Q)[1]
SUMMARY = linear.summary(Q, Q)
TABLE = LagTable(zeros(HEADS, 3), -1)


def same(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors[:2]


GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (lagwise.attention, TENSORS),
    "which_impl": (lagwise.which_impl, TENSORS),
    "linear_attention": (lagwise.linear_attention, TENSORS),
    "prefill": (linear.prefill, TENSORS),
    "step": (linear.step, dict(TENSORS, state=STATE)),
    "summary": (linear.summary, dict(k=Q, v=Q)),
    "recall": (linear.recall, dict(q=Q, state=SUMMARY)),
    "make": (lagwise.make, dict(name="t5", heads=HEADS)),
    "Favor": (lagwise.Favor, dict(width=WIDTH)),
    "redraw": (lagwise.Favor(WIDTH).redraw, {}),
    "LagTable": (LagTable, dict(values=zeros(HEADS, 3), first=-1)),
    "LagTable.at": (TABLE.at, dict(lags=POSITIONS)),
    "LagTable.window": (TABLE.window, dict(first=-4, last=4)),
    "Terms": (Terms, {}),
    "FeatureTransform": (FeatureTransform, dict(function=same)),
    "T5.from_weight": (lagwise.T5.from_weight, dict(weight=zeros(32, HEADS))),
    "Shaw.from_tables": (lagwise.Shaw.from_tables, dict(keys=zeros(5, WIDTH), heads=HEADS)),
    "Shaw.from_distance_embedding": (lagwise.Shaw.from_distance_embedding, dict(weight=zeros(5, WIDTH), heads=HEADS)),
    "HuangM4.from_distance_embedding": (lagwise.HuangM4.from_distance_embedding, dict(weight=zeros(5, WIDTH), heads=HEADS)),
    "Sinusoidal.embed": (lagwise.Sinusoidal(dim=DIM).embed, dict(x=X, positions=POSITIONS)),
    "Learned.embed": (lagwise.Learned(dim=DIM).embed, dict(x=X, positions=POSITIONS)),
    "T5.terms": (lagwise.T5(heads=HEADS).terms, LAGS),
    "Rotary.linear_terms": (lagwise.Rotary(head_dim=WIDTH).linear_terms, LAGS),
    "SineSPE.exact_terms": (lagwise.SineSPE(**SIZES).exact_terms, LAGS),
    "RelativeAttention": (nn.RelativeAttention, dict(dim=DIM, heads=HEADS)),
    "Layer": (nn.Layer, dict(dim=DIM, heads=HEADS)),
    "Encoder": (nn.Encoder, dict(dim=DIM, layers=1, heads=HEADS)),
    "Decoder": (nn.Decoder, dict(dim=DIM, layers=1, heads=HEADS)),
    "RelativeAttention.forward": (nn.RelativeAttention(DIM, heads=HEADS).forward, dict(x=X)),
    "Layer.forward": (nn.Layer(DIM, heads=HEADS).forward, dict(x=X)),
    "Encoder.forward": (nn.Encoder(DIM, layers=1, heads=HEADS).forward, dict(x=X)),
    "Decoder.forward": (nn.Decoder(DIM, layers=1, heads=HEADS, cross=True).forward, dict(x=X, context=X)),
    **{
        kind.__name__: (
            kind,
            {name: value for name, value in dict(SIZES, dim=DIM).items() if name in inspect.signature(kind).parameters},
        )
        for kind in lagwise.ENCODINGS.values()
    },
}

SIZE, SWITCH, SEED = "a whole number of at least 1", "True or False", "a tensor with one integer"
RATIO, RANGE, WINDOW = "at least 0 and less than 1", "a lag, a whole number from", "two numbers of lags of at least 0"
FOUR = r"\[batch, heads, time, dim\]"
INPUT = rf"\[batch, time, {DIM}\]"
NO_FUNCTION, NO_TABLE = "a function of", "a LagTable or None"

BAD: list[tuple[str, str, list[Any], str]] = [
    ("attention", "q", [None, [1.0], zeros(2, 3), zeros(1, 2, 3, 4, 5)], FOUR),
    ("attention", "q", [Q.long(), Q.bool()], "float64, float32, float16 or bfloat16"),
    ("attention", "q", [zeros(BATCH, HEADS, 0, WIDTH)], "not be empty"),
    ("attention", "k", ["k", zeros(6)], FOUR),
    ("attention", "k", [Q.double(), Q.to("meta")], "the dtype and device of q"),
    ("attention", "v", [Q[:1]], "the batch of q"),
    ("attention", "encoding", ["t5", lagwise.T5, 3, TABLE, Q], "an Encoding, Terms or None"),
    ("attention", "causal", ["no", 1, 0.0, None, torch.tensor(True)], SWITCH),
    ("attention", "return_lse", ["yes", 1, None], SWITCH),
    ("attention", "lengths", [3, [6, 6], (6, 6)], "a tensor of shape"),
    ("attention", "lengths", [torch.tensor([6]), torch.tensor([6.0, 6.0])], "int64 or int32 of shape"),
    ("attention", "lengths", [torch.tensor([6, 6], device="meta")], "on cpu, where k is"),
    ("attention", "key_mask", [True, [[True]]], "a tensor of shape"),
    ("attention", "key_mask", [zeros(BATCH, TIME), zeros(TIME, TIME, dtype=torch.bool)], "bool of shape"),
    ("attention", "cu_seqlens", [[0, 6], 6], r"a tensor of integers, \[sequences \+ 1\]"),
    ("attention", "window", [3, (True, False), (1,), (1.0, 2), (-1, 0), "ab", (None, 3)], WINDOW),
    ("attention", "query_start", [True, 1.5, "1", None, [0, 0]], "a whole number or a tensor of them"),
    ("attention", "query_start", [2**70, -(2**40)], "a whole number from"),
    ("attention", "query_start", [torch.tensor([0.0, 1.0])], "int64 or int32"),
    ("attention", "scale", [True, "1", math.nan, -math.inf, 2**70, torch.tensor(1.0)], "a finite number or None"),
    ("attention", "dropout", [None, "0.1", True, math.nan, 1, -0.5], RATIO),
    ("attention", "seed", [0, 1.5, "a"], SEED),
    ("attention", "seed", [torch.tensor([1, 2]), torch.tensor(1.5)], "int64 or int32 of shape"),
    ("attention", "impl", [None, "flash", "Dense", ["split"]], "one of auto, dense, blockwise, split, triton"),
    ("which_impl", "causal", ["no"], SWITCH),
    ("which_impl", "query_start", [2**70], "a whole number from"),
    ("linear_attention", "causal", ["no", 1], SWITCH),
    ("linear_attention", "feature_map", [None, "gelu", lagwise.Favor, ["relu"]], "a FeatureMap or one of favor, relu, elu"),
    ("linear_attention", "impl", [None, "split"], "one of auto, dense, chunked, recurrent, fft"),
    ("linear_attention", "scale", [True, "1"], "a finite number or None"),
    ("prefill", "seed", [0], SEED),
    ("step", "state", [None, (Q, Q)], "a State, which lagwise.linear.prefill and lagwise.linear.summary return"),
    ("summary", "k", [None, zeros(2)], FOUR),
    ("recall", "state", ["a"], "a State"),
    ("make", "name", [None, 3, lagwise.T5], "the name of an encoding"),
    ("make", "strict", ["no", 1], SWITCH),
    ("make", "head_dim", ["a", 0, 4.0], SIZE),
    ("T5", "heads", [True, 0, -2, 2.0, "2", None, 2**40], "a whole number of at"),
    ("T5", "buckets", [32.0, "32", None, True, 0], SIZE),
    ("T5", "max_lag", [None, math.inf, 128.5, "128", True, 2**70], "a whole number of at"),
    ("T5", "causal", ["no", 1], SWITCH),
    ("T5Free", "max_lag", [None, math.inf, 128.5, True, -1], "a whole number of at least 0"),
    ("T5Free", "causal", [0], SWITCH),
    ("AT5", "heads", [True], SIZE),
    ("AT5", "max_lag", [math.inf, "512", -1, True], "a whole number of at least 0"),
    ("AT5", "reach", ["a", math.nan, math.inf, 0, True], "a positive number"),
    ("AT5", "widths", [32, (32,), (32, 4.0), (0, 4), "ab", (True, 4)], "two whole numbers of at least 1"),
    ("AT5", "slopes", [3.0, (1.0,), ("a", "b"), (2.0, 1.0), (math.nan, 1.0)], "two finite numbers, the lower one first"),
    ("AT5", "activation", [None, "gelu", torch.relu], "one of relu, sigmoid"),
    ("AT5", "dropout", [None, "0.1", True, 1.0], RATIO),
    ("AT5", "std", [0, "0.1", math.nan, None], "a positive number"),
    ("AT5Free", "widths", [32], "two whole numbers of at least 1"),
    ("ALiBi", "heads", [True, "4"], SIZE),
    ("Kerple", "kind", [None, "exp"], "one of log, power"),
    ("Sandwich", "head_dim", ["8", 8.0], SIZE),
    ("Rotary", "base", ["1", None, 0, -1.0, math.inf, True], "a positive number"),
    ("Rotary", "head_dim", [3], "even"),
    ("Rotary", "interleaved", ["no", 1], SWITCH),
    ("XPos", "unit", [0.0, "512"], "a positive number"),
    ("Learned", "std", [-1, math.nan, "0.02", None], "a number of at least 0"),
    ("Learned", "length", [0, 512.0, True], SIZE),
    ("Sinusoidal", "dim", ["8", None, 8.0], SIZE),
    ("Shaw", "values", ["no", 1], SWITCH),
    ("Shaw", "per_head", [None], SWITCH),
    ("HuangM1", "max_lag", [None, 1.5], "a whole number of at least 0"),
    ("HuangM2", "per_head", [0], SWITCH),
    ("HuangM3", "head_dim", [True], SIZE),
    ("XL", "dim", ["8", 3.0], SIZE),
    ("SineSPE", "sines", [2.5, True], SIZE),
    ("SineSPE", "gated", ["no"], SWITCH),
    ("ConvSPE", "kernel_size", [2.5, "a", True, 0], SIZE),
    ("ConvSPE", "kernel_size", [(2, 3)], "one number per axis"),
    ("ConvSPE", "grid", [8, "a"], "the extents of all axes but the first"),
    ("PermuteFormer", "seed", ["a", 1.5, True, None], "a whole number of at least"),
    ("PermuteFormer", "seed", [2**64], "a whole number of at most"),
    ("PermuteFormer", "decay", [1], SWITCH),
    ("Favor", "width", [True, 0, 4.0], SIZE),
    ("Favor", "features", ["64", None], SIZE),
    ("Favor", "seed", ["a", 1.5], "a whole number of at least"),
    ("redraw", "seed", [2**64], "a whole number of at most"),
    ("T5.terms", "seed", [0, "a"], SEED),
    ("T5.terms", "seed", [torch.tensor([1, 2]), torch.tensor(0.5)], "int64 or int32 of shape"),
    ("T5.terms", "first", [None, True, 1.5, 2**70], RANGE),
    ("T5.terms", "last", ["a"], RANGE),
    ("T5.terms", "first", [5], "at most last"),
    ("T5.terms", "scale", [None, True, math.nan], "a finite number"),
    ("Rotary.linear_terms", "seed", [0], SEED),
    ("SineSPE.exact_terms", "first", [5], "at most last"),
    ("LagTable", "values", [[[1.0]], None, 1.0], r"a tensor \[heads, lags\] or \[heads, lags, channels\]"),
    ("LagTable", "values", [zeros(3), zeros(1, 1, 1, 1)], r"\[heads, lags\] or \[heads, lags, channels\]"),
    ("LagTable", "values", [zeros(2, 3, dtype=torch.int64)], "floating-point numbers"),
    ("LagTable", "first", [-1.0, None, "a", True, torch.tensor(-1)], "a whole number, the lag of the first column"),
    ("LagTable", "slopes", [0.5, (0.5, 0.5), [1, 2]], "two tensors of floating-point numbers, of the past and of the future"),
    ("LagTable.at", "lags", [3, [1, 2], zeros(3)], "int64 or int32|a tensor of lags"),
    ("LagTable.window", "first", [1.5, 5], "a lag|at most last"),
    ("Terms", "transform", [3, "rotary", TABLE], NO_FUNCTION),
    ("Terms", "features", [same], "a FeatureTransform or None"),
    ("Terms", "bias", [zeros(2, 3), 0.5], NO_TABLE),
    ("Terms", "gain", [[1.0]], NO_TABLE),
    ("FeatureTransform", "function", [None, 3], NO_FUNCTION),
    ("FeatureTransform", "numerator_only", ["no"], SWITCH),
    ("T5.from_weight", "weight", [None, [[1.0]], zeros(32), zeros(1, 32, 2)], r"\[buckets, heads\]"),
    ("T5.from_weight", "weight", [zeros(12, 32)], r"\[buckets, heads\], but its shape"),
    ("T5.from_weight", "weight", [zeros(32, 2, dtype=torch.int64)], "floating-point numbers"),
    ("Shaw.from_tables", "keys", [zeros(5), zeros(4, 8), None], r"\[2 max_lag \+ 1, head_dim\]"),
    ("Shaw.from_tables", "values", [zeros(5), [1.0]], r"\[2 max_lag \+ 1, head_dim\]"),
    ("Shaw.from_distance_embedding", "weight", [zeros(5), zeros(4, 8)], r"\[2 max_lag \+ 1, head_dim\]"),
    ("HuangM4.from_distance_embedding", "weight", [zeros(5)], r"\[2 max_lag \+ 1, head_dim\]"),
    ("Sinusoidal.embed", "positions", [[0, 1], zeros(TIME), torch.arange(3)], r"\[time\] or \[batch, time\]|int64 or int32"),
    ("Learned.embed", "x", [None, X.long()], rf"{INPUT}|floating-point numbers"),
    ("RelativeAttention", "dim", ["8", 8.0, True], SIZE),
    ("RelativeAttention", "heads", ["2", True], SIZE),
    ("RelativeAttention", "kv_heads", ["1", 0, True], SIZE),
    ("RelativeAttention", "encoding", [3, Terms()], "an Encoding, the name of one or None"),
    ("RelativeAttention", "bias", ["no", 1], SWITCH),
    ("RelativeAttention", "scale", [True, "a"], "a finite number or None"),
    ("RelativeAttention", "dropout", [None, "0.1"], RATIO),
    ("RelativeAttention", "window", [(True, False)], WINDOW),
    ("RelativeAttention", "impl", ["flash", None], "one of auto, dense, blockwise, split, triton"),
    ("RelativeAttention", "attention", ["linaer", None], "one of softmax, linear"),
    ("RelativeAttention", "content_dim", [0, "a"], SIZE),
    ("Layer", "hidden", ["32", 0, 32.0], SIZE),
    ("Layer", "norm", [None, "rms"], "one of pre, post"),
    ("Layer", "activation", [torch.relu], "one of gelu, relu"),
    ("Layer", "attention_dropout", ["0.1"], RATIO),
    ("Layer", "cross", ["no"], SWITCH),
    ("Encoder", "heads", ["2", 2.0, True], SIZE),
    ("Encoder", "layers", ["1", 1.5, True], SIZE),
    ("Encoder", "per_layer", [1, "gates", None], "False, True or 'gate'"),
    ("Encoder", "tied", ["no"], SWITCH),
    ("Decoder", "cross", [1], SWITCH),
    ("RelativeAttention.forward", "x", [None, [1.0], X.long(), zeros(6, 8)], rf"{INPUT}|floating-point numbers"),
    ("RelativeAttention.forward", "terms", ["t5", lagwise.T5(heads=2)], "Terms or None"),
    ("RelativeAttention.forward", "seed", [0], SEED),
    ("Layer.forward", "context_mask", [zeros(2, 6, dtype=torch.bool)], "None in a layer without cross-attention"),
    ("Decoder.forward", "context", [[1.0], zeros(2, 6, 3)], INPUT),
    ("Decoder.forward", "context_lengths", [[6, 6], torch.tensor([6])], "shape"),
    ("Decoder.forward", "cache", [nn.Cache(), "a"], r"a DecoderCache, from new_cache\(\)"),
]  # fmt: skip

# Processes that share the tests must give them the same names: no addresses of objects.
CASES = [
    pytest.param(name, argument, value, expected, id=re.sub(" at 0x[0-9a-f]+", "", f"{name}({argument}={shown(value)})"))
    for name, argument, values, expected in BAD
    for value in values
]


def call(name: str, /, **changes: Any) -> Any:
    function, arguments = GOOD[name]
    return function(**{**arguments, **changes})


def words_for(value: Any) -> str:
    """Returns the pattern of what a message says of a value; of a tensor that is its shape, its dtype or its device."""
    if isinstance(value, torch.Tensor):
        return "|".join(re.escape(str(fact)) for fact in (tuple(value.shape), value.dtype, value.device))
    return re.escape(shown(value))


@pytest.mark.parametrize("name", GOOD)
def test_the_right_call_is_right(name):
    call(name)


@pytest.mark.parametrize(("name", "argument", "value", "expected"), CASES)
def test_each_bad_value_is_refused_in_words(name, argument, value, expected):
    with pytest.raises(ValueError, match=rf"(?s)\b{argument} must .*({expected}).*({words_for(value)})"):
        call(name, **{argument: value})


JUNK = [
    None, True, "a", b"a", -1.5, math.nan, math.inf, 2**70, -3, 1j, (), ["a"], {}, object(), len,
    zeros(1), zeros(2, 3, 4), torch.tensor(True), torch.tensor([1, 2, 3]),
]  # fmt: skip


def parameters_of(name: str) -> dict[str, Any]:
    """Returns the annotations of the parameters of a call that have a name."""
    parameters = inspect.signature(GOOD[name][0]).parameters.values()
    return {each.name: each.annotation for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}


def allows(annotation: Any, value: Any) -> bool:
    """Says whether a signature allows a value, True and False as numbers aside."""
    if isinstance(value, bool) and "bool" not in str(annotation):
        return False
    return is_bearable(value, annotation, conf=BeartypeConf(is_pep484_tower=True))


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in GOOD for argument in parameters_of(name)])
def test_what_a_signature_does_not_allow_is_refused_by_name(name, argument):
    """Values that it allows may be refused too, but in words and by name."""
    annotation = parameters_of(name)[argument]
    for value in JUNK:
        try:
            call(name, **{argument: value})
        except ValueError as error:
            assert re.search(rf"\b{argument}\b|unknown encoding", str(error)), error
        else:
            assert allows(annotation, value), f"{shown(value)} is taken"


def arguments_with(words: str) -> list[tuple[str, str]]:
    """Returns the calls and arguments of which something is expected in `BAD`."""
    return sorted({(name, argument) for name, argument, _, expected in BAD if expected == words})


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.complex_numbers(),
    st.integers(max_value=0), st.lists(st.text(), max_size=2), st.fractions(), st.just(torch.tensor(2)),
)  # fmt: skip


@QUICKLY
@given(st.sampled_from(arguments_with(SIZE)), ANYTHING)
def test_no_size_but_a_whole_number(where, value):
    name, argument = where
    assume(value is not None or not allows(parameters_of(name).get(argument), None))
    with pytest.raises(ValueError, match=rf"\b{argument} must (be a whole number|have one number per axis)"):
        call(name, **{argument: value})


@QUICKLY
@given(st.sampled_from(arguments_with(SWITCH)), ANYTHING.filter(lambda value: not isinstance(value, bool)))
def test_no_switch_but_true_and_false(where, value):
    with pytest.raises(ValueError, match=f"{where[1]} must be True or False"):
        call(where[0], **{where[1]: value})


@QUICKLY
@given(
    st.sampled_from(["q", "k", "v", "lengths", "key_mask", "cu_seqlens", "query_start", "seed"]),
    st.lists(st.integers(0, 3), max_size=5),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float64]),
)
def test_tensors_of_any_shape_are_used_or_refused_by_name(argument, shape, dtype):
    changes = {argument: torch.zeros(shape, dtype=dtype)}
    try:
        out = call("attention", **changes)
    except ValueError as error:
        assert re.search(r"\b([qkv]|lengths|key_mask|cu_seqlens|query_start|seed)\b", str(error))
    else:
        arguments = {**TENSORS, **changes}
        assert out.shape == (*arguments["q"].shape[:3], arguments["v"].shape[3])


@QUICKLY
@given(st.floats() | st.integers())
def test_scales_are_finite_numbers(scale):
    """Those that float32 cannot hold are refused beside float32."""
    if abs(scale) <= torch.finfo(torch.float32).max and not (isinstance(scale, int) and abs(scale) >= 2**63):
        call("attention", scale=scale)
    else:
        with pytest.raises(ValueError, match=r"scale must be (a finite number or None|from -3.4e\+38)"):
            call("attention", scale=scale)


TORCH = {
    "is_causal": "has no option 'is_causal': here it is causal=",
    "attn_mask": "has no option 'attn_mask': here it is key_mask= or lengths=",
    "dropout_p": "has no option 'dropout_p': here it is dropout=",
    "enable_gqa": "has no option 'enable_gqa': here it is not needed, since fewer heads of k and v than of q are groups",
    "casual": "has no option 'casual': did you mean 'causal'?",
    "length": "has no option 'length': did you mean 'lengths'?",
}


@pytest.mark.parametrize("word", TORCH)
@pytest.mark.parametrize("name", ["attention", "which_impl", "linear_attention"])
def test_options_of_torch_are_refused_with_ours(name, word):
    with pytest.raises(ValueError, match=re.escape(f"{name} {TORCH[word]}")):
        call(name, **{word: None})


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("RelativeAttention", "casual", "causal"),
        ("Layer", "kv_head", "kv_heads"),
        ("Encoder", "activations", "activation"),
        ("Decoder", "impls", "impl"),
    ],
)
def test_layers_name_the_nearest_option(name, word, meant):
    with pytest.raises(ValueError, match=re.escape(f"{name} has no option {word!r}: did you mean {meant!r}?")):
        call(name, **{word: 1})


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_a_cache_of_another_batch_is_refused(kind):
    decoder = nn.Decoder(DIM, layers=1, heads=HEADS, attention=kind)
    cache = decoder.new_cache()
    decoder(X, cache=cache)
    with pytest.raises(ValueError, match=re.escape("cache must have the batch of x, 3, but has 2: take new_cache()")):
        decoder(zeros(3, TIME, DIM), cache=cache)
    cache.select(torch.tensor([0, 1, 1]))
    assert decoder(zeros(3, TIME, DIM), cache=cache).shape == (3, TIME, DIM)


def test_a_turned_weight_is_refused_where_sizes_are_given():
    weight = zeros(16, 8)
    assert lagwise.T5.from_weight(weight, heads=8, buckets=16).weight.shape == (8, 16)
    for sizes, words in ((dict(heads=16), "with heads=16, but has shape (16, 8)"), (dict(buckets=8), "with buckets=8, but")):
        with pytest.raises(ValueError, match=re.escape(f"weight must be [buckets, heads] {words}")):
            lagwise.T5.from_weight(weight, **sizes)
    # Thirty-two heads are possible, if one says so.
    assert lagwise.T5.from_weight(zeros(16, 32), buckets=16).weight.shape == (32, 16)


def test_an_encoding_of_ones_own_checks_its_lags_too():
    class Mine(lagwise.Encoding):
        def terms(self, first, last, *, scale, seed=None):
            return Terms()

    with pytest.raises(ValueError, match="first must be at most last"):
        Mine().terms(4, -4, scale=1.0)
