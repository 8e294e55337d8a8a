"""What kernels of one kind of call share, decided once: tiles, bands, numbers, flags, and the compiled kernels.

A call is known by its `Kind`: sizes, strides and types of its tensors, and its options. Plans are kept for the kinds that were
seen last, so that a call only fills in where its tensors are.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lagwise.call import Call
from lagwise.noise import KEEP_BITS
from lagwise.ops.kernels.arguments import Flags
from lagwise.ops.kernels.launches import Runner, launch
from lagwise.ops.kernels.tape import Tapes
from lagwise.ops.kernels.tiles import DIRECT
from lagwise.ops.lowering import DIFFERENTIABLE, Lowered
from lagwise.terms import TABLES

# Queries, keys, warps and stages of a tile, by kernel and by the width of a head that it holds; there is no autotuner, so that
# a call compiles once and repeats. Measured on an H200. Those of a band alone are few per block, and smaller.
TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (128, 64, 8, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2)},
    "query": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (32, 32, 4, 1)},
    "key": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
    "scored forward": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 4, 2)},
    "scored query": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (32, 32, 4, 1)},
    "twice scored query": {64: (64, 64, 4, 2), 128: (64, 32, 4, 3), 256: (32, 32, 4, 1)},
    "scored key": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3), 256: (32, 32, 4, 1)},
    "band forward": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 4, 2)},
    "band key": {64: (64, 32, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
}
# Products of float32 run on the ordinary units, one instruction per number: larger tiles would compile for minutes.
FLOAT32_TILES = {64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)}
# The interpreter has no registers to fill: small tiles leave less to compute in vain.
INTERPRETED = (16, 16, 1, 1)
# Rows of the kernels that are no matrix products.
ROWS = 64
# Lags that a padded table has beyond the near ones: tiles that touch them and have at most so many queries and keys together stay
# inside.
PADDING = 256
# Columns of dlogit that the pass over queries keeps before it sums their diagonals.
PATCH = 256 if DIRECT.value else 32
# In tiles of [queries, keys] rows of scores are a multiple of this apart: then they are aligned.
ALIGNED = 8
# What kernels without tiles are compiled for.
UNTILED = ("head_dim", "WIDTH", "value_dim", "VALUE_WIDTH", "QUERY", "MASK", "PACKED", "STARTS")
# How many kinds of calls are kept.
KEPT_PLANS = 512

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Kind(NamedTuple):
    """All that a plan depends on."""

    device: torch.device
    tensors: tuple[Layout | None, ...]  # those of DIFFERENTIABLE
    options: tuple[Layout | None, ...]  # key_mask, cu_seqlens, starts, seed
    aligned: tuple[int, ...]  # by how much tensors miss an address that is a multiple of 16; nothing where none does
    firsts: tuple[int, ...]
    query_start: int
    causal: bool
    window: tuple[int, int] | None
    scale: float
    dropout: float
    lags: tuple[int, int] | None
    only: tuple[int, int] | None
    origin: tuple[int, int]
    others: tuple[int, ...]  # the same as `aligned` of what a piece of a call has of other tensors


def plan_for(
    lowered: Lowered,
    *,
    lags: tuple[int, int] | None = None,
    only: tuple[int, int] | None = None,
    origin: tuple[int, int] = (0, 0),
    others: Sequence[torch.Tensor] = (),
) -> "Plan":
    """Returns the plan of a call, made once for all of its kind.

    `lags` limits the lags that are seen, as a window does; `only` limits them to a band without ends, the near part of `split`.
    `origin` is the first row of the batch and the first head of a piece of another call, where dropout counts from, and `others`
    are what the piece has of tensors that are not the call's.
    """
    plans = {} if lowered.plans is None else lowered.plans
    plan = plans.get((lags, only))
    if plan is None:
        plan = plans[lags, only] = kept_plan(kind_of(lowered, lags, only, origin if lowered.call.dropout else (0, 0), others))
    return plan


WHOLE_CALL = (None, None)
"""By what the plan of a call is known among those of its ranges and of its band."""


def kind_of(
    lowered: Lowered,
    lags: tuple[int, int] | None,
    only: tuple[int, int] | None,
    origin: tuple[int, int],
    others: Sequence[torch.Tensor],
) -> Kind:
    """Returns what a call is known by."""
    call, tensors = lowered.call, lowered.tensors
    places = [0 if x is None else x.data_ptr() % 16 for x in tensors]
    more = [x.data_ptr() % 16 for x in others]
    layouts = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
    count = len(DIFFERENTIABLE)
    return Kind(
        lowered.q.device, tuple(layouts[:count]), tuple(layouts[count:]), tuple(places) if any(places) else (),
        tuple(lowered.firsts), lowered.query_start, call.causal, call.window, call.scale, call.dropout, lags, only, origin,
        tuple(more) if any(more) else (),
    )  # fmt: skip


class Plan:
    """What the kernels of a kind of call share: its bands, numbers, flags, and their compiled forms."""

    def __init__(self, kind: Kind):
        self.kind = kind
        layouts: dict[str, Layout | None] = dict(zip(DIFFERENTIABLE, kind.tensors, strict=True))
        q, k, v = (layouts[name] for name in "qkv")
        assert q is not None and k is not None and v is not None
        self.dtype = q[2]
        self.batch, self.heads, self.queries, self.head_dim = q[0]
        self.key_heads, self.keys, self.value_dim = k[0][1], k[0][2], v[0][3]
        self.pairs = self.batch * self.heads
        self.tables = {name: layouts[name] for name in TABLES if layouts[name] is not None}
        self.firsts: dict[str, int] = dict(zip(TABLES, kind.firsts, strict=True))
        gain = layouts["gain"]
        self.channels = gain is not None and gain[0][2] > 1
        self.scalars = [name for name in ("bias", "gain") if name in self.tables and not (name == "gain" and self.channels)]
        self.vectors = [name for name in ("query", "key", "value") if name in self.tables]
        self.scored = bool(self.vectors) or self.channels
        self.only = kind.only
        everything = self._seen_by_all()
        limits = kind.lags or kind.only or everything
        self.first, self.last = max(everything[0], limits[0]), min(everything[1], limits[1])
        self.low, self.high = self._band(self.first, self.last, *self.tables)
        scored = [*self.vectors, *(["gain"] if self.channels else [])]
        self.band_first, band_last = self._band(self.first, self.last, *scored) if scored else (self.low, self.low)
        self.band_lags = blocks(band_last - self.band_first + 1, ALIGNED) * ALIGNED
        self.band_last = self.band_first + self.band_lags - 1
        self.near_first, self.near_last = near_lags(self.low, max(self.high, self.band_last), kind.causal)
        # Padded tables are the same for all ranges of lags of a call.
        self.table_first, self.table_lags = table_window([self.columns(name) for name in self.tables] or [(0, 1)], kind.causal)
        self.flags = self._flags()
        self.tiles = {each: self._tile(each) for each in ("forward", "query", "key")}
        self.numbers = (
            self.heads, self.heads // self.key_heads, self.queries, self.keys, kind.query_start, self.first, self.last,
            self.near_first, self.near_last, self.low, self.high, self.table_first, self.table_lags,
            self.band_first, self.band_lags, kind.scale, round(kind.dropout * 2**KEEP_BITS), *kind.origin,
        )  # fmt: skip
        self.runners: dict[Any, Runner] = {}
        self.tapes = Tapes()
        self.site_flags: dict[Any, Flags] = {}
        self.products: dict[Any, Any] = {}

    def _seen_by_all(self) -> tuple[int, int]:
        """Returns the first and the last lag that the whole call can reach."""
        # Of starts that are a tensor no value is known.
        start = self.kind.query_start if self.kind.options[2] is None else torch.empty(0, device="meta")
        call = Call(causal=self.kind.causal, window=self.kind.window, query_start=start)
        return call.visible_lags(self.queries, self.keys)

    def columns(self, name: str) -> tuple[int, int]:
        """Returns the first lag of a table and its number of lags; nothing useful where there is no such table."""
        layout = self.tables.get(name)
        return self.firsts[name], 1 if layout is None else layout[0][1]

    def _band(self, first: int, last: int, *names: str) -> tuple[int, int]:
        """Returns the first and the last of the lags `first` to `last` that are columns of some tables, at least one lag.

        With `only` it is that band for all tables, so that none of them has an end in it.
        """
        if self.only is not None:
            return self.first, max(self.first, self.last)
        if not names:
            return 0, 0
        columns = [self.columns(name) for name in names]
        low, high = min(first for first, _ in columns), max(first + lags - 1 for first, lags in columns)
        low = min(max(low, first), high)
        return low, max(min(high, last), low)

    def _flags(self) -> dict[str, Any]:
        """Returns what kernels are compiled for, whatever their tiles."""
        kind = self.kind
        windowed = kind.window is not None or kind.lags is not None
        mask, packed, starts, _ = (x is not None for x in kind.options)
        return {
            **{name.upper(): name in self.tables for name in ("bias", "query", "key", "value")},
            "GAIN": "gain" in self.tables and not self.channels, "CHANNELS": self.channels,
            "SCORES": "query" in self.tables or self.channels,
            "SLOPES": kind.tensors[DIFFERENTIABLE.index("past_slope")] is not None,
            "SCORED": self.scored, "head_dim": self.head_dim, "value_dim": self.value_dim,
            "WIDTH": width(self.head_dim), "VALUE_WIDTH": width(self.value_dim),
            "MASK": mask, "HIDE": mask and not self.scored, "PACKED": packed, "STARTS": starts, "DROPOUT": kind.dropout > 0.0,
            "FAR": self.only is None, "LIMITED": kind.causal or windowed or self.only is not None,
            "FAR_MASKED": windowed,
        }  # fmt: skip

    def _tile(self, kind: str) -> tuple[int, int, int, int]:
        """Returns the tile of a kernel: queries, keys, warps, stages."""
        if not DIRECT.value:
            return INTERPRETED
        special = kind
        if self.scored:
            special = f"scored {kind}"
            if len(self.vectors) > 1:
                special = f"twice {special}" if f"twice {special}" in TILES else special
        elif self.only is not None:
            special = f"band {kind}"
        tiles = FLOAT32_TILES if self.dtype == torch.float32 else TILES.get(special, TILES[kind])
        return tiles[max(64, self.flags["WIDTH"], self.flags["VALUE_WIDTH"])]

    @property
    def scalar_shape(self) -> tuple[int, int, int]:
        """The shape of the padded tables of scalars."""
        return len(self.scalars), self.heads, self.table_lags + 2

    @property
    def spans_shape(self) -> tuple[int, int]:
        """The shape of the spans of keys or of sequences."""
        return (self.batch, 2) if self.flags["MASK"] else (2, self.keys)

    def owners(self, name: str) -> int:
        """Returns how many heads have their own table; 1 where all share one."""
        layout = self.tables[name]
        return 1 if layout is None else layout[0][0]

    def score_numbers(self, name: str, lags: int) -> int:
        """Returns how many numbers the scores of a table take, of one head and so many lags: see `tiles.slab_of`."""
        rows, partners = (self.keys, self.queries) if name == "key" else (self.queries, self.keys)
        room = blocks(partners, ALIGNED) * ALIGNED
        return (rows - 1) * min(lags + 2 * ALIGNED, room) + room

    def flags_at(self, site: str, **more: Any) -> Flags:
        """Returns the flags of a kernel without tiles, or with those of its kind, and more."""
        key = (site, *more.values())
        if key not in self.site_flags:
            known = self.flags if site in self.tiles else {name: self.flags[name] for name in UNTILED}
            self.site_flags[key] = Flags(**{**known, **self._tile_flags(site), **more})
        return self.site_flags[key]

    def _tile_flags(self, kind: str) -> dict[str, Any]:
        if kind not in self.tiles:
            return {}
        rows, keys, _, _ = self.tiles[kind]
        even = self.queries % rows == 0 and self.keys % keys == 0
        masked = not even or self.flags["MASK"] or self.flags["PACKED"]
        return {
            "ROWS": rows, "KEYS": keys, "WHOLE": even, "APART": self.band_lags >= rows + keys,
            "NEAR_MASKED": masked or self.flags["LIMITED"], "FAR_MASKED": masked or self.flags["FAR_MASKED"],
        }  # fmt: skip

    def launch(
        self, site: Any, kernel: Any, grid: tuple[int, ...], values: tuple[Any, ...], warps: int = 4, stages: int = 1
    ) -> None:
        """Launches a kernel; `site` tells apart all launches of the plan whose arguments differ in more than where they are."""
        runner = self.runners.get(site)
        if runner is None:
            runner = launch(kernel, grid, values, warps, stages)
            if runner is not None:
                self.runners[site] = runner
        else:
            runner(values)

    def launch_tiles(self, kind: str, site: Any, kernel: Any, values: tuple[Any, ...]) -> None:
        """Launches a kernel on all blocks of queries, or with the kind "key" of keys, of all heads."""
        rows, keys, warps, stages = self.tiles[kind]
        count = blocks(self.keys, keys) if kind == "key" else blocks(self.queries, rows)
        self.launch(site, kernel, (count, self.pairs), values, warps, stages)


kept_plan = lru_cache(maxsize=KEPT_PLANS)(Plan)


def near_lags(low: int, high: int, causal: bool) -> tuple[int, int]:
    """Returns the first and the last lag of near tiles, which look up each pair's own lag: lag 0 too, where a mask ends there."""
    return (min(low, 0), max(high, 0)) if causal else (low, high)


def table_window(columns: Sequence[tuple[int, int]], causal: bool) -> tuple[int, int]:
    """Returns the first lag of padded tables and their number of lags, from the first lags and numbers of lags of all tables.

    It does not depend on the length of a call, so that a program that is compiled for all lengths knows it.
    """
    low, high = min(first for first, _ in columns), max(first + lags - 1 for first, lags in columns)
    low, high = near_lags(low, high, causal)
    return low - PADDING, high - low + 1 + 2 * PADDING


def blocks(count: int, size: int) -> int:
    """Returns how many blocks of a size hold a count."""
    return -(-count // size)


def width(channels: int) -> int:
    """Returns the power of two that holds some channels; products need at least 16."""
    return max(16, 1 << (channels - 1).bit_length())
