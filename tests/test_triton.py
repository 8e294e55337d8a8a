"""The Triton kernels under Triton's interpreter: all of them, on a CPU. Their speed and bfloat16 are left to tests/test_gpu.py.

The interpreter has tiles of 16 queries and 16 keys here, so that 33 of each are three blocks, the last one with a single row.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from oracle import assert_hidden_keys_do_not_matter, assert_within_budget, make_encoding, make_terms

import lagwise
from lagwise.call import Call
from lagwise.ops import support
from lagwise.ops.lowering import lower

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/test_gpu.py runs the kernels on it"
    ),
    # Kernels must write all that they promise.
    pytest.mark.usefixtures("poisoned"),
]

F32, F16 = torch.float32, torch.float16
SCALARS = ("bias", "gain", "query", "key", "value")
CHANNELS = ("bias", "channel gain", "query", "key", "value")
SLOPED = ("slopes", "gain", "query", "key", "value")
HOLES = torch.tensor([[j % 3 > 0 for j in range(33)], [j == 7 for j in range(33)]])
WORDS = {SCALARS: "all", CHANNELS: "channels", SLOPED: "sloped"}


def words(x) -> str:
    """Names a case: its tables, its shape, its options."""
    if isinstance(x, tuple):
        return WORDS.get(x, "+".join(map(str, x)) or "no table")
    if isinstance(x, dict):
        return ",".join(f"{name}={words(value)}" for name, value in x.items()) or "plain"
    if isinstance(x, torch.Tensor) and x.numel() > 8:
        return "mask"
    return str(x.tolist() if isinstance(x, torch.Tensor) else x).replace(" ", "")


def tensors(batch=1, heads=1, queries=33, keys=None, head_dim=8, value_dim=None, kv_heads=None, dtype=F32):
    keys, kv_heads = keys or queries, kv_heads or heads
    return (
        torch.randn(batch, heads, queries, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or head_dim).to(dtype),
    )


def check(tables=SCALARS, shape=None, max_lag=5, impl="triton", **options):
    """Compares a call with random tables with the specification."""
    q, k, v = tensors(**(shape or {}))
    sizes = {"heads": q.shape[1], "head_dim": q.shape[3], "value_dim": v.shape[3], "max_lag": max_lag}
    assert_within_budget(impl, q, k, v, make_terms(*tables, **sizes), **options)


@pytest.mark.parametrize(("causal", "dtype"), [(False, F32), (True, F16)], ids=str)
def test_every_encoding(relative_name, causal, dtype):
    q, k, v = tensors(heads=2, dtype=dtype)
    assert_within_budget("triton", q, k, v, make_encoding(relative_name, heads=2), causal=causal)


@pytest.mark.parametrize(("max_lag", "causal", "dtype"), [(0, True, F32), (5, False, F16), (60, False, F32)], ids=str)
@pytest.mark.parametrize("table", ["bias", "slopes", "gain", "channel gain", "query", "key", "value"])
def test_every_table_alone(table, max_lag, causal, dtype):
    check((table,), {"heads": 2, "dtype": dtype}, max_lag, causal=causal)


@pytest.mark.parametrize(("causal", "dtype"), [(False, F16), (True, F32)], ids=str)
@pytest.mark.parametrize("tables", [(), SCALARS, CHANNELS, SLOPED], ids=words)
def test_all_tables_together(tables, dtype, causal):
    check(tables, {"heads": 2, "dtype": dtype}, causal=causal)


@pytest.mark.parametrize("tables", [("query", "transform"), ("key", "value", "transform"), (*SCALARS, "transform")], ids=words)
def test_tables_beside_a_transform(tables):
    check(tables, {"heads": 2, "kv_heads": 1}, causal=True)


@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (SLOPED, {}, {"window": (9, 4)}),
        (CHANNELS, {}, {"window": (3, 0)}),
        (SCALARS, {}, {"window": (0, 0)}),
        (CHANNELS, {}, {"window": (100, 2), "causal": True}),
        (SCALARS, {"queries": 13, "keys": 40}, {}),
        (CHANNELS, {"queries": 40, "keys": 13}, {"causal": True}),
        (SLOPED, {"queries": 13, "keys": 40}, {"query_start": 27, "causal": True}),
        (SCALARS, {"queries": 13, "keys": 40}, {"query_start": 100}),
        (CHANNELS, {"queries": 20, "keys": 40}, {"query_start": 3}),
        (SCALARS, {"queries": 40, "keys": 13}, {"query_start": -20, "causal": True}),
        (SLOPED, {"queries": 13, "keys": 40}, {"query_start": -50}),
        (CHANNELS, {"queries": 33, "keys": 20}, {"query_start": -7, "window": (4, 6)}),
        (SCALARS, {"batch": 2, "queries": 5, "keys": 40}, {"query_start": torch.tensor([3, 30]), "causal": True}),
        (SLOPED, {"batch": 2, "queries": 20}, {"query_start": torch.tensor([0, 17])}),
        (CHANNELS, {"batch": 2, "queries": 5, "keys": 20}, {"query_start": torch.tensor(15)}),
        (("transform", "query", "key"), {"batch": 2, "queries": 5, "keys": 20}, {"query_start": torch.tensor([0, 15])}),
        (SCALARS, {"batch": 2}, {"lengths": torch.tensor([1, 20])}),
        (CHANNELS, {"batch": 2}, {"lengths": torch.tensor([0, 17]), "causal": True}),
        (SLOPED, {"batch": 2}, {"key_mask": torch.arange(33) >= torch.tensor([[0], [30]]), "causal": True}),
        (SCALARS, {"batch": 2}, {"key_mask": HOLES}),
        (CHANNELS, {"batch": 2, "queries": 17, "keys": 33}, {"key_mask": HOLES, "causal": True}),
        (SCALARS, {"batch": 2}, {"key_mask": HOLES, "window": (6, 6), "lengths": torch.tensor([30, 8])}),
        (SLOPED, {}, {"cu_seqlens": torch.tensor([0, 10, 10, 33])}),
        (CHANNELS, {}, {"cu_seqlens": torch.tensor([0, 1, 17, 17, 33]), "causal": True}),
        (SCALARS, {}, {"cu_seqlens": torch.tensor([0, 16, 33, 33]), "window": (5, 5)}),
        (("transform", "bias", "key"), {}, {"cu_seqlens": torch.tensor([0, 20, 33])}),
    ],
    ids=words,
)
def test_who_sees_whom(tables, shape, options):
    check(tables, shape, **options)


@pytest.mark.parametrize(
    ("tables", "shape"),
    [
        (SCALARS, {"queries": 1, "batch": 2, "heads": 4}),
        (CHANNELS, {"queries": 1, "batch": 2, "heads": 4}),
        (SLOPED, {"queries": 2}),
        (CHANNELS, {"queries": 1, "keys": 33}),
        (SCALARS, {"queries": 33, "keys": 1}),
        (SCALARS, {"queries": 32, "head_dim": 16, "heads": 2}),
        (CHANNELS, {"queries": 32, "head_dim": 16, "value_dim": 16}),
        (SCALARS, {"head_dim": 40}),
        (CHANNELS, {"head_dim": 40, "value_dim": 24, "dtype": F16}),
        (SCALARS, {"value_dim": 5}),
        (SCALARS, {"head_dim": 16, "value_dim": 40}),
        (SCALARS, {"heads": 4, "kv_heads": 2}),
        (CHANNELS, {"heads": 3, "kv_heads": 1, "queries": 20}),
        (("slopes",), {"queries": 100}),
        (SCALARS, {"queries": 70}),
        (CHANNELS, {"queries": 70, "dtype": F16}),
    ],
    ids=words,
)
def test_shapes(tables, shape):
    check(tables, shape)


@pytest.mark.parametrize(
    ("first", "channels", "causal"),
    [(-9, 1, True), (-9, 8, False), (-40, 1, False), (2, 1, False), (2, 8, True), (40, 1, True), (40, 8, False)],
)
def test_tables_that_lie_to_one_side(first, channels, causal):
    terms = lagwise.Terms(
        bias=lagwise.LagTable(torch.randn(2, 3), first, slopes=(torch.rand(2) / 4, -torch.rand(2) / 4)),
        gain=lagwise.LagTable(torch.randn(2, 3, channels), first),
        value=lagwise.LagTable(torch.randn(1, 3, 8), first),
    )
    assert_within_budget("triton", *tensors(heads=2), terms, causal=causal)


@pytest.mark.parametrize(("channels", "causal"), [(1, False), (8, True)])
def test_tables_of_different_ends_and_shared_by_the_heads(channels, causal):
    terms = lagwise.Terms(
        bias=lagwise.LagTable(torch.randn(1, 4), -7, slopes=(torch.rand(1) / 4, -torch.rand(1) / 4)),
        gain=lagwise.LagTable(torch.randn(2, 2, channels), -1),
        query=lagwise.LagTable(torch.randn(1, 50, 8), -3),
        key=lagwise.LagTable(torch.randn(2, 6, 8), 1),
        value=lagwise.LagTable(torch.randn(1, 9, 8), -12),
    )
    assert_within_budget("triton", *tensors(heads=2), terms, causal=causal)


@pytest.mark.parametrize("names", [("bias", "gain", "key"), ("channel gain", "query", "value"), ("slopes",)], ids=words)
def test_tables_shared_by_the_heads(names):
    assert_within_budget("triton", *tensors(heads=2), make_terms(*names, heads=1))


def test_the_widest_table_of_vectors():
    check(("query", "key", "value"), {"queries": 5}, max_lag=1024)


@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (SCALARS, {"heads": 2}, {}),
        (CHANNELS, {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 17}, {"causal": True}),
        (SCALARS, {"dtype": F16}, {"cu_seqlens": torch.tensor([0, 20, 33])}),
        (SCALARS, {"queries": 13, "keys": 33}, {"query_start": torch.tensor([3])}),
        (("slopes", "value"), {"queries": 20, "keys": 40}, {"query_start": -9, "window": (20, 20), "seed": torch.tensor(-5)}),
        ((), {}, {"seed": torch.tensor(2**62)}),
    ],
    ids=words,
)
def test_dropout(tables, shape, options):
    check(tables, shape, dropout=0.4, **options)


@pytest.mark.parametrize("tile", [(32, 16, 1, 1), (16, 32, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (SLOPED, {"causal": True}),
        (SCALARS, {"query_start": 11, "window": (20, 17)}),
        (CHANNELS, {"query_start": -11}),
        (SCALARS, {"cu_seqlens": torch.tensor([0, 9, 40, 40, 70])}),
    ],
    ids=words,
)
def test_tiles_that_are_not_square(tile, tables, options, monkeypatch):
    from lagwise.ops.kernels.plan import kept_plan

    monkeypatch.setattr("lagwise.ops.kernels.plan.INTERPRETED", tile)
    kept_plan.cache_clear()
    check(tables, {"queries": 70}, **options)


@pytest.mark.parametrize(
    ("tables", "shape", "max_lag", "options"),
    [
        (SCALARS, {"heads": 2}, 5, {}),
        (CHANNELS, {"heads": 2, "kv_heads": 1, "dtype": F16}, 5, {}),
        (CHANNELS, {}, 5, {"causal": True}),
        (("bias", "gain"), {"heads": 4, "kv_heads": 2}, 5, {"causal": True}),
        ((), {}, 5, {}),
        (("gain",), {}, 0, {}),
        (("query", "value"), {"value_dim": 12, "dtype": F16}, 2, {}),
        (SCALARS, {"queries": 13, "keys": 40}, 3, {"query_start": 20}),
        (("key", "value"), {"queries": 40, "keys": 13}, 2, {"query_start": -9, "causal": True}),
        (("channel gain", "query"), {"queries": 20, "keys": 33}, 60, {}),
        (("bias", "key"), {}, 3, {"window": (9, 4)}),
        (("query", "transform"), {}, 5, {}),
        (("bias", "value"), {"queries": 100}, 3, {}),
    ],
    ids=words,
)
def test_split_with_its_band_on_the_kernels(tables, shape, max_lag, options, monkeypatch):
    """On a GPU `split` shares the kernels; here it takes them with the far fields of the CPU."""

    monkeypatch.setattr("lagwise.ops.split.is_fused", lambda call: True)
    check(tables, shape, max_lag, impl="split", **options)


@pytest.mark.parametrize("first", [-30, 12])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_table_beyond_what_a_window_sees(name, first):
    terms = lagwise.Terms(**{name: lagwise.LagTable(torch.randn(1, 4, 8), first)})
    assert_within_budget("triton", *tensors(queries=40), terms, window=(6, 6))


@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (SCALARS, {}, {}),
        (SCALARS, {"queries": 20, "keys": 33}, {"query_start": 9, "causal": True}),
        (CHANNELS, {}, {"causal": True, "dropout": 0.3}),
        (SLOPED, {}, {"window": (14, 9)}),
        (("key", "value"), {"batch": 2}, {"key_mask": torch.rand(2, 33) < 0.6}),
        (("query", "key", "transform"), {"heads": 2}, {"cu_seqlens": torch.tensor([0, 10, 33])}),
        (("query",), {"batch": 2}, {"query_start": torch.tensor([3, 20])}),
    ],
    ids=words,
)
def test_wide_tables_of_vectors_go_range_by_range(tables, shape, options, monkeypatch):
    for name, value in {"WIDEST": 8, "LARGEST": 0, "LEAST": 0, "SHARE": 0}.items():
        monkeypatch.setattr(f"lagwise.ops.kernels.pieces.{name}", value)
    check(tables, shape, 12, **options)


@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (("query", "key"), {"queries": 96}, {}),
        (SCALARS, {"queries": 96}, {"causal": True}),
        (CHANNELS, {"queries": 96}, {}),
        (("query", "value"), {"queries": 100, "keys": 110, "batch": 2}, {"lengths": torch.tensor([110, 60])}),
        (("key", "value"), {"queries": 112, "keys": 96, "heads": 2, "kv_heads": 1}, {"query_start": -9}),
        (("query", "key"), {"queries": 128}, {"cu_seqlens": torch.tensor([0, 70, 128])}),
    ],
    ids=words,
)
def test_tiles_within_the_columns_of_scores_on_their_edges_and_beyond(tables, shape, options):
    """There are more columns than a tile has lags, and rows of a residue fill a block."""
    check(tables, shape, 24, **options)


def test_near_tiles_far_from_the_columns_of_scores():
    """A wide table of scalars makes tiles near that a narrow table of vectors has no columns for."""
    terms = lagwise.Terms(
        bias=lagwise.LagTable(torch.randn(1, 61), -30),
        query=lagwise.LagTable(torch.randn(1, 9, 8), -4),
        value=lagwise.LagTable(torch.randn(1, 5, 8), 1),
    )
    assert_within_budget("triton", *tensors(queries=70), terms)


def test_launches_tell_apart_all_that_kernels_are_compiled_for():
    from triton.runtime.jit import JITFunction

    from lagwise.ops.kernels.arguments import flags, view
    from lagwise.ops.kernels.launches import key_of, wide
    from lagwise.ops.kernels.rows import delta_kernel

    # As it is outside the interpreter.
    kernel = JITFunction(delta_kernel.fn, do_not_specialize=["heads", "queries"])
    q, _, _ = tensors(queries=48)
    sizes = {"head_dim": 8, "value_dim": 8, "WIDTH": 16, "VALUE_WIDTH": 16}

    def key(*, flag=None, **changes):
        made = flags(**sizes, **(flag or {}))
        arguments = {"out": q, "dout": view(q), "dlse": q, "delta": q, "heads": 2, "queries": 48, "flags": made, **changes}
        return key_of(kernel, [arguments[name] for name in kernel.arg_names])

    same = key()
    assert key(queries=64, heads=3) == same
    shifted = torch.empty(q.numel() + 1).narrow(0, 1, q.numel()).view(q.shape)
    different = [
        key(queries=2**31), key(flag={"DLSE": True}), key(flag={"ROWS": 32}), key(out=q.half()), key(out=shifted),
        key(dout=view(q)._replace(time=1)), key(dout=view(q)._replace(time=16)), key(dout=view(q)._replace(head=2**31)),
        key(dlse=q.double()),
    ]  # fmt: skip
    assert len({same, *different}) == 1 + len(different)
    assert wide(2**31) and wide(-(2**31) - 1) and not wide(2**31 - 1) and not wide(0.125)


def plan_of(q, k, v, terms=None, **options):
    from lagwise.ops.kernels.plan import plan_for

    return plan_for(lower(q, k, v, terms or lagwise.Terms(), Call(**options)))


def test_calls_of_one_kind_share_a_plan():
    q, k, v = tensors(batch=2, heads=2, queries=48)
    table = lagwise.Terms(bias=lagwise.LagTable(torch.randn(2, 9), -4))
    same = plan_of(q, k, v, table)
    assert plan_of(q.clone(), k.clone(), v.clone(), lagwise.Terms(bias=lagwise.LagTable(torch.randn(2, 9), -4))) is same
    by_token = torch.randn(2, 48, 2, 8).transpose(1, 2)
    shifted = torch.empty(q.numel() + 1).narrow(0, 1, q.numel()).view(q.shape)
    others = [
        plan_of(q[:, :, :40], k, v, table), plan_of(by_token, k, v, table), plan_of(shifted, k, v, table),
        plan_of(q.half(), k.half(), v.half(), table), plan_of(q, k, v, table, causal=True), plan_of(q, k, v, table, scale=0.5),
        plan_of(q, k, v, table, window=(3, 3)), plan_of(q, k, v, table, key_mask=torch.ones(2, 48, dtype=torch.bool)),
        plan_of(q, k, v, table, query_start=1), plan_of(q, k, v, table, query_start=torch.tensor([0, 1])),
        plan_of(q, k, v, lagwise.Terms(bias=lagwise.LagTable(torch.randn(2, 9), -5))), plan_of(q, k, v),
    ]  # fmt: skip
    assert len({id(plan) for plan in [same, *others]}) == 1 + len(others)


def test_launches_of_a_plan_are_told_apart_by_where_gradients_lie():
    from lagwise.ops.kernels.plan import kept_plan

    kept_plan.cache_clear()
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse = lagwise.attention(q, k, v, impl="triton", return_lse=True)

    def sites(dout, dlse):
        torch.autograd.grad([out, lse], [q, k, v], [dout, dlse], retain_graph=True)
        return sum(site[0] == "query" for site in plan_of(q, k, v, scale=8**-0.5).runners)

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    shifted = torch.empty(lse.numel() + 1).narrow(0, 1, lse.numel()).view(lse.shape).copy_(dlse)
    assert [sites(dout, dlse), sites(dout.clone(), dlse.clone()), sites(dout, shifted)] == [1, 1, 2]
    assert sites(dout.mT.contiguous().mT, dlse) == 2  # made contiguous before it is used
    assert sites(torch.randn(1, 33, 1, 16)[..., :8].transpose(1, 2), dlse) == 3


def test_the_plans_that_are_kept_are_bounded():
    from lagwise.ops.kernels.plan import KEPT_PLANS, kept_plan

    for length in range(1, KEPT_PLANS + 50):
        plan_of(*tensors(queries=length))
    assert kept_plan.cache_info().currsize == KEPT_PLANS
    kept_plan.cache_clear()


def test_strides_do_not_matter():
    base = [torch.randn(2, 33, 1, 16).transpose(1, 2)[..., ::2] for _ in range(3)]
    assert not base[0].is_contiguous()
    assert_within_budget("triton", *base, make_terms(*SCALARS, heads=1))
    base = [torch.randn(1, 20, 2, 8).transpose(1, 2) for _ in range(3)]
    assert base[0].stride(3) == 1
    assert_within_budget("triton", *base, make_terms(*CHANNELS, heads=2))


def test_strides_do_not_matter_to_split(monkeypatch):

    monkeypatch.setattr("lagwise.ops.split.is_fused", lambda call: True)
    base = [torch.randn(1, 33, 2, 16).transpose(1, 2)[..., ::2] for _ in range(3)]
    for tables in (SCALARS, CHANNELS):
        made = make_terms(*tables, heads=2, max_lag=3).tables()
        turned = {
            name: lagwise.LagTable(table.values.transpose(0, 1).contiguous().transpose(0, 1), table.first)
            for name, table in made.items()
        }
        assert_within_budget("split", *base, lagwise.Terms(**turned))


@pytest.mark.parametrize("tables", [("bias", "gain"), ("bias", "channel gain")], ids=words)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_large_logits_do_not_overflow(tables, options):
    q, k, v = (30.0 * x for x in tensors())
    assert_within_budget("triton", q, k, v, make_terms(*tables, heads=1), **options)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_large_biases_do_not_overflow(sign):
    table = lagwise.LagTable(sign * 1000.0 * torch.arange(11.0).expand(1, 11), -5, slopes=(torch.ones(1), -torch.ones(1)))
    assert_within_budget("triton", *tensors(), lagwise.Terms(bias=table))


def gradients(tables, incoming, **options):
    """Returns the output and all gradients of a call, for outputs and incoming gradients that a function chooses."""
    torch.manual_seed(1)
    q, k, v = (x.requires_grad_() for x in tensors(queries=20))
    terms = make_terms(*tables, heads=1)
    leaves = [q, k, v, *(table.values.requires_grad_() for table in terms.tables().values())]
    out, lse = lagwise.attention(q, k, v, terms, return_lse=True, impl="triton", seed=torch.tensor(7), **options)
    outputs, given = incoming(out, lse)
    return [out, *torch.autograd.grad(outputs, leaves, given, allow_unused=True)]


def assert_same(some, others):
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tables", [SCALARS, CHANNELS], ids=words)
def test_a_call_repeats_bit_for_bit(tables):
    def incoming(out, lse):
        return out.square().sum() + lse.sum(), None

    assert_same(gradients(tables, incoming, dropout=0.2), gradients(tables, incoming, dropout=0.2))


def test_the_strides_of_incoming_gradients_do_not_matter():
    dout, dlse = torch.randn(1, 1, 8, 20).mT, torch.randn(20, 1, 2)[..., 0].T[None]
    assert_same(
        gradients(SCALARS, lambda out, lse: ([out, lse], [dout, dlse])),
        gradients(SCALARS, lambda out, lse: ([out, lse], [dout.contiguous(), dlse.contiguous()])),
    )
    ones, no = torch.ones(1, 1, 20, 8), torch.zeros(1, 1, 20)
    assert_same(
        gradients(SCALARS, lambda out, lse: (out.sum(), None)),
        gradients(SCALARS, lambda out, lse: ([out, lse], [ones, no])),
    )


def test_a_gradient_of_the_log_sum_exp_alone():
    dlse, no = torch.randn(1, 1, 20), torch.zeros(1, 1, 20, 8)
    assert_same(
        gradients(("bias", "query"), lambda out, lse: (lse, dlse)),
        gradients(("bias", "query"), lambda out, lse: ([out, lse], [no, dlse])),
    )


def by_token(*tensors):
    """Returns tensors [batch, heads, time, dim] with the heads of a token side by side, as projections leave them."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout": 0.3}], ids=words)
@pytest.mark.parametrize("tables", [("bias", "gain"), ("bias", "value"), CHANNELS], ids=words)
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1}, {"value_dim": 5}, {"queries": 7, "keys": 20}], ids=words)
def test_tensors_that_lie_token_by_token(shape, tables, options):
    q, k, v = by_token(*tensors(heads=2, **shape))
    assert_within_budget("triton", q, k, v, make_terms(*tables, heads=2, value_dim=v.shape[3]), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tables", [("bias",), SCALARS], ids=words)
def test_split_of_tensors_that_lie_token_by_token(tables, causal, monkeypatch):
    monkeypatch.setattr("lagwise.ops.split.is_fused", lambda call: True)
    assert_within_budget("split", *by_token(*tensors(heads=2, queries=60)), make_terms(*tables, heads=2), causal=causal)


@pytest.mark.parametrize("impl", ["triton", "split"])
@pytest.mark.parametrize("tables", [("bias",), SCALARS], ids=words)
def test_outputs_and_gradients_lie_as_what_they_belong_to(tables, impl, monkeypatch):
    monkeypatch.setattr("lagwise.ops.split.is_fused", lambda call: True)
    for arrange in (by_token, lambda *tensors: tensors):
        q, k, v = (x.requires_grad_() for x in arrange(*tensors(heads=2, queries=60)))
        out = lagwise.attention(q, k, v, make_terms(*tables, heads=2), impl=impl)
        found = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert out.stride() == q.stride() and [x.stride() for x in found] == [x.stride() for x in (q, k, v)]


def test_sums_of_encodings():
    encoding = make_encoding("t5", heads=2) + make_encoding("shaw", heads=2) + make_encoding("rotary", heads=2)
    assert_within_budget("triton", *tensors(heads=2), encoding)


def test_autocast():
    q, k, v = tensors(heads=2, queries=20)
    encoding = make_encoding("shaw", heads=2)
    with torch.autocast("cpu", dtype=torch.float16):
        out = lagwise.attention(q, k, v, encoding, impl="triton")
    assert out.dtype == torch.float16
    assert torch.equal(out, lagwise.attention(q.half(), k.half(), v.half(), encoding, impl="triton"))


@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["t5", "shaw", "alibi"])
def test_auto_never_takes_the_interpreter(name, dtype):
    for time in (20, 2000):
        q, k, v = tensors(heads=2, queries=time, dtype=dtype)
        for options in ({}, {"dropout": 0.1}, {"causal": True}, {"window": (9, 9)}):
            chosen = lagwise.which_impl(q, k, v, make_encoding(name, heads=2), **options)
            assert chosen.impl in support.IMPLEMENTATIONS and chosen.impl != "triton"


@pytest.mark.parametrize("tables", [("slopes", "gain"), ("query", "key", "value"), ("channel gain",)], ids=str)
def test_hidden_keys_may_hold_anything(tables):
    terms = make_terms(*tables, heads=1, max_lag=3)
    assert_hidden_keys_do_not_matter("triton", tensors(batch=2, queries=20), terms)


@pytest.mark.parametrize(
    ("tables", "shape", "max_lag", "options"),
    [
        (("channel gain",), {"head_dim": 72, "queries": 20, "keys": 70}, 20, {}),
        (("channel gain",), {"batch": 8, "queries": 9}, 3, {}),
        (("channel gain", "query"), {"heads": 2, "kv_heads": 1, "queries": 20}, 30, {"causal": True}),
        (CHANNELS, {"queries": 26}, 7, {"window": (9, 4)}),
        (("channel gain",), {"batch": 2, "queries": 18, "keys": 40}, 6, {"query_start": torch.tensor([3, 21])}),
        (("channel gain",), {"batch": 2, "queries": 33}, 9, {"key_mask": HOLES}),
        (("channel gain",), {"queries": 33}, 9, {"cu_seqlens": torch.tensor([0, 13, 14, 33])}),
    ],
    ids=words,
)
def test_a_gain_per_channel_in_words(tables, shape, max_lag, options, monkeypatch):
    monkeypatch.setattr("lagwise.ops.kernels.channel_gain.run_gradients", None)
    check(tables, {"dtype": F16, **shape}, max_lag, **options)


@pytest.mark.parametrize("head_dim", [12, 136])
def test_a_gain_per_channel_that_words_cannot_hold(head_dim, monkeypatch):
    monkeypatch.setattr("lagwise.ops.kernels.channel_gain.word_gradients", None)
    check(("channel gain",), {"head_dim": head_dim, "queries": 9, "dtype": F16})


def test_hidden_keys_may_hold_anything_where_words_are_multiplied():
    terms = make_terms("channel gain", heads=1, max_lag=3)
    assert_hidden_keys_do_not_matter("triton", tensors(batch=2, queries=20, dtype=F16), terms)


@pytest.mark.parametrize("columns", [(0, -1), range(7)], ids=len)
def test_minus_infinity_hides_as_a_mask_does(columns):
    terms = make_terms("bias", heads=1, max_lag=3)
    terms.bias.values[0, list(columns)] = -torch.inf
    assert_within_budget("triton", *tensors(), terms)
