"""Launches of kernels: Triton's own, the first time, and the driver's from then on.

Triton works out at every launch what a kernel has to be compiled for, and then reads its arguments one by one; both take longer
than the launch itself (docs/decisions.md has measurements). Here the first is worked out from fewer facts and looked up. For the
second, the arguments are packed as the kernel finds them in memory: only the addresses of tensors differ from launch to launch.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import repeat
from struct import Struct, calcsize
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

from lagwise.ops.kernels.ahead import compiled_kernel, is_rehearsing, note
from lagwise.ops.kernels.tiles import DIRECT

_compiled: dict[tuple[Any, ...], Any] = {}

HOOKS = knobs.runtime
# How C writes the types of Triton's arguments.
FORMATS = {"i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
# The numbers by which the driver knows what a list of extras holds.
BUFFER_POINTER, BUFFER_SIZE = 1, 2
MOST_BYTES = 4096


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


def flattened(value: Any) -> Iterator[Any]:
    """Yields what is in nested tuples."""
    if isinstance(value, tuple):
        for each in value:
            yield from flattened(each)
    else:
        yield value


def replaced(value: Any, found: Iterator[Any]) -> Any:
    """Returns nested tuples with what is found next in the places of their tensors."""
    if isinstance(value, tuple):
        make = getattr(value, "_make", tuple)
        return make(replaced(each, found) for each in value)
    return next(found) if isinstance(value, Tensor | Missing) else value


class Missing:
    """Stands for a tensor."""


MISSING = Missing()


class Runner:
    """Launches one kernel on one grid, again and again, with arguments that differ in nothing but where tensors are."""

    def __init__(self, kernel: Any, compiled: Any, size: int, values: Sequence[Any]):
        self.kernel, self.compiled, self.grid = kernel, compiled, (size, 1, 1)
        self.values = replaced(tuple(values), repeat(MISSING))
        form = form_of(compiled, torch.cuda.current_device()) if DIRECT.value else None
        self.packed = None if form is None else Packed(form, size, self.values)

    def __call__(self, values: Sequence[Any]) -> None:
        """Launches it with tensors and numbers."""
        found = [x for x in flattened(tuple(values)) if isinstance(x, Tensor)]
        told = listener()
        if told is not None:
            told(self, found)
        self.launch([x.data_ptr() for x in found] if DIRECT.value else found)

    def launch(self, found: Sequence[Any]) -> None:
        """Launches it with the addresses of its tensors, or where kernels are interpreted with the tensors."""
        if self.packed is not None and not somebody_watches():
            self.packed(found)
        elif DIRECT.value:
            self.compiled[self.grid](*replaced(self.values, iter(found)))
        else:
            # The interpreter computes with torch, which nobody else should see.
            with _disable_current_modes():
                self.kernel[self.grid](*replaced(self.values, iter(found)))


def somebody_watches() -> bool:
    """Says whether a profiler has asked Triton to be told of launches."""
    return bool(HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls)


def launch_stream(device: torch.device) -> int | None:
    """Returns the stream of launches on a device; None where the driver is not to be called: on a CPU, or under a profiler."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" and not somebody_watches() else None


class Form:
    """How a compiled kernel finds its arguments in memory, and how it is launched on a device."""

    def __init__(self, compiled: Any, device: int):
        types = list(flattened(tuple(compiled.src.signature.values())))
        self.places = [place for place, kind in enumerate(types) if kind != "constexpr"]
        # Triton has two addresses of its own behind the arguments.
        formats = [*["Q" if types[place].startswith("*") else FORMATS[types[place]] for place in self.places], "Q", "Q"]
        self.layout = Struct("".join(formats))
        self.offsets = [calcsize("".join(formats[: place + 1])) - calcsize(kind) for place, kind in enumerate(formats)]
        self.device, self.launch = device, driver_launch()
        self.handle, self.numbers = (
            loaded(compiled, device),
            (1, 1, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared),
        )

    def fields(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arguments that lie in memory; tensors are still tensors."""
        flat = list(flattened(tuple(values)))
        return [*[flat[place] for place in self.places], 0, 0]

    def send(self, fields: Sequence[Any], size: int, stream: int) -> None:
        """Launches the kernel on a grid of some size, with all that lies in memory."""
        block = own_block()
        self.layout.pack_into(block.memory, 0, *fields)
        block.size.value = self.layout.size
        code = self.launch(self.handle, size, *self.numbers, stream, None, block.extras)
        if code:
            raise refused(code)


@cache
def form_of(compiled: Any, device: int) -> Form | None:
    """Returns the form of a kernel that takes its arguments and nothing else, on NVIDIA's driver; of others there is none."""
    about = compiled.metadata
    more = about.global_scratch_size, about.profile_scratch_size, about.launch_cooperative_grid, about.launch_pdl
    fits = torch.version.cuda is not None and about.num_ctas == 1 and not any(more)
    return Form(compiled, device) if fits else None


class Packed:
    """The arguments of a kernel as they lie in memory, with room for the addresses of its tensors."""

    def __init__(self, form: Form, size: int, values: tuple[Any, ...]):
        self.form, self.size = form, size
        self.fields = form.fields(values)
        self.places = [place for place, x in enumerate(self.fields) if x is MISSING]

    def __call__(self, addresses: Sequence[int]) -> None:
        fields = self.fields.copy()
        for place, address in zip(self.places, addresses, strict=True):
            fields[place] = address
        self.form.send(fields, self.size, torch._C._cuda_getCurrentRawStream(self.form.device))


class Sheet:
    """The arguments of some launches, as they lie in the memory of one thread: addresses that they share, and their numbers.

    The driver is told where each argument is, so that an address is written once for all kernels that take it.

    Args:
        launches: The arguments of each launch.
        places: Which of the addresses each of them takes.
        count: The number of addresses.
    """

    def __init__(self, launches: Sequence[Packed], places: Sequence[Sequence[int]], count: int):
        self.addresses, self.layout = (ctypes.c_uint64 * count)(), Struct(f"{count}Q")
        first = ctypes.addressof(self.addresses)
        self.memory, self.calls = [], []
        for packed, own in zip(launches, places, strict=True):
            form = packed.form
            numbers = ctypes.create_string_buffer(form.layout.size)
            form.layout.pack_into(numbers, 0, *[0 if x is MISSING else x for x in packed.fields])
            where = [ctypes.addressof(numbers) + offset for offset in form.offsets]
            for field, place in zip(packed.places, own, strict=True):
                where[field] = first + 8 * place
            arguments = (ctypes.c_void_p * len(where))(*where)
            self.memory += [numbers, arguments]
            self.calls.append(((form.handle, packed.size, *form.numbers), ctypes.addressof(arguments)))
        self.launch = driver_launch()

    def send(self, addresses: Sequence[int], stream: int) -> None:
        """Launches all kernels, one after the other."""
        self.layout.pack_into(self.addresses, 0, *addresses)
        launch = self.launch
        for call, arguments in self.calls:
            code = launch(*call, stream, arguments, None)
            if code:
                raise refused(code)


def refused(code: int) -> RuntimeError:
    """Returns what to raise where the driver does not launch a kernel."""
    return RuntimeError(f"CUDA refused to launch a kernel, with error {code} (cuLaunchKernel)")


@cache
def loaded(compiled: Any, device: int) -> int:
    """Returns the driver's handle of a kernel on a device. Triton's own way there compiles a program in C first."""
    driver: Any = triton.runtime.driver.active
    there = driver.utils.get_device_properties(device)["max_shared_mem"]
    if compiled.metadata.shared > there:
        raise triton.runtime.errors.OutOfResources(compiled.metadata.shared, there, "shared memory")
    return driver.utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)[1]


class Block:
    """Memory for the arguments of a launch, and what the driver is told of it."""

    def __init__(self):
        self.memory, self.size = ctypes.create_string_buffer(MOST_BYTES), ctypes.c_size_t(0)
        places = (BUFFER_POINTER, ctypes.addressof(self.memory), BUFFER_SIZE, ctypes.addressof(self.size), 0)
        self.list = (ctypes.c_void_p * 5)(*places)
        self.extras = ctypes.addressof(self.list)


_own = threading.local()


def own_block() -> Block:
    """Returns the block of the current thread: forward and backward passes run on threads of their own."""
    try:
        return _own.block
    except AttributeError:
        _own.block = Block()
        return _own.block


@cache
def driver_launch() -> Callable[..., int]:
    """Returns the driver's function that launches kernels."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    launch.restype = ctypes.c_int
    return launch


Listener = Callable[[Runner, list[Tensor]], None]
_listening = threading.local()


def listen(listener: Listener | None) -> None:
    """Lets a listener know of all launches of this thread, before they happen; None ends it."""
    _listening.listener = listener


def listener() -> Listener | None:
    """Returns who listens to this thread."""
    return getattr(_listening, "listener", None)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int) -> None:
    """Launches a kernel with those of the arguments that it takes."""
    values = [arguments[name] for name in kernel.arg_names]
    if DIRECT.value and listener() is None and not somebody_watches() and not is_rehearsing():
        device = torch.cuda.current_device()
        form = form_of(compiled_for(kernel, values, warps, stages), device)
        if form is not None:
            fields = [x.data_ptr() if isinstance(x, Tensor) else x for x in form.fields(values)]
            form.send(fields, math.prod(grid), torch._C._cuda_getCurrentRawStream(device))
            return
    launch(kernel, grid, values, warps, stages)


def compiled_for(kernel: Any, values: Sequence[Any], warps: int, stages: int) -> Any:
    """Returns a kernel compiled for arguments of these kinds."""
    key = (kernel.fn, warps, stages, torch.cuda.current_device(), *key_of(kernel, values))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = compiled_kernel(kernel, values, warps, stages)
    return compiled


def launch(kernel: Any, grid: tuple[int, ...], values: Sequence[Any], warps: int, stages: int) -> Runner | None:
    """Launches a kernel, and returns what launches it again on the same grid with arguments of the same kinds.

    The grid is flat, first axis fastest: only that may have more than 65,535 programs. A rehearsal launches nothing, and nothing
    is returned.
    """
    if note(kernel, values, warps, stages):
        return None
    compiled = compiled_for(kernel, values, warps, stages) if DIRECT.value else None
    runner = Runner(kernel, compiled, math.prod(grid), values)
    runner(values)
    return runner
