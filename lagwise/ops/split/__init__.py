"""`impl="split"`: a near band, two far fields on the vendor's kernels, merged by their log-sum-exps."""

from types import ModuleType

from torch import Tensor

from lagwise.ops.lowering import Lowered
from lagwise.ops.split import eager
from lagwise.ops.support import HAS_TRITON


def is_fused(lowered: Lowered) -> bool:
    """Says whether the band runs on the Triton kernels: on a GPU, where Triton is installed."""
    return lowered.q.is_cuda and HAS_TRITON


def engine(lowered: Lowered) -> ModuleType:
    """Returns the module that computes a call."""
    if not is_fused(lowered):
        return eager
    from lagwise.ops.split import fused

    return fused


def forward(lowered: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then what `backward` needs."""
    return engine(lowered).forward(lowered)


def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    return engine(lowered).backward(lowered, saved, dout, dlse, learned)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return engine(lowered).outputs(lowered)


def backward_outputs(lowered: Lowered, learned: bool) -> list[Tensor]:
    """Returns empty tensors like those of `backward`."""
    return engine(lowered).backward_outputs(lowered, learned)
