"""The interface of an encoding, and the sum of two."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.errors import require_lags, require_numbers, require_seed
from lagwise.terms import Terms


def checked(make_terms: Callable[..., Terms]) -> Callable[..., Terms]:
    """Returns a method that makes terms, which refuses bad arguments first."""

    @wraps(make_terms)
    def terms(self: "Encoding", first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        require_lags(first, last)
        require_numbers(scale=scale)
        require_seed(seed)
        return make_terms(self, first, last, scale=scale, seed=seed)

    return terms


class Encoding(nn.Module, ABC):
    """Describes how positions act on attention. It never computes attention itself.

    A relative encoding writes `terms` and nothing else. An absolute one derives from `Absolute` and writes `embed`.
    `a + b` is an encoding with the terms and the embeddings of both.
    """

    absolute: bool = False
    """Whether the encoding acts on the model's input through `embed`."""

    linear_only: bool = False
    """Whether the encoding acts on the features of linear attention, which softmax attention does not have."""

    random: bool = False
    """Whether `terms` draws random numbers: a seed is drawn for those encodings alone."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets every encoding, a user's own included, check what it is asked for before it answers."""
        super().__init_subclass__(**options)
        for name in ("terms", "linear_terms"):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    @abstractmethod
    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        """Returns the encoding's terms for a call that can reach the lags from `first` to `last`.

        Tables may be narrower, where their tails are constant, and wider.

        Args:
            first: The first lag that the call can reach.
            last: The last one.
            scale: The factor of the content product; terms that have to be scaled with it multiply by it.
            seed: Where random numbers start, for an encoding that is `random`.
        """

    def linear_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        """Returns the terms for linear attention: those of softmax attention, unless an encoding has others."""
        return self.terms(first, last, scale=scale, seed=seed)

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "*batch time"]) -> Tensor:
        """Returns the model's input with absolute positions added; relative encodings leave it alone."""
        return x

    def make_neutral(self) -> bool:
        """Sets the parameters so that the encoding changes nothing, and says whether that is possible.

        Where it is possible, gradients reach parameters from there. Where it is not, which is what an encoding says that does
        not write this method, the parameters stay.
        """
        return False

    def __add__(self, other: "Encoding") -> "Sum":
        return Sum(self, other) if isinstance(other, Encoding) else NotImplemented

    # nn.Module's own annotation makes every call Any; the forward pass of an encoding is not defined on purpose.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is not called like a layer: pass it to lagwise.attention(q, k, v, encoding), "
            "or give it to a stack of lagwise.nn"
        )


class Absolute(Encoding):
    """An encoding that acts on the model's input alone."""

    absolute = True

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms()


class Sum(Encoding):
    """Two encodings at once: both embeddings, and the sum of both terms."""

    def __init__(self, left: Encoding, right: Encoding):
        super().__init__()
        self.left, self.right = left, right
        self.absolute = left.absolute or right.absolute
        self.linear_only = left.linear_only or right.linear_only
        self.random = left.random or right.random

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return self.left.terms(first, last, scale=scale, seed=seed) + self.right.terms(first, last, scale=scale, seed=seed)

    def linear_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        left, right = (part.linear_terms(first, last, scale=scale, seed=seed) for part in (self.left, self.right))
        return left + right

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "*batch time"]) -> Tensor:
        return self.right.embed(self.left.embed(x, positions), positions)

    def make_neutral(self) -> bool:
        # Not `and`: a part that can be neutral becomes so, whatever the other one is.
        return all([self.left.make_neutral(), self.right.make_neutral()])
