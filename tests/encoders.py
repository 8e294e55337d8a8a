"""Twelve-layer encoders that are compiled, on a CPU and on a GPU, and the comparison of their gradients with eager ones."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy

import torch
from oracle import make_encoding
from torch import Tensor, nn

import lagwise

LAYERS = 12


def twelve_layers(name: str, *, head_dim: int = 8, max_lag: int = 5) -> lagwise.nn.Encoder:
    """Makes an encoder whose encoding is far from neutral, the same one each time."""
    torch.manual_seed(0)
    encoding = make_encoding(name, heads=2, head_dim=head_dim, max_lag=max_lag)
    return lagwise.nn.Encoder(2 * head_dim, layers=LAYERS, heads=2, encoding=encoding)


def gradients(model: nn.Module, encode: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of one training step, in float64, those of all layers in one."""
    model.zero_grad()
    encode(x).double().square().mean().backward()
    found = defaultdict(list)
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient"
        found[".".join(part for part in name.split(".") if not part.isdigit())].append(weight.grad.double().flatten())
    model.zero_grad()
    return {name: torch.cat(parts) for name, parts in found.items()}


def assert_gradients_within_budget(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Requires gradients whose errors are at most twice those of eager ones, and a rounding unit, against float64."""
    double = deepcopy(model).double()
    exact, eager = gradients(double, double, x.double()), gradients(model, model, x)
    unit = torch.finfo(x.dtype).eps
    for name, actual in gradients(model, compiled, x).items():
        error, allowed = (actual - exact[name]).norm(), 2 * (eager[name] - exact[name]).norm() + unit * exact[name].norm()
        assert error <= allowed, f"the gradient of {name} is off by {error:.3g}, and {allowed:.3g} is allowed"
