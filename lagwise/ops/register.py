"""Functions of tensors as operators with derivatives, registered in one way, so that `torch.compile` traces around them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

Derivative = Callable[[list[Any], Sequence[Tensor], Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | None]]
"""Maps arguments, results, gradients of the results, and of which arguments gradients are needed, to these gradients, None where
there is none."""


class Operator:
    """A function of tensors, numbers and words that returns tensors, as `lagwise::name`, with its derivative.

    An eager call goes around torch's dispatcher, which takes longer than the launch of a few kernels. What
    `torch.library.register_autograd` makes would take longer still.

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
        self.compute, self.derivative, self.differentiable = compute, derivative, differentiable
        torch.library.define(f"lagwise::{name}", f"({arguments}) -> Tensor[]")
        torch.library.impl(f"lagwise::{name}", "CompositeExplicitAutograd", self._in_own_context)
        torch.library.register_fake(f"lagwise::{name}", lambda *arguments: list(outputs(*arguments)))
        self.operator = getattr(torch.ops.lagwise, name).default
        self.function = differentiable_function(self.operator, derivative, differentiable)
        torch.library.impl(f"lagwise::{name}", "Autograd", self._with_derivative)

    def _with_derivative(self, *arguments: Any) -> list[Tensor]:
        if torch.is_grad_enabled():
            return list(self.function.apply(*arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return self.operator(*arguments)

    def _in_own_context(self, *arguments: Any) -> list[Tensor]:
        """Computes without autocast on the device of the first tensor: kernels run on the current device."""
        first = next(x for x in arguments if isinstance(x, Tensor))
        here = not first.is_cuda or first.device.index == torch.cuda.current_device()
        if here and not autocasts(first):
            return list(self.compute(*arguments))
        with without_autocast(first), nullcontext() if here else torch.cuda.device(first.device):
            return list(self.compute(*arguments))

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """Returns the results; a transform of `torch.func` around the call wants the function of autograd, not the operator."""
        if transforms_are_active():
            return self.function.apply(*arguments)
        if not is_eager(arguments):
            return self.operator(*arguments)
        if torch.is_grad_enabled():
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            if any(x.requires_grad for x in tensors):
                return Direct.apply(self, arguments, *tensors)
        return self._in_own_context(*arguments)


PLAIN_TENSORS = {Tensor, torch.nn.Parameter}


def is_eager(arguments: Sequence[Any]) -> bool:
    """Says whether nobody is looking on: no compiler, no mode, no tracer, no subclass of tensors, and no tensor without data."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return all(type(x) in PLAIN_TENSORS and not x.is_meta for x in arguments if isinstance(x, Tensor))


class Direct(torch.autograd.Function):
    """An operator in an eager call, with its derivative."""

    @staticmethod
    def forward(ctx, operator: Operator, arguments: Sequence[Any], *tensors: Tensor):
        results = tuple(operator._in_own_context(*arguments))
        ctx.operator = operator
        ctx.set_materialize_grads(False)
        if operator.differentiable is not None:
            ctx.mark_non_differentiable(*results[operator.differentiable :])
        ctx.places = [place for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = [False] * len(ctx.others)
        for place, need in zip(ctx.places, ctx.needs_input_grad[2:], strict=True):
            needed[place] = need
        found = derivative_of(ctx, ctx.operator.derivative, gradients, needed)
        return None, None, *(found[place] if place < len(found) else None for place in ctx.places)


def derivative_of(
    ctx: Any, derivative: Derivative, gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients of the arguments that were saved."""
    # Read once: under activation checkpointing each tensor is handed out once.
    tensors, count = ctx.saved_tensors, len(ctx.places)
    arguments = list(ctx.others)
    for place, x in zip(ctx.places, tensors[:count], strict=True):
        arguments[place] = x
    return derivative(arguments, tensors[count:], gradients, needed)


def differentiable_function(operator: Any, derivative: Derivative, differentiable: int | None) -> type[torch.autograd.Function]:
    """Returns an operator with its derivative as a function of autograd, for transforms and compilers."""

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
            found = derivative_of(ctx, derivative, gradients, ctx.needs_input_grad)
            return (*found, *[None] * (len(ctx.others) - len(found)))

    return Differentiable


def refusing(words: str) -> Derivative:
    """Returns the derivative of an operator that has none: where somebody asks for it, it raises and says so."""

    def refuse(*_: Any) -> list[Tensor | None]:
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


def forward_mode_is_active() -> bool:
    """Says whether forward-mode derivatives are taken around a call."""
    return torch.autograd.forward_ad._current_level >= 0


def torch_transforms() -> set[str]:
    """Returns those of torch's transforms around a call that operators cannot follow, as the support table names them.

    A compiler has transforms of its own.
    """
    if torch.compiler.is_compiling():
        return set()
    stack = _functorch.get_interpreter_stack() or []
    found = {"forward mode"} if forward_mode_is_active() else set()
    return found | ({"vmap"} if any(level.key() == _functorch.TransformType.Vmap for level in stack) else set())
