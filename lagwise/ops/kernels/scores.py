"""Scores of vector tables, and what their gradients become: who launches the kernels of `lagwise.ops.kernels.score_kernels`."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.arguments import Seen, view
from lagwise.ops.kernels.plan import ALIGNED, Plan, blocks
from lagwise.ops.kernels.score_kernels import (
    COLUMNS,
    ROOM,
    ROWS,
    fold_vectors_kernel,
    score_rows_kernel,
    score_table_kernel,
    scores_kernel,
)
from lagwise.ops.kernels.tables import steps

# Programs with a tile of a table each, enough to fill a GPU.
TABLE_PROGRAMS = 1024
# Columns of a table that a program adds up from their sums, and how many of these at a time.
FOLDED, PARTS = 2, 8


class Side(NamedTuple):
    """Whose scores they are: those of queries, or with `reversed` lags of keys, and the width of their vectors."""

    name: str
    rows: int
    partners: int
    group: int
    dim: int
    width: int
    reversed: bool


def side_of(plan: Plan, name: str) -> Side:
    """Returns whose scores a table makes; those of values are products with gradients of the output, of queries too."""
    if name == "key":
        return Side(
            name, plan.keys, plan.queries, plan.heads // plan.key_heads, plan.head_dim, plan.flags["WIDTH"], reversed=True
        )
    if name == "value":
        return Side(name, plan.queries, plan.keys, 1, plan.value_dim, plan.flags["VALUE_WIDTH"], reversed=False)
    return Side(name, plan.queries, plan.keys, 1, plan.head_dim, plan.flags["WIDTH"], reversed=False)


def slab_of(rows: int, stretch: int) -> int:
    """Returns how many numbers the scores of a head take."""
    return blocks(rows * stretch + ALIGNED, ALIGNED) * ALIGNED


def empty_scores(plan: Plan, rows: int, stretch: int, dtype: torch.dtype, *, zeros: bool = False) -> Tensor:
    """Returns space for the scores of all heads, with some room before and after it."""
    size = plan.pairs * slab_of(rows, stretch) + 2 * ROOM
    make = torch.zeros if zeros else torch.empty
    return make(size, dtype=dtype, device=plan.kind.device)[ROOM:-ROOM]


def empty_ends(plan: Plan, rows: int) -> Tensor:
    """Returns space for the ends of scores, or for their gradients."""
    return torch.empty(plan.batch, plan.heads, 2, rows, dtype=torch.float32, device=plan.kind.device)


def span_of(plan: Plan, side: Side) -> int:
    """Returns how many rows of a residue are counted for each pair of a batch row and a head.

    Those of a block have their columns at the same places, so that where rows of the batch start at their own positions a block
    has one of them.
    """
    span = blocks(side.rows, ALIGNED)
    return blocks(span, ROWS) * ROWS if plan.flags["STARTS"] else span


def numbers_of(plan: Plan, side: Side, table: Tensor, stretch: int) -> tuple[int, ...]:
    """Returns the numbers of SCORE_NUMBERS."""
    return (
        *steps(table), plan.heads, side.group, side.rows, side.partners, plan.kind.query_start, *plan.columns(side.name),
        plan.first, plan.last, plan.band_first, plan.band_lags, stretch, slab_of(side.rows, stretch),
    )  # fmt: skip


def beside(plan: Plan, table: Tensor) -> Tensor:
    """Returns a table of vectors in the type of the products, its channels side by side."""
    table = table if table.dtype == plan.dtype else table.to(plan.dtype)
    return table if table.stride(2) == 1 else table.contiguous()


def make_scores(plan: Plan, name: str, x: Tensor, table: Tensor, seen: Seen, stretch: int) -> tuple[Tensor, Tensor]:
    """Returns the scores of x, [batch, heads, rows, dim], with a table, and their ends."""
    side, table = side_of(plan, name), beside(plan, table)
    scores = empty_scores(plan, side.rows, stretch, plan.dtype)
    ends = empty_ends(plan, side.rows) if plan.flags["FAR"] else scores
    # The last row goes on to the end of a slab.
    sharing = share(plan, side, table.shape[0], stretch + 3 * ALIGNED)
    values = (
        view(x), table, scores, ends, seen, *numbers_of(plan, side, table, stretch), *sharing,
        side.dim, side.width, ROWS, COLUMNS, ROOM, side.reversed, plan.flags["STARTS"], plan.flags["FAR"],
    )  # fmt: skip
    site = ("scores", name, stretch, x.stride(), x.data_ptr() % 16)
    plan.launch(site, scores_kernel, grid_of(sharing), values, 4, 2)
    return scores, ends


class Sharing(NamedTuple):
    """How rows are shared between programs: those of SHARE_NUMBERS."""

    owners: int  # tables: one for each head, or one
    members: int  # pairs of a row of the batch and a head that have the same table
    shares: int
    spots: int  # aligned columns, a multiple of those of a program
    span: int  # rows of a residue that are counted for each member


def share(plan: Plan, side: Side, owners: int, spots: int) -> Sharing:
    """Shares the rows so that there are enough programs."""
    column_blocks, members, span = blocks(spots, COLUMNS), plan.pairs // owners, span_of(plan, side)
    shares = max(1, min(blocks(members * span, ROWS), TABLE_PROGRAMS // (column_blocks * ALIGNED * owners)))
    return Sharing(owners, members, shares, column_blocks * COLUMNS, span)


def grid_of(sharing: Sharing) -> tuple[int, ...]:
    return sharing.spots // COLUMNS, ALIGNED, sharing.owners, sharing.shares


def product_flags(plan: Plan, dends: Tensor | None) -> tuple[bool, ...]:
    """Returns the constants that the kernels on gradients of scores share, from STARTS to ENDS."""
    return plan.flags["STARTS"], plan.flags["MASK"], plan.flags["PACKED"], dends is not None


def add_row_gradients(
    plan: Plan, name: str, dscores: Tensor, dends: Tensor | None, table: Tensor, seen: Seen, dx: Tensor, *, added: bool
) -> None:
    """Adds to the gradient of the raw q or k, or writes to it, what gradients of scores and of their ends give."""
    side, table = side_of(plan, name), beside(plan, table)
    owners, span = table.shape[0], span_of(plan, side)
    members = plan.pairs // owners
    values = (
        dscores, dscores if dends is None else dends, table, view(dx), seen, *numbers_of(plan, side, table, plan.stretch),
        owners, members, span, plan.kind.scale, side.dim, side.width, ROWS, COLUMNS, side.reversed,
        *product_flags(plan, dends), added, KINDS[plan.dtype],
    )  # fmt: skip
    grid = (ALIGNED, blocks(members * span, ROWS), owners)
    plan.launch(("row gradients", name), score_rows_kernel, grid, values, 4, 2)


def table_gradient(
    plan: Plan, name: str, dscores: Tensor, dends: Tensor | None, x: Tensor, table: Tensor, seen: Seen, dtype: torch.dtype
) -> Tensor:
    """Returns the gradient of a table of vectors from gradients of scores and of their ends."""
    side, starts = side_of(plan, name), plan.flags["STARTS"]
    sharing = share(plan, side, table.shape[0], plan.band_lags + 2 * ALIGNED)
    if starts:
        # Rows of the batch that start at their own positions have their own alignment.
        sharing = sharing._replace(shares=sharing.members)
    owners, _, shares, spots, _ = sharing
    sums = torch.empty(shares * owners * ALIGNED * spots * side.dim, dtype=torch.float32, device=x.device)
    values = (
        dscores, dscores if dends is None else dends, view(x), sums, seen, *numbers_of(plan, side, table, plan.stretch), *sharing,
        side.dim, side.width, ROWS, COLUMNS, side.reversed, *product_flags(plan, dends), KINDS[plan.dtype],
    )  # fmt: skip
    site = ("table sums", name, x.stride(), x.data_ptr() % 16)
    plan.launch(site, score_table_kernel, grid_of(sharing), values, 4, 2)
    if shares > 1 and not starts:
        sums, shares = sums.view(shares, -1).sum(0), 1
    found = torch.empty(table.shape, dtype=dtype, device=x.device)
    values = (
        sums, seen, found, owners, plan.heads, plan.kind.query_start, plan.band_first, plan.band_lags, spots, shares,
        *plan.columns(name), 1.0 if name == "value" else plan.kind.scale,
        side.dim, side.width, FOLDED, PARTS, side.reversed, starts,
    )  # fmt: skip
    plan.launch(("fold", name, dtype), fold_vectors_kernel, (blocks(table.shape[1], FOLDED), owners), values)
    return found


KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""The types of torch in Triton's language."""
