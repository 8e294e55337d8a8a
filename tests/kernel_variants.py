"""A program without Triton's interpreter and without a GPU: which kernels calls need, and what becomes of them.

python tests/kernel_variants.py count           variants of each kernel for typical calls, as JSON
python tests/kernel_variants.py compile         compiles the kernels of a small call for an H100, twice: made and found
python tests/kernel_variants.py call NAME       what passes of an encoding compile, load and launch, where the driver does nothing
python tests/kernel_variants.py imports NAME    which slow packages are there after the first pass of an encoding
python tests/kernel_variants.py fail KERNEL     what passes raise where one of their kernels cannot be compiled
"""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from struct import calcsize, unpack
from threading import current_thread, main_thread
from typing import Any, ClassVar

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

import lagwise
from lagwise.call import Call
from lagwise.ops import triton
from lagwise.ops.implementations import compute
from lagwise.ops.kernels import ahead, forward, gradients, tape
from lagwise.ops.kernels import launches as kernel_launches
from lagwise.ops.kernels.launches import key_of
from lagwise.ops.lowering import lower
from lagwise.ops.split import fused

BATCH, HEADS, HEAD_DIM = 8, 12, 64
SEED = torch.tensor(1)

LENGTHS = (128, 130, 384, 500, 512, 1000, 1024, 2048)


def call_of(words: str, time: int) -> Call:
    """Returns the options of a call that words tell."""
    mask = torch.ones(BATCH, time, dtype=torch.bool) if "padded" in words else None
    dropout = 0.1 if "dropout" in words else 0.0
    return Call(causal="causal" in words, key_mask=mask, dropout=dropout, seed=SEED if dropout else None)


OPTIONS = ("", "causal", "dropout", "causal dropout", "padded", "padded dropout")


def launches(name: str, time: int, words: str = "", *, training: bool = True) -> list[ahead.Launch]:
    """Returns the launches of a call, with those of its gradient in training; tensors lie as projections leave them."""
    made = torch.empty(BATCH, time, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta", requires_grad=training)
    encoding = lagwise.make(name, heads=HEADS, head_dim=HEAD_DIM, max_lag=128)
    call = replace(call_of(words, time), scale=0.125)
    terms = encoding.terms(*call.reachable_lags(time, time), scale=call.scale)
    q = made.transpose(1, 2)
    implementation = fused if "split" in words else triton
    given = [lower(q, q, q, terms, call)]
    return ahead.launches_of(partial(ahead.rehearse, implementation.forward, lambda: implementation.backward, given))


def count() -> dict[str, dict[str, int]]:
    """Returns how many variants of each kernel there are, for all lengths, and for all options."""
    found = {}
    for name in ("t5", "shaw", "huang3", "huang4"):
        lengths = [each for time in LENGTHS for each in launches(name, time)]
        options = [each for words in OPTIONS for each in launches(name, 512, words)]
        inference = launches(name, 512, training=False)
        found[f"{name}, lengths"] = variants([*lengths, *inference])
        found[f"{name}, options"] = variants(options)
    found["t5, split"] = variants([each for time in LENGTHS for each in launches("t5", time, "split")])
    return found


def variants(launches: list[ahead.Launch]) -> dict[str, int]:
    """Returns how many variants of each kernel some launches need."""
    seen = {(each.kernel.fn.__name__, each.warps, each.stages, key_of(each.kernel, each.values)) for each in launches}
    return dict(Counter(name for name, *_ in seen))


class Absent:
    """Triton's driver of a GPU that is not there: instead of loading kernels it writes down their names, and on which thread."""

    loaded: ClassVar[list[tuple[str, str]]] = []

    class utils:
        """What a driver knows of a device."""

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

        @staticmethod
        def load_binary(name, binary, shared, device):
            Absent.loaded.append((name, thread()))
            return None, len(Absent.loaded) - 1, 0, 0, 1024

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device):
        return 0


def thread() -> str:
    """Tells the first thread from others."""
    return "first" if current_thread() is main_thread() else "other"


def pretend() -> None:
    """Lets this program take its CPU for an H100."""
    driver.set_active(Absent())
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.version.cuda = "12.8"
    kernel_launches.driver_launch = lambda: lambda *arguments: 0
    tape.launch_stream = lambda device: 0


def compile_twice() -> list[dict[str, int]]:
    """Compiles the kernels of a call, forgets them, and compiles them again; returns what was made and found on disk."""
    pretend()
    noted = launches("t5", 512, training=False)
    found = []
    for _ in range(2):
        with ahead.counted_kernels() as kernels:
            ahead.compile_all(noted)
        found.append({"made": len(kernels.made), "found": len(kernels.found)})
        for each in noted:
            each.kernel.device_caches.clear()
    return found


def step(name: str, time: int, tell: Callable[[], None] = lambda: None) -> None:
    """Calls attention eagerly on tensors of this machine, and asks for gradients."""
    q, k, v = (torch.zeros(2, time, 2, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    encoding = lagwise.make(name, heads=2, head_dim=64, max_lag=16)
    call = Call(scale=0.125)
    terms = encoding.terms(*call.reachable_lags(time, time), scale=call.scale)
    out, _ = compute("triton", lower(q, k, v, terms, call))
    tell()
    out.backward(torch.zeros_like(out))
    tell()


def arguments_at(pointers: int, kinds: str) -> list[Any]:
    """Returns the arguments of a launch, of which the driver is told where each one is."""
    places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
    return [unpack(kind, ctypes.string_at(places[place], calcsize(kind)))[0] for place, kind in enumerate(kinds)]


def block_at(extras: int) -> bytes:
    """Returns the arguments of a launch that lie in one block."""
    told = ctypes.cast(extras, ctypes.POINTER(ctypes.c_void_p))
    return ctypes.string_at(told[1], ctypes.cast(told[3], ctypes.POINTER(ctypes.c_size_t))[0])


def call_again(name: str) -> list[dict[str, Any]]:
    """Takes steps and tells of each of their passes what was compiled and loaded, on which thread, and what was launched.

    Of a launch it tells the name, how the driver is told of its arguments, all numbers, and how the tensors are aligned.
    The second step is the first again. The third has a length that tiles do not divide: some of its kernels are there already.
    """
    pretend()
    compiled, sent, told, forms = [], [], [], {}
    knobs.compilation.listener = lambda src, **event: compiled.append((src.name, thread()))
    made = kernel_launches.Form.__init__

    def known(self, *arguments):
        made(self, *arguments)
        forms[self.handle] = self

    def listened(handle, size, *rest):
        form, (pointers, extras) = forms[handle], rest[-2:]
        kinds = form.layout.format
        values = arguments_at(pointers, kinds) if pointers else form.layout.unpack(block_at(extras))
        # Where the layout has an address, there is one; the last two are Triton's own.
        addresses = [x for x, kind in zip(values, kinds, strict=True) if kind == "Q"][:-2]
        assert all(addresses), "a kernel is launched with tensors that have no data"
        numbers = [size, *rest[:-3], *[x for x, kind in zip(values, kinds, strict=True) if kind != "Q"]]
        sent.append([Absent.loaded[handle][0], "pointers" if pointers else "block", numbers, [x % 16 for x in addresses]])
        return 0

    def tell():
        before = sum(len(each["loaded"]) for each in told)
        told.append({"compiled": [*compiled], "loaded": Absent.loaded[before:], "launched": [*sent]})
        compiled.clear()
        sent.clear()

    kernel_launches.Form.__init__ = known
    kernel_launches.driver_launch = lambda: listened
    for time in (128, 128, 130):
        step(name, time, tell)
    return told


def imports(name: str) -> list[str]:
    """Returns which packages are there after a forward pass; two of them take a second to import, and it has no use for them."""
    pretend()
    found = []
    step(name, 128, lambda: found.append(sorted({"torch", "torch._dynamo", "sympy"} & {*sys.modules})))
    return found[0]


def fail(name: str) -> list[str]:
    """Takes two steps where a kernel cannot be compiled, and returns what they say; no rehearsal is left behind."""
    pretend()

    def compile(*arguments, **options):
        raise CompileTimeAssertionFailure(None, None, f"no {name}")

    kernel = getattr(forward if name == "forward_kernel" else gradients, name)
    assert kernel.device_caches[0]
    kernel.compile = compile
    said = []
    for _ in range(2):
        try:
            step("t5", 128, lambda: said.append("forward passed"))
        except CompileTimeAssertionFailure as error:
            said.append(error.error_message)
    assert ahead._present.noted is None and ahead._present.rehearsal is None and active_mode.get() is None
    return said


if __name__ == "__main__":
    programs = {"count": count, "compile": compile_twice, "call": call_again, "imports": imports, "fail": fail}
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))
