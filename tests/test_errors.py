"""Bad input gets an error that names the argument, what was given and what was expected.

Each row of a table below is a mistake and the words of its message, where " ... " stands for anything.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import make_encoding, make_terms

import lagwise
from lagwise import AT5, LagTable, Terms
from lagwise.nn import Cache, Decoder, DecoderCache, Encoder, Layer, LinearCache, RelativeAttention

BATCH, HEADS, TIME, WIDTH = 2, 4, 6, 8
DIM = HEADS * WIDTH

INTEGERS = torch.tensor([0, TIME])


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


def tensors(batch: int = BATCH, **others: Any) -> dict[str, Any]:
    """Returns good q, k and v of a call, with some of its arguments in their place or beside them."""
    return {**{name: zeros(batch, HEADS, TIME, WIDTH) for name in "qkv"}, **others}


def table(heads: int, *channels: int, **options: Any) -> LagTable:
    return LagTable(zeros(heads, 3, *channels, **options), -1)


def packed(*ends: float, batch: int = 1, dtype: torch.dtype = torch.int64, **others: Any) -> dict[str, Any]:
    return tensors(batch, cu_seqlens=torch.tensor(ends, dtype=dtype), **others)


def words_of(message: str) -> str:
    """Returns the pattern of a message in which " ... " stands for anything."""
    return ".*".join(re.escape(part) for part in message.split(" ... "))


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "q of rank 3": (tensors(q=zeros(4, 6, 8)), "q must be [batch, heads, time, dim], but has shape (4, 6, 8)"),
    "k of rank 5": (tensors(k=zeros(1, 2, 4, 6, 8)), "k must be [batch, heads, time, dim], but has shape (1, 2, 4, 6, 8)"),
    "v of rank 2": (tensors(v=zeros(6, 8)), "v must be [batch, heads, time, dim], but has shape (6, 8)"),
    "q of integers": (
        tensors(q=zeros(2, 4, 6, 8, dtype=torch.int64)),
        "q must be float64, float32, float16 or bfloat16, but is torch.int64",
    ),
    "k of integers": (
        tensors(k=zeros(2, 4, 6, 8, dtype=torch.int32)),
        "k must be float64, float32, float16 or bfloat16, but is torch.int32",
    ),
    "q of complex numbers": (
        tensors(q=zeros(2, 4, 6, 8, dtype=torch.complex64)),
        "q must be float64, float32, float16 or bfloat16, but is torch.complex64",
    ),
    "k of another dtype": (
        tensors(k=zeros(2, 4, 6, 8, dtype=torch.float64)),
        "k must have the dtype and device of q, torch.float32 on cpu, but is torch.float64 on cpu",
    ),
    "v of another dtype": (
        tensors(v=zeros(2, 4, 6, 8, dtype=torch.bfloat16)),
        "v must have the dtype and device of q, torch.float32 on cpu, but is torch.bfloat16 on cpu",
    ),
    "v on another device": (
        tensors(v=zeros(2, 4, 6, 8, device="meta")),
        "v must have the dtype and device of q, torch.float32 on cpu, but is torch.float32 on meta",
    ),
    "k of another batch": (tensors(k=zeros(1, 4, 6, 8)), "k must have the batch of q, 2, but has shape (1, 4, 6, 8)"),
    "v of another batch": (tensors(v=zeros(3, 4, 6, 8)), "v must have the batch of q, 2, but has shape (3, 4, 6, 8)"),
    "no queries": (tensors(q=zeros(2, 4, 0, 8)), "q must not be empty, but has shape (2, 4, 0, 8)"),
    "no keys": (tensors(k=zeros(2, 4, 0, 8)), "k must not be empty, but has shape (2, 4, 0, 8)"),
    "values without width": (tensors(v=zeros(2, 4, 6, 0)), "v must not be empty, but has shape (2, 4, 6, 0)"),
    "no batch": (tensors(batch=0), "q must not be empty, but has shape (0, 4, 6, 8)"),
    "k of another width": (tensors(k=zeros(2, 4, 6, 5)), "k must have the width of q, 8, but has shape (2, 4, 6, 5)"),
    "v of other heads": (
        tensors(v=zeros(2, 2, 6, 8)),
        "v must have the heads and the length of k, (4, 6), but has shape (2, 2, 6, 8)",
    ),
    "v of another length": (
        tensors(v=zeros(2, 4, 5, 8)),
        "v must have the heads and the length of k, (4, 6), but has shape (2, 4, 5, 8)",
    ),
    "heads that do not divide": (
        tensors(k=zeros(2, 3, 6, 8), v=zeros(2, 3, 6, 8)),
        "the heads of q must be a multiple of those of k, but q has 4 and k has 3",
    ),
    "more heads of keys than of queries": (
        tensors(k=zeros(2, 8, 6, 8), v=zeros(2, 8, 6, 8)),
        "the heads of q must be a multiple of those of k, but q has 4 and k has 8",
    ),
    # Tables that do not fit the tensors.
    "bias of other heads": (
        tensors(encoding=Terms(bias=table(3))),
        "the bias table must have 4 heads, those of q, or 1, but has 3",
    ),
    "gain of other heads": (
        tensors(encoding=Terms(gain=table(2, 1))),
        "the gain table must have 4 heads, those of q, or 1, but has 2",
    ),
    "query of other heads": (
        tensors(encoding=Terms(query=table(8, 8))),
        "the query table must have 4 heads, those of q, or 1, but has 8",
    ),
    "encoding of other heads": (
        tensors(encoding=make_encoding("t5", heads=3)),
        "the bias table must have 4 heads, those of q, or 1, but has 3",
    ),
    # Key tables stand for query heads, so that the number of key heads is no substitute.
    "key table for grouped heads": (
        tensors(k=zeros(2, 2, 6, 8), v=zeros(2, 2, 6, 8), encoding=Terms(key=table(2, 8))),
        "the key table must have 4 heads, those of q, or 1, but has 2",
    ),
    "gain of other channels": (tensors(encoding=Terms(gain=table(1, 3))), "the gain table must have 8 channels, but has 3"),
    "query of other channels": (tensors(encoding=Terms(query=table(1, 5))), "the query table must have 8 channels, but has 5"),
    "query of one channel": (tensors(encoding=Terms(query=table(1, 1))), "the query table must have 8 channels, but has 1"),
    "key of other channels": (tensors(encoding=Terms(key=table(1, 16))), "the key table must have 8 channels, but has 16"),
    "value of other channels": (tensors(encoding=Terms(value=table(1, 5))), "the value table must have 8 channels, but has 5"),
    "value of the width of q": (
        tensors(v=zeros(2, 4, 6, 5), encoding=make_encoding("shaw")),
        "the value table must have 5 channels, but has 8",
    ),
    "table on another device": (
        tensors(encoding=Terms(bias=table(1, device="meta"))),
        "the bias table must be on cpu, where q is, but is on meta",
    ),
    # Masks.
    "lengths of another batch": (
        tensors(lengths=torch.tensor([1, 2, 3])),
        "lengths must be int64 or int32 of shape (2,), but is torch.int64 of shape (3,)",
    ),
    "lengths of another rank": (
        tensors(lengths=torch.tensor([[1], [2]])),
        "lengths must be int64 or int32 of shape (2,), but is torch.int64 of shape (2, 1)",
    ),
    "lengths that are no integers": (
        tensors(lengths=torch.tensor([1.0, 2.0])),
        "lengths must be int64 or int32 of shape (2,), but is torch.float32 of shape (2,)",
    ),
    "negative lengths": (tensors(lengths=torch.tensor([-1, 2])), "lengths must be between 0 and 6, but is [-1, 2]"),
    "lengths beyond the keys": (tensors(lengths=torch.tensor([6, 7])), "lengths must be between 0 and 6, but is [6, 7]"),
    "key_mask of another length": (
        tensors(key_mask=zeros(2, 5, dtype=torch.bool)),
        "key_mask must be bool of shape (2, 6), but is torch.bool of shape (2, 5)",
    ),
    "key_mask of numbers": (
        tensors(key_mask=zeros(2, 6)),
        "key_mask must be bool of shape (2, 6), but is torch.float32 of shape (2, 6)",
    ),
    "key_mask per query": (
        tensors(key_mask=zeros(2, 1, 6, 6, dtype=torch.bool)),
        "key_mask must be bool of shape (2, 6), but is torch.bool of shape (2, 1, 6, 6)",
    ),
    "window of three": (
        tensors(window=(1, 2, 3)),
        "window must be (left, right), two numbers of lags of at least 0, but is (1, 2, 3)",
    ),
    "negative window": (
        tensors(window=(4, -1)),
        "window must be (left, right), two numbers of lags of at least 0, but is (4, -1)",
    ),
    "query_start of another batch": (
        tensors(query_start=torch.tensor([0, 1, 2])),
        "query_start must be a number, or a tensor with one or with 2 (the batch), but has shape (3,)",
    ),
    "query_start per query": (
        tensors(query_start=zeros(2, 6, dtype=torch.int64)),
        "query_start must be a number, or a tensor with one or with 2 (the batch), but has shape (2, 6)",
    ),
    "negative query_start": (tensors(query_start=torch.tensor([-1, 0])), "query_start must be between 0 and 6, but is [-1, 0]"),
    "query_start beyond the keys": (tensors(query_start=torch.tensor(7)), "query_start must be between 0 and 6, but is 7"),
    "dropout below 0": (tensors(dropout=-0.1), "dropout must be at least 0 and less than 1, but is -0.1"),
    "dropout of everything": (tensors(dropout=1.0), "dropout must be at least 0 and less than 1, but is 1.0"),
    "dropout that is no number": (tensors(dropout=math.nan), "dropout must be at least 0 and less than 1, but is nan"),
    # Packed sequences.
    "ends that do not start at 0": (
        packed(1, 6),
        "cu_seqlens must start with 0, never fall, and end with the time axis, 6, but is [1, 6]",
    ),
    "ends that fall": (
        packed(0, 4, 2, 6),
        "cu_seqlens must start with 0, never fall, and end with the time axis, 6, but is [0, 4, 2, 6]",
    ),
    "ends before the end": (
        packed(0, 3, 5),
        "cu_seqlens must start with 0, never fall, and end with the time axis, 6, but is [0, 3, 5]",
    ),
    "ends after the end": (
        packed(0, 3, 7),
        "cu_seqlens must start with 0, never fall, and end with the time axis, 6, but is [0, 3, 7]",
    ),
    "ends of a batch": (
        packed(0, 6, batch=2),
        "cu_seqlens packs sequences of self-attention into batch 1, but q has shape (2, 4, 6, 8) and k (2, 4, 6, 8)",
    ),
    "ends of unequal lengths": (
        packed(0, 6, q=zeros(1, 4, 5, 8)),
        "cu_seqlens packs sequences of self-attention into batch 1, but q has shape (1, 4, 5, 8) and k (1, 4, 6, 8)",
    ),
    "ends with lengths": (packed(0, 6, lengths=torch.tensor([6])), "lengths cannot be combined with cu_seqlens"),
    "ends with key_mask": (
        packed(0, 6, key_mask=zeros(1, 6, dtype=torch.bool)),
        "key_mask cannot be combined with cu_seqlens",
    ),
    "ends with query_start": (packed(0, 6, query_start=3), "query_start cannot be combined with cu_seqlens"),
    "ends with query_start per row": (
        packed(0, 6, query_start=torch.tensor([0])),
        "query_start cannot be combined with cu_seqlens",
    ),
    "ends that are no integers": (
        packed(0, 6, dtype=torch.float32),
        "cu_seqlens must be a tensor of integers, [sequences + 1], but is torch.float32 of shape (2,)",
    ),
    "ends without a sequence": (
        packed(0),
        "cu_seqlens must be a tensor of integers, [sequences + 1], but is torch.int64 of shape (1,)",
    ),
    "ends per row": (
        tensors(1, cu_seqlens=INTEGERS[None]),
        "cu_seqlens must be a tensor of integers, [sequences + 1], but is torch.int64 of shape (1, 2)",
    ),
    # Implementations.
    "unknown impl": (
        tensors(impl="blokwise"),
        "impl must be one of auto, dense, blockwise, split, triton, but is 'blokwise': did you mean 'blockwise'?",
    ),
    "split with slopes": (
        tensors(encoding=make_encoding("alibi"), impl="split"),
        "impl='split' cannot do this: sloped tails ... impl='auto' takes one that can",
    ),
    "split with dropout": (tensors(dropout=0.1, impl="split"), "impl='split' cannot do this: ... dropout"),
    "split with holes in key_mask": (
        tensors(key_mask=torch.arange(6).expand(2, 6) != 3, impl="split"),
        "impl='split' cannot do this: ... key_mask hides others ... give lengths instead if all padding is on the right",
    ),
    "split with query_start per row": (
        tensors(query_start=INTEGERS, impl="split"),
        "impl='split' cannot do this: ... one query_start",
    ),
    "split with a transform beside a key table": (
        tensors(encoding=make_terms("key", "transform"), impl="split"),
        "impl='split' cannot do this: a `key` table reads the raw k",
    ),
    # Encodings that are none.
    "a name as encoding": (
        tensors(encoding="t5"),
        "encoding must be an Encoding, Terms or None, but is 't5': make it with lagwise.make('t5', ...",
    ),
    "a class as encoding": (tensors(encoding=lagwise.T5), "encoding must be an Encoding, Terms or None, but is <class"),
    "a table as encoding": (tensors(encoding=table(1)), "encoding must be an Encoding, Terms or None, but is LagTable("),
    "sinusoidal positions": (
        tensors(encoding=make_encoding("sinusoidal")),
        "encoding Sinusoidal is absolute: it acts on the model's input ... `embed`",
    ),
    "learned positions": (
        tensors(encoding=make_encoding("learned")),
        "encoding Learned is absolute: it acts on the model's input ... `embed`",
    ),
    "a sum with sinusoidal positions": (
        tensors(encoding=make_encoding("t5") + make_encoding("sinusoidal")),
        "encoding Sum is absolute: it acts on the model's input ... `embed`",
    ),
    # A window into the future needs the same values as no mask at all.
    **{
        f"{name} of the past alone, {option or 'alone'}": (
            tensors(encoding=make_encoding(name, causal=True), **option),
            f"{type(make_encoding(name)).__name__}(causal=True) has no values for the future, but lags up to "
            f"{1 if option else 5} were asked for: call attention with causal=True, or make the encoding with causal=False",
        )
        for name in ("t5", "t5-free", "at5", "at5-free")
        for option in ({}, {"window": (3, 1)})
    },
    "q no tensor": (tensors(q=[1.0]), "q must be a tensor [batch, heads, time, dim], but is [1.0]"),
    "window of one number": (tensors(window=3), "window must be (left, right), two numbers of lags of at least 0, but is 3"),
    "window of fractions": (
        tensors(window=(1.5, 2)),
        "window must be (left, right), two numbers of lags of at least 0, but is (1.5, 2)",
    ),
    "query_start fraction": (tensors(query_start=1.5), "query_start must be a whole number or a tensor of them, but is 1.5"),
    "query_start fractions": (
        tensors(query_start=torch.tensor([0.5, 1.0])),
        "query_start must be int64 or int32, but is torch.float32",
    ),
    "query_start bool": (
        tensors(query_start=torch.tensor([True, False])),
        "query_start must be int64 or int32, but is torch.bool",
    ),
    "lengths list": (tensors(lengths=[1, 2]), "lengths must be a tensor of shape (2,), but is [1, 2]"),
    "key_mask list": (tensors(key_mask=[[True]]), "key_mask must be a tensor of shape (2, 6), but is [[True]]"),
    "ends list": (tensors(1, cu_seqlens=[0, 6]), "cu_seqlens must be a tensor of integers, [sequences + 1], but is [0, 6]"),
    "longest without ends": (
        tensors(max_seqlen=3),
        "max_seqlen is the length of the longest packed sequence, but cu_seqlens is missing: leave it out",
    ),
    "longest of zero": (
        tensors(1, cu_seqlens=torch.tensor([0, 6]), max_seqlen=0),
        "max_seqlen must be a whole number of at least 1, but is 0",
    ),
    "longest too short": (
        tensors(1, cu_seqlens=torch.tensor([0, 4, 6]), max_seqlen=3),
        "cu_seqlens must have no sequence longer than max_seqlen, 3, but is [0, 4, 6]",
    ),
    "seed number": (
        tensors(dropout=0.5, seed=7),
        "seed must be a tensor with one integer, torch.tensor(7, device=q.device), but is 7",
    ),
    "seed of two": (
        tensors(dropout=0.5, seed=torch.tensor([7, 8])),
        "seed must be int64 or int32 of shape (), but is torch.int64 of shape (2,)",
    ),
    "seed fraction": (
        tensors(dropout=0.5, seed=torch.tensor(7.5)),
        "seed must be int64 or int32 of shape (), but is torch.float32 of shape ()",
    ),
    "seed elsewhere": (
        tensors(dropout=0.5, seed=torch.tensor(7, device="meta")),
        "seed must be on cpu, where q is, but is on meta",
    ),
    "scale nan": (tensors(scale=math.nan), "scale must be a finite number or None, but is nan"),
    "scale word": (tensors(scale="1"), "scale must be a finite number or None, but is '1'"),
    "impl None": (tensors(impl=None), "impl must be one of auto, dense, blockwise, split, triton, but is None"),
    "sum of other heads": (
        tensors(encoding=make_encoding("t5") + make_encoding("kerple", heads=3)),
        "tables that are joined must have the same heads, or one",
    ),
}


@pytest.mark.parametrize("function", [lagwise.attention, lagwise.which_impl])
@pytest.mark.parametrize("mistake", list(CALLS))
def test_bad_calls(function, mistake):
    arguments, message = CALLS[mistake]
    with pytest.raises(ValueError, match=words_of(message)):
        function(**arguments)


# What a transform refuses shows when it is applied, which `which_impl` does not do.
TRANSFORMS: dict[str, tuple[dict[str, Any], str]] = {
    "rotary of another width": (
        tensors(encoding=make_encoding("rotary", head_dim=6)),
        "q and k must have the width that the encoding was made for, head_dim=6, but have 8",
    ),
    "xpos of another width": (
        tensors(encoding=make_encoding("xpos", head_dim=16)),
        "q and k must have the width that the encoding was made for, head_dim=16, but have 8",
    ),
    "xpos beyond its range": (
        {name: x.half() for name, x in tensors().items()} | {"encoding": make_encoding("xpos"), "query_start": 3000},
        "positions reach 3005, but beyond 1983 the scales of xPos leave the range of torch.float16",
    ),
    "sine-spe of fewer heads": (
        tensors(encoding=make_encoding("sine-spe", heads=3)),
        "SineSPE is made for heads=3 and head_dim=8, but q has 4 heads of width 8",
    ),
    "conv-spe of more heads": (
        tensors(encoding=make_encoding("conv-spe", heads=6)),
        "ConvSPE is made for heads=6 and head_dim=8, but q has 4 heads of width 8",
    ),
    "conv-spe of another width": (
        tensors(encoding=make_encoding("conv-spe", head_dim=6)),
        "ConvSPE is made for heads=4 and head_dim=6, but q has 4 heads of width 8",
    ),
    # Codes replace the channels that the rotation wants to turn.
    "a rotation after codes": (
        tensors(encoding=make_encoding("sine-spe") + make_encoding("rotary")),
        "q and k must have the width that the encoding was made for, head_dim=8, but have 16",
    ),
}


@pytest.mark.parametrize("impl", ["auto", "dense"])
@pytest.mark.parametrize("mistake", list(TRANSFORMS))
def test_bad_transforms(impl, mistake):
    arguments, message = TRANSFORMS[mistake]
    with pytest.raises(ValueError, match=words_of(message)):
        lagwise.attention(**arguments, impl=impl)


def mask_of_new_keys_alone() -> None:
    decoder, x = Decoder(DIM, layers=1, heads=4), zeros(2, 6, DIM)
    cache = decoder.new_cache()
    decoder(x, cache=cache)
    decoder(x, cache=cache, key_mask=zeros(2, 6, dtype=torch.bool))


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    # Tables and terms.
    "table of rank 1": (
        lambda: LagTable(zeros(3), 0),
        "values must be [heads, lags] or [heads, lags, channels], but has shape (3,)",
    ),
    "table of rank 4": (
        lambda: LagTable(zeros(1, 3, 2, 2), 0),
        "values must be [heads, lags] or [heads, lags, channels], but has shape (1, 3, 2, 2)",
    ),
    "table without lags": (
        lambda: LagTable(zeros(4, 0), 0),
        "values must have at least one head, lag and channel, but has shape (4, 0)",
    ),
    "past slope of other heads": (
        lambda: LagTable(zeros(4, 3), 0, (zeros(3), zeros(4))),
        "the past slope must have one number per head, shape (4,), but has shape (3,)",
    ),
    "future slope of another rank": (
        lambda: LagTable(zeros(4, 3), 0, (zeros(4), zeros(4, 1))),
        "the future slope must have one number per head, shape (4,), but has shape (4, 1)",
    ),
    "slopes on a table of vectors": (
        lambda: LagTable(zeros(4, 3, 8), 0, (zeros(4), zeros(4))),
        "slopes need a table of scalars, values [heads, lags]",
    ),
    "product of sloped tables": (
        lambda: make_terms("slopes").bias * table(4),
        "tables with slopes cannot be multiplied: their product is not linear beyond its ends",
    ),
    "product with a sloped table": (
        lambda: table(4) * make_terms("slopes").bias,
        "tables with slopes cannot be multiplied: their product is not linear beyond its ends",
    ),
    "bias of vectors": (
        lambda: Terms(bias=table(4, 8)),
        "bias must be a table [heads, lags], but its values have shape (4, 3, 8)",
    ),
    **{
        f"{name} of scalars": (
            lambda name=name: Terms(**{name: table(4)}),
            f"{name} must be a table [heads, lags, channels], but its values have shape (4, 3)",
        )
        for name in ("gain", "query", "key", "value")
    },
    "gain per channel with a transform": (
        lambda: make_terms("channel gain", "transform"),
        "a gain per channel cannot be combined with a transform ... use a gain with one channel, [heads, lags, 1]",
    ),
    "gain per channel plus a transform": (
        lambda: make_terms("transform") + make_terms("channel gain"),
        "a gain per channel cannot be combined with a transform ... use a gain with one channel, [heads, lags, 1]",
    ),
    # Making encodings.
    "unknown encoding": (
        lambda: lagwise.make("rotery"),
        "unknown encoding 'rotery': did you mean 'rotary'? ... There are: none, ",
    ),
    "encoding like no other": (lambda: lagwise.make("zzzz"), "unknown encoding 'zzzz'. There are: none, "),
    "no switch": (
        lambda: lagwise.make("sine-spe", heads=2, head_dim=8, fixed="no"),
        "fixed must be True or False (true or false on the command line), but is 'no'",
    ),
    "unknown option": (
        lambda: lagwise.make("t5", heads=4, bucket=3),
        "unknown option 'bucket' for encoding 't5': did you mean 'buckets'? ... It has: heads, buckets, max_lag, causal",
    ),
    "option of another encoding": (
        lambda: lagwise.make("rotary", head_dim=8, gated=True),
        "unknown option 'gated' for encoding 'rotary' ... It has: head_dim, base, interleaved",
    ),
    "option of an encoding without any": (
        lambda: lagwise.make("none", sines=3),
        "unknown option 'sines' for encoding 'none'. It has: no options",
    ),
    "missing option": (lambda: lagwise.make("t5"), "encoding 't5' needs heads"),
    "missing options": (lambda: lagwise.make("conv-spe", dim=8), "encoding 'conv-spe' needs heads, head_dim"),
    # Scalar encodings.
    "too few buckets for two directions": (
        lambda: lagwise.T5(heads=4, buckets=3),
        "buckets must be at least 4, two for each direction, but is 3",
    ),
    "no buckets": (
        lambda: lagwise.T5(heads=4, buckets=0),
        "buckets must be a whole number of at least 1, but is 0",
    ),
    "too few buckets of the past": (
        lambda: lagwise.T5(heads=4, buckets=1, causal=True),
        "buckets must be at least 2, two for each direction, but is 1",
    ),
    "max_lag inside the exact buckets": (
        lambda: lagwise.T5(heads=4, max_lag=8),
        "max_lag must be larger than 8 ... bucket of their own with buckets=32, but is 8",
    ),
    "max_lag inside the exact buckets of the past": (
        lambda: lagwise.T5(heads=4, max_lag=-1, causal=True),
        "max_lag must be a whole number of at least 1, but is -1",
    ),
    **{
        f"negative max_lag of {name}": (
            lambda name=name: lagwise.make(name, heads=4, head_dim=8, max_lag=-2),
            "max_lag must be a whole number of at least 0, but is -2",
        )
        for name in ("t5-free", "at5", "at5-free", "shaw", "huang1", "huang2", "huang3", "huang4")
    },
    "slope that is no number": (
        lambda: AT5(heads=4, slopes=(math.nan, 1.0)),
        "slopes must be two finite numbers, the lower one first, but is (nan, 1.0)",
    ),
    "infinite slope": (
        lambda: AT5(heads=4, slopes=(1.0, math.inf)),
        "slopes must be two finite numbers, the lower one first, but is (1.0, inf)",
    ),
    "slopes in the wrong order": (
        lambda: AT5(heads=4, slopes=(10.0, 1.0)),
        "slopes must be two finite numbers, the lower one first, but is (10.0, 1.0)",
    ),
    "reach of nothing": (lambda: AT5(heads=4, reach=0), "reach must be a positive number, but is 0"),
    "negative reach": (lambda: AT5(heads=4, reach=-512), "reach must be a positive number, but is -512"),
    **{
        f"{mistake} of {name}": (lambda name=name, option=option: lagwise.make(name, heads=4, **option), message)
        for name in ("at5", "at5-free")
        for mistake, option, message in (
            ("dropout of everything", {"dropout": 1.0}, "dropout must be at least 0 and less than 1, but is 1.0"),
            ("negative dropout", {"dropout": -0.5}, "dropout must be at least 0 and less than 1, but is -0.5"),
            ("unknown activation", {"activation": "gelu"}, "activation must be one of relu, sigmoid, but is 'gelu'"),
        )
    },
    "unknown kind": (lambda: lagwise.Kerple(heads=4, kind="exp"), "kind must be one of log, power, but is 'exp'"),
    **{
        f"lags of the future of {name}": (
            lambda name=name: make_encoding(name, causal=True).terms(-3, 2, scale=1.0),
            "(causal=True) has no values for the future, but lags up to 2 were asked for",
        )
        for name in ("t5", "t5-free", "at5", "at5-free")
    },
    # Widths in pairs.
    **{
        f"odd head_dim of {name}": (
            lambda name=name: lagwise.make(name, heads=4, head_dim=7),
            "head_dim must be even, since sines and cosines come in pairs, but is 7",
        )
        for name in ("rotary", "xpos", "sandwich")
    },
    "odd dim of sinusoidal": (
        lambda: lagwise.Sinusoidal(dim=7),
        "dim must be even, since sines and cosines come in pairs, but is 7",
    ),
    "odd dim of xl": (
        lambda: lagwise.XL(heads=4, head_dim=8, dim=7),
        "dim must be even, since sines and cosines come in pairs, but is 7",
    ),
    "odd heads of odd width": (
        lambda: lagwise.XL(heads=3, head_dim=5),
        "dim must be even, since sines and cosines come in pairs, but is 15",
    ),
    # Absolute positions.
    "input of another width for sinusoidal": (
        lambda: lagwise.Sinusoidal(dim=8).embed(zeros(1, 3, 6), torch.arange(3)),
        "x must have width dim=8, but has shape (1, 3, 6)",
    ),
    "input of another width for learned": (
        lambda: lagwise.Learned(dim=8).embed(zeros(1, 3, 6), torch.arange(3)),
        "x must have width dim=8, but has shape (1, 3, 6)",
    ),
    "positions beyond the table": (
        lambda: lagwise.Learned(dim=8, length=5).embed(zeros(1, 6, 8), torch.arange(6)),
        "positions reach 5, but the learned table ends at 4: make the encoding with length=6 or more",
    ),
    # Tables of others.
    "even number of rows for shaw": (
        lambda: lagwise.Shaw.from_tables(zeros(4, 8), heads=2),
        "keys must be [2 max_lag + 1, head_dim], but has shape (4, 8)",
    ),
    "values of another shape for shaw": (
        lambda: lagwise.Shaw.from_tables(zeros(5, 8), zeros(3, 8), heads=2),
        "values must have the shape of keys, (5, 8), but has (3, 8)",
    ),
    "even number of rows for huang4": (
        lambda: lagwise.HuangM4.from_distance_embedding(zeros(1024, 64), heads=2),
        "weight must be [2 max_lag + 1, head_dim], but has shape (1024, 64)",
    ),
    # Seeds.
    **{
        f"{name} without seed": (
            lambda name=name: make_encoding(name).terms(-5, 5, scale=1.0),
            f"seed must be given to draw the codes of {type(make_encoding(name)).__name__}, but is None",
        )
        for name in ("sine-spe", "conv-spe")
    },
    "at5 in training without seed": (
        lambda: make_encoding("at5", dropout=0.5).train().terms(-5, 5, scale=1.0),
        "seed must be given to draw the dropout of AT5 in training, but is None",
    ),
    # Layers.
    "dim that is no multiple of heads": (
        lambda: RelativeAttention(30, heads=4),
        "dim must be a multiple of heads, but dim=30 and heads=4: or pass head_dim",
    ),
    "dim of a stack that is no multiple of heads": (
        lambda: Encoder(30, layers=2, heads=4, encoding="t5"),
        "dim must be a multiple of heads, but dim=30 and heads=4: or pass head_dim",
    ),
    "kv_heads that do not divide": (
        lambda: RelativeAttention(DIM, heads=4, kv_heads=3),
        "heads must be a multiple of kv_heads, but heads=4 and kv_heads=3",
    ),
    "more kv_heads than heads": (
        lambda: Decoder(DIM, layers=2, heads=4, kv_heads=8),
        "heads must be a multiple of kv_heads, but heads=4 and kv_heads=8",
    ),
    "unknown norm": (lambda: Encoder(DIM, layers=2, heads=4, norm="rms"), "norm must be one of pre, post, but is 'rms'"),
    "unknown activation": (
        lambda: Layer(DIM, heads=4, activation="silu"),
        "activation must be one of gelu, relu, but is 'silu'",
    ),
    "unknown encoding of a layer": (
        lambda: RelativeAttention(DIM, heads=4, encoding="t6"),
        "unknown encoding 't6': did you mean 't5'?",
    ),
    "unknown encoding of a causal stack": (
        lambda: Decoder(DIM, layers=2, heads=4, encoding="t6"),
        "unknown encoding 't6': did you mean 't5'?",
    ),
    "absolute encoding of a layer": (
        lambda: RelativeAttention(DIM, heads=4, encoding="sinusoidal"),
        "encoding Sinusoidal is absolute and acts on the model's input: give it to an Encoder or Decoder",
    ),
    "absolute encoding in each layer": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding="learned", per_layer=True),
        "encoding Learned is absolute and acts on the model's input",
    ),
    "sum with an absolute encoding in each layer": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding=[make_encoding("t5") + make_encoding("sinusoidal")]),
        "encoding Sum is absolute and acts on the model's input",
    ),
    "too few encodings": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding=[make_encoding("t5")]),
        "encoding must be one, or one for each of 2 layers, but 1 were given",
    ),
    "one object for each layer": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding=make_encoding("t5"), per_layer=True),
        "per_layer needs the name of an encoding ... a list with one encoding for each layer",
    ),
    "encoding of a layer with other heads": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding=make_encoding("t5", heads=2))(zeros(2, 6, DIM)),
        "the bias table must have 4 heads, those of q, or 1, but has 2",
    ),
    "encoding of the past in a stack that sees the future": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding=make_encoding("t5", causal=True))(zeros(2, 6, DIM)),
        "T5(causal=True) has no values for the future, but lags up to 5 were asked for",
    ),
    "context without cross-attention": (
        lambda: Decoder(DIM, layers=2, heads=4)(zeros(2, 6, DIM), zeros(2, 6, DIM)),
        "context must be given to a layer with cross-attention, and to no other",
    ),
    "cross-attention without context": (
        lambda: Decoder(DIM, layers=2, heads=4, cross=True)(zeros(2, 6, DIM)),
        "context must be given to a layer with cross-attention, and to no other",
    ),
    "context of another batch": (
        lambda: RelativeAttention(DIM, heads=4)(zeros(2, 6, DIM), zeros(3, 6, DIM)),
        "k must have the batch of q, 2, but has shape (3, 4, 6, 8)",
    ),
    "lengths of a stack": (
        lambda: Encoder(DIM, layers=2, heads=4)(zeros(2, 6, DIM), lengths=torch.tensor([6])),
        "lengths must be int64 or int32 of shape (2,), but is torch.int64 of shape (1,)",
    ),
    # The mask has to tell about the keys in the cache too.
    "key_mask of the new keys alone": (
        mask_of_new_keys_alone,
        "key_mask must be bool of shape (2, 12), but is torch.bool of shape (2, 6)",
    ),
    "packed sequences of a batch": (
        lambda: Encoder(DIM, layers=2, heads=4)(zeros(2, 6, DIM), cu_seqlens=INTEGERS),
        "cu_seqlens packs sequences of self-attention into batch 1, but q has shape (2, 4, 6, 8)",
    ),
    "packed sequences that end early": (
        lambda: Encoder(DIM, layers=2, heads=4)(zeros(1, 8, DIM), cu_seqlens=INTEGERS),
        "cu_seqlens must start with 0, never fall, and end with the time axis, 8, but is [0, 6]",
    ),
    "sequence longer than the table": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding=lagwise.Learned(dim=DIM, length=5))(zeros(2, 6, DIM)),
        "positions reach 5, but the learned table ends at 4",
    ),
    "dropout of a stack": (
        lambda: Encoder(DIM, layers=1, heads=4, attention_dropout=1.0)(zeros(2, 6, DIM)),
        "dropout must be at least 0 and less than 1, but is 1.0",
    ),
    "slopes of three": (
        lambda: LagTable(zeros(4, 3), 0, (zeros(4),) * 3),
        "slopes must be two tensors of floating-point numbers, of the past and of the future, but is (tensor(",
    ),
    "table of integers": (
        lambda: LagTable(zeros(4, 3, dtype=torch.int64), 0),
        "values must be floating-point numbers, but are torch.int64",
    ),
    "tables of other heads": (lambda: table(4) + table(3), "but their values have shapes (4, 3) and (3, 3)"),
    "tables of other channels": (lambda: table(4, 8) + table(4, 1), "but their values have shapes (4, 3, 8) and (4, 3, 1)"),
    "product of other channels": (lambda: table(4, 8) * table(4, 5), "but their values have shapes (4, 3, 8) and (4, 3, 5)"),
    "bias tensor": (
        lambda: Terms(bias=zeros(4, 3)),
        "bias must be a LagTable or None, but is a tensor of torch.float32 and shape (4, 3)",
    ),
    "no heads": (lambda: lagwise.T5(heads=0), "heads must be a whole number of at least 1, but is 0"),
    "no alibi heads": (lambda: lagwise.ALiBi(heads=0), "heads must be a whole number of at least 1, but is 0"),
    "no width": (lambda: lagwise.Rotary(head_dim=0), "head_dim must be a whole number of at least 1, but is 0"),
    "base": (lambda: lagwise.Rotary(head_dim=8, base=0.0), "base must be a positive number, but is 0.0"),
    "unit": (lambda: lagwise.XPos(head_dim=8, unit=0.0), "unit must be a positive number, but is 0.0"),
    "length": (lambda: lagwise.Learned(dim=8, length=0), "length must be a whole number of at least 1, but is 0"),
    "negative position": (
        lambda: lagwise.Learned(dim=8).embed(zeros(1, 1, 8), torch.tensor([-1])),
        "positions must not be negative, but reach -1",
    ),
    "realizations": (
        lambda: lagwise.SineSPE(heads=2, head_dim=8, realizations=0),
        "realizations must be a whole number of at least 1, but is 0",
    ),
    "sines": (lambda: lagwise.SineSPE(heads=2, head_dim=8, sines=0), "sines must be a whole number of at least 1, but is 0"),
    "kernel_size": (
        lambda: lagwise.ConvSPE(heads=2, head_dim=8, kernel_size=0),
        "kernel_size must be a whole number of at least 1, but is 0",
    ),
    "widths": (lambda: AT5(heads=2, widths=(1, 2, 3)), "widths must be two whole numbers of at least 1, but is (1, 2, 3)"),
    "std": (lambda: AT5(heads=2, std=0.0), "std must be a positive number, but is 0.0"),
    "slopes": (
        lambda: AT5(heads=2, slopes=(1, 2, 3)),
        "slopes must be two finite numbers, the lower one first, but is (1, 2, 3)",
    ),
    "max_lag": (lambda: lagwise.T5Free(heads=2, max_lag=2.5), "max_lag must be a whole number of at least 0, but is 2.5"),
    "kv_heads": (
        lambda: RelativeAttention(DIM, heads=4, kv_heads=0),
        "kv_heads must be a whole number of at least 1, but is 0",
    ),
    "nn heads": (lambda: RelativeAttention(DIM, heads=0), "heads must be a whole number of at least 1, but is 0"),
    "layers": (lambda: Encoder(DIM, layers=0, heads=4), "layers must be a whole number of at least 1, but is 0"),
    "x width": (
        lambda: Encoder(DIM, layers=1, heads=4)(zeros(2, 6, 31)),
        "x must be [batch, time, 32], but has shape (2, 6, 31)",
    ),
    "x rank": (lambda: RelativeAttention(DIM, heads=4)(zeros(6, DIM)), "x must be [batch, time, 32], but has shape (6, 32)"),
    "context width": (
        lambda: RelativeAttention(DIM, heads=4)(zeros(2, 6, DIM), zeros(2, 6, 31)),
        "context must be [batch, time, 32], but has shape (2, 6, 31)",
    ),
    "encoding": (
        lambda: RelativeAttention(DIM, heads=4, encoding=3),
        "encoding must be an Encoding, the name of one or None, but is 3",
    ),
    "encoding terms": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding=Terms()),
        "encoding must be an Encoding, the name of one or None, but is Terms",
    ),
    "attention_dropout": (
        lambda: Encoder(DIM, layers=1, heads=4, attention_dropout=1.5),
        "dropout must be at least 0 and less than 1, but is 1.5",
    ),
    "window": (
        lambda: Encoder(DIM, layers=1, heads=4, window=3),
        "window must be (left, right), two numbers of lags of at least 0, but is 3",
    ),
    "cache of another": (
        lambda: Decoder(DIM, layers=2, heads=4)(zeros(2, 6, DIM), cache=Decoder(DIM, layers=1, heads=4).new_cache()),
        "cache must come from this stack's new_cache(), for 2 layers, but has 1",
    ),
    "packed cache": (
        lambda: RelativeAttention(DIM, heads=4)(zeros(1, 6, DIM), cache=Cache(), cu_seqlens=torch.tensor([0, 6])),
        "cu_seqlens cannot be combined with a cache",
    ),
    "cross cache": (
        lambda: RelativeAttention(DIM, heads=4, encoding="t5")(zeros(2, 6, DIM), zeros(2, 6, DIM), cache=Cache()),
        "cache cannot be combined with a context in attention with positions",
    ),
    "kind of attention": (
        lambda: Encoder(DIM, layers=1, heads=4, attention="linaer"),
        "attention must be one of softmax, linear, but is 'linaer': did you mean 'linear'?",
    ),
    "feature map of softmax attention": (
        lambda: Encoder(DIM, layers=1, heads=4, feature_map="relu"),
        "feature_map belongs to linear attention, but attention is 'softmax': pass attention='linear'",
    ),
    "unknown feature map of a stack": (
        lambda: Encoder(DIM, layers=1, heads=4, attention="linear", feature_map="favour"),
        "feature_map must be a FeatureMap or one of favor, relu, elu, but is 'favour': did you mean 'favor'?",
    ),
    "feature map of another width": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding="sine-spe", attention="linear", feature_map=lagwise.Favor(8)),
        "the feature map Favor is made for width 8, but the encoding makes queries of width 64: make it with Favor(64)",
    ),
    "dropout of linear attention": (
        lambda: Encoder(DIM, layers=1, heads=4, attention="linear", attention_dropout=0.1),
        "dropout of attention weights must be 0 with attention='linear', which never makes them, but is 0.1",
    ),
    "window of linear attention": (
        lambda: Decoder(DIM, layers=1, heads=4, attention="linear", window=(4, 0)),
        "window must be None with attention='linear', but is (4, 0)",
    ),
    "impl of softmax in linear attention": (
        lambda: Decoder(DIM, layers=1, heads=4, attention="linear", impl="blockwise"),
        "impl must be one of auto, dense, chunked, recurrent, fft, but is 'blockwise'",
    ),
    "fft in a decoder": (
        lambda: Decoder(DIM, layers=1, heads=4, attention="linear", impl="fft"),
        "impl='fft' cannot do this ... impl='chunked'",
    ),
    "shared encoding without a linear form": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding="shaw", attention="linear"),
        "the encoding has a query table, which does not factor into features of queries and of keys",
    ),
    "encoding of a layer without a linear form": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding="xpos", per_layer=True, attention="linear"),
        "encoding XPos has no form for linear attention",
    ),
    "features in softmax attention": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding="permute"),
        "encoding PermuteFormer acts on the features of linear attention ... pass attention='linear'",
    ),
    "features in a layer of softmax attention": (
        lambda: RelativeAttention(DIM, heads=4, encoding="permute"),
        "encoding PermuteFormer acts on the features of linear attention ... pass attention='linear'",
    ),
    "cache of softmax in linear attention": (
        lambda: RelativeAttention(DIM, heads=4, causal=True, attention="linear")(zeros(2, 6, DIM), cache=Cache()),
        "cache must be a LinearCache in this attention, but is a Cache: take it from new_cache()",
    ),
    "linear cache of attention that sees the future": (
        lambda: RelativeAttention(DIM, heads=4, attention="linear")(zeros(2, 6, DIM), cache=LinearCache()),
        "cache needs causal=True in linear attention",
    ),
    "key_mask of a linear cache": (
        lambda: Decoder(DIM, layers=1, heads=4, attention="linear")(
            zeros(2, 6, DIM), cache=DecoderCache([LinearCache()]), key_mask=zeros(2, 5, dtype=torch.bool)
        ),
        "key_mask must be bool of shape (2, 6), but is torch.bool of shape (2, 5)",
    ),
    "per_layer": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding="sine-spe", per_layer="gates"),
        "per_layer must be False, True or 'gate', but is 'gates'",
    ),
    "gates of an encoding without": (
        lambda: Encoder(DIM, layers=2, heads=4, encoding="t5", per_layer="gate"),
        "per_layer='gate' needs a stochastic encoding, 'sine-spe' or 'conv-spe', with gated=True, but encoding is T5",
    ),
    "gates of no encoding": (
        lambda: Encoder(DIM, layers=2, heads=4, per_layer="gate"),
        "per_layer='gate' needs one encoding or its name, but encoding is NoneType",
    ),
    "packed learned": (
        lambda: Encoder(DIM, layers=1, heads=4, encoding="learned")(zeros(1, 6, DIM), cu_seqlens=torch.tensor([3, 6])),
        "cu_seqlens must start with 0",
    ),
    "packed list": (
        lambda: Encoder(DIM, layers=1, heads=4)(zeros(1, 6, DIM), cu_seqlens=[0, 6]),
        "cu_seqlens must be a tensor of integers, [sequences + 1], but is [0, 6]",
    ),
}


@pytest.mark.parametrize("mistake", list(MADE))
def test_bad_tables_encodings_and_layers(mistake):
    call, message = MADE[mistake]
    with pytest.raises(ValueError, match=words_of(message)):
        call()


def test_an_encoding_is_not_called_like_a_layer(encoding_name):
    encoding = make_encoding(encoding_name)
    words = f"{type(encoding).__name__} is not called like a layer: pass it to lagwise.attention(q, k, v, encoding)"
    with pytest.raises(TypeError, match=words_of(words)):
        encoding(zeros(2, 6, DIM))


@pytest.mark.parametrize("impl", ["auto", "dense"])
def test_transforms_that_do_not_fit(impl):
    with pytest.raises(ValueError, match=re.escape("SineSPE is made for heads=8 and head_dim=8, but q has 4 heads of width 8")):
        lagwise.attention(**tensors(encoding=make_encoding("sine-spe", heads=8)), impl=impl)
    terms = Terms(transform=lambda q, k, *_: (q[..., :3], k))
    with pytest.raises(ValueError, match=re.escape("it makes (2, 4, 6, 3) and (2, 4, 6, 8)")):
        lagwise.attention(**tensors(encoding=terms), impl=impl)


def test_autocast_casts_no_integers():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="q must be float64"):
        lagwise.attention(**tensors(q=zeros(2, 4, 6, 8, dtype=torch.int64)))


@pytest.mark.parametrize("left", [make_encoding("t5"), Terms()], ids=["encoding", "terms"])
def test_sums_with_something_else(left):
    with pytest.raises(TypeError, match="unsupported operand"):
        left + "rotary"
