"""Launches of kernels: Triton's own, the first time, and its compiled kernel from then on.

Triton works out at every launch what a kernel has to be compiled for. Here that is worked out from fewer facts and looked up:
beside an H200 a launch took 77 to 90 microseconds before and takes 70, with twenty more arguments.
"""

import math
from typing import Any, NamedTuple

import torch

from lagwise.ops.kernels.tiles import DIRECT

_compiled: dict[tuple[Any, ...], Any] = {}
_signatures: dict[Any, "Signature"] = {}


class Signature(NamedTuple):
    """The names of a kernel's arguments, and where its constants, tensors, strides and other numbers are among them."""

    names: list[str]
    constants: list[int]
    tensors: list[int]
    strides: list[int]
    numbers: list[int]


def signature(kernel: Any) -> Signature:
    """Sorts the arguments of a kernel; tensors are spelt with a capital, and Triton looks at the values of strides alone."""
    found = _signatures.get(kernel.fn)
    if found is None:
        constants, tensors, strides, numbers = [], [], [], []
        for parameter in kernel.params:
            kind = constants if parameter.is_constexpr else numbers if parameter.do_not_specialize else strides
            (tensors if kind is strides and parameter.name[0].isupper() else kind).append(parameter.num)
        found = _signatures[kernel.fn] = Signature(kernel.arg_names, constants, tensors, strides, numbers)
    return found


def wide(x: float) -> bool:
    """Says whether a number needs 64 bits."""
    return not -(2**31) <= x < 2**31


def stride_kind(x: int) -> tuple[bool, bool, bool]:
    """Returns what Triton tells apart in strides."""
    return x == 1, x % 16 == 0, wide(x)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int) -> None:
    """Launches a kernel with those of the arguments that it takes.

    The grid is flat, first axis fastest: only that may have more than 65,535 programs.
    """
    size = (math.prod(grid), 1, 1)
    if not DIRECT.value:
        kernel[size](**{name: arguments[name] for name in kernel.arg_names})
        return
    names, constants, tensors, strides, numbers = signature(kernel)
    values = [arguments[name] for name in names]
    key = (
        kernel.fn, warps, stages, torch.cuda.current_device(), *[values[i] for i in constants],
        *[(values[i].dtype, values[i].data_ptr() % 16 == 0) for i in tensors],
        *[stride_kind(values[i]) for i in strides], *[wide(values[i]) for i in numbers],
    )  # fmt: skip
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[size](*values, num_warps=warps, num_stages=stages)
    else:
        compiled[size](*values)
