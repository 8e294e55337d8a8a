"""The first paper's ablation: heads' priors switched on one by one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lagwise.lags import LagTable
from lagwise.lens.calls import Captured, watching
from lagwise.lens.priors import Prior
from lagwise.terms import Terms


@dataclass(frozen=True)
class PriorHead:
    """The prior of one head.

    Args:
        layers: The layers that have it: all those with the same bias.
        head: The number of the head.
        peak: Its maximum prior probability.
        peak_lag: The lag at which it has that.
    """

    layers: tuple[str, ...]
    head: int
    peak: float
    peak_lag: int


@dataclass(frozen=True)
class Ablation:
    """A metric with the priors of more and more heads.

    Args:
        order: The heads in the order in which they were switched on.
        values: The metric with none of them, with the first, with the first two, and so on.
    """

    order: list[PriorHead]
    values: list[float]


def prior_heads(model: nn.Module, run: Callable[[], Any]) -> list[PriorHead]:
    """Returns the heads with a prior, from the lowest to the highest maximum prior probability.

    Layers that have the same bias, as those of T5, share their heads. The probability is taken over the lags of the longest
    sequence that a layer sees.

    Args:
        model: The model, in evaluation mode.
        run: Runs it.
    """
    priors: dict[str, Prior] = {}

    def look(call: Captured) -> Terms:
        if call.terms.bias is not None:
            found = call.prior()
            if call.layer not in priors or len(found.lags) > len(priors[call.layer].lags):
                priors[call.layer] = replace(found, bias=found.bias.expand(call.q.shape[1], -1))
        return call.terms

    with watching(model, look):
        run()
    if not priors:
        raise ValueError("model must have an encoding with a bias, but no layer has one: only a bias is a prior")
    groups: list[tuple[list[str], Prior]] = []
    for layer, found in priors.items():
        same = next((layers for layers, other in groups if torch.equal(other.bias, found.bias)), None)
        if same is None:
            groups.append(([layer], found))
        else:
            same.append(layer)
    heads = [
        PriorHead(tuple(layers), head, float(found.peak[head]), int(found.peak_lag[head]))
        for layers, found in groups
        for head in range(len(found.bias))
    ]
    return sorted(heads, key=lambda head: head.peak)


@contextmanager
def only_priors(model: nn.Module, heads: Iterable[PriorHead]) -> Iterator[None]:
    """Lets a model compute with the biases of some heads alone; those of all others are zero while the context lasts.

    Terms other than the bias stay as they are.
    """
    chosen = {(layer, head.head) for head in heads for layer in head.layers}

    def switch(call: Captured) -> Terms:
        bias = call.terms.bias
        if bias is None:
            return call.terms
        on = torch.tensor([(call.layer, head) in chosen for head in range(call.q.shape[1])], device=bias.values.device)
        return replace(call.terms, bias=_masked(bias, on))

    with watching(model, switch):
        yield


@torch.no_grad()
def ablate(model: nn.Module, evaluate: Callable[[], float], *, order: Sequence[PriorHead] | None = None) -> Ablation:
    """Switches the priors of heads on one by one and returns a metric after each.

    Works for all encodings with a bias, in any model that `capture` can look into. No gradients are made.

    Args:
        model: The model, in evaluation mode.
        evaluate: Runs the model and returns the metric; it is called once for each head, and twice more.
        order: The heads to switch on; as in the paper those of `prior_heads`, from the lowest to the highest, unless given.
    """
    heads = prior_heads(model, evaluate) if order is None else list(order)
    values = []
    for number in range(len(heads) + 1):
        with only_priors(model, heads[:number]):
            values.append(float(evaluate()))
    return Ablation(heads, values)


def _masked(bias: LagTable, on: Tensor) -> LagTable:
    """Returns a bias that is zero in the heads that are off."""
    slopes = bias.slopes and (bias.slopes[0] * on, bias.slopes[1] * on)
    return LagTable(bias.values * on[:, None], bias.first, slopes)
