"""Encodings in which lags meet queries, keys or values: Shaw, Huang's four methods, Transformer-XL."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.encodings.absolute import inverse_frequencies
from lagwise.encodings.base import Encoding
from lagwise.encodings.shared import Shared
from lagwise.errors import require_even, require_floats, require_lag, require_sizes, require_switches
from lagwise.kept import over_lags
from lagwise.lags import LagTable
from lagwise.terms import Terms


class Shaw(Encoding):
    """Adds one learned vector per lag to the keys, and another to the values.

        logit(i, j) = scale * q_i . (k_j + keys[clip(j - i, -max_lag, max_lag)])
        out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + values[clip(j - i, -max_lag, max_lag)])

    Shaw, Uszkoreit, Vaswani (2018), equations 3 and 4, where `max_lag` is called k.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head, of queries, keys and values.
        max_lag: Where the tables end; lags beyond share the last vector.
        values: Also add vectors to the values; the authors found that the keys suffice.
        per_head: Have separate vectors for each head; the paper shares them.

    >>> terms = Shaw(heads=8, head_dim=64, max_lag=16).terms(-99, 99, scale=0.125)
    >>> terms.query.values.shape, terms.value.values.shape
    (torch.Size([1, 33, 64]), torch.Size([1, 33, 64]))
    """

    def __init__(self, *, heads: int, head_dim: int, max_lag: int = 128, values: bool = True, per_head: bool = False):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim)
        require_switches(values=values, per_head=per_head)
        self.max_lag = require_lag(max_lag)
        self.keys = learned_vectors(heads if per_head else 1, max_lag, head_dim)
        self.values = learned_vectors(heads if per_head else 1, max_lag, head_dim) if values else None

    @classmethod
    def from_tables(
        cls, keys: Float[Tensor, "lags head_dim"], values: Float[Tensor, "lags head_dim"] | None = None, *, heads: int
    ) -> "Shaw":
        """Makes the encoding from tables whose row r is the vector of lag `r - max_lag`, as in the paper.

        >>> Shaw.from_tables(torch.randn(33, 64), heads=8).max_lag
        16
        """
        max_lag = table_end("keys", keys)
        encoding = cls(heads=heads, head_dim=keys.shape[1], max_lag=max_lag, values=values is not None)
        encoding.keys.data = keys.detach().clone()[None]
        if values is not None:
            if table_end("values", values) != max_lag or values.shape != keys.shape:
                raise ValueError(f"values must have the shape of keys, {tuple(keys.shape)}, but has {tuple(values.shape)}")
            encoding.values.data = values.detach().clone()[None]  # pyright: ignore[reportOptionalMemberAccess]
        return encoding

    @classmethod
    def from_distance_embedding(cls, weight: Float[Tensor, "lags head_dim"], *, heads: int) -> "Shaw":
        """Makes the encoding from the `distance_embedding` of a BERT with `relative_key`, whose lag runs the other way.

        >>> Shaw.from_distance_embedding(torch.randn(1023, 64), heads=12).max_lag
        511
        """
        table_end("weight", weight)
        return cls.from_tables(weight.flip(0), heads=heads)

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        value = None if self.values is None else LagTable(self.values, -self.max_lag)
        return Terms(query=LagTable(self.keys, -self.max_lag), value=value)

    def make_neutral(self) -> bool:
        for table in self.parameters():
            nn.init.zeros_(table)
        return True


class HuangM1(Encoding):
    """Multiplies the content product by one learned scalar per distance: method 1.

        logit(i, j) = scale * (q_i . k_j) * weight[head, min(|j - i|, max_lag)]

    Huang, Liang, Xu, Xiang (2020). The weights start at one: near zero all logits would vanish.

    Args:
        heads: Number of query heads.
        max_lag: Where the table ends; lags beyond share the last value.
        per_head: Have separate scalars for each head.

    >>> HuangM1(heads=8, max_lag=16).terms(-99, 99, scale=0.125).gain.values.shape
    torch.Size([8, 33, 1])
    """

    def __init__(self, *, heads: int, max_lag: int = 128, per_head: bool = True):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(per_head=per_head)
        self.max_lag = require_lag(max_lag)
        self.weight = nn.Parameter(torch.ones(heads if per_head else 1, max_lag + 1))
        distance = torch.arange(-max_lag, max_lag + 1, device="cpu").abs()
        self.shared = Shared(distance, count=max_lag + 1, device=self.weight.device)

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(gain=LagTable(self.shared.table(self.weight)[..., None], -self.max_lag))

    def make_neutral(self) -> bool:
        nn.init.ones_(self.weight)
        return True


class HuangM2(Encoding):
    """Multiplies the content product by one learned scalar per lag, past and future apart: method 2.

        logit(i, j) = scale * (q_i . k_j) * weight[head, clip(j - i, -max_lag, max_lag)]

    Huang, Liang, Xu, Xiang (2020). The weights start at one.

    Args:
        heads: Number of query heads.
        max_lag: Where the table ends; lags beyond share the last value.
        per_head: Have separate scalars for each head.

    >>> HuangM2(heads=8, max_lag=16).terms(-99, 99, scale=0.125).gain.values.shape
    torch.Size([8, 33, 1])
    """

    def __init__(self, *, heads: int, max_lag: int = 128, per_head: bool = True):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(per_head=per_head)
        self.max_lag = require_lag(max_lag)
        self.weight = nn.Parameter(torch.ones(heads if per_head else 1, 2 * max_lag + 1))

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(gain=LagTable(self.weight[..., None], -self.max_lag))

    def make_neutral(self) -> bool:
        nn.init.ones_(self.weight)
        return True


class HuangM3(Encoding):
    """Multiplies each channel of the content product by a learned scalar per lag: method 3.

        logit(i, j) = scale * sum_c q_ic k_jc weight[clip(j - i, -max_lag, max_lag), c]

    Huang, Liang, Xu, Xiang (2020). The weights start at one.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        max_lag: Where the table ends; lags beyond share the last vector.
        per_head: Have separate vectors for each head.

    >>> HuangM3(heads=8, head_dim=64, max_lag=16).terms(-99, 99, scale=0.125).gain.values.shape
    torch.Size([1, 33, 64])
    """

    def __init__(self, *, heads: int, head_dim: int, max_lag: int = 128, per_head: bool = False):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim)
        require_switches(per_head=per_head)
        self.max_lag = require_lag(max_lag)
        self.weight = nn.Parameter(torch.ones(heads if per_head else 1, 2 * max_lag + 1, head_dim))

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(gain=LagTable(self.weight, -self.max_lag))

    def make_neutral(self) -> bool:
        nn.init.ones_(self.weight)
        return True


class HuangM4(Encoding):
    """Lets one learned vector per lag meet both the query and the key: method 4.

        logit(i, j) = scale * (q_i . k_j + q_i . a + k_j . a)          a = weight[clip(j - i, -max_lag, max_lag)]

    Huang, Liang, Xu, Xiang (2020); the `relative_key_query` of BERT in Hugging Face transformers 4.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        max_lag: Where the table ends; lags beyond share the last vector.
        per_head: Have separate vectors for each head; BERT shares them.

    >>> terms = HuangM4(heads=8, head_dim=64, max_lag=16).terms(-99, 99, scale=0.125)
    >>> terms.query is terms.key
    True
    """

    def __init__(self, *, heads: int, head_dim: int, max_lag: int = 128, per_head: bool = False):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim)
        require_switches(per_head=per_head)
        self.max_lag = require_lag(max_lag)
        self.weight = learned_vectors(heads if per_head else 1, max_lag, head_dim)

    @classmethod
    def from_distance_embedding(cls, weight: Float[Tensor, "lags head_dim"], *, heads: int) -> "HuangM4":
        """Makes the encoding from the `distance_embedding` of a BERT with `relative_key_query`, whose lag runs the other way.

        >>> HuangM4.from_distance_embedding(torch.randn(1023, 64), heads=12).max_lag
        511
        """
        max_lag = table_end("weight", weight)
        encoding = cls(heads=heads, head_dim=weight.shape[1], max_lag=max_lag)
        encoding.weight.data = weight.detach().flip(0)[None]
        return encoding

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        table = LagTable(self.weight, -self.max_lag)
        return Terms(query=table, key=table)

    def make_neutral(self) -> bool:
        nn.init.zeros_(self.weight)
        return True


class XL(Encoding):
    """Lets projected sinusoids of the lag meet the query, with two learned global biases: Transformer-XL.

        logit(i, j) = scale * ((q_i + u) . k_j + (q_i + v) . (W r(i - j)))           u, v per head, W [heads * head_dim, dim]
        r(d)        = [sin(d / 10000^(2c / dim)), cos(d / 10000^(2c / dim))]          c = 0 .. dim / 2 - 1

    Dai et al. (2019), section 3.3. The table covers the sequence: it has no end.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        dim: Number of sinusoid channels; even. None takes `heads * head_dim`, the paper's choice.

    >>> terms = XL(heads=2, head_dim=8).terms(-9, 9, scale=0.35)
    >>> terms.query.values.shape, terms.key.values.shape, terms.bias.values.shape
    (torch.Size([2, 19, 8]), torch.Size([2, 1, 8]), torch.Size([2, 19]))
    """

    def __init__(self, *, heads: int, head_dim: int, dim: int | None = None):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim)
        self.dim = require_even("dim", heads * head_dim if dim is None else dim)
        self.u = nn.Parameter(torch.zeros(heads, head_dim))
        self.v = nn.Parameter(torch.zeros(heads, head_dim))
        self.weight = nn.Parameter(torch.empty(heads, head_dim, self.dim).normal_(std=0.02))

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        (sinusoids,) = sinusoids_of_lags(first, last, self.weight.device, self.dim, self.weight.dtype)
        query = sinusoids @ self.weight.mT
        bias = scale * torch.einsum("hld,hd->hl", query, self.v)
        return Terms(bias=LagTable(bias, first), query=LagTable(query, first), key=LagTable(self.u[:, None], 0))

    def make_neutral(self) -> bool:
        # The gradient of v is that of a product with W and vanishes until W moves; those of W and u do not.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        return True


@over_lags
def sinusoids_of_lags(first: int, last: int, device: torch.device, dim: int, dtype: torch.dtype) -> tuple[Tensor]:
    """Returns sines and cosines of lags, [lags, dim]."""
    lags = torch.arange(first, last + 1, device=device)
    # The paper's argument is the distance into the past, i - j.
    angles = -lags[:, None] * inverse_frequencies(dim, device)
    return (torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype),)


def learned_vectors(heads: int, max_lag: int, head_dim: int) -> nn.Parameter:
    """Returns a learned vector for each lag from -max_lag to max_lag, with BERT's first values."""
    return nn.Parameter(torch.empty(heads, 2 * max_lag + 1, head_dim).normal_(std=0.02))


def table_end(name: str, table: Tensor) -> int:
    """Returns the last lag of a table of vectors that has one row per lag and is centred on lag 0."""
    require_floats(name, table, "[2 max_lag + 1, head_dim]")
    if table.ndim != 2 or table.shape[0] % 2 == 0:
        raise ValueError(f"{name} must be [2 max_lag + 1, head_dim], but has shape {tuple(table.shape)}")
    return table.shape[0] // 2
