"""Scores of keys between the coordinates of keys and those of queries.

    scores(i, n) += key_scores(i + n, n)            dkey_scores(j, n) = dscores(j - n, n)

Products of keys with a table come as [keys, lags]; the attention kernels read scores as [queries, lags]. Both are read and
written in tiles [queries, keys], where the lags of a query lie side by side and, with the columns of `key_scores` in the order of
falling lags, the lags of a key as well.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs_per_start", "queries", "keys", "query_start", "first", "lags"])
def shear_kernel(
    Scores, KeyScores, Starts, pairs_per_start, queries, keys, query_start, first, lags,
    SIZE: tl.constexpr, STARTS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """With ADD adds key scores to scores, else copies scores to key scores, for one tile."""
    index, count, steps = tl.program_id(0), tl.cdiv(queries, SIZE), tl.cdiv(lags + SIZE - 1, SIZE)
    block, step, pair = index % count, index // count % steps, index // (count * steps)
    start = tl.load(Starts + pair // pairs_per_start).to(tl.int32) if STARTS else query_start
    Scores += pair.to(tl.int64) * queries * lags
    KeyScores += pair.to(tl.int64) * keys * lags
    row = block * SIZE + tl.arange(0, SIZE)
    key = row + start + first + step * SIZE
    column = key[None, :] - row[:, None] - start - first
    back = row[:, None] - key[None, :] + start + first + lags - 1
    inside = (column >= 0) & (column < lags) & (row < queries)[:, None] & (key >= 0)[None, :] & (key < keys)[None, :]
    query_side = Scores + row.to(tl.int64)[:, None] * lags + column
    key_side = KeyScores + key.to(tl.int64)[None, :] * lags + back
    if ADD:
        found = tl.load(query_side, mask=inside, other=0.0) + tl.load(key_side, mask=inside, other=0.0)
        tl.store(query_side, found, mask=inside)
    else:
        tl.store(key_side, tl.load(query_side, mask=inside, other=0.0), mask=inside)
