"""What a bias says before anything is read: a prior over lags, after Wu, Zhang, Mao, Chen (2021)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lagwise.encodings import Encoding
from lagwise.noise import draw_seed
from lagwise.softmax import relative_only
from lagwise.terms import Terms


@dataclass(frozen=True)
class Prior:
    """The bias of each head by lag, and what follows from it alone.

    Args:
        lags: The lags, from the past to the future.
        bias: What is added to the logit at each of them.
    """

    lags: Int[Tensor, " lags"]
    bias: Float[Tensor, "heads lags"]

    @property
    def probability(self) -> Float[Tensor, "heads lags"]:
        """The paper's prior probability: one softmax over all lags."""
        return torch.softmax(self.bias, dim=-1)

    @property
    def peak(self) -> Float[Tensor, " heads"]:
        """The largest prior probability of each head."""
        return self.probability.amax(-1)

    @property
    def peak_lag(self) -> Int[Tensor, " heads"]:
        """The lag at which each head has its largest prior probability."""
        return self.lags[self.probability.argmax(-1)]

    @property
    def ranking(self) -> Int[Tensor, " heads"]:
        """The heads from the lowest to the highest peak; of equal ones the first comes first."""
        return self.peak.argsort(stable=True)


@torch.no_grad()
def prior(encoding: Encoding | Terms, length: int, *, causal: bool = False, scale: float | None = None) -> Prior:
    """Returns the prior of each head over the lags of a sequence, exactly.

        P(lag = n) = softmax_n(bias(n))             n = 1 - length .. length - 1, or up to 0 if causal

    An encoding with more than a bias has a prior too, that of its bias; what its other terms do depends on the content, see
    `expected_logits`. A table that all heads share gives one row.

    Args:
        encoding: An encoding in evaluation mode, or terms, which are taken as they are: beyond the lags that they were made for,
            their tails go on.
        length: Number of tokens of the sequence.
        causal: Leave the future out.
        scale: The factor of the content product. An encoding with a bias alone does not depend on it.

    >>> import lagwise
    >>> found = prior(lagwise.ALiBi(heads=8), 100, causal=True)
    >>> found.peak_lag, found.ranking[-1]
    (tensor([0, 0, 0, 0, 0, 0, 0, 0]), tensor(0))
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, but is {length}: give the number of tokens of a sequence")
    first, last = 1 - length, 0 if causal else length - 1
    name = type(encoding).__name__
    terms = relative_only(encoding)
    if isinstance(terms, Encoding):
        terms = _terms_of(terms, first, last, scale)
    if terms.bias is None:
        raise ValueError(
            f"encoding must have a bias to have a prior, but {name} has none: take expected_logits over data, which every "
            "encoding has"
        )
    # One softmax over thousands of lags needs more than half precision.
    bias = terms.bias.window(first, last)
    return Prior(torch.arange(first, last + 1, device=bias.device), bias.to(torch.promote_types(bias.dtype, torch.float32)))


def _terms_of(encoding: Encoding, first: int, last: int, scale: float | None) -> Terms:
    """Returns the terms of an encoding; raises where they would not be those of a trained model."""
    if encoding.random and encoding.training:
        raise ValueError(
            f"encoding must be in evaluation mode, but {type(encoding).__name__} is in training, where it is random: "
            "call its eval()"
        )
    device = next((x.device for x in (*encoding.parameters(), *encoding.buffers())), torch.device("cpu"))
    terms = encoding.terms(first, last, scale=1.0 if scale is None else scale, seed=draw_seed(False, device))
    if scale is None and terms.bias is not None and (len(terms.tables()) > 1 or terms.transform is not None):
        raise ValueError(
            f"scale must be given for {type(encoding).__name__}, whose bias may depend on it, but is None: pass "
            "head_dim ** -0.5, or what the model uses"
        )
    return terms
