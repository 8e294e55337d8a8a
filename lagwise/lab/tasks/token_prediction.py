"""Telling tokens: the loss of each, what is made of it, and how it depends on the position."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lagwise.errors import require_sizes
from lagwise.lab.tasks.base import Batch, Examples, Task, batches_on


class TokenPrediction(Task):
    """A task whose models give scores of all symbols for each of `targets`."""

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        losses = token_losses(outputs, batch)
        return losses.sum(), losses.new_tensor(losses.numel())


def token_losses(outputs: Float[Tensor, "*items symbols"], batch: Batch) -> Float[Tensor, " tokens"]:
    """Returns the loss of each target in nats."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), batch["targets"].flatten(), reduction="none")


class MeanLoss(MeanMetric):
    """The mean loss of a token in nats."""

    higher_is_better = False

    def __init__(self) -> None:
        # Left to itself the library leaves out what is not a number.
        super().__init__(nan_strategy="disable")
        self.set_dtype(torch.float64)

    def update(self, losses: Float[Tensor, " tokens"], *_: object) -> None:
        """Takes the loss of each token; what other metrics are told beside it does not matter."""
        super().update(losses.double())


class Perplexity(MeanLoss):
    """The exponential of the mean loss of a token."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(Metric):
    """The bits that a model needs for each byte of the text, whatever its tokens are."""

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("bytes", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " tokens"], sizes: Int[Tensor, " tokens"]) -> None:
        self.nats += losses.double().sum()
        self.bytes += sizes.sum()

    def compute(self) -> Tensor:
        return self.nats / math.log(2.0) / self.bytes


class LossBin(NamedTuple):
    """The mean loss of the tokens at some positions."""

    first: int
    nats: float
    tokens: int


@torch.no_grad()
def mean_loss_by_position(
    model: nn.Module, examples: Examples, length: int, bins: int, *, batch: int = 16, limit: int | None = None
) -> list[LossBin]:
    """Returns the mean loss against the position in the sequence, in bins of equal width; empty bins are left out.

    Args:
        model: Of the task, in evaluation mode.
        examples: Rows of tokens.
        length: Of the longest row.
        bins: Number of bins over the length of a row.
        batch: Rows at a time.
        limit: How many rows are taken; all unless given.
    """
    require_sizes(bins=bins, batch=batch)
    device = next(model.parameters()).device
    width = -(-length // bins)
    nats, count = torch.zeros(2, bins, dtype=torch.float64).unbind()
    for given in batches_on(device, examples, batch, limit):
        losses, where = token_losses(model(given), given).double().cpu(), given["positions"].flatten().cpu() // width
        nats.index_add_(0, where, losses)
        count.index_add_(0, where, torch.ones_like(losses))
    there = [number for number in range(bins) if count[number] > 0]
    return [LossBin(number * width, float(nats[number] / count[number]), int(count[number])) for number in there]
