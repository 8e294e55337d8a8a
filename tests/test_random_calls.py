"""Random calls of every kind against a double loop over queries and keys that shares no code with the library.

    logit(i, j) = scale * (sum_c gain_c(n) q'_ic k'_jc + q_i . query(n) + k_j . key(n)) + bias(n)      n = j - i
    out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

Scales have any sign, columns may be minus infinity, tables any precision, and keys that a mask hides hold NaN.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from oracle import INTERPRETED
from torch import Tensor

import lagwise
from lagwise import LagTable, Terms

CALLS, AT_A_TIME = 1000, 50
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    """One call, as it is given to the library; `seen` says which pairs may be seen, `positions` where tokens stand."""

    q: Tensor
    k: Tensor
    v: Tensor
    values: dict[str, Tensor]  # of the tables
    firsts: dict[str, int]
    slopes: Tensor | None  # [2, heads], past and future
    base: float | None  # of a rotation
    scale: float
    options: dict[str, Any]
    hidden: Tensor  # [batch, keys]: nobody sees them
    seen: Tensor  # [batch, queries, keys]
    positions: tuple[Tensor, Tensor]  # of queries and keys, [batch, time]
    leaves: list[Tensor] = field(default_factory=list)

    @property
    def terms(self) -> Terms:
        slopes = None if self.slopes is None else tuple(self.slopes.unbind())
        tables = {name: LagTable(x, self.firsts[name], slopes if name == "bias" else None) for name, x in self.values.items()}
        rotation = None if self.base is None else lagwise.Rotary(head_dim=self.q.shape[3], base=self.base)
        return Terms(**tables, transform=rotation and rotation.terms(0, 0, scale=1.0).transform)


def drawn(number: int, *, dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)) -> Call:
    """Draws a call by a number."""
    draw = random.Random(number)
    torch.manual_seed(number)
    batch, group, kv_heads = draw.choice([1, 2]), draw.choice([1, 1, 2]), draw.choice([1, 2])
    heads, queries, keys = group * kv_heads, draw.randint(1, 11), draw.randint(1, 11)
    width, value_width, dtype = 2 * draw.randint(1, 2), draw.randint(1, 4), draw.choice(dtypes)
    kind = draw.choice(["plain", "plain", "causal", "window", "packed", "start", "starts"])
    if kind == "packed":
        batch, keys = 1, queries
    elif draw.random() < 0.5:
        keys = queries
    q = torch.randn(batch, heads, queries, width, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, keys, size, dtype=dtype) for size in (width, value_width))
    options: dict[str, Any] = {}
    starts = torch.zeros(batch, dtype=torch.int64)
    if kind == "start":
        options["query_start"] = start = draw.randint(-3, keys + 3)
        starts += start
    if kind == "starts":
        options["query_start"] = starts = torch.randint(0, keys + 1, (batch,))
    rows, columns = starts[:, None] + torch.arange(queries), torch.arange(keys).expand(batch, -1)
    seen = torch.ones(batch, queries, keys, dtype=torch.bool)
    lags = columns[:, None] - rows[:, :, None]
    if kind == "packed":
        ends = sorted([0, queries, *draw.choices(range(queries + 1), k=2)])
        options["cu_seqlens"] = torch.tensor(ends)
        begins = torch.tensor([max(end for end in ends if end <= token) for token in range(queries)])
        seen = (begins[:, None] == begins)[None]
        rows = columns = torch.arange(queries)[None] - begins
    if kind == "causal" or draw.random() < 0.2:
        options["causal"] = True
        seen = seen & (lags <= 0)
    if kind == "window":
        options["window"] = left, right = draw.randint(0, 5), draw.randint(0, 5)
        seen = seen & (lags >= -left) & (lags <= right)
    hidden = torch.zeros(batch, keys, dtype=torch.bool)
    if kind != "packed" and draw.random() < 0.3:
        options["lengths"] = torch.randint(0, keys + 1, (batch,))
        hidden = hidden | (torch.arange(keys) >= options["lengths"][:, None])
    if kind != "packed" and draw.random() < 0.3:
        options["key_mask"] = torch.rand(batch, keys) < 0.6
        hidden = hidden | ~options["key_mask"]
    values, firsts, slopes, base = tables_of(draw, heads, width, value_width)
    scale = draw.choice([width**-0.5, 1.0, 2.3, -0.7, 0.0, 1e-50, -1e-43])
    call = Call(q, k, v, values, firsts, slopes, base, scale, options, hidden, seen & ~hidden[:, None], (rows, columns))
    call.leaves = [q, k, v, *values.values(), *([] if slopes is None else [slopes])]
    return call


def tables_of(
    draw: random.Random, heads: int, width: int, value_width: int
) -> tuple[dict[str, Tensor], dict[str, int], Tensor | None, float | None]:
    """Draws tables, the lags of their first columns, slopes, and the base of a rotation."""
    channels = {"bias": (), "gain": (draw.choice([1, width]),), "query": (width,), "key": (width,), "value": (value_width,)}
    names = [name for name in channels if draw.random() < 0.35]
    base = draw.choice([10.0, 10000.0]) if draw.random() < 0.25 else None
    if base is not None and "gain" in names and channels["gain"] != (1,):
        channels["gain"] = (1,)
    values, firsts = {}, {}
    for name in names:
        lags, kind = draw.randint(1, 7), draw.choice(FLOATS)
        values[name] = torch.randn(draw.choice([1, heads]), lags, *channels[name]).to(kind)
        firsts[name] = draw.randint(-6, 3)
        if name == "bias" and draw.random() < 0.4:
            values[name][draw.randrange(len(values[name])), torch.rand(lags) < 0.4] = -torch.inf
    slopes = None
    if "bias" in values and draw.random() < 0.3:
        slopes = torch.randn(2, len(values["bias"])).to(values["bias"].dtype)
    return values, firsts, slopes, base


def looped(call: Call) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp in float64, pair by pair."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    turned_q, turned_k = (
        x if call.base is None else turned(x, at, call.base) for x, at in zip((q, k), call.positions, strict=True)
    )
    start = call.options.get("query_start", 0)
    outs, lses = [], []
    for i in range(q.shape[2]):
        logits, values = [], []
        for j in range(k.shape[2]):
            lags = [j - i - int(each) for each in torch.as_tensor(start).expand(q.shape[0])]

            def at(name: str, lags: list[int] = lags) -> Tensor:
                return torch.stack([column(call, name, lag) for lag in lags])

            gain = at("gain") if "gain" in call.values else torch.ones(1, 1, 1)
            logit = call.scale * (gain * turned_q[:, :, i] * turned_k[:, :, j]).sum(-1)
            if "query" in call.values:
                logit = logit + call.scale * (q[:, :, i] * at("query")).sum(-1)
            if "key" in call.values:
                logit = logit + call.scale * (k[:, :, j] * at("key")).sum(-1)
            if "bias" in call.values:
                logit = logit + at("bias")
            logits.append(torch.where(call.seen[:, None, i, j], logit, -torch.inf))
            values.append(v[:, :, j] + at("value") if "value" in call.values else v[:, :, j])
        row = torch.stack(logits, -1)
        empty = (row == -torch.inf).all(-1, keepdim=True)
        row = torch.where(empty, 0.0, row)
        weights = torch.where(empty, 0.0, torch.exp(row - row.logsumexp(-1, keepdim=True)))
        outs.append((weights[..., None] * torch.stack(values, 2)).sum(2))
        lses.append(torch.where(empty[..., 0], -torch.inf, row.logsumexp(-1)))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def column(call: Call, name: str, lag: int) -> Tensor:
    """Returns a table at a lag, [heads] or [heads, channels]."""
    values, first = call.values[name].double(), call.firsts[name]
    last = first + values.shape[1] - 1
    found = values[:, min(max(lag, first), last) - first]
    if name == "bias" and call.slopes is not None:
        past, future = call.slopes.double()
        found = found + past * min(lag - first, 0) + future * max(lag - last, 0)
    return found.expand(call.q.shape[1], *found.shape[1:])


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotates neighbouring channels of x, [batch, heads, time, width], as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    speeds = torch.tensor([base ** (-2 * pair / x.shape[-1]) for pair in range(x.shape[-1] // 2)], dtype=torch.float64)
    angles = positions.double()[:, None, :, None] * speeds
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def results(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Returns output, log-sum-exp and the gradients of all that was given."""
    torch.manual_seed(0)
    dout, dlse = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape, dtype=torch.float64)
    incoming = [dout.to(out.dtype), torch.where(lse == -torch.inf, 0.0, dlse).to(lse.dtype)]
    found = torch.autograd.grad([out, lse], leaves, incoming, allow_unused=True)
    return [out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def check(call: Call, impl: str, attend: Any = lagwise.attention) -> None:
    """Compares a call with the loop."""
    for leaf in call.leaves:
        leaf.requires_grad_()
    expected = results(*looped(call), call.leaves)
    hidden = call.hidden[:, None, :, None]
    k, v = (x.masked_fill(hidden, math.nan) for x in (call.k, call.v))
    given = dict(call.options, scale=call.scale, return_lse=True)
    try:
        out, lse = attend(call.q, k, v, call.terms, impl=impl, **given)
    except ValueError as error:
        # What an implementation refuses it says, and "auto" finds another.
        assert f"impl={impl!r} cannot do this" in str(error)
        out, lse = attend(call.q, k, v, call.terms, impl="auto", **given)
    names = ["out", "lse", "q", "k", "v", *call.values, "slopes"]
    for name, a, b in zip(names, results(out, lse, call.leaves), expected, strict=False):
        precision = max(torch.finfo(a.dtype).eps, torch.finfo(call.q.dtype).eps)
        size = float(b[b != -torch.inf].abs().max()) if (b != -torch.inf).any() else 0.0
        torch.testing.assert_close(
            a.double(),
            b.double(),
            rtol=0.0,
            atol=200 * precision * max(1.0, size),
            msg=lambda words, name=name: f"{name}: {words}",
        )


@pytest.mark.parametrize("start", range(0, CALLS, AT_A_TIME))
def test_random_calls_are_the_double_loop(start):
    for number in range(start, start + AT_A_TIME):
        impl = ("auto", "dense", "blockwise", "split")[number % 4]
        try:
            check(drawn(number), impl)
        except Exception as error:
            raise AssertionError(f"call {number} of impl={impl!r}: {error}") from error


@INTERPRETED
@pytest.mark.parametrize("number", range(5000, 5030))
def test_random_calls_of_the_kernels(number):
    check(drawn(number, dtypes=(torch.float32,)), "triton")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
# The compiler looks at the gradients of all inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("number", range(7000, 7016))
def test_random_calls_that_are_compiled_for_any_size(number):
    torch._dynamo.reset()
    impl = ("auto", "dense", "blockwise")[number % 3]
    check(drawn(number), impl, torch.compile(lagwise.attention, fullgraph=True, dynamic=True, backend="aot_eager"))
