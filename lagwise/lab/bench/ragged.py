"""Batches of sequences that are not equally long, padded or packed, and attention without positions on them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lagwise.lab.bench.baselines import plain_attention
from lagwise.lab.bench.cases import Case
from lagwise.lab.bench.contenders import Contender, Entry, make_tensors


def make_lengths(case: Case) -> list[int]:
    """Returns the lengths of a case's sequences, between a quarter of its time and all of it, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(max(1, case.time // 4), case.time + 1, (case.batch,), generator=generator).tolist()


def make_ragged(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    """Returns q, k, v and a gradient of the output, padded or packed, and the lengths of the sequences.

    The heads of a token lie side by side, as projections leave them and as the vendor's kernel wants them.
    """
    lengths = make_lengths(case)
    if case.ragged == "cu_seqlens":
        case = replace(case, batch=1, time=sum(lengths))
    return make_tensors(case, device, dtype, by_token=True), lengths


def options_for(lengths: list[int], ragged: str, device: torch.device) -> dict[str, Any]:
    """Returns what `lagwise.attention` is told about sequences of some lengths."""
    if ragged == "lengths":
        return {"lengths": torch.tensor(lengths, device=device)}
    return {"cu_seqlens": ends_of(lengths, device), "max_seqlen": max(lengths)}


def ends_of(lengths: list[int], device: torch.device) -> Tensor:
    """Returns where sequences that lie one after another end, after a 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def plain_ragged(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], ragged: str) -> dict[str, Entry]:
    """Returns attention without positions by name: the vendor's kernel for variable lengths, on a CPU one call a sequence."""
    if q.device.type != "cuda":
        return {"plain, one by one": [Contender(lambda: one_by_one(q, k, v, lengths, ragged))]}
    return {"plain varlen": [varlen_contender(q, k, v, lengths, ragged)]}


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], ragged: str) -> Tensor:
    """Attention without positions, sequence by sequence."""
    parts = [plain_attention(*part, causal=False) for part in sequences(q, k, v, lengths, ragged)]
    return torch.cat(parts, dim=0 if ragged == "lengths" else 2)


def sequences(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], ragged: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the queries, keys and values of each sequence; padded queries are computed too, as ours are."""
    if ragged == "cu_seqlens":
        yield from zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return
    for row, length in enumerate(lengths):
        yield q[row, None], k[row, None, :, :length], v[row, None, :, :length]


def varlen_contender(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], ragged: str) -> Contender:
    """Returns the vendor's kernel for packed sequences, [tokens, heads, head_dim].

    Padded keys and values are packed beforehand and have gradients of their own, so that the kernel alone is timed. It takes all
    queries, padded ones too: then it looks at as many pairs as ours.
    """
    ends, longest = ends_of(lengths, q.device), max(lengths)
    if ragged == "cu_seqlens":

        def packed() -> Tensor:
            rows, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
            out = varlen_attn(rows, keys, values, ends, ends, longest, longest)
            assert isinstance(out, Tensor)
            return out.transpose(0, 1)[None]

        return Contender(packed)
    batch, _, time, _ = q.shape
    query_ends = ends_of([time] * batch, q.device)
    keys, values = (
        torch.cat([row[:, :length].transpose(0, 1) for row, length in zip(x.detach(), lengths, strict=True)]).requires_grad_()
        for x in (k, v)
    )

    def padded() -> Tensor:
        rows = q.transpose(1, 2).flatten(0, 1)
        out = varlen_attn(rows, keys, values, query_ends, ends, time, longest)
        assert isinstance(out, Tensor)
        return out.unflatten(0, (batch, time)).transpose(1, 2)

    return Contender(padded, (keys, values))
