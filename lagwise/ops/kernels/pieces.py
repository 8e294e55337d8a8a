"""What of a call goes through the kernels at a time, so that the scores of its tables of vectors fit into memory.

Scores of a table as wide as the sequence have a number for each pair. Then some rows of the batch go through all kernels, and the
next ones after them in the same memory. Where one row is too much, some of its heads do. Where a single head is too much, the
lags go range by range: each range is attention that sees its lags alone, and outputs are merged by their log-sum-exps.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lagwise.ops.kernels.plan import ALIGNED, Plan, blocks
from lagwise.ops.lowering import OPERANDS, Lowered
from lagwise.terms import TABLES

# Scores with at most so many numbers per query are there all at once: tables that end at lag 128 are not cut.
SPARED = 640
# Scores may take so many times what q, k, v and the output do: training then takes at most twice what plain attention does, which
# sums dq in float32.
SHARE = 3
# So many bytes they may always take, and those of a single head so many.
LEAST, LARGEST = 2**26, 2**30
# The most lags of a range.
WIDEST = 1024


class Piece(NamedTuple):
    """Some rows of the batch, and some of their heads."""

    rows: slice
    heads: slice
    key_heads: slice

    @property
    def origin(self) -> tuple[int, int]:
        """The first row and the first head, from which dropout counts."""
        return self.rows.start or 0, self.heads.start or 0

    def cut(self, x: Tensor) -> Tensor:
        """Returns the piece's share of a tensor [batch, heads, ...]."""
        return x if self == EVERYTHING else x[self.rows, self.heads]

    def of_heads(self, x: Tensor) -> Tensor:
        """Returns the piece's share of a table [heads or 1, ...]."""
        return x if x.shape[0] == 1 else x[self.heads]

    def part(self, lowered: Lowered) -> Lowered:
        """Returns the piece of a call as a call of its own."""
        if self == EVERYTHING:
            return lowered
        call = lowered.call
        mask = None if call.key_mask is None else call.key_mask[self.rows]
        start = call.query_start[self.rows] if isinstance(call.query_start, Tensor) else call.query_start
        shares: dict[str, Tensor] = {}
        for name in (*OPERANDS, *TABLES, "past_slope", "future_slope"):
            x = getattr(lowered, name)
            if x is not None and name in OPERANDS:
                shares[name] = x[self.rows, self.heads if name in ("q", "raw_q") else self.key_heads]
            elif x is not None:
                shares[name] = self.of_heads(x)
        return lowered._replace(**shares, call=replace(call, key_mask=mask, query_start=start), plans={})

    def prepared(self, plan: Plan, prepared: list[Tensor]) -> list[Tensor]:
        """Returns the piece's share of what was prepared of a call's tables and masks."""
        scalars, spans = int(bool(plan.scalars)), int(plan.flags["MASK"] or plan.flags["PACKED"])
        end = len(prepared) - spans
        return [
            *(x[:, self.heads] for x in prepared[:scalars]),
            *(self.of_heads(x) for x in prepared[scalars:end]),
            *(x[self.rows] if plan.flags["MASK"] else x for x in prepared[end:]),
        ]


EVERYTHING = Piece(slice(None), slice(None), slice(None))


def pair_bytes(plan: Plan, lags: int) -> int:
    """Returns how much memory the scores of one head take that have so many lags, with the sums of a table of its own."""
    scored = [*plan.vectors, *(["query"] if plan.channels and "query" not in plan.tables else [])]
    scores = sum(plan.score_numbers(name, lags) for name in scored) * plan.dtype.itemsize
    return scores + sum(sum_bytes(plan, name, lags) for name in plan.vectors if plan.owners(name) > 1)


def sum_bytes(plan: Plan, name: str, lags: int) -> int:
    """Returns how much memory the sums take that the gradient of a table of vectors becomes."""
    return 4 * ALIGNED * (lags + 2 * ALIGNED) * (plan.value_dim if name == "value" else plan.head_dim)


def room_of(plan: Plan, lags: int) -> int:
    """Returns how much memory the scores of all heads may take that have so many lags."""
    rows = plan.pairs * plan.queries + plan.batch * plan.key_heads * plan.keys
    sums = sum(sum_bytes(plan, name, lags) for name in plan.vectors if plan.owners(name) == 1)
    return max(SHARE * rows * (plan.head_dim + plan.value_dim) * plan.dtype.itemsize - sums, LEAST)


def lag_ranges(plan: Plan) -> list[tuple[int, int]]:
    """Returns the ranges of lags that are computed one after the other, where the scores of one head have no room; else none.

    Each has at most WIDEST columns of the tables of vectors; the first and the last reach beyond.
    """
    lags = plan.band_lags
    if not plan.scored or lags <= WIDEST:
        return []
    counted = max(plan.score_numbers(name, lags) for name in ("query", "key")) < 2**31
    if counted and pair_bytes(plan, lags) <= max(room_of(plan, lags), LARGEST):
        return []
    starts = [plan.first, *range(plan.band_first + WIDEST, plan.band_last + 1, WIDEST)]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), plan.last], strict=True))


def pieces_of(plan: Plan) -> list[Piece]:
    """Returns the pieces of a call, whose scores or those of whose ranges have room one after the other."""
    lags = WIDEST if lag_ranges(plan) else plan.band_lags
    each = pair_bytes(plan, lags) if plan.scored else 0
    most = max(room_of(plan, lags) // max(each, 1), 1)
    spared = SPARED * max(plan.queries, plan.keys) * plan.dtype.itemsize
    if each <= spared or most >= plan.pairs:
        return [EVERYTHING]
    if most >= plan.heads:
        # As even as may be.
        rows = blocks(plan.batch, blocks(plan.batch, most // plan.heads))
        everything = slice(None)
        return [Piece(slice(row, row + rows), everything, everything) for row in range(0, plan.batch, rows)]
    group = plan.heads // plan.key_heads
    heads = max(count for count in range(1, most + 1) if plan.heads % count == 0 and (count % group == 0 or group % count == 0))
    return [
        Piece(slice(row, row + 1), slice(head, head + heads), slice(head // group, blocks(head + heads, group)))
        for row in range(plan.batch)
        for head in range(0, plan.heads, heads)
    ]
