"""`impl="triton"` on the host: scores of vector tables by matrix products, then the kernels, then the gradients of the tables."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.lags import LagTable, visible_lags
from lagwise.noise import KEEP_BITS
from lagwise.ops.kernels.bias_gradient import fold_kernel, scalar_gradient_kernel
from lagwise.ops.kernels.channel_gain import (
    channel_gain_gradient_kernel,
    channel_key_gradient_kernel,
    channel_query_gradient_kernel,
    channel_scores_kernel,
)
from lagwise.ops.kernels.forward import forward_kernel, key_gradient_kernel, query_gradient_kernel
from lagwise.ops.kernels.rows import delta_kernel
from lagwise.ops.kernels.run import run
from lagwise.ops.kernels.tiles import DIRECT
from lagwise.ops.lowering import DIFFERENTIABLE, Lowered, empty_laid_out, is_by_token, tables_of
from lagwise.ops.split.eager import merge
from lagwise.terms import Terms

# Queries, keys, warps and stages of a tile, by kernel and by the width of a head that it holds; there is no autotuner, so that
# a call compiles once and repeats. Measured on an H200. Those of a band alone are few per block, and smaller.
TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)},
    "query": {64: (64, 32, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
    "key": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
    "scalar": {64: (64, 64, 4, 3), 128: (64, 64, 8, 2), 256: (32, 32, 4, 1)},
    "scored forward": {64: (64, 32, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2)},
    "band forward": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 4, 2)},
    "valued query": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
    "keyed key": {64: (64, 32, 4, 3), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
    "band key": {64: (64, 32, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
}
# Products of float32 run on the ordinary units, one instruction per number: larger tiles would compile for minutes.
FLOAT32_TILES = {64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)}
# The interpreter has no registers to fill: small tiles leave less to compute in vain.
INTERPRETED = (16, 16, 1, 1)
# Entries that a padded table has beyond the near lags: tiles that touch them and have at most so many queries and keys together
# stay inside.
PADDING = 256
# Programs of the diagonal sums, enough to fill a GPU, and how many of their sums and columns a program adds up at a time.
DIAGONAL_PROGRAMS = 2048
PARTS, COLUMNS = 32, 32
# The most lags of tables of vectors whose scores are in memory at a time.
WIDEST = 1024
# Rows of the kernels that are no matrix products.
ROWS = 64
# Of the kernels for a gain per channel: the rows of a run, and those where the gradient of the gain is computed, the lags of a
# step, which divides every band, the lags of a program that scores, and the channels of all runs that a warp holds. The
# interpreter takes time by the operation.
LENGTH, GAIN_LENGTH, STEP = (4, 8, 8) if DIRECT.value else (2, 2, 4)
LAGS, WARP_CHANNELS = 64, 256


class Plan:
    """What the kernels of a call share: its bands, numbers, flags, and scores.

    `tables` are the call's; `lags` limits the lags that are seen, as a window does; `only` limits them to a band without ends,
    the near part of `split`.
    """

    def __init__(self, call: Lowered, tables: Terms, *, lags: tuple[int, int] | None = None, only: tuple[int, int] | None = None):
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        self.call, self.q, self.k, self.only = call, q, k, only
        self.batch, self.heads, self.queries, head_dim = q.shape
        self.keys, value_dim = k.shape[2], v.shape[3]
        self.raw_q, self.raw_k = (x if raw is None else raw for x, raw in ((q, call.raw_q), (k, call.raw_k)))
        first, last = seen_lags(call)
        for limits in (lags, only):
            if limits is not None:
                first, last = max(first, limits[0]), min(last, limits[1])
        self.first, self.last = first, last
        self.tables = tables
        self.bands: dict[str, Tensor] = {}
        gain = self.tables.gain
        self.channels = gain is not None and gain.values.shape[2] > 1
        self.low = self.high = 0
        self.low, self.high = self.band("bias", "gain", "query", "key", "value")
        scored = [name for name in ("query", "key", "gain") if name != "gain" or self.channels]
        self.scored = any(getattr(self.tables, name) is not None for name in scored)
        self.v = v = self.shown(v)
        scores = self.tables.query is not None or self.channels
        self.band_first, self.band_last = aligned(*self.band(*scored))
        self.value_first, self.value_last = aligned(*self.band("value"))
        near_first, near_last = self.low, max(self.high, self.band_last, self.value_last)
        if call.causal:
            # Beyond the near tiles nothing is masked.
            near_first, near_last = min(near_first, last), max(near_last, last)
        # Near tiles gather scores at all near lags: there must be room for them, a multiple that keeps the scores aligned.
        self.room = (1 + blocks(near_last - near_first + 1, PADDING)) * PADDING
        self.arguments: dict[str, Any] = {
            **dict.fromkeys(POINTERS, q), **dict.fromkeys(FAR_NUMBERS, 0), "SIDES": 0, "Q": q, "K": k, "V": v,
            **strides("q", q), **strides("k", k), **strides("v", v),
            "heads": self.heads, "group": self.heads // k.shape[1], "queries": self.queries, "keys": self.keys,
            "query_start": call.query_start, "first": first, "last": last, "near_first": near_first, "near_last": near_last,
            "low": self.low, "high": self.high, "table_first": near_first - PADDING,
            "table_lags": near_last - near_first + 1 + 2 * PADDING,
            "band_first": self.band_first, "band_lags": self.band_last - self.band_first + 1,
            "value_first": self.value_first, "value_lags": self.value_last - self.value_first + 1,
            "scale": call.scale, "dropped": round(call.dropout * 2**KEEP_BITS),
            "head_dim": head_dim, "value_dim": value_dim, "WIDTH": width(head_dim), "VALUE_WIDTH": width(value_dim),
            "BIAS": self.tables.bias is not None, "SLOPES": call.slopes is not None,
            "GAIN": gain is not None and not self.channels, "CHANNELS": self.channels, "SCORES": scores,
            "QUERY": self.tables.query is not None, "KEY": self.tables.key is not None, "VALUE": self.tables.value is not None,
            "MASK": call.key_mask is not None, "HIDE": call.key_mask is not None and not self.scored,
            "PACKED": call.cu_seqlens is not None, "STARTS": call.starts is not None,
            "DROPOUT": call.dropout > 0.0, "FAR": only is None,
            "LIMITED": call.causal or call.window is not None or lags is not None or only is not None,
            "WINDOW": call.window is not None or lags is not None,
            # Gradients to which others add products, or whose heads are summed, lie head by head.
            "DQ_BY_TOKEN": is_by_token(q) and not self.scored,
            "DK_BY_TOKEN": is_by_token(k) and is_by_token(v) and not self.scored and self.heads == k.shape[1],
        }  # fmt: skip
        if call.seed is not None:
            self.arguments["Seed"] = call.seed
        if call.starts is not None:
            self.arguments["Starts"] = call.starts
        self._pad_tables(near_first - PADDING, near_last + PADDING)
        self._mask_keys()

    def band(self, *names: str) -> tuple[int, int]:
        """Returns the first and the last lag of the columns of some tables that the call can reach, at least one lag.

        With `only` it is that band for all tables, so that none of them has an end in it.
        """
        if self.only is not None:
            return self.first, max(self.first, self.last)
        found = [table for name in names if (table := getattr(self.tables, name)) is not None]
        if not found:
            # Somewhere among the others, where it widens nothing.
            return self.low, self.low
        low, high = min(table.first for table in found), max(table.last for table in found)
        low = min(max(low, self.first), high)
        return low, max(min(high, self.last), low)

    def _pad_tables(self, first: int, last: int) -> None:
        """Gives the kernels tables of scalars for all lags that near tiles touch, one row per head."""
        if self.tables.bias is not None:
            self.arguments["Bias"] = self.per_head(self.tables.bias.window(first, last))
        if self.call.slopes is not None:
            self.arguments["Slopes"] = self.call.slopes.float().expand(2, self.heads).contiguous()
        if self.tables.gain is not None and self.channels:
            window = self.tables.gain.window(self.band_first, self.band_last)
            self.arguments["ChannelGain"] = self.per_head(window)
            self.arguments["Gain"] = self.per_head(torch.stack([window[:, 0], window[:, -1]], dim=1))
        elif self.tables.gain is not None:
            self.arguments["Gain"] = self.per_head(self.tables.gain.window(first, last)[..., 0])
        if self.tables.value is not None:
            window = self.tables.value.window(self.value_first, self.value_last)
            self.arguments["Value"] = self.per_head(window, self.q.dtype)

    def per_head(self, window: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gives each head its own copy of a table."""
        return window.to(dtype).expand(self.heads, *window.shape[1:]).contiguous()

    def _mask_keys(self) -> None:
        call = self.call
        if call.key_mask is not None:
            index = torch.arange(self.keys, device=self.q.device, dtype=torch.int32)
            begin = torch.where(call.key_mask, index, self.keys).amin(1)
            end = torch.where(call.key_mask, index + 1, 0).amax(1)
            self.arguments["KeyMask"] = call.key_mask.contiguous().view(torch.uint8)
            self.arguments["Bounds"] = torch.stack([begin, end], dim=1).int()
        if call.cu_seqlens is not None:
            index = torch.arange(self.keys, device=self.q.device)
            sequence = torch.searchsorted(call.cu_seqlens, index, right=True)
            self.arguments["SequenceStart"] = call.cu_seqlens[sequence - 1].int()
            self.arguments["SequenceEnd"] = call.cu_seqlens[sequence].int()

    def shown(self, x: Tensor) -> Tensor:
        """Returns k or v with zeros where a mask hides them, if there are scores; without them the kernels see to that.

        Where there are scores, loads that depend on a mask slow the forward kernel down by more than this costs (on an H200).
        """
        if self.call.key_mask is None or not self.scored:
            return x
        # One pass over the memory, where `masked_fill` takes two.
        return torch.where(self.call.key_mask[:, None, :, None], x, 0.0)

    def hide_keys(self) -> None:
        """Leaves zeros of hidden keys, for gradients alone: logits are masked, but a gradient of zero times NaN is NaN."""
        self.k = self.shown(self.k)
        self.raw_k = self.k if self.call.raw_k is None else self.shown(self.raw_k)
        self.arguments |= {"K": self.k, **strides("k", self.k)}

    def table(self, name: str) -> Tensor:
        """Returns the band of `query` or `key`, [heads or 1, lags, channels]."""
        if name not in self.bands:
            self.bands[name] = getattr(self.tables, name).window(self.band_first, self.band_last).to(self.q.dtype)
        return self.bands[name]

    def score(self) -> None:
        """Computes the scores of the band, [queries, lags] and [keys, lags], and their ends, by matrix products."""
        found: dict[str, Tensor] = {}
        if self.tables.query is not None:
            found["BandScores"] = products(self.raw_q, self.table("query"), self.room)
        elif self.channels:
            found["BandScores"] = empty_scores(self.q, self.arguments["band_lags"], self.room)
        if self.tables.key is not None:
            found["KeyScores"] = products(per_query_head(self.raw_k, self.heads), self.table("key"), self.room)
        if self.only is None and self.tables.query is not None:
            found["QueryEnds"] = ends_of(found["BandScores"])
        if self.only is None and self.tables.key is not None:
            found["KeyEnds"] = ends_of(found["KeyScores"])
        self.arguments |= found
        if self.channels:
            sizes, rows, warps = self.runs(loads_gain=True)
            grid = (blocks(self.queries, rows), blocks(self.arguments["band_lags"], LAGS), self.batch * self.heads)
            run(channel_scores_kernel, grid, {**self.arguments, **sizes}, warps, stages=1)

    def runs(self, *, loads_gain: bool) -> tuple[dict[str, int], int, int]:
        """Returns the sizes of the kernels for a gain per channel, the rows of a program, and its warps.

        To fewer warps Triton would hand the gains of a wide head through shared memory.
        """
        warps, length = (max(4, self.arguments["WIDTH"] // 16), LENGTH) if loads_gain else (4, GAIN_LENGTH)
        count = warps * WARP_CHANNELS // self.arguments["WIDTH"]
        return {"RUNS": count, "LENGTH": length, "STEP": STEP, "LAGS": LAGS}, count * length, warps

    def tile(self, kind: str) -> tuple[int, int, int, int]:
        if not DIRECT.value:
            return INTERPRETED
        if self.only is not None:
            special = f"band {kind}"
        elif kind == "key" and (self.tables.key is not None or self.channels):
            special = "keyed key"
        elif kind == "query" and self.tables.value is not None:
            special = "valued query"
        else:
            special = f"scored {kind}" if self.scored else kind
        tiles = FLOAT32_TILES if self.q.dtype == torch.float32 else TILES.get(special, TILES[kind])
        return tiles[max(64, self.arguments["WIDTH"], self.arguments["VALUE_WIDTH"])]

    def launch(self, kernel: Any, kind: str, **arguments: Any) -> None:
        """Runs a kernel on all blocks of queries, or with the kind "key" of keys, of all heads."""
        rows, keys, warps, stages = self.tile(kind)
        even = self.queries % rows == 0 and self.keys % keys == 0
        masked = not even or self.arguments["MASK"] or self.arguments["PACKED"]
        given = {
            **self.arguments, **arguments, "ROWS": rows, "KEYS": keys, "WHOLE": even,
            "NEAR_MASKED": masked or self.arguments["LIMITED"], "FAR_MASKED": masked or self.arguments["WINDOW"],
        }  # fmt: skip
        count = blocks(self.keys, keys) if kind == "key" else blocks(self.queries, rows)
        run(kernel, (count, self.batch * self.heads), given, warps, stages)


POINTERS = (
    "Bias", "Slopes", "Gain", "ChannelGain", "Value", "BandScores", "KeyScores", "QueryEnds", "KeyEnds", "ValueScores",
    "ValueEnds", "BandLogits", "DKeyScores", "DQueryEnds", "DKeyEnds", "ValueMasses", "DScalarEnds", "DGainEnds", "DBias",
    "DGain", "DqPast", "DqFuture", "DkPast", "DkFuture", "DvPast", "DvFuture", "EndGains",
    "KeyMask", "Bounds", "SequenceStart", "SequenceEnd", "Starts", "Seed",
)  # fmt: skip
"""Arguments of kernels that a call may lack; any tensor stands for them."""

FAR_NUMBERS = (
    "past_rows", "future_rows", "past_keys", "future_keys", "end_gains_head", "end_gains_last",
    *(f"d{x}_{side}_{axis}" for x in "qkv" for side in ("past", "future") for axis in ("batch", "head", "time")),
)  # fmt: skip
"""Numbers of the far fields that other kernels compute; there are none unless `split` says so."""


def blocks(count: int, size: int) -> int:
    """Returns how many blocks of a size hold a count."""
    return -(-count // size)


def aligned(first: int, last: int) -> tuple[int, int]:
    """Widens a band of lags to a multiple of 8, which the vendor's matrix products need to be fast."""
    return first, first + blocks(last - first + 1, 8) * 8 - 1


def width(channels: int) -> int:
    """Returns the power of two that holds some channels; products need at least 16."""
    return max(16, 1 << (channels - 1).bit_length())


def strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_time": x.stride(2)}


def empty_scores(x: Tensor, lags: int, room: int) -> Tensor:
    """Returns space for the scores of x, [batch, heads, time, lags], with some room before and after it."""
    shape = (*x.shape[:3], lags)
    return x.new_empty(math.prod(shape) + 2 * room)[room:-room].view(shape)


def products(x: Tensor, table: Tensor, room: int) -> Tensor:
    """Returns the scores of x, [batch, heads, time, channels], with a table, [heads or 1, lags, channels], amid some room."""
    scores = empty_scores(x, table.shape[1], room)
    if len(table) == 1:
        torch.mm(x.flatten(0, 2), table[0].mT, out=scores.flatten(0, 2))
    else:
        torch.bmm(x.flatten(0, 1), per_pair(table, x).mT, out=scores.flatten(0, 1))
    return scores


def per_pair(table: Tensor, x: Tensor) -> Tensor:
    """Repeats a table for each batch row of x, [batch * heads, lags, channels]."""
    return table.expand(*x.shape[:2], *table.shape[1:]).flatten(0, 1)


def ends_of(scores: Tensor) -> Tensor:
    """Returns the first and the last column of scores, of at least two, as [batch, heads, time, 2] in float32."""
    return scores[..., :: scores.shape[3] - 1].float().contiguous()


def add_ends(scores: Tensor, ends: Tensor) -> Tensor:
    """Adds ends to the first and the last column of scores, in place."""
    scores[..., :: scores.shape[3] - 1] += ends
    return scores


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeats grouped key heads until each query head has its own."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def per_key_head(x: Tensor, heads: int) -> Tensor:
    """Sums what several query heads give to the key head that they share."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def summed_products(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Returns the sum over batch and time, for one head over heads as well, of a's columns times b's, [heads, a's, b's]."""
    if a.is_cuda and a.dtype != torch.float32:
        found = torch.bmm(a.flatten(0, 1).mT, b.flatten(0, 1), out_dtype=torch.float32)
    else:
        found = torch.bmm(a.float().flatten(0, 1).mT, b.float().flatten(0, 1))
    return found.sum(0, keepdim=True) if heads == 1 else found.unflatten(0, a.shape[:2]).sum(0)


def seen_lags(call: Lowered) -> tuple[int, int]:
    """Returns the first and the last lag that the call can see."""
    return visible_lags(
        call.q.shape[2], call.k.shape[2], query_start=call.query_start if call.starts is None else call.starts,
        causal=call.causal, window=None if call.window is None else (call.window[0], call.window[1]),
    )  # fmt: skip


def lag_ranges(call: Lowered, tables: Terms) -> list[tuple[int, int] | None]:
    """Returns the ranges of lags that are computed one after the other, so that the scores of a range fit into memory.

    None stands for all lags. Each range has at most WIDEST columns of the tables of vectors; the first and the last reach beyond.
    """
    vectors = [table for table in tables.tables().values() if table.values.ndim == 3 and table.values.shape[2] > 1]
    if not vectors:
        return [None]
    first, last = seen_lags(call)
    low, high = max(first, min(table.first for table in vectors)), min(last, max(table.last for table in vectors))
    if high - low < WIDEST:
        return [None]
    starts = [first, *range(low + WIDEST, high + 1, WIDEST)]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), last], strict=True))


def forward(call: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp."""
    out, lse = outputs(call)
    tables = tables_of(call)
    ranges = lag_ranges(call, tables)
    if len(ranges) == 1:
        attend(Plan(call, tables), out, lse)
        return [out, lse]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    lse.fill_(-torch.inf)
    for lags in ranges:
        range_out, range_lse = outputs(call)
        attend(Plan(call, tables, lags=lags), range_out, range_lse)
        merge(total, lse, range_out, range_lse)
    return [out.copy_(total), lse]


def attend(plan: Plan, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp of a plan."""
    plan.score()
    given: dict[str, Any] = {"Out": out, "Lse": lse, "OUT_BY_TOKEN": is_by_token(out)}
    if plan.tables.value is not None:
        given["BandLogits"] = torch.empty(*lse.shape, plan.arguments["value_lags"], dtype=torch.float32, device=out.device)
    plan.launch(forward_kernel, "forward", **given)


def backward(call: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    out, lse = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    deltas, tables = delta(dout, out, dlse), tables_of(call)
    found: dict[str, Tensor] = {}
    learned: Terms | None = None
    for lags in lag_ranges(call, tables):
        more, gradient = differentiate(Plan(call, tables, lags=lags), dout, lse, deltas)
        # Ranges are added up in float32.
        found = {name: found[name] + x if name in found else x if lags is None else x.float() for name, x in more.items()}
        learned = gradient if learned is None else summed(learned, gradient)
    assert learned is not None
    return gradients(call, found, learned)


def summed(a: Terms, b: Terms) -> Terms:
    """Returns the sum of two gradients of tables."""
    others = b.tables()
    tables: dict[str, Any] = {}
    for name, table in a.tables().items():
        mine, theirs = table.slopes, others[name].slopes
        slopes = (mine[0] + theirs[0], mine[1] + theirs[1]) if mine is not None and theirs is not None else None
        tables[name] = LagTable(table.values + others[name].values, table.first, slopes)
    return Terms(**tables)


def gradients(call: Lowered, found: dict[str, Tensor], tables: Terms) -> list[Tensor]:
    """Returns gradients in the order of DIFFERENTIABLE and in the types of what they belong to; key heads get their sums."""
    found |= {name: per_key_head(found[name], call.k.shape[1]) for name in ("k", "v", "raw_k") if name in found}
    found |= {name: table.values for name, table in tables.tables().items()}
    if tables.bias is not None and tables.bias.slopes is not None:
        found["slopes"] = torch.stack(tables.bias.slopes)
    present = ((x, found[name].to(x.dtype)) for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None)
    return [
        gradient.transpose(1, 2).contiguous().transpose(1, 2) if like_tokens(x) else gradient.contiguous()
        for x, gradient in present
    ]


def like_tokens(x: Tensor) -> bool:
    """Says whether the gradient of a tensor lies token by token, as the tensor does: q, k and v may, tables do not."""
    return x.ndim == 4 and is_by_token(x)


def backward_outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `backward`."""
    present = (x for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None)
    return [empty_laid_out(True, x, *x.shape) if like_tokens(x) else x.new_empty(x.shape) for x in present]


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns `dout . out - dlse` per row: what each row's logits lose to the normalisation."""
    found = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    given = {
        "Out": out, "Dout": dout, "Dlse": out if dlse is None else dlse.contiguous(), "Delta": found, **strides("dout", dout),
        "heads": out.shape[1], "queries": out.shape[2], "value_dim": out.shape[3], "VALUE_WIDTH": width(out.shape[3]),
        "ROWS": ROWS, "DLSE": dlse is not None, "OUT_BY_TOKEN": is_by_token(out),
    }  # fmt: skip
    run(delta_kernel, (blocks(out.shape[2], ROWS), out.shape[0] * out.shape[1]), given, warps=4, stages=1)
    return found


class FarEnds(NamedTuple):
    """What the far fields of `split` add to the ends of tables, per row: [batch, heads, queries, 2]."""

    changes: Tensor  # sums of dlogit
    masses: Tensor  # sums of weights


def differentiate(
    plan: Plan, dout: Tensor, lse: Tensor, delta: Tensor, far: FarEnds | None = None
) -> tuple[dict[str, Tensor], Terms]:
    """Returns the gradients of q, k, v and of the raw q and k by name, those of k and v per query head, and those of the tables.

    The ends come from the kernels, or from the far fields where the plan has only the band.
    """
    plan.hide_keys()
    plan.score()
    zeros: dict[str, Any] = {name: table.zeros(torch.float32) for name, table in plan.tables.tables().items()}
    tables = Terms(**zeros)
    given: dict[str, Any] = {"Dout": dout, **strides("dout", dout), "Lse": lse, "Delta": delta}
    if plan.tables.value is not None:
        given["ValueScores"] = products(dout, plan.arguments["Value"], plan.room)
        given["ValueEnds"] = ends_of(given["ValueScores"])
    sums = diagonal_sums(plan, given)
    if plan.tables.key is not None:
        # Gradients stand where the scores were, unless there are columns or pairs that no program looks at.
        scores = plan.arguments["KeyScores"]
        whole = plan.band_first >= plan.first and not (plan.arguments["MASK"] or plan.arguments["PACKED"])
        given["DKeyScores"] = scores if whole else torch.zeros_like(scores)
    found, key_ends = _key_gradients(plan, given)
    found["q"], rows = _query_gradients(plan, given)
    if plan.tables.value is not None and tables.value is not None:
        masses = rows["ValueMasses"] if far is None else far.masses
        weights = add_ends(given.pop("ValueScores"), masses)
        plan.tables.value.fold(summed_products(weights, dout, tables.value.heads), plan.value_first, tables.value)
    if plan.scored:
        _score_gradients(plan, given, key_ends, rows["DQueryEnds"] if far is None else far.changes, found, tables)
    if plan.channels:
        _channel_ends(plan, rows["DGainEnds"], tables)
    _scalar_gradients(plan, sums, rows["DScalarEnds"] if far is None else far.changes[:, :, None], tables)
    return found, tables


def _add(found: dict[str, Tensor], name: str, raw: Tensor | None, dscores: Tensor, table: Tensor, scale: float) -> None:
    """Adds scores' share of the gradient of the raw q or k to that of the transformed one where they are the same tensor."""
    if raw is not None:
        found[f"raw_{name}"] = scale * (dscores @ table)
    elif len(table) == 1:
        found[name].flatten(0, 2).addmm_(dscores.flatten(0, 2), table[0], alpha=scale)
    else:
        found[name].flatten(0, 1).baddbmm_(dscores.flatten(0, 1), per_pair(table, dscores), alpha=scale)


def _key_gradients(plan: Plan, given: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns dk and dv per query head, and the gradients of the keys' ends, which a band has not."""
    shape, by_token = (plan.batch, plan.heads, plan.keys), plan.arguments["DK_BY_TOKEN"]
    dk, dv = (empty_laid_out(by_token, x, *shape, x.shape[3]) for x in (plan.k, plan.v))
    more = {}
    if plan.tables.key is not None and plan.only is None:
        more["DKeyEnds"] = torch.empty(*shape, 2, dtype=torch.float32, device=dk.device)
    plan.launch(key_gradient_kernel, "key", Dk=dk, Dv=dv, **given, **more)
    return {"k": dk, "v": dv}, more.get("DKeyEnds")


def _query_gradients(plan: Plan, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns dq and what the same kernel finds for the ends of the tables; scores turn into their gradients."""
    lse = given["Lse"]
    dq = empty_laid_out(plan.arguments["DQ_BY_TOKEN"], plan.q, *plan.q.shape)

    def ends(*shape: int) -> Tensor:
        return torch.empty(*lse.shape[:2], *shape, lse.shape[2], 2, dtype=torch.float32, device=lse.device)

    rows = {"DScalarEnds": ends(3), "DQueryEnds": ends(), "ValueMasses": ends()} if plan.only is None else {}
    if plan.channels:
        count = blocks(plan.queries, plan.tile("query")[0])
        rows["DGainEnds"] = torch.empty(*lse.shape[:2], count, 2, plan.arguments["WIDTH"], device=lse.device)
    plan.launch(query_gradient_kernel, "query", Dq=dq, **given, **rows)
    return dq, rows


def _score_gradients(
    plan: Plan, given: dict[str, Any], key_ends: Tensor | None, query_ends: Tensor, found: dict[str, Tensor], tables: Terms
) -> None:
    """Adds the gradients of the tables behind the scores, and their shares of dq and dk."""
    scale = plan.call.scale
    if plan.tables.key is not None and tables.key is not None:
        dscores = given["DKeyScores"]
        if key_ends is not None:
            add_ends(dscores, key_ends)
        gradient = scale * summed_products(dscores, per_query_head(plan.raw_k, plan.heads), tables.key.heads)
        plan.tables.key.fold(gradient, plan.band_first, tables.key)
        _add(found, "k", plan.call.raw_k, dscores, plan.table("key"), scale)
    dscores = plan.arguments.pop("BandScores")
    if plan.channels:
        _channel_gradients(plan, dscores, found, tables)
    if plan.tables.query is not None and tables.query is not None:
        add_ends(dscores, query_ends)
        gradient = scale * summed_products(dscores, plan.raw_q, tables.query.heads)
        plan.tables.query.fold(gradient, plan.band_first, tables.query)
        _add(found, "q", plan.call.raw_q, dscores, plan.table("query"), scale)


def _channel_gradients(plan: Plan, dscores: Tensor, found: dict[str, Tensor], tables: Terms) -> None:
    """Adds the shares of a gain per channel to dq and dk, and its gradient in the band."""
    assert plan.tables.gain is not None and tables.gain is not None
    sizes, rows, warps = plan.runs(loads_gain=True)
    pairs = plan.batch * plan.heads
    given = {**plan.arguments, **sizes, "DBandScores": dscores, "Dq": found["q"], "Dk": found["k"]}
    run(channel_query_gradient_kernel, (blocks(plan.queries, rows), pairs), given, warps, stages=1)
    run(channel_key_gradient_kernel, (blocks(plan.keys, rows), pairs), given, warps, stages=1)
    sizes, rows, warps = plan.runs(loads_gain=False)
    steps = given["band_lags"] // STEP
    chunks = min(blocks(DIAGONAL_PROGRAMS, steps * pairs), blocks(plan.queries, rows))
    shape = (plan.batch, plan.heads, chunks, given["band_lags"], plan.q.shape[3])
    shares = torch.empty(shape, dtype=torch.float32, device=plan.q.device)
    given |= {**sizes, "DChannelGain": shares, "chunks": chunks}
    run(channel_gain_gradient_kernel, (steps, chunks, pairs), given, warps, stages=1)
    plan.tables.gain.fold(shares.sum((0, 2)), plan.band_first, tables.gain)


def _channel_ends(plan: Plan, ends: Tensor, tables: Terms) -> None:
    """Adds the gradient of a gain per channel beyond the band."""
    if plan.only is None and tables.gain is not None:
        past, future = ends[..., : plan.q.shape[3]].sum((0, 2)).unbind(1)
        for column, gradient in ((0, past), (-1, future)):
            tables.gain.values[:, column] += gradient.sum(0, keepdim=True) if tables.gain.heads == 1 else gradient


class DiagonalSums(NamedTuple):
    """Partial sums of the gradients of bias and of a gain of scalars, [batch, heads, chunks, diagonals, 2 size] each."""

    size: int
    chunks: int
    diagonals: int
    sums: dict[str, Tensor]


def diagonal_sums(plan: Plan, given: dict[str, Any]) -> DiagonalSums:
    """Computes the gradients of tables of scalars in the band, spread over the programs."""
    size, _, warps, stages = plan.tile("scalar")
    diagonals = blocks(plan.high - plan.low + size, size)
    chunks = min(blocks(DIAGONAL_PROGRAMS, diagonals * plan.heads * plan.batch), blocks(plan.queries, size))
    shape = (plan.batch, plan.heads, chunks, diagonals, 2 * size)
    wanted = [name for name in ("bias", "gain") if plan.arguments[name.upper()]]
    sums = {name: torch.empty(shape, dtype=torch.float32, device=plan.q.device) for name in wanted}
    if wanted:
        more = {**{f"D{name.capitalize()}": x for name, x in sums.items()}, "SIZE": size, "chunks": chunks}
        grid = (diagonals, chunks, plan.batch * plan.heads)
        run(scalar_gradient_kernel, grid, {**plan.arguments, **given, **more}, warps, stages)
    return DiagonalSums(size, chunks, diagonals, sums)


def _scalar_gradients(plan: Plan, found: DiagonalSums, ends: Tensor, tables: Terms) -> None:
    """Writes the gradients of bias, slopes and a gain of scalars: in the band from diagonals, beyond it from the rows.

    `ends` is [batch, heads, bias or gain or slope, queries, past or future]; far fields have those of the bias only.
    """
    if not found.sums:
        return
    beyond = ends.sum((0, 3))
    for index, name in enumerate(("bias", "gain")):
        if name not in found.sums:
            continue
        table: LagTable = getattr(tables, name)
        lags = table.values.shape[1]
        sloped = table.slopes is not None
        slopes = torch.empty(2, table.heads, dtype=torch.float32, device=plan.q.device) if sloped else beyond
        given = {
            "Sums": found.sums[name], "Ends": beyond[:, index] if index < beyond.shape[1] else beyond, "Dtable": table.values,
            "SlopeEnds": beyond[:, -1], "Dslopes": slopes, "ends_head": beyond.stride(0), "batch": plan.batch,
            "heads": plan.heads, "chunks": found.chunks, "diagonals": found.diagonals, "low": plan.low, "high": plan.high,
            "first": table.first, "lags": lags, "SIZE": found.size, "PARTS": PARTS, "COLUMNS": COLUMNS,
            "SHARED": table.heads == 1, "ENDS": index < beyond.shape[1], "SLOPES": sloped,
        }  # fmt: skip
        run(fold_kernel, (blocks(lags, COLUMNS), table.heads), given, warps=4, stages=1)
        if table.slopes is not None:
            for slope, gradient in zip(table.slopes, slopes, strict=True):
                slope.copy_(gradient)


def outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return [
        empty_laid_out(is_by_token(call.q), call.q, *call.q.shape[:3], call.v.shape[3]),
        call.q.new_empty(call.q.shape[:3], dtype=torch.float32),
    ]
