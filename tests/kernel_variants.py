"""A program without Triton's interpreter and without a GPU: which kernels calls need, and what becomes of them on disk.

python tests/kernel_variants.py count           variants of each kernel for TYPICAL calls, as JSON
python tests/kernel_variants.py compile         compiles the kernels of a small call for an H100, twice: made and found
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import lagwise
from lagwise.call import Call
from lagwise.ops import triton
from lagwise.ops.kernels import ahead
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
    """Triton's driver of a GPU that is not there."""

    launchers = 0

    class utils:
        """What a driver knows of a device."""

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        Absent.launchers += 1


def compile_twice() -> list[dict[str, int]]:
    """Compiles the kernels of a call, forgets them, and compiles them again; returns what was made and found on disk."""
    driver.set_active(Absent())
    noted = launches("t5", 512, training=False)
    found = []
    for _ in range(2):
        with ahead.counted_kernels() as kernels:
            ahead.compile_all(noted)
        found.append({"made": len(kernels.made), "found": len(kernels.found), "launchers": Absent.launchers})
        for each in noted:
            each.kernel.device_caches.clear()
    return found


if __name__ == "__main__":
    print(json.dumps({"count": count, "compile": compile_twice}[sys.argv[1]]()))
