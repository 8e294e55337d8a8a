"""T5's rule for sharing one value between neighbouring lags."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from lagwise.errors import require_sizes, require_switches


def t5_bucket(lags: Int[Tensor, "*shape"], buckets: int, max_lag: int, causal: bool) -> Int[Tensor, "*shape"]:
    """Returns the bucket of each lag.

    Half of a direction's buckets, rounded down, hold one lag each, the others grow logarithmically up to `max_lag`. Without
    `causal` the second half of all buckets is for the future, and the last of an odd number is not used; with it, all future
    lags share bucket 0.

    The boundary of a logarithmic bucket is a rounded logarithm. It is taken in float32 on the CPU, whatever the device of the
    model, so that tables and checkpoints agree everywhere; the result equals that of Hugging Face's T5.
    """
    lags = lags.cpu()
    if causal:
        offset, distance = torch.zeros_like(lags), (-lags).clamp(min=0)
    else:
        buckets //= 2
        offset, distance = (lags > 0) * buckets, lags.abs()
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_lag / exact) * (buckets - exact)
    shared = (exact + growth.long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, shared)


def near_lags(buckets: int, max_lag: int, causal: bool) -> Int[Tensor, " lags"]:
    """Returns the lags up to the start of the last bucket on each side; beyond them nothing changes."""
    lags = torch.arange(-max_lag - 1, 1 if causal else max_lag + 2, device="cpu")
    bucket = t5_bucket(lags, buckets, max_lag, causal)
    changes = (bucket.diff() != 0).nonzero().flatten()
    # bucket[c] != bucket[c + 1]: the first run of equal buckets ends at lags[c] and the last one starts at lags[c + 1].
    return lags[changes[0] : changes[-1] + 2] if not causal else lags[changes[0] :]


def check_buckets(buckets: int, max_lag: int, causal: bool) -> None:
    """Raises for sizes with which the rule is not defined."""
    require_switches(causal=causal)
    require_sizes(buckets=buckets, max_lag=max_lag)
    directions = 1 if causal else 2
    if buckets < 2 * directions:
        raise ValueError(f"buckets must be at least {2 * directions}, two for each direction, but is {buckets}")
    exact = buckets // directions // 2
    if max_lag <= exact:
        raise ValueError(
            f"max_lag must be larger than {exact}, the lags that have a bucket of their own with buckets={buckets}, "
            f"but is {max_lag}"
        )
