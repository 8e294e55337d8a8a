"""What the kernels of one call share, worked out on the host: tiles, bands, numbers, flags."""

from typing import Any

import torch
from torch import Tensor

from lagwise.noise import KEEP_BITS
from lagwise.ops.kernels.arguments import FarKeys, FarQueries, Scores, Seen, Tables, flags, view
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.logits import PADDING
from lagwise.ops.kernels.tiles import DIRECT
from lagwise.ops.lowering import Lowered, is_by_token
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
# Rows of the kernels that are no matrix products.
ROWS = 64


class Plan:
    """What the kernels of a call share: its bands, numbers, flags, and scores.

    `tables` are the call's; `lags` limits the lags that are seen, as a window does; `only` limits them to a band without ends,
    the near part of `split`.
    """

    def __init__(
        self, lowered: Lowered, tables: Terms, *, lags: tuple[int, int] | None = None, only: tuple[int, int] | None = None
    ):
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (lowered.q, lowered.k, lowered.v))
        self.lowered, self.call, self.tables, self.only = lowered, lowered.call, tables, only
        self.batch, self.heads, self.queries, _ = q.shape
        self.keys = k.shape[2]
        self.channels = tables.gain is not None and tables.gain.values.shape[2] > 1
        scored = ["query", "key", "gain"] if self.channels else ["query", "key"]
        self.scored = any(getattr(tables, name) is not None for name in scored)
        self.windowed = self.call.window is not None or lags is not None
        self.limited = self.call.causal or self.windowed or only is not None
        self.q, self.k, self.v = q, k, self.shown(v)
        self.raw_q, self.raw_k = (x if raw is None else raw for x, raw in ((q, lowered.raw_q), (k, lowered.raw_k)))
        first, last = self.call.visible_lags(self.queries, self.keys)
        for limits in (lags, only):
            if limits is not None:
                first, last = max(first, limits[0]), min(last, limits[1])
        self.first, self.last = first, last
        self.low = self.high = 0
        self.low, self.high = self.band("bias", "gain", "query", "key", "value")
        self.band_first, self.band_last = aligned(*self.band(*scored))
        self.value_first, self.value_last = aligned(*self.band("value"))
        near_first, near_last = self.near()
        # Near tiles gather scores at all near lags: there must be room for them, a multiple that keeps the scores aligned.
        self.room = (1 + blocks(near_last - near_first + 1, PADDING.value)) * PADDING.value
        self.numbers, self.flags = self._numbers(), self._flags()
        # Any tensor stands for what the call has not.
        self.table_values = self._padded_tables(near_first - PADDING.value, near_last + PADDING.value)
        self.scores = Scores(q, q, q, q, q, q)
        self.seen = self._seen()
        # What others computed of the far fields; nothing unless `split` says so.
        self.sides = 0
        self.far_queries: FarQueries | None = None
        self.far_keys: FarKeys | None = None
        self.far_query_counts = self.far_key_counts = {"past_count": 0, "future_count": 0}
        self.bands: dict[str, Tensor] = {}

    def near(self) -> tuple[int, int]:
        """Returns the first and the last lag of near tiles, which look up each pair's own lag."""
        first, last = self.low, max(self.high, self.band_last, self.value_last)
        # Beyond the near tiles nothing is masked.
        return (min(first, self.last), max(last, self.last)) if self.call.causal else (first, last)

    def _numbers(self) -> dict[str, Any]:
        """Returns the numbers of the call."""
        near_first, near_last = self.near()
        return {
            "heads": self.heads, "group": self.heads // self.k.shape[1], "queries": self.queries, "keys": self.keys,
            "query_start": self.lowered.query_start, "first": self.first, "last": self.last,
            "near_first": near_first, "near_last": near_last, "low": self.low, "high": self.high,
            "band_first": self.band_first, "band_lags": self.band_last - self.band_first + 1,
            "value_first": self.value_first, "value_lags": self.value_last - self.value_first + 1,
            "scale": self.call.scale, "dropped": round(self.call.dropout * 2**KEEP_BITS),
        }  # fmt: skip

    def _flags(self) -> dict[str, int | bool]:
        """Returns what kernels are compiled for, whatever their tiles."""
        q, k, v, call, tables = self.q, self.k, self.v, self.call, self.tables
        there = {name.upper(): getattr(tables, name) is not None for name in ("bias", "query", "key", "value")}
        return {
            **there, "GAIN": tables.gain is not None and not self.channels, "CHANNELS": self.channels,
            "SCORES": tables.query is not None or self.channels, "SLOPES": self.lowered.slopes is not None,
            "head_dim": q.shape[3], "value_dim": v.shape[3], "WIDTH": width(q.shape[3]), "VALUE_WIDTH": width(v.shape[3]),
            "MASK": call.key_mask is not None, "HIDE": call.key_mask is not None and not self.scored,
            "PACKED": call.cu_seqlens is not None, "STARTS": call.per_row, "DROPOUT": call.dropout > 0.0,
            "FAR": self.only is None, "LIMITED": self.limited,
            # Gradients to which others add products, or whose heads are summed, lie head by head.
            "DQ_BY_TOKEN": is_by_token(q) and not self.scored,
            "DK_BY_TOKEN": is_by_token(k) and is_by_token(v) and not self.scored and self.heads == k.shape[1],
        }  # fmt: skip

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

    def _padded_tables(self, first: int, last: int) -> Tables:
        """Returns tables of scalars for all lags that near tiles touch, one row per head, and the others for their bands."""
        none, tables = self.q, self.tables
        bias = slopes = gain = channel_gain = value = none
        if tables.bias is not None:
            bias = self.per_head(tables.bias.window(first, last))
        if self.lowered.slopes is not None:
            slopes = self.lowered.slopes.float().expand(2, self.heads).contiguous()
        if tables.gain is not None and self.channels:
            window = tables.gain.window(self.band_first, self.band_last)
            channel_gain = self.per_head(window)
            gain = self.per_head(torch.stack([window[:, 0], window[:, -1]], dim=1))
        elif tables.gain is not None:
            gain = self.per_head(tables.gain.window(first, last)[..., 0])
        if tables.value is not None:
            value = self.per_head(tables.value.window(self.value_first, self.value_last), none.dtype)
        return Tables(bias, slopes, gain, channel_gain, value)

    def per_head(self, window: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gives each head its own copy of a table."""
        return window.to(dtype).expand(self.heads, *window.shape[1:]).contiguous()

    def _seen(self) -> Seen:
        """Returns who may see whom: masks, with the first and the last key that they leave, and where sequences begin and end."""
        call, none = self.call, self.q
        key_mask = bounds = sequence_start = sequence_end = none
        if call.key_mask is not None:
            index = torch.arange(self.keys, device=none.device, dtype=torch.int32)
            begin = torch.where(call.key_mask, index, self.keys).amin(1)
            end = torch.where(call.key_mask, index + 1, 0).amax(1)
            key_mask = call.key_mask.contiguous().view(torch.uint8)
            bounds = torch.stack([begin, end], dim=1).int()
        if call.cu_seqlens is not None:
            index = torch.arange(self.keys, device=none.device)
            sequence = torch.searchsorted(call.cu_seqlens, index, right=True)
            sequence_start, sequence_end = call.cu_seqlens[sequence - 1].int(), call.cu_seqlens[sequence].int()
        starts, seed = (none if x is None else x for x in (self.lowered.starts, call.seed))
        return Seen(key_mask, bounds, sequence_start, sequence_end, starts, seed)

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
        self.raw_k = self.k if self.lowered.raw_k is None else self.shown(self.raw_k)

    def table(self, name: str) -> Tensor:
        """Returns the band of `query` or `key`, [heads or 1, lags, channels]."""
        if name not in self.bands:
            self.bands[name] = getattr(self.tables, name).window(self.band_first, self.band_last).to(self.q.dtype)
        return self.bands[name]

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
        return tiles[max(64, self.flags["WIDTH"], self.flags["VALUE_WIDTH"])]

    def arguments(self, **given: Any) -> dict[str, Any]:
        """Returns what kernels take of the call, with more arguments, and flags, which are spelt in capitals."""
        more = {name: value for name, value in given.items() if name.isupper()}
        others = {name: value for name, value in given.items() if not name.isupper()}
        return {
            "q": view(self.q), "k": view(self.k), "v": view(self.v), "tables": self.table_values, "scores": self.scores,
            "seen": self.seen, **self.numbers, **others, "flags": flags(**(self.flags | more)),
        }  # fmt: skip

    def launch(self, kernel: Any, kind: str, **given: Any) -> None:
        """Runs a kernel on all blocks of queries, or with the kind "key" of keys, of all heads."""
        rows, keys, warps, stages = self.tile(kind)
        even = self.queries % rows == 0 and self.keys % keys == 0
        masked = not even or self.flags["MASK"] or self.flags["PACKED"]
        arguments = self.arguments(
            **given, ROWS=rows, KEYS=keys, WHOLE=even,
            NEAR_MASKED=masked or self.flags["LIMITED"], FAR_MASKED=masked or self.windowed,
            SIDES=self.sides,
        )  # fmt: skip
        count = blocks(self.keys, keys) if kind == "key" else blocks(self.queries, rows)
        run(kernel, (count, self.batch * self.heads), arguments, warps, stages)


def blocks(count: int, size: int) -> int:
    """Returns how many blocks of a size hold a count."""
    return -(-count // size)


def aligned(first: int, last: int) -> tuple[int, int]:
    """Widens a band of lags to a multiple of 8, which the vendor's matrix products need to be fast."""
    return first, first + blocks(last - first + 1, 8) * 8 - 1


def width(channels: int) -> int:
    """Returns the power of two that holds some channels; products need at least 16."""
    return max(16, 1 << (channels - 1).bit_length())
