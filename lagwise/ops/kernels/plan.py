"""What the kernels of one call share, worked out on the host: tiles, bands, numbers, flags."""

from typing import Any

import torch
from torch import Tensor

from lagwise.noise import KEEP_BITS
from lagwise.ops.kernels.run import run
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
# Entries that a padded table has beyond the near lags: tiles that touch them and have at most so many queries and keys together
# stay inside.
PADDING = 256
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
        call = lowered.call
        self.lowered, self.call, self.q, self.k, self.only = lowered, call, q, k, only
        self.batch, self.heads, self.queries, head_dim = q.shape
        self.keys, value_dim = k.shape[2], v.shape[3]
        self.raw_q, self.raw_k = (x if raw is None else raw for x, raw in ((q, lowered.raw_q), (k, lowered.raw_k)))
        first, last = call.visible_lags(self.queries, self.keys)
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
            "query_start": lowered.query_start, "first": first, "last": last, "near_first": near_first, "near_last": near_last,
            "low": self.low, "high": self.high, "table_first": near_first - PADDING,
            "table_lags": near_last - near_first + 1 + 2 * PADDING,
            "band_first": self.band_first, "band_lags": self.band_last - self.band_first + 1,
            "value_first": self.value_first, "value_lags": self.value_last - self.value_first + 1,
            "scale": call.scale, "dropped": round(call.dropout * 2**KEEP_BITS),
            "head_dim": head_dim, "value_dim": value_dim, "WIDTH": width(head_dim), "VALUE_WIDTH": width(value_dim),
            "BIAS": self.tables.bias is not None, "SLOPES": lowered.slopes is not None,
            "GAIN": gain is not None and not self.channels, "CHANNELS": self.channels, "SCORES": scores,
            "QUERY": self.tables.query is not None, "KEY": self.tables.key is not None, "VALUE": self.tables.value is not None,
            "MASK": call.key_mask is not None, "HIDE": call.key_mask is not None and not self.scored,
            "PACKED": call.cu_seqlens is not None, "STARTS": call.per_row,
            "DROPOUT": call.dropout > 0.0, "FAR": only is None,
            "LIMITED": call.causal or call.window is not None or lags is not None or only is not None,
            "WINDOW": call.window is not None or lags is not None,
            # Gradients to which others add products, or whose heads are summed, lie head by head.
            "DQ_BY_TOKEN": is_by_token(q) and not self.scored,
            "DK_BY_TOKEN": is_by_token(k) and is_by_token(v) and not self.scored and self.heads == k.shape[1],
        }  # fmt: skip
        if call.seed is not None:
            self.arguments["Seed"] = call.seed
        if lowered.starts is not None:
            self.arguments["Starts"] = lowered.starts
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
        if self.lowered.slopes is not None:
            self.arguments["Slopes"] = self.lowered.slopes.float().expand(2, self.heads).contiguous()
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
        self.raw_k = self.k if self.lowered.raw_k is None else self.shown(self.raw_k)
        self.arguments |= {"K": self.k, **strides("k", self.k)}

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
