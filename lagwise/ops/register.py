"""The fast implementations as registered operators, so that `torch.compile` traces around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._pytree import tree_flatten, tree_unflatten

from lagwise.ops import support
from lagwise.ops.lowering import DIFFERENTIABLE, Lowered

# The fields of Lowered.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? raw_q, Tensor? raw_k, Tensor? bias, Tensor? slopes, Tensor? gain, Tensor? query, "
    "Tensor? key, Tensor? value, SymInt[] firsts, Tensor? key_mask, Tensor? cu_seqlens, Tensor? starts, SymInt query_start, "
    "bool causal, SymInt[]? window, float scale, float dropout, Tensor? seed"
)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off on the device of x, where it is on: a call has been cast already, and the rest keeps its own type."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    """Says whether autocast is on for the device of x; the meta device has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def transforms_are_active() -> bool:
    """Says whether a transform of `torch.func` is around a call: it wants functions of autograd, not operators."""
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
        def forward(*arguments):
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(operator(*arguments))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[2:])
            ctx.tensors = [position for position, x in enumerate(inputs) if isinstance(x, Tensor)]
            ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.save_for_backward(*[inputs[position] for position in ctx.tensors], *output)

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
            found = iter(once(support.no_second_derivative(name), backward_operator, saved, dout, dlse, *arguments))
            present = [x is not None for x in arguments[: len(DIFFERENTIABLE)]]
            result: list[Tensor | None] = [next(found) if there else None for there in present]
            return (*result, *[None] * (len(arguments) - len(result)))

    @torch.library.impl(f"lagwise::{name}", "Autograd")
    def autograd(*arguments):
        return list(Differentiable.apply(*arguments))

    FUNCTIONS[name] = Differentiable


class Once(torch.autograd.Function):
    """Calls a function whose derivative is refused. The tensors in its arguments come apart, so that autograd sees them."""

    @staticmethod
    def forward(refusal, function, structure, *leaves):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(function(*tree_unflatten(leaves, structure)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.refusal = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(ctx.refusal)


def once(refusal: str, function: Callable[..., Sequence[Tensor]], *arguments: Any) -> Sequence[Tensor]:
    """Returns what a function of a backward pass returns, and lets its derivative be refused where somebody asks for it."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    leaves, structure = tree_flatten(arguments)
    return Once.apply(refusal, function, structure, *leaves)


FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}
"""The operators with their derivatives, as `torch.func` takes them."""

_register("blockwise", "lagwise.ops.blockwise")
_register("split", "lagwise.ops.split.eager")
_register("triton", "lagwise.ops.kernels.launch")


def run(name: str, call: Lowered) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of a call, computed by the named implementation."""
    if transforms_are_active():
        out, lse, *_ = FUNCTIONS[name].apply(*call)
    else:
        out, lse, *_ = getattr(torch.ops.lagwise, name)(*call)
    return out, lse
