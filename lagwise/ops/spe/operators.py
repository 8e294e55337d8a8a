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
    "Tensor q, Tensor k, Tensor first, Tensor? second, Tensor? third, Tensor q_positions, Tensor k_positions, Tensor seed, "
    "str kind, SymInt realizations, SymInt gate_number, SymInt[] grid, str impl"
)
"""Of the operator; the parameters of a recipe, one to three, come after q and k."""

SECOND_DERIVATIVE = "stochastic features have no second derivative: use exact_terms of the encoding for gradients of gradients"


def recipe_of(arguments: Sequence[Any]) -> tuple[Any, Recipe, list[Tensor]]:
    """Returns who computes, how the codes are made, and [q, k, q_positions, k_positions], of an operator's arguments."""
    q, k, *parameters, q_positions, k_positions, seed, kind, realizations, gate_number, grid, impl = arguments
    given = [x for x in parameters if x is not None]
    if kind == "filters":
        recipe = Filters(given, realizations, seed, grid=grid, gate_number=gate_number)
    else:
        recipe = Sines(given, realizations, seed, gated=kind == "gated sines", gate_number=gate_number)
    return module_of(impl), recipe, [q, k, q_positions, k_positions]


def module_of(impl: str) -> ModuleType:
    """Returns who computes; the kernels are imported when they are first used, because Triton is."""
    if impl != "triton":
        return eager
    from lagwise.ops.spe import fused

    return fused


def compute(*arguments: Any) -> list[Tensor]:
    """Returns the features of q and k."""
    module, recipe, tensors = recipe_of(arguments)
    return module.forward(recipe, *tensors)


def compute_backward(dq: Tensor, dk: Tensor, *arguments: Any) -> list[Tensor]:
    """Returns the gradients of q, of k, and of the parameters."""
    module, recipe, tensors = recipe_of(arguments)
    return module.backward(recipe, [dq, dk], *tensors)


def derivative(
    arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of q, k and the parameters that there are."""
    douts = [torch.zeros_like(x) if dout is None else dout for x, dout in zip(results, gradients, strict=True)]
    found = iter(FEATURES_BACKWARD(*douts, *arguments))
    return [None if x is None else next(found) for x in arguments[:5]]


FEATURES_BACKWARD = Operator(
    "features_backward", f"Tensor dfeatures_q, Tensor dfeatures_k, {ARGUMENTS}", compute=compute_backward,
    outputs=lambda dq, dk, *arguments: [x.new_empty(x.shape) for x in arguments[:5] if x is not None],
    derivative=refusing(SECOND_DERIVATIVE),
)  # fmt: skip

FEATURES = Operator(
    "features", ARGUMENTS, compute=compute, derivative=derivative,
    outputs=lambda q, k, *others: [x.new_empty(*x.shape[:3], others[7]) for x in (q, k)],
)  # fmt: skip


def features(
    recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns the features of q and k, which both have the recipe's heads; positions are [time] or [batch, time].

    On a GPU kernels make them, except in float64 and on grids of more than three axes.
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
    parameters = [*recipe.parameters, None, None][:3]
    features_q, features_k = FEATURES(
        q, k, *parameters, q_positions, k_positions, recipe.seed,
        recipe.kind, recipe.realizations, recipe.gate_number, grid, impl,
    )  # fmt: skip
    return features_q, features_k
