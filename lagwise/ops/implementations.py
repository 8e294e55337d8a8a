"""The fast implementations as operators: each is a module with `forward`, `backward`, and the shapes of what they return."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lagwise.ops import blockwise, split
from lagwise.ops.lowering import ARGUMENTS, DIFFERENTIABLE, OPERANDS, Lowered, flat, unflattened
from lagwise.ops.register import Operator, directly, eager_tensors, in_own_context, refusing, transforms_are_active
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


IMPLEMENTATIONS: dict[str, Callable[[], Any]] = {"blockwise": lambda: blockwise, "split": lambda: split, "triton": kernels}
"""The implementations beside `dense`, which needs no operator."""

OPERATORS = {name: register(name, implementation) for name, implementation in IMPLEMENTATIONS.items()}


class Attended:
    """A call of an implementation, of which tensors are left out. In an eager call it takes the place of an operator."""

    def __init__(self, impl: str, lowered: Lowered):
        self.impl, self.implementation = impl, IMPLEMENTATIONS[impl]()
        # What repeats a backward pass without going through the call, where an implementation can.
        self.again = getattr(self.implementation, "backward_again", None)
        self.firsts, self.plans = lowered.firsts, lowered.plans
        self.places = [place for place, x in enumerate(lowered.tensors) if x is not None]
        self.masked = self.places[-1] >= len(DIFFERENTIABLE)
        self.call = lowered.call
        if self.masked:
            self.call = replace(self.call, key_mask=None, cu_seqlens=None, query_start=lowered.query_start, seed=None)
        self.given: Lowered | None = lowered
        self.addresses: list[int] = []

    def lowered(self, tensors: Sequence[Tensor]) -> Lowered:
        """Returns the call with its tensors."""
        fields: list[Tensor | None] = [None] * MOST_TENSORS
        for place, x in zip(self.places, tensors, strict=True):
            fields[place] = x
        call = self.call
        if self.masked:
            key_mask, cu_seqlens, starts, seed = fields[len(DIFFERENTIABLE) :]
            start = call.query_start if starts is None else starts
            call = replace(call, key_mask=key_mask, cu_seqlens=cu_seqlens, query_start=start, seed=seed)
        return Lowered._make((*fields[: len(DIFFERENTIABLE)], self.firsts, call, self.plans))

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        # Inside a function of autograd tensors are others, with the same memory: what is given will do, and is let go of.
        lowered, self.given = self.given, None
        self.addresses = [x.data_ptr() for x in tensors]
        return in_own_context(tensors[0], self.implementation.forward, lowered), 2

    def backward(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if torch.is_grad_enabled():
            # Somebody may ask for the derivative of this, which the operator refuses.
            wanted = [False] * MOST_TENSORS
            for place, need in zip(self.places, needed, strict=True):
                wanted[place] = need
            found = OPERATORS[self.impl].derivative(list(flat(self.lowered(tensors))), results, gradients, wanted)
            present = [x for place, x in enumerate(found) if place in self.places]
            return *present, *[None] * (len(tensors) - len(present))
        dout, dlse = gradients
        dout = torch.zeros_like(results[0]) if dout is None else dout
        learned = any([need for place, need in zip(self.places, needed, strict=True) if place in TABLE_PLACES])
        found = in_own_context(tensors[0], self.differentiated, tensors, results, dout, dlse, learned)
        return *found, *[None] * (len(tensors) - len(found))

    def differentiated(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool
    ) -> Sequence[Tensor]:
        """Returns the gradients of the tensors that have one."""
        if self.addresses != [x.data_ptr() for x in tensors]:
            # Whoever kept the tensors may have laid them out in another way.
            self.plans = {}
        elif self.again is not None and self.plans:
            found = self.again(self.plans, tensors, results, dout, dlse, learned)
            if found is not None:
                return found
        return self.implementation.backward(self.lowered(tensors), list(results), dout, dlse, learned)


# Beside the operands and the tables there are `key_mask`, `cu_seqlens`, `starts` and `seed`.
MOST_TENSORS = len(DIFFERENTIABLE) + 4
TABLE_PLACES = range(len(OPERANDS), len(DIFFERENTIABLE))


def compute(impl: str, lowered: Lowered) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of a call, computed by the named implementation."""
    tensors = None if transforms_are_active() else eager_tensors(lowered.tensors)
    if tensors is None:
        out, lse, *_ = OPERATORS[impl](*flat(lowered))
    else:
        out, lse = directly(Attended(impl, lowered), tensors)
    return out, lse
