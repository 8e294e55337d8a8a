"""Functions of tensors as operators with derivatives, registered in one way, so that `torch.compile` traces around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

Derivative = Callable[[list[Any], Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]]
"""Maps arguments, results and gradients of the results to gradients of the arguments, None where there is none."""


class Operator:
    """A function of tensors, numbers and words that returns tensors, as `lagwise::name`, with its derivative.

    What `torch.library.register_autograd` makes would take 0.3 ms more per step (beside an H200).

    Args:
        name: Its name in `torch.ops.lagwise`.
        arguments: Its arguments, in the words of a schema. Tensors that gradients flow to are no items of a list.
        compute: Returns the results, whatever the device.
        outputs: Returns empty tensors like the results, for tracing.
        derivative: Returns the gradients of the arguments.
        differentiable: How many of the results, the first ones, gradients come from; all unless given.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        *,
        compute: Callable[..., Sequence[Tensor]],
        outputs: Callable[..., Sequence[Tensor]],
        derivative: Derivative,
        differentiable: int | None = None,
    ):
        torch.library.define(f"lagwise::{name}", f"({arguments}) -> Tensor[]")
        torch.library.impl(f"lagwise::{name}", "CompositeExplicitAutograd", in_own_context(compute))
        torch.library.register_fake(f"lagwise::{name}", lambda *arguments: list(outputs(*arguments)))
        self.operator = getattr(torch.ops.lagwise, name).default
        self.function = differentiable_function(self.operator, derivative, differentiable)
        torch.library.impl(f"lagwise::{name}", "Autograd", self._with_derivative)

    def _with_derivative(self, *arguments: Any) -> list[Tensor]:
        if torch.is_grad_enabled():
            return list(self.function.apply(*arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return self.operator(*arguments)

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """Returns the results; a transform of `torch.func` around the call wants the function of autograd, not the operator."""
        return self.function.apply(*arguments) if transforms_are_active() else self.operator(*arguments)


def in_own_context(compute: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """Returns a function that computes without autocast on the device of its first tensor."""

    def run(*arguments: Any) -> list[Tensor]:
        with own_context(next(x for x in arguments if isinstance(x, Tensor))):
            return list(compute(*arguments))

    return run


def differentiable_function(operator: Any, derivative: Derivative, differentiable: int | None) -> type[torch.autograd.Function]:
    """Returns an operator with its derivative as a function of autograd."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(operator(*arguments))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            if differentiable is not None:
                ctx.mark_non_differentiable(*output[differentiable:])
            ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
            ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.save_for_backward(*[inputs[place] for place in ctx.places], *output)

        @staticmethod
        def backward(ctx, *gradients):
            # Read once: under activation checkpointing each tensor is handed out once.
            tensors, count = ctx.saved_tensors, len(ctx.places)
            arguments = list(ctx.others)
            for place, x in zip(ctx.places, tensors[:count], strict=True):
                arguments[place] = x
            found = derivative(arguments, tensors[count:], gradients)
            return (*found, *[None] * (len(arguments) - len(found)))

    return Differentiable


def refusing(words: str) -> Derivative:
    """Returns the derivative of an operator that has none: where somebody asks for it, it raises and says so."""

    def refuse(arguments: list[Any], results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        raise RuntimeError(words)

    return refuse


class Refused(torch.autograd.Function):
    """The identity, whose derivative raises and says why."""

    @staticmethod
    def forward(x, words):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.words = inputs[1]

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(ctx.words)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off on the device of x, where it is on: a call has been cast already, and the rest keeps its own type."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    """Says whether autocast is on for the device of x; the meta device has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def transforms_are_active() -> bool:
    """Says whether a transform of `torch.func` is around a call."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def torch_transforms() -> set[str]:
    """Returns those of torch's transforms around a call that operators cannot follow, as the support table names them.

    A compiler has transforms of its own.
    """
    if torch.compiler.is_compiling():
        return set()
    stack = _functorch.get_interpreter_stack() or []
    found = {"forward mode"} if torch.autograd.forward_ad._current_level >= 0 else set()
    return found | ({"vmap"} if any(level.key() == _functorch.TransformType.Vmap for level in stack) else set())


@contextmanager
def own_context(q: Tensor) -> Iterator[None]:
    """Switches autocast off and to the device of q, where that is needed: kernels run on the current device."""
    with ExitStack() as stack:
        stack.enter_context(without_autocast(q))
        if q.is_cuda and q.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(q.device))
        yield
