"""The fast implementations as operators: each is a module with `forward`, `backward`, and the shapes of what they return."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lagwise.ops import blockwise, split
from lagwise.ops.lowering import ARGUMENTS, DIFFERENTIABLE, OPERANDS, Lowered, flat, unflattened
from lagwise.ops.register import Operator, refusing
from lagwise.ops.support import no_second_derivative


def register(name: str, implementation: Callable[[], Any]) -> Operator:
    """Returns an implementation as `lagwise::name`, which returns [output, log-sum-exp, what the backward pass needs ...]."""

    backward = Operator(
        f"{name}_backward", f"Tensor dout, Tensor? dlse, Tensor[] saved, bool learned, {ARGUMENTS}",
        compute=lambda dout, dlse, saved, learned, *arguments: implementation().backward(
            unflattened(arguments), saved, dout, dlse, learned
        ),
        outputs=lambda dout, dlse, saved, learned, *arguments: implementation().backward_outputs(unflattened(arguments), learned),
        derivative=refusing(no_second_derivative(name)),
    )  # fmt: skip

    def derivative(
        arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        dout, dlse = gradients[0], gradients[1]
        if dout is None:
            dout = torch.zeros_like(results[0])
        tables = slice(len(OPERANDS), len(DIFFERENTIABLE))
        learned = any(need and x is not None for need, x in zip(needed[tables], arguments[tables], strict=True))
        found = iter(backward(dout, dlse, list(results), learned, *arguments))
        wanted = DIFFERENTIABLE if learned else OPERANDS
        return [None if x is None else next(found) for x in arguments[: len(wanted)]]

    return Operator(
        name, ARGUMENTS,
        compute=lambda *arguments: implementation().forward(unflattened(arguments)),
        outputs=lambda *arguments: implementation().outputs(unflattened(arguments)),
        derivative=derivative, differentiable=2,
    )  # fmt: skip


def kernels() -> ModuleType:
    """Returns the implementation by kernels, which is imported when it is first used, because Triton is."""
    from lagwise.ops import triton

    return triton


OPERATORS = {
    "blockwise": register("blockwise", lambda: blockwise),
    "split": register("split", lambda: split),
    "triton": register("triton", kernels),
}
"""The implementations beside `dense`, which needs no operator."""


def compute(impl: str, lowered: Lowered) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of a call, computed by the named implementation."""
    out, lse, *_ = OPERATORS[impl](*flat(lowered))
    return out, lse
