"""The fast implementations as registered operators, so that `torch.compile` traces around them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lagwise.impl.lowering import DIFFERENTIABLE, Lowered

# The fields of Lowered.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? raw_q, Tensor? raw_k, Tensor? bias, Tensor? slopes, Tensor? gain, Tensor? query, "
    "Tensor? key, Tensor? value, SymInt[] firsts, Tensor? key_mask, Tensor? cu_seqlens, Tensor? starts, SymInt query_start, "
    "bool causal, SymInt[]? window, float scale, float dropout, Tensor? seed"
)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off on the device of x, where it is on: a call has been cast already, and the rest keeps its own type."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def own_context(q: Tensor) -> Iterator[None]:
    """Switches autocast off and to the device of q, where that is needed: kernels run on the current device."""
    with ExitStack() as stack:
        stack.enter_context(without_autocast(q))
        if q.is_cuda and q.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(q.device))
        yield


def _register(name: str, module: str) -> None:
    """Registers `lagwise::name`, which returns [output, log-sum-exp, what the backward pass needs ...], and its backward.

    The module that computes them is imported when it is first used, because Triton is.
    """

    def implementation() -> Any:
        return import_module(module)

    torch.library.define(f"lagwise::{name}", f"({_ARGUMENTS}) -> Tensor[]")
    torch.library.define(f"lagwise::{name}_backward", f"(Tensor[] saved, Tensor dout, Tensor? dlse, {_ARGUMENTS}) -> Tensor[]")

    @torch.library.impl(f"lagwise::{name}", "CompositeExplicitAutograd")
    def forward(*arguments):
        call = Lowered(*arguments)
        with own_context(call.q):
            return implementation().forward(call)

    @torch.library.impl(f"lagwise::{name}_backward", "CompositeExplicitAutograd")
    def backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, *arguments):
        call = Lowered(*arguments)
        with own_context(call.q):
            return implementation().backward(call, saved, dout, dlse)

    @torch.library.register_fake(f"lagwise::{name}")
    def fake_forward(*arguments):
        return implementation().outputs(Lowered(*arguments))

    @torch.library.register_fake(f"lagwise::{name}_backward")
    def fake_backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, *arguments):
        return implementation().backward_outputs(Lowered(*arguments))

    operator, backward_operator = (getattr(torch.ops.lagwise, op).default for op in (name, f"{name}_backward"))

    class Differentiable(torch.autograd.Function):
        """The operator with its derivative. What `torch.library.register_autograd` makes takes 0.3 ms more per step."""

        @staticmethod
        def forward(ctx, *arguments):
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*arguments)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[2:])
            ctx.tensors = [position for position, x in enumerate(arguments) if isinstance(x, Tensor)]
            ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
            ctx.save_for_backward(*[arguments[position] for position in ctx.tensors], *output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *gradients):
            # Read once: under activation checkpointing each tensor is handed out once.
            tensors, count = ctx.saved_tensors, len(ctx.tensors)
            arguments, saved = list(ctx.others), list(tensors[count:])
            for position, x in zip(ctx.tensors, tensors[:count], strict=True):
                arguments[position] = x
            dout, dlse = gradients[0], gradients[1]
            if dout is None:
                dout = torch.zeros_like(saved[0])
            found = iter(backward_operator(saved, dout, dlse, *arguments))
            present = [x is not None for x in arguments[: len(DIFFERENTIABLE)]]
            result: list[Tensor | None] = [next(found) if there else None for there in present]
            return (*result, *[None] * (len(arguments) - len(result)))

    @torch.library.impl(f"lagwise::{name}", "Autograd")
    def autograd(*arguments):
        return list(Differentiable.apply(*arguments))

    def second_derivative(ctx, gradients):
        raise RuntimeError(f"impl={name!r} has no second derivative: use impl='dense' for gradients of gradients")

    torch.library.register_autograd(f"lagwise::{name}_backward", second_derivative)


_register("blockwise", "lagwise.impl.blockwise")
_register("split", "lagwise.impl.split")
_register("triton", "lagwise.impl.triton.launch")


def run(name: str, call: Lowered) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of a call, computed by the named implementation."""
    out, lse, *_ = getattr(torch.ops.lagwise, name)(*call)
    return out, lse
