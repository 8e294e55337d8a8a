"""Scores of vector tables, and what their gradients become: who launches the kernels of `lagwise.ops.kernels.score_kernels`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.ops.kernels.arguments import Seen, view
from lagwise.ops.kernels.plan import ALIGNED, Plan, blocks
from lagwise.ops.kernels.score_kernels import (
    ProductFlags,
    Side,
    SideFlags,
    fold_vectors_kernel,
    score_rows_kernel,
    score_table_kernel,
    scores_kernel,
)
from lagwise.ops.kernels.tables import steps
from lagwise.ops.kernels.tiles import DIRECT

# Rows of one residue and columns that a program takes at a time, warps and stages, by the width of a head that it holds.
# Measured on an H200. A fold takes sums and columns.
TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "scores": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    "rows": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2)},
    "table": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 64, 4, 2)},
    "fold": {64: (64, 2, 4, 1), 128: (32, 2, 4, 1), 256: (32, 2, 4, 1)},
}
FLOAT32_TILE = (32, 32, 4, 1)
INTERPRETED = (16, 16, 1, 1)
# How many pairs of a batch row and a head a block of rows may have together, of short sequences.
TOGETHER = (16, 8, 4, 2, 1)
# Programs that sum columns, enough to fill a GPU.
TABLE_PROGRAMS = 396


class Given(NamedTuple):
    """A table, the rows that it meets or their gradient, and scores and ends that are there, or their gradients."""

    name: str
    x: Tensor
    table: Tensor
    scores: Tensor
    ends: Tensor | None
    added: bool = False


def rows_of(plan: Plan, name: str) -> int:
    """Returns how many rows the scores of a table have; those of values are products with gradients of the output."""
    return plan.keys if name == "key" else plan.queries


def empty_scores(plan: Plan, name: str, dtype: torch.dtype, *, zeros: bool = False) -> Tensor:
    """Returns space for the scores of a table, of all heads."""
    numbers = plan.score_numbers(name, plan.band_lags)
    assert numbers < 2**31, "kernels count a head's scores in 32 bits"
    make = torch.zeros if zeros else torch.empty
    return make(plan.pairs * numbers, dtype=dtype, device=plan.kind.device)


def empty_ends(plan: Plan, rows: int) -> Tensor:
    """Returns space for the ends of scores, or for their gradients."""
    return torch.empty(plan.batch, plan.heads, 2, rows, dtype=torch.float32, device=plan.kind.device)


def product_of(plan: Plan, kind: str, given: Sequence[Given]) -> "Product":
    """Returns what a plan keeps of one kind of product of tables."""
    sides = tuple((of.name, of.table.shape[0], of.ends is not None, of.added) for of in given)
    if (kind, sides) not in plan.products:
        plan.products[kind, sides] = Product(plan, kind, sides)
    return plan.products[kind, sides]


class Product:
    """One kind of product of some tables, by name, number of tables, whether there are ends, and whether they are added."""

    def __init__(self, plan: Plan, kind: str, sides: Sequence[tuple[str, int, bool, bool]]):
        self.plan, self.kind, self.sides = plan, kind, sides
        widest = max(64, plan.flags["WIDTH"], plan.flags["VALUE_WIDTH"])
        tile = FLOAT32_TILE if plan.dtype == torch.float32 and kind != "fold" else TILES[kind][widest]
        self.rows, self.columns, self.warps, self.stages = tile if DIRECT.value else INTERPRETED
        spans = [blocks(rows, ALIGNED) for rows in (plan.queries, plan.keys)]
        # A block whose rows all belong to one head has less to compute; where rows of the batch start at their own positions,
        # those of others lie elsewhere.
        alone = plan.flags["STARTS"] or all(4 * span >= 3 * self.rows for span in spans)
        members = plan.pairs // max(owners for _, owners, _, _ in sides)
        self.together = 1 if alone else min(TOGETHER, key=lambda count: self.places(members, count, spans))
        self.spans = [self.span(span, self.together) for span in spans]
        dims = {
            **dict.fromkeys(("query", "key"), (plan.head_dim, plan.flags["WIDTH"])),
            "value": (plan.value_dim, plan.flags["VALUE_WIDTH"]),
        }
        # Scores are made of what is hidden, too, and folds take sums as they are.
        hides = kind not in ("scores", "fold")
        self.flags = ProductFlags(
            tuple(SideFlags(name, *dims[name], owners == 1, ends, added) for name, owners, ends, added in sides),
            self.rows, self.columns, alone or kind == "fold", plan.flags["STARTS"],
            hides and plan.flags["MASK"], hides and plan.flags["PACKED"],
        )  # fmt: skip
        self.numbers = (
            plan.heads, plan.pairs, plan.heads // plan.key_heads, plan.queries, plan.keys, plan.kind.query_start,
            plan.first, plan.last, plan.band_first, plan.band_lags,
            *plan.columns("query"), *plan.columns("key"), *plan.columns("value"), *self.spans, self.together,
        )  # fmt: skip
        # How many programs one table has at most, each with a block of rows of one residue.
        self.row_programs = ALIGNED * max(
            owners * self.places(plan.pairs // owners, self.together, [self.spans[name == "key"]]) // self.rows
            for name, owners, _, _ in sides
        )

    def span(self, rows: int, together: int) -> int:
        """Returns how many rows of a residue are counted of a pair, some of which are taken together: whole blocks."""
        depth = self.rows // together
        return blocks(rows, depth) * depth

    def places(self, members: int, together: int, spans: Sequence[int]) -> int:
        """Returns how many rows of a residue blocks have room for, where some pairs are taken together."""
        return blocks(members, together) * together * sum(self.span(span, together) for span in spans)

    def launch(
        self, kernel: Any, given: Sequence[Given], programs: int, sums: Sequence[Tensor | None], seen: Seen, *more: Any
    ) -> None:
        """Launches the kernel on all tables; `programs` are those of one."""
        sides = tuple(
            Side(
                view(of.x), of.table, of.scores, of.scores if of.ends is None else of.ends, of.scores if total is None else total,
                *steps(of.table),
            )
            for of, total in zip(given, sums, strict=True)
        )  # fmt: skip
        site = (self.kind, self.sides, *((of.x.stride(), of.x.data_ptr() % 16, of.x.dtype, of.table.dtype) for of in given))
        values = (sides, seen, *self.numbers, *more, self.flags)
        self.plan.launch(site, kernel, (programs, len(given)), values, self.warps, self.stages)


def make_scores(plan: Plan, tables: Sequence[tuple[str, Tensor, Tensor]], seen: Seen) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by name the scores of x, [batch, heads, rows, dim], with tables, and their ends."""
    given = []
    for name, x, table in tables:
        scores = empty_scores(plan, name, plan.dtype)
        ends = empty_ends(plan, rows_of(plan, name)) if plan.flags["FAR"] else None
        given.append(Given(name, x, table, scores, ends))
    product = product_of(plan, "scores", given)
    # Passes look at whole tiles.
    reach = max(sum(tile[:2]) for tile in plan.tiles.values())
    product.launch(scores_kernel, given, product.row_programs, [None] * len(given), seen, reach)
    return {of.name: (of.scores, of.scores if of.ends is None else of.ends) for of in given}


def add_row_gradients(plan: Plan, given: Sequence[Given], seen: Seen) -> None:
    """Adds to the gradients of the raw q and k, or writes to them, what gradients of scores and of their ends give."""
    product = product_of(plan, "rows", given)
    product.launch(score_rows_kernel, given, product.row_programs, [None] * len(given), seen, plan.kind.scale)


def table_gradients(plan: Plan, given: Sequence[Given], seen: Seen, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    """Returns the gradients of tables of vectors, by name, from gradients of scores and of their ends."""
    product = product_of(plan, "table", given)
    column_blocks = blocks(plan.band_lags + 2 * ALIGNED, product.columns)
    # The ends have programs and spots too.
    spots, programs = column_blocks * product.columns + 2, ALIGNED * (column_blocks + any(of.ends is not None for of in given))
    owners = [of.table.shape[0] for of in given]
    shares = max(1, min(product.row_programs // ALIGNED, TABLE_PROGRAMS // (programs * max(owners) * len(given))))
    counts = [plan.pairs if plan.flags["STARTS"] else shares * each for each in owners]
    sums = [
        torch.empty(count * ALIGNED * spots * of.table.shape[2], dtype=torch.float32, device=of.x.device)
        for count, of in zip(counts, given, strict=True)
    ]
    product.launch(score_table_kernel, given, programs * max(counts), sums, seen, shares, spots)
    found = [
        of._replace(table=torch.empty(of.table.shape, dtype=dtype, device=of.x.device))
        for of, dtype in zip(given, dtypes, strict=True)
    ]
    fold = product_of(plan, "fold", found)
    programs = max(blocks(of.table.shape[1], fold.columns) * of.table.shape[0] for of in given)
    # What it does not read has one type for all calls, so that it is not compiled anew.
    places = seen._replace(key_mask=seen.seed, spans=seen.seed)
    fold.launch(fold_vectors_kernel, found, programs, sums, places, shares, spots, plan.kind.scale)
    return {of.name: of.table for of in found}
