"""Passes of kernels that are recorded once and replayed, under Triton's interpreter, and their arguments as they are packed."""

import ctypes
import gc
import os
import weakref
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from oracle import make_terms
from torch import Tensor

import lagwise

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/test_gpu.py repeats its calls"),
    # Memory that a replay makes holds whatever was there before.
    pytest.mark.usefixtures("poisoned"),
]

ALL = ("bias", "gain", "query", "key", "value")
CASES = {
    "scalars": (("bias", "gain"), {}, {}),
    "slopes": (("slopes",), {}, {"causal": True}),
    "all": (ALL, {}, {}),
    "channels": (("channel gain", "key"), {}, {}),
    "grouped heads": (("bias", "query"), {"kv_heads": 1}, {}),
    "lengths": (("bias", "value"), {}, {"lengths": torch.tensor([18, 7])}),
    "window": (("bias", "value"), {}, {"window": (3, 2)}),
    "packed": (("bias", "key"), {"batch": 1}, {"cu_seqlens": torch.tensor([0, 5, 18])}),
    "starts": (("bias",), {}, {"query_start": torch.tensor([0, 3])}),
    "dropout": (("bias",), {}, {"dropout": 0.3, "seed": torch.tensor(5)}),
}


def made(seed, batch=2, heads=2, kv_heads=2, time=18, dim=8):
    """Returns q, k, v and a gradient of the output."""
    torch.manual_seed(seed)
    shapes = [(batch, count, time, dim) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def step(q, k, v, dout, terms, learned, **options) -> list[Tensor]:
    """Returns the output and all gradients of a call."""
    out = lagwise.attention(q, k, v, terms, impl="triton", **options)
    inputs = [x for x in (q, k, v) if x.requires_grad]
    return [out, *torch.autograd.grad(out, [*inputs, *learned], dout)]


def tables(*names):
    """Returns random terms and their tensors, which are learned."""
    terms = make_terms(*names, heads=2, head_dim=8, value_dim=8, max_lag=4)
    learned = [x for table in terms.tables().values() for x in (table.values, *(table.slopes or ()))]
    return terms, [x.requires_grad_() for x in learned]


def forget():
    from lagwise.ops.kernels.plan import kept_plan

    kept_plan.cache_clear()


def kept_tapes():
    from lagwise.ops.kernels.plan import Plan

    return [tape for plan in gc.get_objects() if type(plan) is Plan for tape in plan.tapes.kept.values()]


@pytest.mark.parametrize("case", CASES)
def test_a_replay_is_what_a_first_pass_would_be(case):
    names, sizes, options = CASES[case]
    terms, learned = tables(*names)
    forget()
    step(*made(0, **sizes), terms, learned, **options)
    replayed = step(*made(1, **sizes), terms, learned, **options)
    assert all(tape is not None for tape in kept_tapes())
    forget()
    first = step(*made(1, **sizes), terms, learned, **options)
    assert all(torch.equal(x, y) for x, y in zip(replayed, first, strict=True))


def test_results_of_two_replays_share_no_memory():
    terms, learned = tables("bias")
    found = [x for seed in range(3) for x in step(*made(seed), terms, learned)]
    places = [x.untyped_storage().data_ptr() for x in found]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("same", ["qk", "kv", "qkv"])
def test_tensors_that_are_one_are_told_apart_from_those_that_are_not(same):
    terms, learned = tables("bias")

    def run(seed, aliased):
        q, k, v, dout = (x.detach() for x in made(seed))
        if aliased:
            q, k, v = {"qk": (q, q, v), "kv": (q, k, k), "qkv": (q, q, q)}[same]
        out = lagwise.attention(q, k, v, terms, impl="triton")
        return [out, *torch.autograd.grad(out, learned, dout)]

    forget()
    found = [run(0, True), run(1, False), run(2, True), run(3, False)]
    for seed, aliased in enumerate((True, False, True, False)):
        forget()
        assert all(torch.equal(x, y) for x, y in zip(found[seed], run(seed, aliased), strict=True)), (seed, aliased)


@pytest.mark.parametrize("layout", ["expanded", "by token", "shifted"])
def test_gradients_that_come_in_may_lie_anywhere(layout):
    terms, learned = tables("bias")
    q, k, v, dout = made(0)
    laid = {
        "expanded": torch.ones(()).expand(dout.shape),
        "by token": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "shifted": torch.randn(dout.numel() + 1)[1:].view(dout.shape),
    }[layout]
    forget()
    step(q, k, v, dout, terms, learned)
    found = step(q, k, v, laid, terms, learned)
    again = step(q, k, v, laid, terms, learned)
    forget()
    expected = step(q, k, v, laid, terms, learned)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(found, again, expected, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_second_backward_pass_does_not_go_through_the_call(case, monkeypatch):
    from lagwise.ops import triton

    names, shape, options = CASES[case]
    terms, learned = tables(*names)
    given = made(0, **shape)
    forget()
    first = step(*given, terms, learned, **options)
    monkeypatch.setattr(triton, "backward", None)
    again = step(*given, terms, learned, **options)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_no_tensor_of_a_call_is_kept():
    terms, learned = tables("bias", "query")
    forget()
    seen = []
    for seed in range(2):
        tensors = made(seed)
        found = step(*tensors, terms, learned)
        seen += [weakref.ref(x) for x in (*tensors, *found)]
        del tensors, found
    gc.collect()
    assert not [x for x in seen if x() is not None]


def test_tensors_that_were_packed_elsewhere_are_looked_at_again():
    """A hook may hand back tensors that lie in another way than those of the forward pass."""
    terms, learned = tables("bias")
    q, k, v, dout = made(0)
    by_token = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x):
        found = step(*by_token, dout, terms, learned)
    forget()
    expected = step(q, k, v, dout, terms, learned)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_tensor_from_elsewhere_is_never_replayed():
    from lagwise.ops.kernels.tape import Tapes

    elsewhere, tapes = torch.ones(3), Tapes()
    results = [tapes.run("sum", [x], lambda x=x: [torch.add(x, elsewhere)]) for x in (torch.zeros(3), torch.ones(3))]
    assert tapes.kept == {"sum": None}
    assert [x.tolist() for (x,) in results] == [[1.0] * 3, [2.0] * 3]


def check_replays(compute):
    """Compares what a pass computes by itself and from its tape."""
    from lagwise.ops.kernels.tape import Tapes

    tapes = Tapes()
    for x in (torch.arange(4.0) + shift for shift in range(3)):
        found = tapes.run("pass", [x], lambda x=x: compute(x))
        assert all(torch.equal(a, b) for a, b in zip(found, compute(x), strict=True))
    assert tapes.kept["pass"] is not None


def test_operations_of_torch_are_replayed_on_other_tensors():
    def compute(x):
        halves = x.view(2, 2)
        made = torch.empty(2)
        made.copy_(halves[1])
        return [made.mul(2), halves.sum(0)]

    check_replays(compute)


def test_parts_of_one_piece_of_memory_are_replayed_as_such():
    def compute(x):
        one, other = torch.empty(4).copy_(x), x.mul(2)
        return [*one.split(2), *other.split([1, 3])]

    check_replays(compute)


def test_a_pass_that_returns_what_it_was_given_is_not_recorded():
    from lagwise.ops.kernels.tape import Tapes

    tapes, x = Tapes(), torch.ones(2)
    assert tapes.run("same", [x], lambda: [x])[0] is x
    assert tapes.kept == {"same": None}


def test_tapes_of_a_kind_are_bounded():
    from lagwise.ops.kernels.tape import MOST_TAPES, Tapes

    tapes = Tapes()
    for key in range(3 * MOST_TAPES):
        tapes.run(key, [torch.ones(2)], lambda: [torch.empty(1).fill_(2.0)])
        assert len(tapes.kept) <= MOST_TAPES


def test_arguments_are_packed_as_a_kernel_finds_them(monkeypatch):
    """Pointers, numbers of 32 and 64 bits and float32, each aligned to its own size, as C does; constants are left out."""
    from lagwise.ops.kernels import launches

    class Layout(ctypes.Structure):
        _fields_ = [
            ("x", ctypes.c_uint64), ("rows", ctypes.c_int32), ("step", ctypes.c_int64), ("scale", ctypes.c_float),
            ("y", ctypes.c_uint64), ("scratch", ctypes.c_uint64), ("profile", ctypes.c_uint64),
        ]  # fmt: skip

    seen = {}

    def driver(function, *rest):
        extras = ctypes.cast(rest[-1], ctypes.POINTER(ctypes.c_void_p))
        size = ctypes.cast(extras[3], ctypes.POINTER(ctypes.c_size_t))[0]
        seen.update(function=function, grid=rest[:3], block=rest[3:6], shared=rest[6], stream=rest[7], size=size)
        seen["data"] = Layout.from_buffer_copy(ctypes.string_at(extras[1], ctypes.sizeof(Layout)))
        return seen.get("code", 0)

    monkeypatch.setattr(launches, "driver_launch", lambda: driver)
    monkeypatch.setattr(launches, "loaded", lambda compiled, device: 77)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    signature = {"x": ("*bf16", "i32"), "step": "i64", "one": "constexpr", "scale": "fp32", "y": "*fp32", "flags": "constexpr"}
    compiled = SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(num_warps=4, shared=99))
    values = ((launches.MISSING, 3), 2**40, 1, 0.5, launches.MISSING, "flags")
    packed = launches.Packed(launches.Form(compiled, 0), 12, values)
    packed([1000, 2000])
    data = seen["data"]
    assert (data.x, data.rows, data.step, data.scale, data.y, data.scratch) == (1000, 3, 2**40, 0.5, 2000, 0)
    assert (seen["function"], seen["grid"], seen["block"], seen["shared"], seen["stream"]) == (77, (12, 1, 1), (128, 1, 1), 99, 5)
    assert seen["size"] == ctypes.sizeof(Layout)
    seen["code"] = 1
    with pytest.raises(RuntimeError, match="refused to launch a kernel, with error 1"):
        packed([1000, 2000])
