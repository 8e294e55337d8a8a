"""Tensors that depend on lags or positions alone, kept from call to call: a short call has no time to make them anew."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MOST_BYTES = 2**26
"""What is kept takes no more memory; the tensors that nobody has asked for longest go first."""

LONGEST = 2**13
"""Tensors of farther lags are not kept: there a call takes longer than they do."""

SHORTEST = 2**8

# What positions carry that are a range.
RANGE = "lagwise_range"

# How many stretches of kept tensors are known; then they are cut anew.
MOST_CUT = 64

_kept: OrderedDict[tuple[Any, ...], "Kept"] = OrderedDict()
_lock = Lock()


class Kept(NamedTuple):
    """Tensors that are kept, and stretches that were cut from them, by their first and last lag."""

    tensors: tuple[Tensor, ...]
    stretches: dict[tuple[int, int], tuple[Tensor, ...]]


def over_lags(make: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function of lags that cuts what it returns from tensors that were made before, for farther lags too.

    Lags are rounded up to powers of two, so that batches of other lengths find the same tensors. Who changes one in place
    changes nothing for others: it is then made anew.

    Args:
        make: A function of `first`, `last`, a device and further facts, which returns tensors with these lags as first axis.
    """

    @wraps(make)
    def cut(first: int, last: int, device: torch.device, *facts: Any) -> tuple[Tensor, ...]:
        if not may_keep(device) or max(-first, last) > LONGEST:
            return make(first, last, device, *facts)
        low, high = -reach(-first), reach(last)
        key = (make, low, high, device, stream_of(device), *facts)
        with _lock:
            found = _kept.get(key)
            if found is not None:
                _kept.move_to_end(key)
        if found is None or any([x._version for x in found.tensors]):
            # Not seen by whoever counts, saves or hides operations, and of use in training too.
            with _disable_current_modes(), torch.inference_mode(False):
                found = Kept(make(low, high, device, *facts), {})
            keep(key, found)
        stretch = found.stretches.get((first, last))
        if stretch is None:
            if len(found.stretches) >= MOST_CUT:
                found.stretches.clear()
            with _disable_current_modes(), torch.inference_mode(False):
                stretch = tuple(x.narrow(0, first - low, last - first + 1) for x in found.tensors)
            found.stretches[first, last] = stretch
        return stretch

    return cut


def reach(lag: int) -> int:
    """Returns how far tensors go that reach a lag: a power of two, or 0 if they need not go that way."""
    return max(SHORTEST, 1 << (lag - 1).bit_length()) if lag > 0 else 0


def keep(key: tuple[Any, ...], found: Kept) -> None:
    """Keeps tensors, and lets go of others if all of them are too many."""
    with _lock:
        _kept[key] = found
        while sum(x.nbytes for each in _kept.values() for x in each.tensors) > MOST_BYTES:
            _kept.popitem(last=False)


def may_keep(device: torch.device) -> bool:
    """Says whether a tensor that is made now is one that later calls can use, and the other way round.

    While compiling, under `torch.func` and with fake tensors it is not. A CUDA graph reads what it read while it was captured,
    at any later time, and so must own it.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


def stream_of(device: torch.device) -> int:
    """Returns the stream that tensors are made and read on: another one would have to wait for it."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def distances(first: int, last: int, parameter: Tensor) -> Float[Tensor, " lags"]:
    """Returns |n| for the lags from `first` to `last`, in float32 at least: half precision cannot tell far lags apart."""
    return made_distances(first, last, parameter.device, torch.promote_types(parameter.dtype, torch.float32))[0]


@over_lags
def made_distances(first: int, last: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor]:
    """Makes them."""
    return (torch.arange(first, last + 1, dtype=dtype, device=device).abs(),)


def positions(first: int, last: int, device: torch.device) -> Int[Tensor, " positions"]:
    """Returns the positions from `first` to `last`, of which `range_of` knows without looking at them."""
    (found,) = made_positions(first, last, device)
    if not torch.compiler.is_compiling():
        setattr(found, RANGE, (first, last))
    return found


def range_of(positions: Tensor) -> tuple[int, int] | None:
    """Returns the first and the last of positions that `positions` has made and nobody has changed, otherwise None."""
    if torch.compiler.is_compiling() or positions.is_inference() or positions._version:
        return None
    return getattr(positions, RANGE, None)


@over_lags
def made_positions(first: int, last: int, device: torch.device) -> tuple[Tensor]:
    """Makes them."""
    return (torch.arange(first, last + 1, device=device),)
