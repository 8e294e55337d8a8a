"""What kernels are given, by what belongs together.

Tensors and strides come in tuples. Numbers that differ from call to call come one by one: those in a tuple are always
specialised, so that Triton would compile a kernel anew for multiples of 16 and for others. Kernels put them together at their
start. What a kernel is compiled for is one value, `Flags`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """A tensor [batch, heads, time, dim] whose channels lie side by side: where it is, and how far apart its axes are."""

    data: Any
    batch: Any
    head: Any
    time: Any


def view(x: Tensor) -> View:
    """Returns a tensor as kernels take it."""
    return View(x, *x.stride()[:3])


class Tables(NamedTuple):
    """Tables, one row per head; any tensor stands for one that a call has not.

    `bias` and `gain` have scalars for all near lags, and some more, see `lagwise.ops.kernels.tables`. Of a gain per channel
    `ends` are the end columns, [heads, 2, head_dim], and `channel_gain` is the band, [heads, lags, head_dim]. `value` is
    a band too, which the forward pass alone reads.
    """

    bias: Any
    gain: Any
    ends: Any
    channel_gain: Any
    value: Any


class Scores(NamedTuple):
    """Scores of vector tables, see `lagwise.ops.kernels.score_kernels`, and their ends, [..., 2, queries or keys]; likewise."""

    query: Any
    key: Any
    value: Any
    query_ends: Any
    key_ends: Any
    value_ends: Any


class Seen(NamedTuple):
    """Who may see whom, and where random numbers start; likewise.

    `spans` are the first key and the end of those that a mask leaves in each row of the batch, or of each token's sequence.
    """

    key_mask: Any
    spans: Any
    starts: Any
    seed: Any


class Sizes(NamedTuple):
    """Numbers of heads, query heads per key head, queries and keys, and the first and the last lag that may be seen."""

    heads: Any
    group: Any
    queries: Any
    keys: Any
    first: Any
    last: Any


class Bands(NamedTuple):
    """Lags: of near tiles, of all tables together, of the padded tables, and of the scores."""

    near_first: Any
    near_last: Any
    low: Any
    high: Any
    table_first: Any
    table_lags: Any
    first: Any
    lags: Any


class HeadPointers(NamedTuple):
    """Where a head has its tables, its scores and the mask of its keys."""

    bias: Any
    gain: Any
    ends: Any
    value: Any
    query: Any
    key: Any
    value_scores: Any
    query_ends: Any
    key_ends: Any
    value_ends: Any
    key_mask: Any


class QueryGradients(NamedTuple):
    """What the pass over queries writes: beside dq, see `lagwise.ops.kernels.backward`, sums for the tables."""

    q: View
    query_ends: Any
    value_masses: Any
    patches: Any
    bias: Any
    gain: Any
    ends: Any
    gain_ends: Any


class KeyGradients(NamedTuple):
    """What the pass over keys writes."""

    k: View
    v: View
    key_ends: Any


class FarQueries(NamedTuple):
    """The gradients of queries that others computed for the far fields, and the gains of the end columns."""

    past: View
    future: View
    gains: Any
    gains_head: Any
    gains_last: Any


class FarKeys(NamedTuple):
    """The gradients of keys and values that others computed for the far fields."""

    past_k: View
    future_k: View
    past_v: View
    future_v: View


@dataclass(frozen=True)
class Flags:
    """What a kernel is compiled for.

    Widths of heads, and the powers of two that hold them; rows and keys of a tile; which tables there are (SCORES: those of
    the queries or of a gain per channel; SCORED: any scores, with which tiles of the pass over keys are turned); what hides
    pairs (MASK, with HIDE also from loads; PACKED; LIMITED to some lags; ragged tiles unless WHOLE); whether tiles beyond the
    tables' columns come too (FAR), and whether none has lags on both sides of the columns of scores (APART); how many far
    fields others computed (SIDES), whether tables of scalars get a gradient (LEARNED), and whether the pass over queries
    computes delta (DELTA), with a gradient of the log-sum-exp (DLSE). OUT_BY_TOKEN is of kernels on rows, RUNS, LENGTH, STEP,
    LAGS and WARPS are of a gain per channel.
    """

    head_dim: int
    value_dim: int
    WIDTH: int
    VALUE_WIDTH: int
    ROWS: int = 0
    KEYS: int = 0
    BIAS: bool = False
    SLOPES: bool = False
    GAIN: bool = False
    CHANNELS: bool = False
    SCORES: bool = False
    SCORED: bool = False
    QUERY: bool = False
    KEY: bool = False
    VALUE: bool = False
    MASK: bool = False
    HIDE: bool = False
    PACKED: bool = False
    STARTS: bool = False
    DROPOUT: bool = False
    FAR: bool = True
    LIMITED: bool = False
    WHOLE: bool = False
    APART: bool = False
    NEAR_MASKED: bool = True
    FAR_MASKED: bool = True
    SIDES: int = 0
    LEARNED: bool = False
    DELTA: bool = False
    DLSE: bool = False
    OUT_BY_TOKEN: bool = False
    RUNS: int = 0
    LENGTH: int = 0
    STEP: int = 0
    LAGS: int = 0
    WARPS: int = 0


@lru_cache(maxsize=4096)
def kept_flags(names: tuple[str, ...], values: tuple[Any, ...]) -> Flags:
    """Returns flags by name; the same ones are made once."""
    return Flags(**dict(zip(names, values, strict=True)))


def flags(**given: Any) -> Flags:
    """Returns flags; those that are not given are at rest."""
    return kept_flags(tuple(given), tuple(given.values()))
