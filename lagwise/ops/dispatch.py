"""Who computes a call of attention: the one that is named, or the fastest that can."""

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from lagwise.call import Call, hides_last_keys
from lagwise.errors import counted, require_choice
from lagwise.ops import support
from lagwise.ops.merge import near_band
from lagwise.ops.register import is_exporting, torch_transforms
from lagwise.terms import Terms

# Measured crossover points. With few pairs and tables of scalars the matrix of pairs is the fastest; the far field pays once
# the keys outnumber the tables' lags by a factor, which a GPU's launches raise: less for vectors where there is much to compute.
# Ragged batches on a GPU have a slower kernel in the far field than others. Where a kind has no factor, it never pays.
DENSE_PAIRS = 128 * 128
SPLIT_PAYS_FROM = {"cpu": 1, "cuda": 40, "cuda, vectors": 15, "cuda, ragged, vectors": 15}
MANY_PAIRS = 2**31

# The most lags of a table of vectors whose scores `split` writes out on a GPU.
WIDEST_VECTORS = 1024

VECTORS = {"query", "key", "value", "channel gain"}
RAGGED = {"lengths", "key_mask", "cu_seqlens"}


class Choice(NamedTuple):
    """An implementation and the reason for it."""

    impl: str
    why: str


class Shape(NamedTuple):
    """The sizes of a call that a choice depends on."""

    pairs: int  # of a batch row and a query head
    queries: int
    keys: int
    sequence: int  # keys of a sequence, the mean of packed ones


def choose(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call, impl: str) -> Choice:
    """Returns the implementation that is named, or with "auto" the fastest that can do the job."""
    if terms.features is not None:
        raise ValueError(
            "the encoding maps the features of linear attention, which softmax attention does not have: "
            "call lagwise.linear_attention with it"
        )
    terms.check_fit(q, v)
    asked = requests(q, k, v, terms, call)
    if impl != "auto":
        return named_choice(impl, asked)
    keys, sequences = k.shape[2], 1 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return fastest(asked, Shape(q.shape[0] * q.shape[1], q.shape[2], keys, keys // sequences), near_band(terms))


def named_choice(impl: str, asked: set[str]) -> Choice:
    """Returns an implementation that was asked for; raises where it cannot do the job."""
    require_choice("impl", impl, ("auto", *support.IMPLEMENTATIONS))
    reason = support.refusal(impl, asked)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot do this: {reason}. impl='auto' takes one that can")
    return Choice(impl, "it was named")


def fastest(asked: set[str], shape: Shape, band: tuple[int, int] | None) -> Choice:
    """Returns the fastest implementation by what is asked for, in the words of `requests`, and by the sizes alone.

    Args:
        asked: What the call asks for, with its device and its dtype.
        shape: Its sizes.
        band: The first and the last lag between which a table depends on the lag, or None where none does.
    """
    reason = support.refusal("blockwise", asked)
    if reason is not None:
        return Choice("dense", f"the others cannot do this: {reason}")
    on_gpu, vectors = "cuda" in asked, bool(asked & VECTORS)
    # An exported program has one choice for all lengths: those at hand say nothing about others.
    any_length = is_exporting()
    # Half-precision inputs are left to those who sum in float32.
    if not any_length and shape.queries * shape.keys <= DENSE_PAIRS and not vectors and asked & {"float32", "float64"}:
        few = f"{counted(shape.queries)} queries and {counted(shape.keys)} keys are few pairs"
        return Choice("dense", f"{few}, and the tables are scalars")
    # On a CPU the kernels would be interpreted.
    otherwise = "triton" if on_gpu and support.refusal("triton", asked) is None else "blockwise"
    reason = support.refusal("split", asked)
    if reason is not None:
        return Choice(otherwise, f"split cannot do this: {reason}")
    if "window" in asked:
        return Choice(otherwise, "a window leaves no far field")
    many = vectors and shape.pairs * shape.queries * shape.sequence >= MANY_PAIRS
    ragged = otherwise == "triton" and bool(asked & RAGGED)
    kind = "cpu" if not on_gpu else "cuda" + (", ragged" if ragged else "") + (", vectors" if many else "")
    if kind not in SPLIT_PAYS_FROM:
        return Choice(otherwise, "where lengths differ, the far field of these tables does not pay on a GPU")
    if band is None:
        return Choice("split", "no table depends on the lag: all of it is plain attention")
    needed = SPLIT_PAYS_FROM[kind] * (band[1] - band[0] + 1)
    if any_length:
        return choice_for_export(needed, otherwise)
    keys = f"{counted(shape.sequence)} keys{' per packed sequence' if 'cu_seqlens' in asked else ''}"
    pays = f"{counted(needed)}, from which on the far field of these tables pays"
    if shape.sequence < needed:
        return Choice(otherwise, f"{keys} are fewer than {pays}")
    return Choice("split", f"{keys} are at least {pays}")


def choice_for_export(needed: int, otherwise: str) -> Choice:
    """Returns the implementation of a program that is exported for any length, by the keys from which on the far field pays."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if has_static_value(needed):
        return Choice("split", "the program is exported for any length, and the far field pays for long ones")
    return Choice(otherwise, "the tables grow with the sequence and leave no far field")


def requests(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call) -> set[str]:
    """Returns what a call asks for, in the words of the support table, with its device and its dtype."""
    band = near_band(terms)
    asked = {
        "slopes": terms.bias is not None and terms.bias.slopes is not None,
        "channel gain": terms.gain is not None and terms.gain.values.shape[2] > 1,
        "query": terms.query is not None,
        "key": terms.key is not None,
        "value": terms.value is not None,
        "transform": terms.transform is not None,
        "causal": call.causal,
        "window": call.window is not None,
        "lengths": call.lengths is not None,
        "key_mask": call.key_mask is not None,
        "key_mask with holes": call.key_mask is not None and not pads_on_the_right(call.key_mask),
        "cu_seqlens": call.cu_seqlens is not None,
        "query_start": not call.per_row and call.query_start != 0,
        "query_start per row": call.per_row,
        "unequal lengths": q.shape[2] != k.shape[2],
        "grouped heads": q.shape[1] != k.shape[1],
        "value width": q.shape[3] != v.shape[3],
        "dropout": call.dropout > 0.0,
        "wide head": max(q.shape[3], v.shape[3]) > 256,
        "wide vectors": q.is_cuda and any(table.values.shape[1] > WIDEST_VECTORS for table in terms.vector_tables()),
        "off centre": band is not None and (band[0] > 1 or band[1] < -1),
        "no kernels": not kernels_run_on(q.device),
    }
    kinds = {"bias": "bias" if not asked["slopes"] else "slopes", "gain": "gain"}
    tables = {kinds.get(name, name) for name in terms.tables()}
    words = {q.device.type, str(q.dtype).removeprefix("torch.")}
    return {name for name, there in asked.items() if there} | tables | words | torch_transforms()


def pads_on_the_right(key_mask: Tensor) -> bool:
    """Says whether a mask is known to hide the last keys of each row alone, as lengths do.

    One on a GPU is not looked at, which would wait for it, and one that is traced or transformed has no values yet.
    """
    unknown = key_mask.device.type != "cpu" or torch.compiler.is_compiling() or type(key_mask) is not Tensor
    if unknown or _functorch.is_functorch_wrapped_tensor(key_mask):
        return False
    return hides_last_keys(key_mask)


def kernels_run_on(device: torch.device) -> bool:
    """Says whether the Triton kernels can run: on a CUDA device, or anywhere under Triton's interpreter."""
    return support.HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
