"""Launches of kernels: Triton's own, the first time, and its compiled kernel from then on.

Triton works out at every launch what a kernel has to be compiled for, which takes longer than the launch of a compiled kernel
(docs/decisions.md has a measurement). Here that is worked out from fewer facts and looked up.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagwise.ops.kernels.ahead import compile_present, note
from lagwise.ops.kernels.tiles import DIRECT

_compiled: dict[tuple[Any, ...], Any] = {}


def wide(x: float) -> bool:
    """Says whether a number needs 64 bits."""
    return not -(2**31) <= x < 2**31


def add_kinds(found: list[Any], value: Any) -> None:
    """Adds what Triton tells apart in an argument: types and alignment of tensors, in tuples too, and kinds of strides."""
    if isinstance(value, Tensor):
        found += (value.dtype, value.data_ptr() % 16)
    elif isinstance(value, tuple):
        for each in value:
            add_kinds(found, each)
    elif value is None:
        found.append(None)
    else:
        found.append((value == 1, value % 16 == 0, wide(value)))


def key_of(kernel: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what a kernel is compiled for with some arguments; of numbers that it is not specialised for, their width alone."""
    found: list[Any] = []
    for parameter, value in zip(kernel.params, values, strict=True):
        if parameter.is_constexpr:
            found.append(value)
        elif parameter.do_not_specialize:
            found.append(wide(value))
        else:
            add_kinds(found, value)
    return tuple(found)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int) -> None:
    """Launches a kernel with those of the arguments that it takes."""
    launch(kernel, grid, [arguments[name] for name in kernel.arg_names], warps, stages)


def launch(kernel: Any, grid: tuple[int, ...], values: Sequence[Any], warps: int, stages: int) -> Any:
    """Launches a kernel, and returns what launches it again on the same grid with arguments of the same kinds.

    The grid is flat, first axis fastest: only that may have more than 65,535 programs. A rehearsal launches nothing, and nothing
    is returned.
    """
    if note(kernel, values, warps, stages):
        return None
    size = (math.prod(grid), 1, 1)
    if not DIRECT.value:
        kernel[size](*values)
        return kernel[size]
    key = (kernel.fn, warps, stages, torch.cuda.current_device(), *key_of(kernel, values))
    compiled = _compiled.get(key)
    if compiled is None:
        compile_present()
        compiled = _compiled[key] = kernel[size](*values, num_warps=warps, num_stages=stages)
    else:
        compiled[size](*values)
    return compiled[size]
