"""No encoding at all, and encodings of absolute positions."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.encodings.base import Absolute, Encoding
from lagwise.errors import is_number, refuse, require_even, require_floats, require_integers, require_sizes
from lagwise.terms import Terms


class NoEncoding(Encoding):
    """Adds nothing: attention without positions.

        logit(i, j) = scale * q_i . k_j

    >>> NoEncoding().terms(-4, 4, scale=1.0)
    Terms(bias=None, gain=None, query=None, key=None, value=None, transform=None, features=None)
    """

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms()

    def make_neutral(self) -> bool:
        return True


class Sinusoidal(Absolute):
    """Adds fixed sines and cosines of the absolute position to the model's input.

        x(t, 2c) += sin(t / 10000^(2c / dim))        x(t, 2c + 1) += cos(t / 10000^(2c / dim))

    Vaswani et al. (2017), section 3.5.

    Args:
        dim: Width of the model's input; even.

    >>> Sinusoidal(dim=4).embed(torch.zeros(1, 2, 4), torch.arange(2))[0, 0]
    tensor([0., 1., 0., 1.])
    """

    def __init__(self, *, dim: int):
        super().__init__()
        self.dim = require_even("dim", dim)

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "*batch time"]) -> Tensor:
        check_embed(x, positions, self.dim)
        angles = positions[..., None] * inverse_frequencies(self.dim, x.device)
        return x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x.dtype)


class Learned(Absolute):
    """Adds one learned vector per absolute position to the model's input.

        x(t) += weight[t]

    Devlin et al. (2019). Positions beyond the table raise: the table says nothing about them.

    Args:
        dim: Width of the model's input.
        length: Number of positions in the table.
        std: Standard deviation of the first values; BERT's unless given, where the embedding of tokens has the same.

    >>> Learned(dim=8, length=16).embed(torch.zeros(2, 3, 8), torch.arange(3)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, *, dim: int, length: int = 512, std: float = 0.02):
        super().__init__()
        require_sizes(dim=dim, length=length)
        if not is_number(std) or std < 0:
            refuse("std", "a number of at least 0", std)
        self.weight = nn.Parameter(torch.empty(length, dim).normal_(std=std))

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "*batch time"]) -> Tensor:
        length, dim = self.weight.shape
        check_embed(x, positions, dim)
        check_positions(positions, 0, length - 1, self._refusal, wait=not self.training)
        return x + nn.functional.embedding(positions, self.weight)

    def _refusal(self, position: int) -> str:
        """Returns why a position is refused."""
        if position < 0:
            return f"positions must not be negative, but reach {position}"
        return (
            f"positions reach {position}, but the learned table ends at {len(self.weight) - 1}: make the encoding with "
            f"length={position + 1} or more, or use a relative encoding, which has no such limit"
        )

    def make_neutral(self) -> bool:
        nn.init.zeros_(self.weight)
        return True


def inverse_frequencies(dim: int, device: torch.device, base: float = 10000.0) -> Float[Tensor, " half"]:
    """Returns `base^(-2c / dim)` for c = 0 .. dim / 2 - 1, in float64, so that far positions keep their phase."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def check_embed(x: Tensor, positions: Tensor, dim: int) -> None:
    """Raises for an input, or for positions, that an absolute encoding cannot add to each other."""
    require_floats("x", x, f"[batch, time, {dim}]")
    if x.ndim < 2 or x.shape[-1] != dim:
        raise ValueError(f"x must have width dim={dim}, but has shape {tuple(x.shape)}")
    require_integers("positions", positions, "[time] or [batch, time]")
    if positions.ndim not in (1, 2) or positions.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"positions must be [time] or [batch, time] for the {x.shape[-2]} tokens of x, but has shape {tuple(positions.shape)}"
        )


def check_positions(positions: Tensor, first: int, last: int, words: Callable[[int], str], *, wait: bool) -> None:
    """Raises for positions outside of a range, with words about one of them.

    A GPU is not waited for in training, where it ends with an assertion instead. While compiling, or on
    the meta device, values cannot be read.

    Args:
        positions: The positions.
        first: The first that is allowed.
        last: The last one.
        words: Tells why a position is refused.
        wait: Whether a GPU is waited for.
    """
    if torch.compiler.is_compiling() or positions.is_meta or positions.numel() == 0:
        return
    low, high = positions.aminmax()
    if positions.is_cuda and not wait:
        torch.ops.aten._assert_async.msg((low >= first) & (high <= last), f"positions must be from {first} to {last}")
        return
    for found in (int(high), int(low)):
        if not first <= found <= last:
            raise ValueError(words(found))
