"""On a GPU: the same comparisons with the specification, the vendor's kernels in the far field. `pytest -m gpu` runs them."""

import os
import random
from collections.abc import Iterable

import pytest
import torch
from encoders import assert_gradients_within_budget, gradients, twelve_layers
from oracle import assert_hidden_keys_do_not_matter, assert_within_budget, make_encoding, make_terms
from test_codes import CALLS, assert_kernels_within_budget, features, kernel_call
from test_rotation import SHAPES, by_hand, case
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import lagwise
from lagwise.call import Call
from lagwise.ops.dispatch import SPLIT_PAYS_FROM
from lagwise.ops.kernels.ahead import counted_kernels
from lagwise.ops.lowering import flat, lower
from lagwise.ops.rotation import turn

# cuBLAS repeats its results only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch's own, once, when the first product of a process runs in a backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


def tensors(batch=2, heads=4, queries=300, keys=None, head_dim=64, value_dim=None, kv_heads=None, dtype=torch.bfloat16):
    keys, kv_heads = keys or queries, kv_heads or heads
    return (
        torch.randn(batch, heads, queries, head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, keys, head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or head_dim, device="cuda").to(dtype),
    )


def on_gpu(terms: lagwise.Terms) -> lagwise.Terms:
    def move(table):
        slopes = table.slopes and tuple(slope.cuda() for slope in table.slopes)
        return lagwise.LagTable(table.values.cuda(), table.first, slopes)

    return lagwise.Terms(**{name: move(table) for name, table in terms.tables().items()}, transform=terms.transform)


@pytest.mark.parametrize("causal", [False, True])
def test_split_with_every_encoding(relative_name, causal):
    if relative_name == "alibi":
        pytest.skip("sloped tails: the support table says no")
    assert_within_budget("split", *tensors(), make_encoding(relative_name, head_dim=64).cuda(), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_with_every_encoding(relative_name, dtype):
    assert_within_budget(
        "blockwise", *tensors(head_dim=32, dtype=dtype), make_encoding(relative_name, head_dim=32).cuda(), causal=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"query_start": 100}, {"query_start": -40}, {"window": (20, 3)}],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_split_with_unequal_lengths(dtype, options, causal):
    terms = on_gpu(make_terms("bias", "gain", "query", "key", "value", head_dim=64, value_dim=64))
    assert_within_budget("split", *tensors(queries=150, keys=300, dtype=dtype), terms, causal=causal, **options)


@pytest.mark.parametrize("shape", [{"kv_heads": 2}, {"head_dim": 40, "value_dim": 40}, {"value_dim": 32}], ids=str)
def test_split_with_odd_shapes(shape):
    q, k, v = tensors(**shape)
    terms = on_gpu(make_terms("bias", "query", "value", head_dim=q.shape[3], value_dim=v.shape[3]))
    assert_within_budget("split", q, k, v, terms)


# Empty, of one token, shorter than the band, as long, longer.
RAGGED = [
    {"lengths": torch.tensor([300, 300])}, {"lengths": torch.tensor([0, 200])}, {"lengths": torch.tensor([5, 1])},
    {"cu_seqlens": torch.tensor([0, 300])}, {"cu_seqlens": torch.tensor([0, 1, 130, 130, 137, 300]), "max_seqlen": 163},
    {"cu_seqlens": torch.tensor([0, 0, 6, 17, 300])},
]  # fmt: skip


def ragged(options: dict, **shape) -> tuple[list[torch.Tensor], dict]:
    """Returns tensors that fit lengths or ends of sequences, and these on the GPU."""
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return list(tensors(batch=1 if "cu_seqlens" in options else 2, **shape)), moved


@pytest.mark.parametrize("option", ["lengths", "cu_seqlens"])
@pytest.mark.parametrize("causal", [False, True])
def test_split_of_different_lengths_with_every_encoding(relative_name, option, causal):
    if relative_name == "alibi":
        pytest.skip("sloped tails: the support table says no")
    given, options = ragged({option: torch.tensor([200, 3] if option == "lengths" else [0, 7, 7, 180, 300])})
    assert_within_budget("split", *given, make_encoding(relative_name, head_dim=64).cuda(), causal=causal, **options)


@pytest.mark.parametrize("options", RAGGED, ids=str)
@pytest.mark.parametrize("tables", [(), ("bias", "gain", "query", "key", "value"), ("channel gain",)], ids=len)
@pytest.mark.parametrize("causal", [False, True])
def test_split_of_different_lengths(options, tables, causal, poisoned):
    given, options = ragged(options, kv_heads=2, dtype=torch.float16)
    terms = on_gpu(make_terms(*tables, head_dim=64, value_dim=64))
    assert_within_budget("split", *given, terms, causal=causal, **options)


@pytest.mark.parametrize("options", RAGGED[1::3], ids=str)
def test_split_of_different_lengths_repeats_in_deterministic_mode(options, deterministic):
    given, options = ragged(options)
    encoding = make_encoding("huang4", head_dim=64).cuda()
    leaves = [x.requires_grad_() for x in given]

    def run():
        out = lagwise.attention(*leaves, encoding, impl="split", **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), [*leaves, *encoding.parameters()])]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("options", RAGGED[1::3], ids=str)
def test_split_of_different_lengths_does_not_wait_for_the_gpu(options):
    given, options = ragged(options)
    encoding = make_encoding("shaw", head_dim=64).cuda()
    leaves = [x.requires_grad_() for x in given]

    def step():
        out = lagwise.attention(*leaves, encoding, impl="split", **options)
        torch.autograd.grad(out.float().square().sum(), [*leaves, *encoding.parameters()])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_lengths_hide_may_hold_anything_in_split(deterministic):
    (q, k, v), options = ragged({"lengths": torch.tensor([0, 200])})
    hidden = (torch.arange(300, device="cuda") >= options["lengths"][:, None])[:, None, :, None]
    terms = on_gpu(make_terms("bias", "query", "key", "value", head_dim=64, value_dim=64))
    found = []
    for fill in (0.0, torch.nan):
        inputs = [x.requires_grad_() for x in (q.clone(), *(x.masked_fill(hidden, fill) for x in (k, v)))]
        out = lagwise.attention(*inputs, terms, impl="split", **options)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_key_mask_on_a_gpu_is_not_looked_at(monkeypatch):
    monkeypatch.setitem(SPLIT_PAYS_FROM, "cuda, ragged, vectors", 25)
    q, k, v = tensors(queries=9000, batch=1, heads=32)
    terms, mask = on_gpu(make_terms("query", heads=32, head_dim=64)), torch.ones(1, 9000, dtype=torch.bool, device="cuda")
    choice = lagwise.which_impl(q, k, v, terms, key_mask=mask)
    assert choice.impl == "triton" and "give lengths instead" in choice.why
    assert lagwise.which_impl(q, k, v, terms, lengths=torch.tensor([9000], device="cuda")).impl == "split"


@pytest.mark.parametrize(
    ("option", "captured", "replayed"),
    [("lengths", [300, 200], [0, 33]), ("cu_seqlens", [0, 100, 290, 300], [0, 0, 3, 300])],
)
def test_a_cuda_graph_of_split_takes_other_lengths(option, captured, replayed):
    given, options = ragged({option: torch.tensor(captured)})
    encoding = make_encoding("huang4", head_dim=64).cuda()
    leaves = [x.requires_grad_() for x in given]

    def step():
        out = lagwise.attention(*leaves, encoding, impl="split", **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), [*leaves, *encoding.parameters()])]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = step()
    for ends in (captured, replayed):
        options[option].copy_(torch.tensor(ends))
        graph.replay()
        # Flash adds its gradients in another order each time.
        for a, b in zip(found, step(), strict=True):
            assert float((a - b).double().norm()) <= 1e-2 * float(b.double().norm())


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_mode_uses_flash_and_repeats(deterministic):
    from lagwise.ops import vendor

    q, k, v = (x.requires_grad_() for x in tensors(queries=1500))
    assert vendor.backend(q, k) == "flash"
    encoding = make_encoding("huang4", head_dim=64).cuda()

    def run():
        out = lagwise.attention(q, k, v, encoding, impl="split")
        return [out, *torch.autograd.grad(out.float().square().sum(), [q, k, v, *encoding.parameters()])]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)
    assert_within_budget("split", *tensors(), encoding)


SCALARS = ("bias", "gain", "query", "key", "value")
CHANNELS = ("bias", "channel gain", "query", "key", "value")
SLOPED = ("slopes", "gain", "query", "key", "value")
HOLES = torch.tensor([[j % 3 > 0 for j in range(300)], [j == 77 for j in range(300)]])
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def words(x) -> str:
    """Names a case: its tables, its shape, its options."""
    if isinstance(x, tuple):
        return {SCALARS: "all", CHANNELS: "channels", SLOPED: "sloped"}.get(x, "+".join(map(str, x)) or "no table")
    if isinstance(x, dict):
        return ",".join(f"{name}={words(value)}" for name, value in x.items()) or "plain"
    if isinstance(x, torch.Tensor) and x.numel() > 8:
        return "mask"
    return str(x.tolist() if isinstance(x, torch.Tensor) else x).replace(" ", "").replace("torch.", "")


def check(tables, shape=None, max_lag=40, impl="triton", **options):
    """Compares a call with random tables with the specification."""
    q, k, v = tensors(**{"heads": 2, **(shape or {})})
    sizes = {"heads": q.shape[1], "head_dim": q.shape[3], "value_dim": v.shape[3], "max_lag": max_lag}
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert_within_budget(impl, q, k, v, on_gpu(make_terms(*tables, **sizes)), **options)


@pytest.mark.parametrize("causal", [False, True])
def test_triton_with_every_encoding(relative_name, causal, poisoned):
    assert_within_budget("triton", *tensors(), make_encoding(relative_name, head_dim=64).cuda(), causal=causal)


# Cases are ordered so that neighbours share compiled kernels.
@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (SCALARS, {}, {}),
        (SCALARS, {"queries": 150, "keys": 300}, {"query_start": 100}),
        (SCALARS, {"queries": 300, "keys": 150}, {"query_start": -40}),
        (SCALARS, {}, {"causal": True}),
        (SCALARS, {"queries": 150, "keys": 300}, {"window": (20, 3)}),
        (SCALARS, {"queries": 300, "keys": 150}, {"query_start": -200, "causal": True, "window": (90, 90)}),
        (SCALARS, {"queries": 256}, {}),
        (SCALARS, {"queries": 256}, {"causal": True}),
        (SCALARS, {"queries": 256}, {"window": (100, 50)}),
        (CHANNELS, {}, {}),
        (CHANNELS, {"queries": 150, "keys": 300}, {"query_start": 100}),
        (CHANNELS, {}, {"causal": True}),
        (CHANNELS, {"queries": 256}, {"causal": True}),
        (SLOPED, {"queries": 150, "keys": 300}, {"query_start": -40}),
        (SLOPED, {}, {"window": (200, 1)}),
        (SCALARS, {"queries": 150, "keys": 300}, {"query_start": torch.tensor([3, 150]), "causal": True}),
        (CHANNELS, {"queries": 5, "keys": 300}, {"query_start": torch.tensor([0, 295])}),
        (SCALARS, {}, {"lengths": torch.tensor([0, 200])}),
        (SCALARS, {}, {"key_mask": HOLES}),
        (SCALARS, {}, {"key_mask": HOLES, "causal": True}),
        (CHANNELS, {"queries": 150, "keys": 300}, {"key_mask": HOLES}),
        (SLOPED, {}, {"key_mask": torch.arange(300) >= torch.tensor([[0], [280]]), "causal": True}),
        (SCALARS, {"batch": 1}, {"cu_seqlens": torch.tensor([0, 1, 130, 130, 300])}),
        (SCALARS, {"batch": 1}, {"cu_seqlens": torch.tensor([0, 64, 128, 300, 300]), "causal": True}),
        (CHANNELS, {"batch": 1}, {"cu_seqlens": torch.tensor([0, 200, 300]), "causal": True}),
        (SCALARS, {}, {"dropout": 0.3}),
        (CHANNELS, {}, {"dropout": 0.3, "causal": True}),
        (SCALARS, {"batch": 1}, {"dropout": 0.3, "cu_seqlens": torch.tensor([0, 100, 300])}),
        (("query", "key", "transform"), {"kv_heads": 1}, {}),
        (SCALARS, {"heads": 6, "kv_heads": 2}, {}),
        (CHANNELS, {"heads": 3, "kv_heads": 1}, {"causal": True}),
        (SCALARS, {"dtype": F16}, {}),
        (CHANNELS, {"dtype": F16}, {"causal": True}),
        (SLOPED, {"dtype": F16}, {"key_mask": HOLES, "dropout": 0.3}),
        (("bias", "query", "value"), {"dtype": F32}, {}),
        (("key", "gain"), {"dtype": F32}, {"causal": True}),
        (("channel gain", "slopes"), {"dtype": F32}, {"key_mask": HOLES}),
    ],
    ids=words,
)
def test_triton_options(tables, shape, options, poisoned):
    check(tables, shape, **options)


@pytest.mark.parametrize("tables", [SCALARS, ("channel gain", "slopes")], ids=words)
@pytest.mark.parametrize("head_dim", [16, 32, 40, 80, 96, 128, 192, 256])
def test_triton_head_sizes(tables, head_dim, poisoned):
    check(tables, {"head_dim": head_dim, "batch": 1}, causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (128, 40), (40, 24), (16, 256), (256, 16)])
def test_triton_value_widths(head_dim, value_dim, poisoned):
    check(("bias", "query", "value"), {"head_dim": head_dim, "value_dim": value_dim})


@pytest.mark.parametrize("head_dim", [128, 256])
def test_triton_wide_heads_in_float32(head_dim, poisoned):
    check(("bias", "query", "key"), {"head_dim": head_dim, "dtype": F32, "batch": 1})


@pytest.mark.parametrize("max_lag", [0, 3, 200, 1024])
@pytest.mark.parametrize("tables", [SCALARS, ("channel gain",)], ids=words)
def test_triton_tables_of_one_lag_and_wider_than_the_sequence(tables, max_lag, poisoned):
    check(tables, {"batch": 1, "queries": 200}, max_lag)


@pytest.mark.parametrize("tables", [SCALARS, CHANNELS], ids=words)
def test_triton_goes_range_by_range(tables, monkeypatch, poisoned):
    for name, value in {"WIDEST": 64, "LARGEST": 0, "LEAST": 0, "SHARE": 0}.items():
        monkeypatch.setattr(f"lagwise.ops.kernels.pieces.{name}", value)
    check(tables, {"queries": 200, "keys": 300}, 100, query_start=50, causal=True)
    check(tables, {"batch": 1}, 100)


@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (1, 700), (700, 1), (129, 64), (2, 3)])
def test_triton_lengths(queries, keys, poisoned):
    check(SCALARS, {"queries": queries, "keys": keys, "heads": 4})


def test_triton_strides_do_not_matter(poisoned):
    terms = on_gpu(make_terms(*SCALARS, heads=2, head_dim=64, value_dim=64))
    packed = torch.randn(2, 300, 3, 2, 64, device="cuda", dtype=BF16).unbind(2)
    assert_within_budget("triton", *(x.transpose(1, 2) for x in packed), terms)
    spread = [torch.randn(2, 2, 300, 128, device="cuda", dtype=BF16)[..., ::2] for _ in range(3)]
    assert_within_budget("triton", *spread, terms)
    # One number further than the alignment that the kernels are compiled for.
    shifted = [torch.randn(2 * 2 * 300 * 64 + 1, device="cuda").to(BF16)[1:].view(2, 2, 300, 64) for _ in range(3)]
    assert_within_budget("triton", *shifted, terms)


def test_triton_large_logits_do_not_overflow(poisoned):
    q, k, v = (30.0 * x for x in tensors(heads=2))
    for tables in (("bias", "gain"), ("bias", "channel gain")):
        assert_within_budget("triton", q, k, v, on_gpu(make_terms(*tables, heads=2, head_dim=64)), causal=True)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-42])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tables", [(), SCALARS], ids=words)
@pytest.mark.parametrize("impl", ["triton", "split"])
def test_scales_of_any_sign(impl, tables, causal, scale):
    check(tables, impl=impl, causal=causal, scale=scale)


@pytest.mark.parametrize("columns", [(0,), (-1,), (0, -1), range(81)], ids=len)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["triton", "split"])
def test_minus_infinity_hides_as_a_mask_does(impl, causal, columns):
    terms = make_terms("bias", "query", "value", head_dim=64, value_dim=64, max_lag=40)
    terms.bias.values[0, list(columns)] = -torch.inf
    assert_within_budget(impl, *tensors(), on_gpu(terms), causal=causal)


@pytest.mark.parametrize("tables", [(), ("slopes", "gain"), SCALARS, CHANNELS, ("key", "transform")], ids=words)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_keys_may_hold_anything(dtype, causal, tables):
    terms = make_terms(*tables, head_dim=64, value_dim=64, max_lag=40)
    assert_hidden_keys_do_not_matter("triton", tensors(dtype=dtype), on_gpu(terms), causal=causal)


def test_triton_with_more_heads_than_a_grid_has_columns(poisoned):
    """The second and the third axis of a CUDA grid have at most 65,535 programs."""
    check(("bias", "query", "value"), {"batch": 8200, "heads": 8, "queries": 8, "head_dim": 16}, max_lag=2)
    check(("key", "channel gain"), {"batch": 8200, "heads": 8, "queries": 8, "head_dim": 16}, max_lag=2)


def test_auto_takes_the_far_field_earlier_for_vectors_with_many_pairs():
    def taken(name, batch, time):
        q = torch.empty(1, 1, 1, 64, device="cuda", dtype=BF16).expand(batch, 16, time, 64)
        return lagwise.which_impl(q, q, q, lagwise.make(name, heads=16, head_dim=64, max_lag=128).cuda()).impl

    assert [taken("huang4", 16, 4096), taken("huang4", 2, 4096), taken("huang4", 2, 8192)] == ["split", "triton", "split"]
    assert [taken("huang2", 16, 8192), taken("huang2", 2, 16384)] == ["triton", "split"]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"window": (30, 30)}, {"lengths": torch.tensor([20, 300])}], ids=words)
@pytest.mark.parametrize("tables", [SCALARS, ("slopes",)], ids=words)
def test_auto_is_within_the_budget(tables, options):
    check(tables, impl="auto", **options)


STRESS_TABLES = [
    SCALARS, ("bias",), ("slopes",), ("gain",), ("query",), ("key",), ("value",), ("channel gain",), CHANNELS, SLOPED,
    ("bias", "query"), ("query", "key"), ("gain", "value"), ("slopes", "channel gain"), ("key", "value"), (),
    ("channel gain", "value"), ("query", "key", "transform"), ("bias", "gain", "transform"), SCALARS,
]  # fmt: skip
STRESS_SHAPES = 26


def stress_call(case: int, draw: random.Random) -> tuple[list[torch.Tensor], lagwise.Terms, dict]:
    """Draws tensors, tables and options of a call on the CPU. What a kernel is compiled for depends on the case alone."""
    tables = STRESS_TABLES[case]
    fixed = random.Random(case)
    dtype = (BF16, F16)[case % 2]
    head_dim, value_dim = fixed.choice([(16, 16), (32, 64), (64, 64), (64, 64), (128, 128), (80, 32)])
    kind = ("plain", "mask", "plain", "packed", "starts", "plain", "lengths")[case % 7]
    limited, dropped, group = case % 3 == 1, fixed.random() < 0.3, fixed.choice([1, 1, 2])
    most = 120 if "channel gain" in tables else 400
    queries = draw.choice([draw.randint(1, 40), draw.randint(20, most), draw.randint(20, most)])
    # All gradients of a single pair are zero but for rounding, which no budget measures.
    keys = max(3, queries if kind == "packed" else draw.choice([queries, draw.randint(1, most)]))
    queries = keys if kind == "packed" else queries
    batch, heads = (1 if kind == "packed" else 2), 2 * group
    options: dict = {"dropout": 0.25 if dropped else 0.0}
    if limited:
        options["causal"] = draw.random() < 0.6
        if not options["causal"] or draw.random() < 0.3:
            options["window"] = (draw.randint(0, 200), draw.randint(0, 200))
    if kind == "plain":
        options["query_start"] = draw.choice([0, 0, keys - queries, draw.randint(-queries, keys)])
    elif kind == "starts":
        options["query_start"] = torch.tensor([draw.randint(0, keys) for _ in range(batch)])
    elif kind == "lengths":
        options["lengths"] = torch.tensor([draw.randint(0, keys), keys])
    elif kind == "mask":
        options["key_mask"] = torch.rand(batch, keys) < draw.choice([0.03, 0.5, 0.97])
        # As above: where few queries see one key each, there is nothing but rounding.
        options["key_mask"][:, :3] |= queries < 8
    elif kind == "packed":
        inner = sorted(draw.randint(0, keys) for _ in range(draw.randint(0, 5)))
        options["cu_seqlens"] = torch.tensor([0, *inner, keys])
    made = {}
    for name in tables:
        if name == "transform":
            continue
        lags = draw.choice([1, draw.randint(1, 20), draw.randint(1, 300)])
        # The gradient of a single slope is one number, which may happen to be small beside the terms in it.
        rows = heads if name == "slopes" else draw.choice([1, heads])
        first = draw.choice([-(lags // 2), draw.randint(-lags - 60, 60)])
        channels = {"bias": (), "slopes": (), "gain": (1,), "value": (value_dim,)}.get(name, (head_dim,))
        slopes = (torch.rand(rows) / 8, -torch.rand(rows) / 8) if name == "slopes" else None
        field = {"slopes": "bias", "channel gain": "gain"}.get(name, name)
        made[field] = lagwise.LagTable(torch.randn(rows, lags, *channels), first, slopes)
    transform = lagwise.Rotary(head_dim=head_dim).terms(0, 0, scale=1.0).transform if "transform" in tables else None
    q = torch.randn(batch, heads, queries, head_dim).to(dtype)
    k = torch.randn(batch, heads // group, keys, head_dim).to(dtype)
    v = torch.randn(batch, heads // group, keys, value_dim).to(dtype)
    return [q, k, v], lagwise.Terms(**made, transform=transform), options


def stress(impl: str, calls: Iterable[tuple[list[torch.Tensor], lagwise.Terms, dict]]) -> None:
    """Compares calls with the specification and tells of all that fail."""
    failures = []
    for index, ((q, k, v), terms, options) in enumerate(calls):
        options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        try:
            assert_within_budget(impl, q.cuda(), k.cuda(), v.cuda(), on_gpu(terms), **options)
        except AssertionError as error:
            lags = {name: (table.first, table.last) for name, table in terms.tables().items()}
            failures.append(f"{index}: q {tuple(q.shape)}, k {tuple(k.shape)}, {lags}, {options}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", range(len(STRESS_TABLES)))
def test_triton_stress(case, poisoned):
    """Many random shapes, tables, masks and offsets: 520 calls over all cases."""
    draw = random.Random(1000 + case)

    def calls():
        for index in range(STRESS_SHAPES):
            torch.manual_seed(100 * case + index)
            yield stress_call(case, draw)

    stress("triton", calls())


SPLIT_TABLES = [SCALARS, ("bias",), ("gain", "key"), ("query", "value"), CHANNELS]


@pytest.mark.parametrize("tables", SPLIT_TABLES, ids=words)
def test_split_stress(tables, poisoned):
    """Random lengths, offsets and tables that lie anywhere; the far fields have from no row to all of them."""
    draw = random.Random(len(tables))

    def calls():
        for index in range(12):
            torch.manual_seed(index)
            group, queries = draw.choice([1, 2]), draw.choice([draw.randint(20, 90), draw.randint(90, 500)])
            keys = draw.choice([queries, draw.randint(20, 500)])
            made = make_terms(*tables, heads=2 * group, head_dim=64, value_dim=64, max_lag=draw.choice([0, 5, 40]))
            shift = draw.choice([0, 0, draw.randint(-60, 60)])
            moved = {name: lagwise.LagTable(table.values, table.first + shift) for name, table in made.tables().items()}
            shapes = [(2, 2 * group, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64)]
            options = {"causal": draw.random() < 0.4, "query_start": draw.choice([0, 0, keys - queries, draw.randint(-40, keys)])}
            yield [torch.randn(shape).to(BF16) for shape in shapes], lagwise.Terms(**moved), options

    stress("split", calls())


@pytest.mark.parametrize("name", ["t5", "huang4", "shaw", "huang3"])
@pytest.mark.parametrize("impl", ["triton", "split"])
def test_memory_grows_with_the_length_and_not_with_its_square(impl, name):
    encoding = make_encoding(name, heads=2, head_dim=64, max_lag=64).cuda()

    def peak(time: int) -> int:
        q, k, v = (x.requires_grad_() for x in tensors(batch=1, heads=2, queries=time))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        lagwise.attention(q, k, v, encoding, impl=impl).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    # The first calls set up kernels, workspaces and the gradients of the parameters.
    peak(4096), peak(8192)
    half, whole = peak(4096), peak(8192)
    assert whole <= 2.2 * half
    # One head's matrix of pairs, in the type of q.
    assert whole < 8192 * 8192 * 2


def leaves_of(terms: lagwise.Terms) -> list[torch.Tensor]:
    """Returns the tables and slopes of terms, made to require gradients."""
    values = [table.values for table in terms.tables().values()]
    slopes = [slope for table in terms.tables().values() for slope in table.slopes or ()]
    return [x.requires_grad_() for x in (*values, *slopes)]


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (SCALARS, {"dropout": 0.1}),
        (CHANNELS, {"causal": True}),
        (SLOPED, {"lengths": torch.tensor([700, 300])}),
        (("query", "key", "transform"), {}),
    ],
    ids=words,
)
def test_triton_repeats_bit_for_bit(tables, options):
    q, k, v = (x.requires_grad_() for x in tensors(queries=700, kv_heads=2))
    terms = on_gpu(make_terms(*tables, head_dim=64, value_dim=64, max_lag=40))
    wanted = [q, k, v, *leaves_of(terms)]
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    seed = torch.tensor(7, device="cuda")

    def run():
        out, lse = lagwise.attention(q, k, v, terms, impl="triton", return_lse=True, seed=seed, **options)
        finite = torch.where(lse == -torch.inf, 0.0, lse)
        return [out, lse, *torch.autograd.grad(out.float().square().sum() + finite.sum(), wanted)]

    first = run()
    for _ in range(3):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["t5", "at5", "shaw", "huang3", "huang4", "xl", "kerple", "conv-spe"])
def test_triton_repeats_the_gradients_of_parameters(name, deterministic):
    q, k, v = (x.requires_grad_() for x in tensors(queries=700))
    encoding = make_encoding(name, head_dim=64, max_lag=40).cuda()
    wanted = [q, k, v, *(x for x in encoding.parameters() if x.requires_grad)]

    def run():
        out = lagwise.attention(q, k, v, encoding, impl="triton", seed=torch.tensor(7, device="cuda"))
        return [out, *torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)]

    for a, b in zip(run(), run(), strict=True):
        assert a is b is None or torch.equal(a, b)


# Inductor's own imports and its advice warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["none", "t5", "huang4", "shaw", "rotary"])
@pytest.mark.parametrize("impl", ["triton", "split"])
def test_compiled_attention_is_attention(impl, name):
    torch._dynamo.reset()
    encoding = make_encoding(name, head_dim=64).cuda()
    seed = torch.tensor(3, device="cuda")

    def function(q, k, v):
        return lagwise.attention(q, k, v, encoding, causal=True, seed=seed, impl=impl)

    compiled = torch.compile(function, fullgraph=True)
    for time in (700, 701):
        q, k, v = (x.requires_grad_() for x in tensors(queries=time))
        wanted = [q, k, v, *encoding.parameters()]
        dout = torch.randn_like(q)
        expected, actual = function(q, k, v), compiled(q, k, v)
        # The compiler rounds a transform less often.
        torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=1e-3)
        for a, b in zip(
            torch.autograd.grad(actual, wanted, dout, allow_unused=True),
            torch.autograd.grad(expected, wanted, dout, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["t5", "huang4"])
@pytest.mark.parametrize("options", [{"dynamic": True}, {"mode": "reduce-overhead"}], ids=words)
def test_twelve_layers_train_as_one_graph(options, name):
    """At any length where lengths are dynamic; as two CUDA graphs, forward and backward, where these are asked for."""
    torch._dynamo.reset()
    counters.clear()
    model = twelve_layers(name, head_dim=64, max_lag=40).cuda().to(BF16)
    compiled = torch.compile(model, fullgraph=True, **options)
    batches = [
        torch.randn(2, time, model.dim, device="cuda", dtype=BF16)
        for time in ((300, 331, 402) if "dynamic" in options else (300,))
    ]
    # CUDA graphs are captured in the second step.
    for _ in range(2):
        gradients(model, compiled, batches[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for x in batches:
            assert_gradients_within_budget(model, compiled, x)
    assert not counters["graph_break"]
    if "mode" in options:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            gradients(model, compiled, batches[0])
        launched = [event.count for event in profiler.key_averages() if event.key == "cudaGraphLaunch"]
        assert launched == [2] and counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("tables", [SCALARS, CHANNELS], ids=words)
def test_triton_passes_the_operator_check(tables):
    terms = on_gpu(make_terms(*tables, heads=2, head_dim=16, value_dim=16, max_lag=5))
    leaves_of(terms)
    q, k, v = (x.requires_grad_() for x in tensors(batch=1, heads=2, queries=70, head_dim=16, dtype=F32))
    arguments = flat(lower(q, k, v, terms, Call(scale=0.25)))
    torch.library.opcheck(torch.ops.lagwise.triton.default, arguments)


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (SCALARS, {"causal": True}),
        (CHANNELS, {"lengths": torch.tensor([300, 200])}),
        (SLOPED, {"dropout": 0.2}),
        (("bias", "key"), {"query_start": torch.tensor([0, 7])}),
    ],
    ids=words,
)
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_triton_in_a_cuda_graph(tables, options):
    q, k, v = (x.requires_grad_() for x in tensors(queries=300, heads=2))
    terms = on_gpu(make_terms(*tables, heads=2, head_dim=64, value_dim=64, max_lag=40))
    wanted = [q, k, v, *leaves_of(terms)]
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    seed, dout = torch.tensor(7, device="cuda"), torch.randn_like(v)

    def run():
        out = lagwise.attention(q, k, v, terms, impl="triton", seed=seed, **options)
        return [out, *torch.autograd.grad(out, wanted, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in (*wanted, dout):
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", ["triton", "split"])
def test_autocast(impl):
    q, k, v = (x.requires_grad_() for x in tensors(dtype=F32))
    encoding = make_encoding("shaw", head_dim=64).cuda()
    with torch.autocast("cuda", dtype=BF16):
        out = lagwise.attention(q, k, v, encoding, impl=impl)
    assert out.dtype == BF16
    assert torch.equal(out, lagwise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), encoding, impl=impl))
    assert all(g.dtype == F32 for g in torch.autograd.grad(out.float().square().sum(), [q, k, v, *encoding.parameters()]))


CODE_SHAPES = {
    "as published": {"batch": 8, "time": 300, "head_dim": 16, "realizations": 64},
    "one row, long": {"time": 5000, "head_dim": 8, "realizations": 32},
    "many realizations": {"batch": 2, "time": 100, "realizations": 256},
    "many realizations side by side": {"batch": 2, "time": 100, "realizations": 256, "consecutive": True},
    "bfloat16": {"batch": 3, "time": 130, "realizations": 64, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("shape", CODE_SHAPES.values(), ids=CODE_SHAPES)
@pytest.mark.parametrize("kind", [("sine-spe", {"sines": 5}), ("conv-spe", {"kernel_size": 128})], ids=["sine", "conv"])
def test_code_kernels_are_within_the_budget(kind, shape):
    assert_kernels_within_budget(*kernel_call(kind, device="cuda", **shape))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_code_kernels_with_every_option(call):
    kind, options = call
    assert_kernels_within_budget(*kernel_call(kind, device="cuda", **options))


@pytest.mark.parametrize("size", [1e-30, 1e-37, 1e-41])
@pytest.mark.parametrize("kind", [("sine-spe", {"sines": 5}), ("conv-spe", {"kernel_size": 128})], ids=["sine", "conv"])
def test_code_kernels_where_a_token_has_next_to_no_gradient(kind, size):
    weight = torch.tensor([1.0, size, 0.0, 1.0], device="cuda")[:, None]
    assert_kernels_within_budget(*kernel_call(kind, device="cuda", time=4, realizations=64), weight=weight)


def test_codes_on_a_grid_are_those_of_the_cpu():
    encoding, q, k, *positions = kernel_call(("conv-spe", {"kernel_size": (2, 3), "grid": (5,)}), batch=2, time=25)
    expected = features(encoding, q, k, *positions)
    actual = features(encoding.cuda(), q.cuda(), k.cuda(), *(x.cuda() for x in positions))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("shape", "per_row"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rotation_kernel(shape, per_row, interleaved, dtype):
    x, cos, sin = case(shape, per_row, dtype, "cuda")
    expected = by_hand(x, cos, sin, interleaved)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        found, _ = turn(given, given, (cos, sin), interleaved=interleaved)
        assert found.stride() == given.stride()
        torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("impl", ["triton", "split"])
@pytest.mark.parametrize("name", ["t5", "huang2", "huang4"])
def test_tensors_that_lie_token_by_token(name, impl):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(queries=700))
    encoding = make_encoding(name, heads=4, head_dim=64).cuda()
    assert_within_budget(impl, q, k, v, encoding)
    out = lagwise.attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), encoding, impl=impl)
    found = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert [x.stride() for x in (out, *found)] == [x.stride() for x in (q, q, k, v)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "rotary"])
def test_attention_without_tables_is_the_vendors(name, causal):
    for sizes in ({}, {"queries": 40}, {"kv_heads": 2}, {"head_dim": 128}):
        q, k, v = tensors(**sizes)
        encoding = make_encoding(name, heads=4, head_dim=q.shape[3])
        assert lagwise.which_impl(q, k, v, encoding, causal=causal).impl == "split"
        assert_within_budget("split", q, k, v, encoding, causal=causal, return_lse=False)


@pytest.mark.parametrize("name", ["sine-spe", "conv-spe"])
def test_linear_attention_with_codes_repeats_and_grows_with_the_length(name):
    encoding = lagwise.make(name, heads=4, head_dim=32).cuda()

    def step(time):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, time, 32, device="cuda", requires_grad=True) for _ in range(3))
        torch.cuda.reset_peak_memory_stats()
        out = lagwise.linear_attention(q, k, v, encoding, feature_map="relu", seed=torch.tensor(3, device="cuda"))
        found = torch.autograd.grad(out.square().sum(), [q, k, v, *encoding.parameters()])
        return torch.cuda.max_memory_allocated(), [out, *found]

    step(2048)
    (half, _), (whole, first), (_, again) = step(2048), step(4096), step(4096)
    assert whole < 2.2 * half
    # The products with v are cuBLAS's, which repeats with a workspace of its own.
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("impl", ["triton", "split"])
@pytest.mark.parametrize("name", ["t5", "shaw", "huang2", "huang3", "huang4"])
def test_a_first_call_leaves_nothing_to_compile_to_its_gradient(name, impl):
    # No other test has heads of this width: in this process these kernels are new, whatever is on disk.
    q, k, v = (torch.randn(2, 500, 4, 44, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for _ in range(3))
    encoding = lagwise.make(name, heads=4, head_dim=44, max_lag=20).cuda()
    with counted_kernels() as first:
        out = lagwise.attention(q, k, v, encoding, impl=impl)
    with counted_kernels() as left:
        out.backward(torch.ones_like(out))
    assert first.made | first.found and not left.made | left.found


def test_a_warmup_leaves_nothing_to_compile():
    sizes = {"heads": 4, "head_dim": 36}
    lagwise.warmup("huang4", **sizes, times=[512], padded=True, dropout=0.1, max_lag=20)
    q, k, v = (torch.randn(3, 384, 4, 36, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for _ in range(3))
    encoding = lagwise.make("huang4", **sizes, max_lag=20).cuda()
    with counted_kernels() as left:
        for lengths in (None, torch.tensor([384, 3, 200], device="cuda")):
            out = lagwise.attention(q, k, v, encoding, lengths=lengths, dropout=0.1)
            out.backward(torch.ones_like(out))
    assert not left.made


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_does_not_wait_for_the_gpu(encoding_name, attention, packed):
    if attention == "softmax" and lagwise.ENCODINGS[encoding_name].linear_only:
        pytest.skip("stochastic encodings are for linear attention")
    if attention == "linear" and encoding_name in ("shaw", "huang1", "huang2", "huang3", "huang4", "xl", "xpos"):
        pytest.skip("refused there")
    model = lagwise.nn.Encoder(64, layers=2, heads=4, encoding=encoding_name, attention=attention, norm="post").cuda()
    ends = {"cu_seqlens": torch.tensor([0, 200, 300], device="cuda"), "max_seqlen": 200} if packed else {}
    x = torch.randn(1 if packed else 2, 300, 64, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, **ends).float().square().mean()
        loss.backward()
        return loss.detach()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
