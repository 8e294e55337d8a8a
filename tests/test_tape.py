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


def test_passes_are_recorded_where_torch_compiles_around_them():
    """Its compiler looks at all frames of Python between compiled parts, and at none inside of a recorder."""
    terms, learned = tables("bias", "value")
    given = made(1)

    def broken(q, k, v):
        torch._dynamo.graph_break()
        return lagwise.attention(q, k, v, terms, impl="triton")

    expected = step(*given, terms, learned)
    forget()
    torch._dynamo.utils.counters.clear()
    out = torch.compile(broken, backend="aot_eager")(*given[:3])
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1
    found = [out, *torch.autograd.grad(out, [*given[:3], *learned], given[3])]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert kept_tapes()


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


class Arguments(ctypes.Structure):
    """The arguments of a kernel as C lays them out: pointers, numbers of 32 and 64 bits and float32; no constants."""

    _fields_ = [
        ("x", ctypes.c_uint64), ("rows", ctypes.c_int32), ("step", ctypes.c_int64), ("scale", ctypes.c_float),
        ("y", ctypes.c_uint64), ("scratch", ctypes.c_uint64), ("profile", ctypes.c_uint64),
    ]  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    """What the driver is called with, and what it answers."""
    from lagwise.ops.kernels import launches

    told = SimpleNamespace(calls=[], answer=0)

    def called(*arguments):
        told.calls.append(read(*arguments[-2:]) | {"call": arguments[:-2]})
        return told.answer

    monkeypatch.setattr(launches, "driver_launch", lambda: called)
    return told


def read(pointers, extras):
    """Returns the arguments of a launch by name, of which the driver is told where each one is, or gets a block of them."""
    if pointers:
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        parts = [ctypes.string_at(places[place], ctypes.sizeof(kind)) for place, (_, kind) in enumerate(Arguments._fields_)]
        found = [kind.from_buffer_copy(part).value for part, (_, kind) in zip(parts, Arguments._fields_, strict=True)]
    else:
        told = ctypes.cast(extras, ctypes.POINTER(ctypes.c_void_p))
        assert ctypes.cast(told[3], ctypes.POINTER(ctypes.c_size_t))[0] == ctypes.sizeof(Arguments)
        block = Arguments.from_buffer_copy(ctypes.string_at(told[1], ctypes.sizeof(Arguments)))
        found = [getattr(block, name) for name, _ in Arguments._fields_]
    return {name: x for (name, _), x in zip(Arguments._fields_, found, strict=True)}


@pytest.fixture
def packed(monkeypatch, driver):
    """The arguments of a launch of a kernel that Triton has compiled, where handles and streams are numbers."""
    from lagwise.ops.kernels import launches

    monkeypatch.setattr(launches, "loaded", lambda compiled, device: 77)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    signature = {"x": ("*bf16", "i32"), "step": "i64", "one": "constexpr", "scale": "fp32", "y": "*fp32", "flags": "constexpr"}
    compiled = SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(num_warps=4, shared=99))
    values = ((launches.MISSING, 3), 2**40, 1, 0.5, launches.MISSING, "flags")
    return launches.Packed(launches.Form(compiled, 0), 12, values)


NUMBERS = {"rows": 3, "step": 2**40, "scale": 0.5, "scratch": 0, "profile": 0}


def test_arguments_are_packed_as_a_kernel_finds_them(driver, packed):
    packed([1000, 2000])
    assert driver.calls == [{"x": 1000, "y": 2000, **NUMBERS, "call": (77, 12, 1, 1, 128, 1, 1, 99, 5)}]
    driver.answer = 1
    with pytest.raises(RuntimeError, match="refused to launch a kernel, with error 1"):
        packed([1000, 2000])


def test_launches_share_addresses_and_have_numbers_of_their_own(driver, packed):
    from lagwise.ops.kernels import launches

    sheet = launches.Sheet([packed, packed], [[0, 1], [2, 0]], 3)
    sheet.send([1000, 2000, 3000], 9)
    same = {**NUMBERS, "call": (77, 12, 1, 1, 128, 1, 1, 99, 9)}
    assert driver.calls == [{"x": 1000, "y": 2000, **same}, {"x": 3000, "y": 1000, **same}]
    driver.answer = 1
    with pytest.raises(RuntimeError, match="refused to launch a kernel, with error 1"):
        sheet.send([4000, 5000, 6000], 9)
    assert len(driver.calls) == 3
