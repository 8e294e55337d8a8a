"""Functions of tensors as operators with derivatives, registered in one way, so that `torch.compile` traces around them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

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
        """Computes the results on the device of the first tensor."""
        first = next(x for x in arguments if isinstance(x, Tensor))
        return list(in_own_context(first, self.compute, *arguments))

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """Returns the results; a transform of `torch.func` around the call wants the function of autograd, not the operator."""
        if transforms_are_active():
            return self.function.apply(*arguments)
        tensors = eager_tensors(arguments)
        if tensors is None:
            return self.operator(*arguments)
        if need_derivative(tensors):
            return apply_directly(Arguments(self, arguments), *tensors)
        return in_own_context(tensors[0], self.compute, *arguments)[: self.differentiable]


def in_own_context(x: Tensor, compute: Callable[..., Sequence[Tensor]], *arguments: Any) -> Sequence[Tensor]:
    """Computes without autocast on the device of x: kernels run on the current device."""
    here = not x.is_cuda or x.device.index == torch.cuda.current_device()
    if here and not autocasts(x):
        return compute(*arguments)
    with without_autocast(x), nullcontext() if here else torch.cuda.device(x.device):
        return compute(*arguments)


# What an eager call may be given beside tensors, so that nothing else has to be looked at closely.
PLAIN_TYPES = {type(None), bool, int, float, str, list, tuple, torch.dtype, torch.device}


def eager_tensors(arguments: Sequence[Any]) -> list[Tensor] | None:
    """Returns the tensors among arguments where nobody is looking on, otherwise None.

    Who looks on: a compiler, a mode, a tracer, a subclass of tensors; tensors without data are nobody's to compute with.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    if torch._C._get_tracing_state() is not None:
        return None
    tensors = []
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            if x.is_meta:
                return None
            tensors.append(x)
        elif kind not in PLAIN_TYPES:
            return None
    return tensors


@runtime_checkable
class Work(Protocol):
    """Something to compute from tensors, and its derivative. It holds no tensors: those are saved by autograd."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        """Returns the results, and how many of them, the first ones, the caller gets; the others are for the backward pass."""
        ...

    def backward(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the tensors."""
        ...


def directly(work: Work, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Computes something in an eager call, with its derivative where one may be asked for."""
    if need_derivative(tensors):
        return apply_directly(work, *tensors)
    results, count = work.forward(tensors)
    return results[:count]


def need_derivative(tensors: Sequence[Tensor]) -> bool:
    """Says whether somebody may ask for the derivative of what is computed from tensors."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


class Direct(torch.autograd.Function):
    """What is computed in an eager call, with its derivative."""

    @staticmethod
    def forward(ctx, work: Work, *tensors: Tensor):
        results, count = work.forward(tensors)
        ctx.work, ctx.count = work, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        return tuple(results[:count])

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        # Read once: under activation checkpointing each tensor is handed out once.
        saved, count = ctx.saved_tensors, ctx.count
        return None, *ctx.work.backward(saved[:count], saved[count:], gradients, ctx.needs_input_grad[1:])


# Not `Direct.apply`, which looks for transforms in each argument: there are none around an eager call.
apply_directly: Callable[..., Sequence[Tensor]] = super(torch.autograd.Function, Direct).apply  # pyright: ignore[reportAttributeAccessIssue]


class Arguments:
    """An operator with its arguments, of which tensors are left out."""

    def __init__(self, operator: Operator, arguments: Sequence[Any]):
        self.operator = operator
        self.places = [place for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        self.others = [None if isinstance(x, Tensor) else x for x in arguments]

    def with_tensors(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Returns all arguments."""
        arguments = list(self.others)
        for place, x in zip(self.places, tensors, strict=True):
            arguments[place] = x
        return arguments

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        results = self.operator._in_own_context(*self.with_tensors(tensors))
        return results, len(results) if self.operator.differentiable is None else self.operator.differentiable

    def backward(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        wanted = [False] * len(self.others)
        for place, need in zip(self.places, needed, strict=True):
            wanted[place] = need
        found = self.operator.derivative(self.with_tensors(tensors), results, gradients, wanted)
        return [found[place] if place < len(found) else None for place in self.places]


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
            # Read once: under activation checkpointing each tensor is handed out once.
            tensors, count = ctx.saved_tensors, len(ctx.places)
            arguments = list(ctx.others)
            for place, x in zip(ctx.places, tensors[:count], strict=True):
                arguments[place] = x
            found = derivative(arguments, tensors[count:], gradients, ctx.needs_input_grad)
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


def is_exporting() -> bool:
    """Says whether a program is being exported. The compiler of torch 2.11 takes torch's own function of this name for true."""
    return torch.compiler._is_exporting_flag


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
