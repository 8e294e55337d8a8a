"""Checks of arguments. Each refuses in words that name the argument, what was given and what is expected.

They run on every call: none reads a number from a GPU, and `torch.compile` traces all of them, symbolic sizes included.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)

# Kernels count positions, lags and sizes in 32 bits.
LARGEST = 2**31 - 1

# A lag is the difference of two positions.
LARGEST_LAG = 2**32

# Longer values are cut in messages.
SHOWN = 120


def refuse(name: str, expected: str, value: Any) -> NoReturn:
    """Raises because an argument is not what is expected."""
    raise ValueError(f"{name} must be {expected}, but is {shown(value)}")


def shown(value: Any) -> str:
    """Returns a value in a few words; of a tensor its dtype and its shape.

    >>> shown("relu"), shown(torch.zeros(2, 3))
    ("'relu'", 'a tensor of torch.float32 and shape (2, 3)')
    """
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    words = repr(value)
    return words if len(words) <= SHOWN else f"{words[:SHOWN]}..."


def counted(size: int) -> str:
    """Returns a size as a word; while compiling it names no number, since the compiled program would then be for that one."""
    return "so many" if torch.compiler.is_compiling() else str(size)


def nearest(word: Any, known: Iterable[str]) -> str:
    """Returns a question that offers the known word nearest to an unknown one, or nothing."""
    found = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f": did you mean {found[0]!r}?" if found else "."


ELSEWHERE = {
    "is_causal": "causal=",
    "attn_mask": "key_mask= or lengths= for padding, window= for a band, and an encoding for a bias",
    "dropout_p": "dropout=",
    "enable_gqa": "not needed, since fewer heads of k and v than of q are groups",
    "key_padding_mask": "key_mask=, which is True where a key may be attended to",
}
"""Options of torch's attention, and what they are here."""


def refuse_keywords(unknown: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Raises if there are keywords that a function, and those that it hands options on to, do not have."""
    for word in unknown:
        here = f": here it is {ELSEWHERE[word]}" if word in ELSEWHERE else nearest(word, keywords_of(*functions))
        raise ValueError(f"{functions[0].__qualname__} has no option {word!r}{here}")


def keywords_of(*functions: Callable[..., Any]) -> set[str]:
    """Returns the names of all parameters of some functions that can be given by name."""
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    return {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD} - {"self"}


def is_whole(value: Any) -> bool:
    """Says whether a value is a whole number; True and False are none."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Says whether a value is a finite number; True and False are none."""
    if isinstance(value, int | torch.SymInt):
        # torch takes no larger integers.
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, float | torch.SymFloat) and -math.inf < value < math.inf


def is_pair(values: Any, fits: Callable[[Any], bool]) -> bool:
    """Says whether there are two values, both of which fit."""
    return isinstance(values, tuple | list) and len(values) == 2 and fits(values[0]) and fits(values[1])


def require_whole(name: str, value: Any, *, least: int, most: int = LARGEST) -> None:
    """Raises for anything but a whole number in a range."""
    if not is_whole(value) or value < least:
        refuse(name, f"a whole number of at least {least}", value)
    if value > most:
        refuse(name, f"a whole number of at most {most}", value)


def require_sizes(**sizes: Any) -> None:
    """Raises for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        require_whole(name, size, least=1)


def require_lags(first: Any, last: Any) -> None:
    """Raises for anything but a range of lags, the first one first."""
    for name, lag in (("first", first), ("last", last)):
        if not is_whole(lag) or not -LARGEST_LAG <= lag <= LARGEST_LAG:
            refuse(name, f"a lag, a whole number from {-LARGEST_LAG} to {LARGEST_LAG}", lag)
    if first > last:
        raise ValueError(
            f"first must be at most last, since lags run from the past to the future, but is {first} with last={last}"
        )


def require_even(name: str, size: int) -> int:
    """Returns a size that must be even, because sines and cosines come in pairs."""
    require_whole(name, size, least=1)
    if size % 2:
        raise ValueError(f"{name} must be even, since sines and cosines come in pairs, but is {size}")
    return size


def require_lag(max_lag: int) -> int:
    """Returns the lag at which a table ends, which must not be negative."""
    require_whole("max_lag", max_lag, least=0)
    return max_lag


def require_switches(**switches: Any) -> None:
    """Raises for a switch that is neither True nor False."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            refuse(name, "True or False (true or false on the command line)", switch)


def require_numbers(**numbers: Any) -> None:
    """Raises for anything but a finite number."""
    for name, number in numbers.items():
        if not is_number(number):
            refuse(name, "a finite number", number)


def require_positive(**numbers: Any) -> None:
    """Raises for anything but a finite number above 0."""
    for name, number in numbers.items():
        if not is_number(number) or number <= 0:
            refuse(name, "a positive number", number)


def require_probability(name: str, value: Any) -> float:
    """Returns a probability of dropping, which must leave something."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        refuse(name, "at least 0 and less than 1", value)
    return value


def require_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises for anything but one of some words, and offers the nearest."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        words = f"{name} must be one of {', '.join(known)}, but is {shown(value)}"
        raise ValueError(words + (nearest(value, known) if isinstance(value, str) else ""))


def require_seed(seed: Any) -> None:
    """Raises for anything but None or a tensor with one integer."""
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        refuse("seed", "a tensor with one integer, torch.tensor(7, device=q.device)", seed)
    require_tensor("seed", seed, (), *INTEGERS)


def require_seed_number(seed: Any) -> None:
    """Raises for anything but a whole number of 64 bits, from which random numbers can start."""
    require_whole("seed", seed, least=-(2**63), most=2**63 - 1)


def require_tensor(name: str, x: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises for anything but a tensor of a shape and of one of some dtypes."""
    if not isinstance(x, Tensor):
        refuse(name, f"a tensor of shape {shape}", x)
    if tuple(x.shape) != shape or x.dtype not in dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {words} of shape {shape}, but is {x.dtype} of shape {tuple(x.shape)}")


def require_integers(name: str, x: Any, shape: str) -> None:
    """Raises for anything but a tensor of integers; `shape` says in words which shape it should have."""
    if not isinstance(x, Tensor):
        refuse(name, f"a tensor {shape}", x)
    if x.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int64 or int32, but are {x.dtype}")


def require_floats(name: str, x: Any, shape: str) -> None:
    """Raises for anything but a tensor of floating-point numbers; `shape` says in words which shape it should have."""
    if not isinstance(x, Tensor):
        refuse(name, f"a tensor {shape}", x)
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating-point numbers, but are {x.dtype}")


def require_beside(name: str, x: Tensor, other: str, device: torch.device) -> None:
    """Raises for a tensor that is not on the device of another one."""
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where {other} is, but is on {x.device}")


def require_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Raises for numbers outside of a range, see `require`."""
    require(((x >= low) & (x <= high)).all(), f"{name} must be between {low} and {counted(high)}", x)


def require(condition: Tensor, message: str, x: Tensor | None = None) -> None:
    """Raises unless a condition on values holds, which x shows: on the CPU at once, on a GPU later, by a device assertion.

    Values that a transform of `torch.func` hides, or that the meta device has not, cannot be looked at.
    """
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(condition, message)
    elif condition.is_meta or _functorch.is_functorch_wrapped_tensor(condition):
        return
    elif condition.device.type != "cpu":
        torch.ops.aten._assert_async.msg(condition, message)
    elif not condition:
        raise ValueError(message if x is None else f"{message}, but is {x.tolist()}")


def require_past_only(encoding: object, last: int) -> None:
    """Raises for a table of the past alone that is asked for future lags."""
    if last > 0:
        raise ValueError(
            f"{type(encoding).__name__}(causal=True) has no values for the future, but lags up to {last} were asked for: "
            "call attention with causal=True, or make the encoding with causal=False"
        )
