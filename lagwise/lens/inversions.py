"""Pairs of keys in the wrong order, counted by merging; numpy sorts several times faster than torch."""

import numpy as np
from jaxtyping import Bool, Float, Int


def violations(
    values: Float[np.ndarray, "queries keys"], counts: Bool[np.ndarray, "queries keys"], lags: Int[np.ndarray, "queries keys"]
) -> float:
    """Returns the share of pairs of one map in which the key nearer to the query has the smaller value; NaN without a pair."""
    sizes = np.stack([(counts & side).sum(-1) for side in (lags <= 0, lags >= 0)])
    pairs = int((sizes * (sizes - 1) // 2).sum())
    if not pairs:
        return float("nan")
    counts = counts & ~np.isnan(values)
    ranks, none = ranks_of(values), 2 * values.shape[1]
    # A pair is wrong where the earlier key is above the later one: the future is turned round, and lies above the past.
    turned = np.where(counts, np.where(lags <= 0, ranks, none - 1 - ranks), none)
    own = np.where(counts & (lags == 0), ranks, none).min(-1, keepdims=True)
    return (count_inversions(turned, none) + int((counts & (lags > 0) & (ranks > own)).sum())) / pairs


def ranks_of(values: Float[np.ndarray, "rows places"]) -> Int[np.ndarray, "rows places"]:
    """Returns the place of each value among the different values of its row.

    >>> ranks_of(np.array([[0.5, 0.1, 0.5, 0.7]]))
    array([[1, 0, 1, 2]], dtype=int32)
    """
    order = values.argsort(-1)
    ordered = np.take_along_axis(values, order, -1)
    places = np.zeros(values.shape, dtype=np.int32)
    np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=-1, out=places[:, 1:])
    found = np.empty_like(places)
    np.put_along_axis(found, order, places, -1)
    return found


def count_inversions(numbers: Int[np.ndarray, "rows places"], none: int) -> int:
    """Returns in how many pairs of a row, over all rows, the earlier number is above the later one.

    Halves of growing size are merged, in time n log(n)^2 for a row of n. In a merged block the place of a number of the first
    half is how many are below it: without those of its own half they are its pairs.

    Args:
        numbers: From 0 up.
        none: Stands for a place without a number, and is above all of them.

    >>> count_inversions(np.array([[3, 1, 9, 2], [0, 1, 2, 3]], dtype=np.int32), 9)
    2
    """
    rows, width = numbers.shape
    size = 1 << (width - 1).bit_length()
    numbers = np.pad(numbers, ((0, 0), (0, size - width)), constant_values=none)
    half, found = 1, 0
    while half < size:
        # The last bit tells the halves apart; of equal numbers that of the first half comes first.
        blocks = (2 * numbers.reshape(rows, -1, 2, half) + np.array([[0], [1]], dtype=numbers.dtype)).reshape(-1, 2 * half)
        blocks.sort(-1)
        first = ((blocks & 1) == 0) & (blocks < 2 * none)
        own = first.sum(-1)
        found += int((first @ np.arange(2.0 * half)).sum()) - int((own * (own - 1) // 2).sum())
        numbers, half = blocks >> 1, 2 * half
    return found
