"""Stochastic features of queries and keys, as an operator with its derivative."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lagwise.ops.register import Operator, refusing, torch_transforms
from lagwise.ops.spe import eager
from lagwise.ops.spe.recipes import Filters, Recipe, Sines
from lagwise.ops.support import HAS_TRITON

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor first, Tensor? second, Tensor? third, Tensor? fourth, Tensor? q_positions, Tensor? k_positions, "
    "Tensor seed, str kind, SymInt realizations, SymInt gate_number, SymInt start, SymInt[] grid, str impl"
)
"""Of the operator. After q and k come a recipe's parameters, for kernels what they are made of: one to four tensors. Without
positions both sides stand at consecutive ones from `start`."""

SECOND_DERIVATIVE = "stochastic features have no second derivative: use exact_terms of the encoding for gradients of gradients"


def recipe_of(arguments: Sequence[Any]) -> tuple[Any, Recipe, list[tuple[Tensor, Tensor | int]]]:
    """Returns who computes, how the codes are made, and q and k with their positions or the first of them."""
    q, k, *given, q_positions, k_positions, seed, kind, realizations, gate_number, start, grid, impl = arguments
    given = [x for x in given if x is not None]
    if kind == "filters":
        recipe = Filters(given, realizations, seed, grid=grid, gate_number=gate_number)
    else:
        recipe = Sines(given, realizations, seed, gated=kind == "gated sines", gate_number=gate_number)
    if impl != "triton":
        recipe.made = given
    sides = [(x, start if positions is None else positions) for x, positions in ((q, q_positions), (k, k_positions))]
    return module_of(impl), recipe, sides


def module_of(impl: str) -> ModuleType:
    """Returns who computes; the kernels are imported when they are first used, because Triton is."""
    if impl != "triton":
        return eager
    from lagwise.ops.spe import fused

    return fused


def compute(*arguments: Any) -> list[Tensor]:
    """Returns the features of q and k."""
    module, recipe, sides = recipe_of(arguments)
    return module.forward(recipe, sides)


def compute_backward(dq: Tensor, dk: Tensor, *arguments: Any) -> list[Tensor]:
    """Returns the gradients of q, of k, and of the parameters."""
    module, recipe, sides = recipe_of(arguments)
    return module.backward(recipe, sides, [dq, dk])


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of q, k and the parameters that there are."""
    douts = [torch.zeros_like(x) if dout is None else dout for x, dout in zip(results, gradients, strict=True)]
    found = iter(FEATURES_BACKWARD(*douts, *arguments))
    return [None if x is None else next(found) for x in arguments[:6]]


FEATURES_BACKWARD = Operator(
    "features_backward", f"Tensor dfeatures_q, Tensor dfeatures_k, {ARGUMENTS}", compute=compute_backward,
    outputs=lambda dq, dk, *arguments: [x.new_empty(x.shape) for x in arguments[:6] if x is not None],
    derivative=refusing(SECOND_DERIVATIVE),
)  # fmt: skip

FEATURES = Operator(
    "features", ARGUMENTS, compute=compute, derivative=derivative,
    outputs=lambda q, k, *others: [x.new_empty(*x.shape[:3], others[8]) for x in (q, k)],
)  # fmt: skip


def features(
    recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor | None, k_positions: Tensor | None, *, start: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the features of q and k, which both have the recipe's heads; positions are [time] or [batch, time].

    Without them tokens stand at consecutive positions from `start`. On a GPU kernels make the features, except in float64 and on
    grids of more than three axes.
    """
    transforms = torch_transforms()
    if transforms:
        raise ValueError(
            f"stochastic features cannot be made under {' and '.join(sorted(transforms))} of torch.func: "
            "use exact_terms of the encoding"
        )
    grid = list(recipe.grid) if isinstance(recipe, Filters) else []
    if impl == "auto":
        impl = "triton" if q.is_cuda and HAS_TRITON and len(grid) < 3 and q.dtype != torch.float64 else "torch"
    parameters = [*(recipe.learned if impl == "triton" else recipe.parameters), None, None, None][:4]
    features_q, features_k = FEATURES(
        q, k, *parameters, q_positions, k_positions, recipe.seed,
        recipe.kind, recipe.realizations, recipe.gate_number, start, grid, impl,
    )  # fmt: skip
    return features_q, features_k
