"""Attention over a range of lags, tile by tile, with memory that grows with the time axis and not with its square."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lagwise.ops.lowering import Gradients, Part
from lagwise.ops.tiling.tile import Scratch, Tile, diagonals

# Queries per tile and numbers per tile, by device type. A CPU tile should stay in the cache; a GPU wants few large launches.
TILE_QUERIES = {"cpu": 192, "cuda": 1024}
TILE_NUMBERS = {"cpu": 2**19, "cuda": 2**27}


def blocks(part: Part) -> list[slice]:
    """Cuts the queries of a part into blocks."""
    rows = part.q.shape[2]
    # The rectangle of a tile is wider than its lags by the queries of a block, so that short sequences want small blocks.
    block = min(TILE_QUERIES[_kind(part)], max(16, rows // 4))
    return [slice(start, min(start + block, rows)) for start in range(0, rows, block)]


def tiles(part: Part, first: int, last: int) -> Iterator[tuple[slice, list[Tile]]]:
    """Yields for each block of queries its slice of time and the tiles that cover its lags from `first` to `last`."""
    batch, heads = part.q.shape[:2]
    most = min(max(TILE_NUMBERS[_kind(part)] // (batch * heads * TILE_QUERIES[_kind(part)]), 128), 4096)
    tables = part.tables.tables().values()
    # Tiles end where tables do, so that beyond them every table is a single number or vector.
    start, stop = min((t.first for t in tables), default=0), max((t.last for t in tables), default=0)
    for block in blocks(part):
        row, queries = block.start, block.stop - block.start
        position = part.query_start + row
        low, high = max(first, 1 - queries - position), min(last, part.k.shape[2] - 1 - position)
        regions = ((low, min(high, start - 1)), (max(low, start), min(high, stop)), (max(low, stop + 1), high))
        found = [
            Tile(part, row, queries, lag, min(most, end - lag + 1))
            for begin, end in regions
            for lag in range(begin, end + 1, most)
        ]
        yield block, found


def _kind(part: Part) -> str:
    return "cpu" if part.q.device.type == "cpu" else "cuda"


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns `dout . out - dlse` per row, in the type of the sums: what each row's logits lose to the normalisation."""
    compute = torch.promote_types(out.dtype, torch.float32)
    product = torch.einsum("bhtc,bhtc->bht", dout.to(compute), out.to(compute))
    return product if dlse is None else product - dlse


def forward(part: Part, first: int, last: int, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention over the lags `first .. last`, in the type of the sums.

    The softmax is taken on the way: when a tile brings a larger logit, what was summed so far is scaled down. The logits are
    left in `scores`, [batch, heads, queries, lags], where that is given.
    """
    batch, heads, rows = part.q.shape[:3]
    out = torch.empty(batch, heads, rows, part.v.shape[3], dtype=part.compute, device=part.q.device)
    lse = torch.empty(batch, heads, rows, dtype=part.compute, device=part.q.device)
    scratch = Scratch()
    for block, found in tiles(part, first, last):
        largest = torch.full_like(lse[:, :, block, None], -torch.inf)
        total = torch.zeros_like(largest)
        numerator = torch.zeros_like(out[:, :, block])
        for tile in found:
            logits = tile.logits(scratch, None if scores is None else scores[:, :, block, tile.columns(first)])
            larger = torch.maximum(largest, logits.amax(-1, keepdim=True))
            # A row that has seen nothing yet has -inf here, and -inf - -inf is not a number.
            reference = larger.clamp(min=torch.finfo(part.compute).min / 2)
            rectangle = scratch.rectangle("weights", logits)
            weights = torch.sub(logits, reference, out=diagonals(rectangle, tile.lags)).exp_()
            shrink = torch.exp(largest - reference)
            total = total * shrink + rectangle.sum(-1, keepdim=True)
            kept = tile.kept()
            if kept is not None:
                weights *= kept
            numerator = numerator * shrink + tile.output(rectangle)
            largest = larger
        # The largest weight is one, so that the total of a row that saw anything is at least one.
        out[:, :, block] = numerator / total.clamp(min=1.0)
        lse[:, :, block] = (largest + total.log()).squeeze(-1)
    return out, lse


def backward(
    part: Part, first: int, last: int, dout: Tensor, lse: Tensor, delta: Tensor, gradients: Gradients,
    scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds the share of the lags `first .. last` to the gradients, given the log-sum-exp over all lags.

    The logits are computed again unless they were kept in `scores`.
    """
    scratch = Scratch()
    # A row that saw nothing has weights exp(-inf - 0) = 0.
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    for block, found in tiles(part, first, last):
        here = dout[:, :, block].to(part.compute)
        for tile in found:
            logits = tile.logits(scratch) if scores is None else scores[:, :, block, tile.columns(first)]
            tile.backward(logits, finite[:, :, block, None], delta[:, :, block, None], here, gradients, scratch)
        if len(found) > 1 or block.stop == part.q.shape[2]:
            scratch.fold(gradients, part.tables)
