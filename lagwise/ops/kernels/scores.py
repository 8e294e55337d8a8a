"""Scores of vector tables by matrix products, [rows, lags], and the products that their gradients become."""

import math

import torch
from torch import Tensor

from lagwise.ops.grouped import per_query_head
from lagwise.ops.kernels.channel_gain import channel_scores
from lagwise.ops.kernels.plan import Plan


def score(plan: Plan) -> None:
    """Computes the scores of a plan's band, [queries, lags] and [keys, lags], and their ends, by matrix products."""
    found: dict[str, Tensor] = {}
    if plan.tables.query is not None:
        found["band"] = products(plan.raw_q, plan.table("query"), plan.room)
    elif plan.channels:
        found["band"] = empty_scores(plan.q, plan.numbers["band_lags"], plan.room)
    if plan.tables.key is not None:
        found["key"] = products(per_query_head(plan.raw_k, plan.heads), plan.table("key"), plan.room)
    if plan.only is None and plan.tables.query is not None:
        found["query_ends"] = ends_of(found["band"])
    if plan.only is None and plan.tables.key is not None:
        found["key_ends"] = ends_of(found["key"])
    plan.scores = plan.scores._replace(**found)
    if plan.channels:
        channel_scores(plan)


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


def summed_products(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Returns the sum over batch and time, for one head over heads as well, of a's columns times b's, [heads, a's, b's]."""
    if a.is_cuda and a.dtype != torch.float32:
        found = torch.bmm(a.flatten(0, 1).mT, b.flatten(0, 1), out_dtype=torch.float32)
    else:
        found = torch.bmm(a.float().flatten(0, 1).mT, b.float().flatten(0, 1))
    return found.sum(0, keepdim=True) if heads == 1 else found.unflatten(0, a.shape[:2]).sum(0)
