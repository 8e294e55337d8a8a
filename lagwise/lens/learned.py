"""What encodings learned, in their own terms: ranges and buckets of AT5, kernels of SPE, and what a run stores of all."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lagwise.encodings import AT5, T5, Encoding, NoEncoding, StochasticEncoding
from lagwise.lens.priors import prior
from lagwise.nn import RelativeAttention
from lagwise.noise import draw_seed
from lagwise.pages import finite

FARTHEST_LAG = 128
"""Where the priors that a run stores end on each side."""


class Kernels(NamedTuple):
    """The functions of the lag that multiply each channel of the content product."""

    lags: Int[Tensor, " lags"]
    values: Float[Tensor, "heads lags channels"]


@torch.no_grad()
def dependency_ranges(encoding: AT5) -> Float[Tensor, "directions heads"]:
    """Returns AT5's learned dependency ranges in lags, past first, then future: `reach / slope`.

    Lags much beyond the range share one soft bucket. A slope that is not positive gives infinity: to that head all distances of
    the direction are the same.

    >>> dependency_ranges(AT5(heads=1, max_lag=100, slopes=(4.0, 4.0)))
    tensor([[25.],
            [25.]])
    """
    if not isinstance(encoding, AT5):
        raise ValueError(f"encoding must be AT5, whose slopes are ranges, but is {type(encoding).__name__}: take effective_range")
    return encoding.reach / torch.relu(encoding.slope)


@torch.no_grad()
def bucket_edges(encoding: Encoding, *, levels: int = 16) -> Float[Tensor, "directions heads edges"]:
    """Returns the distances at which buckets begin, without the first, which begins at 0; past first, then future.

    T5's are fixed and the same for all heads, of which there is one here. AT5's soft bucket f grows from 0 to 1 without steps:
    its edges are the distances at which f passes the multiples of `1 / levels`, so that equal slices of f stand beside as many
    buckets. Encodings before and after training show how they moved.

    Args:
        encoding: T5 or AT5.
        levels: Number of slices of AT5's soft bucket; 16 are as many as T5 has in each direction.

    >>> bucket_edges(T5(heads=8))[0, 0].int()
    tensor([ 1,  2,  3,  4,  5,  6,  7,  8, 12, 16, 23, 32, 46, 64, 91],
           dtype=torch.int32)
    """
    if isinstance(encoding, AT5):
        passed = torch.arange(1, levels, device=encoding.slope.device) / levels
        return -dependency_ranges(encoding)[..., None] * torch.log1p(-passed)
    if not isinstance(encoding, T5):
        raise ValueError(f"encoding must be T5 or AT5, which have buckets, but is {type(encoding).__name__}")
    here = -encoding.first
    sides = [encoding.bucket[: here + 1].flip(0)] if encoding.causal else [
        encoding.bucket[: here + 1].flip(0), encoding.bucket[here:]
    ]  # fmt: skip
    return torch.stack([(side.diff().nonzero() + 1.0).T for side in sides])


@torch.no_grad()
def spe_kernels(encoding: StochasticEncoding, length: int) -> Kernels:
    """Returns the kernels P_d of a stochastic encoding over the lags of a sequence: the expected gain of each channel.

    The gate is included, `delta + (1 - delta) P`: a channel whose kernel is 1 everywhere is position-free.

    >>> import lagwise
    >>> spe_kernels(lagwise.ConvSPE(heads=2, head_dim=8, kernel_size=4), 10).values.shape
    torch.Size([2, 19, 8])
    """
    if not isinstance(encoding, StochasticEncoding):
        raise ValueError(f"encoding must be stochastic, sine-spe or conv-spe, to have kernels, but is {type(encoding).__name__}")
    first, last = 1 - length, length - 1
    gain = encoding.exact_terms(first, last, scale=1.0).gain
    assert gain is not None
    values = gain.window(first, last)
    return Kernels(torch.arange(first, last + 1, device=values.device), values)


def learned_priors(model: nn.Module, length: int | None) -> list[dict[str, Any]]:
    """Returns what each position encoding of a model learned, by lag, as JSON knows it.

    Each has its `name` in the model and its class as `encoding`, and beside them the `first` lag and a row of numbers for each
    head: the `bias` that makes the prior, or of a stochastic encoding the `kernel`, in the mean over the channels. One that has
    neither has the `reason` instead.

    Args:
        model: The model, in evaluation mode.
        length: How many tokens its sequences have, if that is known: lags end there, and at `FARTHEST_LAG`.
    """
    reach = FARTHEST_LAG if length is None else min(length - 1, FARTHEST_LAG)
    found = []
    for name, encoding in model.named_modules():
        if not isinstance(encoding, Encoding) or isinstance(encoding, NoEncoding):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        try:
            learned = learned_by_lag(encoding, owner, reach)
        except Exception as error:
            # A training that is done must not be lost for want of a picture.
            learned = {"reason": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
        found.append({"name": name, "encoding": type(encoding).__name__, **finite(learned)})
    return found


@torch.no_grad()
def learned_by_lag(encoding: Encoding, owner: nn.Module, reach: int) -> dict[str, Any]:
    """Returns the bias or the kernel of an encoding by lag, or the reason why there is none."""
    if encoding.absolute:
        return {"reason": "it is absolute, and acts on the model's input before attention"}
    attention = next((module for module in owner.modules() if isinstance(module, RelativeAttention)), None)
    causal = getattr(encoding, "causal", False) or (attention is not None and attention.causal)
    last = 0 if causal else reach
    if isinstance(encoding, StochasticEncoding):
        kernels = spe_kernels(encoding, reach + 1)
        return {"first": -reach, "kernel": kernels.values[:, kernels.lags <= last].mean(-1).tolist()}
    scale = getattr(owner, "scaling", None) if attention is None else attention.scale
    seed = draw_seed(False, next(owner.parameters()).device)
    if encoding.terms(-reach, last, scale=1.0, seed=seed).bias is None:
        return {"reason": "it has no bias, so that what it does depends on the content"}
    return {"first": -reach, "bias": prior(encoding, reach + 1, causal=causal, scale=scale).bias.tolist()}
