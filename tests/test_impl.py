"""Every implementation of plain torch against the specification: outputs, all gradients, over encodings, options, odd shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_hidden_keys_do_not_matter, assert_within_budget, make_encoding, make_terms

import lagwise
from lagwise import softmax
from lagwise.ops import merge, support

# The Triton kernels have files of their own: test_triton.py and test_gpu.py.
FAST = [impl for impl in support.IMPLEMENTATIONS if impl not in ("dense", "triton")]


def tensors(batch=2, heads=4, queries=37, keys=None, head_dim=8, value_dim=None, kv_heads=None, dtype=torch.float32):
    keys, kv_heads = keys or queries, kv_heads or heads
    return (
        torch.randn(batch, heads, queries, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or head_dim).to(dtype),
    )


def refuses(impl: str, *features: str) -> bool:
    return support.refusal(impl, set(features)) is not None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", FAST)
def test_every_encoding(impl, relative_name, causal, poisoned):
    if relative_name == "alibi" and refuses(impl, "slopes"):
        pytest.skip("sloped tails: the support table says no")
    assert_within_budget(impl, *tensors(), make_encoding(relative_name), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", FAST)
def test_every_dtype(impl, dtype, poisoned):
    terms = make_terms("bias", "gain", "query", "key", "value")
    assert_within_budget(impl, *tensors(queries=70, dtype=dtype), terms)


SHAPES_OF_PLAIN = [{}, {"kv_heads": 2}, {"value_dim": 24}, {"keys": 13}, {"head_dim": 40}, {"queries": 300, "batch": 1}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES_OF_PLAIN, ids=str)
@pytest.mark.parametrize("name", ["none", "rotary"])
def test_attention_without_tables_and_without_its_sum(name, shape, causal, dtype, monkeypatch):
    """Such calls go to the vendor's kernel alone, unless a causal mask would not begin in the corner."""
    q, k, v = tensors(dtype=dtype, **shape)
    ran = []
    compute = softmax.compute
    monkeypatch.setattr(softmax, "compute", lambda impl, lowered: ran.append(impl) or compute(impl, lowered))
    encoding = make_encoding(name, head_dim=q.shape[3])
    assert_within_budget("split", q, k, v, encoding, causal=causal, return_lse=False)
    # The helper asks for the sum once.
    assert ran == ["split"] * (2 if causal and "keys" in shape else 1)


@pytest.mark.parametrize("tables", [(), ("bias",), ("gain",), ("channel gain",), ("query",), ("key",), ("value",)])
@pytest.mark.parametrize("max_lag", [0, 2, 60])
@pytest.mark.parametrize("impl", FAST)
def test_tables_of_one_lag_and_wider_than_the_sequence(impl, tables, max_lag):
    assert_within_budget(impl, *tensors(), make_terms(*tables, max_lag=max_lag))


@pytest.mark.parametrize(
    "shape",
    [
        {"queries": 1},
        {"queries": 2, "batch": 1, "heads": 1},
        {"queries": 13, "keys": 40},
        {"queries": 40, "keys": 13},
        {"queries": 37, "head_dim": 40},
        {"queries": 37, "value_dim": 5},
        {"queries": 37, "value_dim": 24},
        {"queries": 37, "heads": 6, "kv_heads": 2},
        {"queries": 33, "heads": 3, "kv_heads": 1},
        {"queries": 257, "batch": 1, "heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", FAST)
def test_odd_shapes(impl, shape, causal, poisoned):
    q, k, v = tensors(**shape)
    sizes = {"heads": q.shape[1], "head_dim": q.shape[3], "value_dim": v.shape[3]}
    assert_within_budget(impl, q, k, v, make_terms("bias", "gain", "query", "key", "value", **sizes), causal=causal)


@pytest.mark.parametrize("start", [-50, -7, 0, 3, 27, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", FAST)
def test_query_start(impl, start, causal):
    terms = make_terms("bias", "gain", "query", "key", "value")
    assert_within_budget(impl, *tensors(queries=13, keys=40), terms, causal=causal, query_start=start)


@pytest.mark.parametrize("first", [-9, -4, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", FAST)
def test_tables_that_lie_to_one_side(impl, first, causal):
    table = lagwise.LagTable(torch.randn(4, 3), first)
    assert_within_budget(impl, *tensors(), lagwise.Terms(bias=table), causal=causal)


@pytest.mark.parametrize("impl", FAST)
def test_tables_of_different_ends(impl):
    bias, key = lagwise.LagTable(torch.randn(1, 4), -7), lagwise.LagTable(torch.randn(4, 6, 8), 1)
    gain = lagwise.LagTable(torch.randn(4, 2, 1), -1)
    assert_within_budget(impl, *tensors(), lagwise.Terms(bias=bias, key=key, gain=gain))


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (2, 9), (100, 100)])
@pytest.mark.parametrize("impl", FAST)
def test_window(impl, window):
    assert_within_budget(impl, *tensors(), make_terms("bias", "query"), window=window)


def test_window_that_sees_nothing():
    assert_within_budget("blockwise", *tensors(queries=13, keys=9), make_terms("bias"), window=(2, 2), query_start=20)


@pytest.mark.parametrize("lengths", [[37, 37], [1, 20], [0, 5]])
def test_lengths(lengths):
    assert_within_budget("blockwise", *tensors(), make_terms("bias", "query", "key", "value"), lengths=torch.tensor(lengths))


@pytest.mark.parametrize("causal", [False, True])
def test_key_mask_pads_on_the_left(causal):
    mask = torch.arange(37) >= torch.tensor([[0], [30]])
    assert_within_budget("blockwise", *tensors(), make_terms("bias", "key"), key_mask=mask, causal=causal)


@pytest.mark.parametrize("ends", [[0, 37], [0, 1, 5, 37], [0, 12, 12, 37]])
@pytest.mark.parametrize("name", ["t5", "shaw", "rotary", "sine-spe"])
def test_packed_sequences(ends, name):
    assert_within_budget("blockwise", *tensors(batch=1), make_encoding(name), cu_seqlens=torch.tensor(ends), causal=True)


@pytest.mark.parametrize("start", [torch.tensor([0, 27]), torch.tensor([13, 40]), torch.tensor(27)], ids=str)
@pytest.mark.parametrize("name", ["t5", "rotary", "conv-spe", "xl"])
def test_query_start_per_row(start, name):
    assert_within_budget("blockwise", *tensors(queries=5, keys=40), make_encoding(name), query_start=start, causal=True)


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": torch.tensor([0, 20, 37])}, {"query_start": torch.tensor([3])}], ids=str)
def test_dropout(options):
    terms = make_terms("bias", "gain", "query", "key", "value")
    assert_within_budget("blockwise", *tensors(batch=1), terms, dropout=0.4, **options)


@pytest.mark.parametrize("impl", FAST)
def test_more_keys_than_one_tile_holds(impl):
    q, k, v = tensors(batch=1, heads=1, queries=5, keys=9000, head_dim=4)
    assert_within_budget(impl, q, k, v, make_terms("bias", "query", "value", heads=1, head_dim=4, value_dim=4))


@pytest.mark.parametrize("impl", FAST)
def test_strides_do_not_matter(impl):
    base = [torch.randn(2, 37, 4, 16).transpose(1, 2)[..., ::2] for _ in range(3)]
    assert not base[0].is_contiguous()
    assert_within_budget(impl, *base, make_terms("bias", "query", "key"))


@pytest.mark.parametrize("impl", FAST)
def test_large_logits_do_not_overflow(impl):
    q, k, v = (30.0 * x for x in tensors())
    assert_within_budget(impl, q, k, v, make_terms("bias", "gain"))


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-42, -1e-300, 3.0])
@pytest.mark.parametrize("tables", [(), ("bias",), ("gain", "query", "key", "value")], ids=len)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", FAST)
def test_scales_of_any_sign(impl, causal, tables, scale):
    assert_within_budget(impl, *tensors(), make_terms(*tables), causal=causal, scale=scale)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_compiled_plain_call_takes_scales_of_any_sign(scale):
    q, k, v = tensors(queries=200)

    def call(q, k, v):
        return lagwise.attention(q, k, v, causal=True, scale=scale)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


@pytest.mark.parametrize("columns", [(0,), (-1,), (0, -1), range(11)], ids=len)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["dense", *FAST])
def test_minus_infinity_hides_as_a_mask_does(impl, causal, columns):
    """Of the first head, so that the others have logits; where all columns are hidden, its rows see nothing."""
    terms = make_terms("bias", "query", "value")
    terms.bias.values[0, list(columns)] = -torch.inf
    assert_within_budget(impl, *tensors(), terms, causal=causal)
    out, lse = lagwise.attention(*tensors(), terms, causal=causal, impl=impl, return_lse=True)
    assert not out[lse == -torch.inf].any()
    assert (lse[:, 0] == -torch.inf).all() == (len(columns) == 11)


@pytest.mark.parametrize("tables", [(), ("slopes", "gain"), ("query", "key", "value"), ("channel gain",), ("key", "transform")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_hidden_keys_may_hold_anything(impl, causal, tables):
    assert_hidden_keys_do_not_matter(impl, tensors(), make_terms(*tables), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_specification_sums_gradients_of_tables_in_float32(dtype):
    """One column gets the sum of 90,000 numbers, of which half precision would lose most."""
    q, k, v = (x.to(dtype) for x in tensors(batch=1, heads=1, queries=300))
    found = []
    for kind in (dtype, torch.float64):
        values = torch.zeros(1, 1, 8, dtype=dtype, requires_grad=True)
        terms = lagwise.Terms(value=lagwise.LagTable(values, 0))
        out = lagwise.attention(q.to(kind), k.to(kind), v.to(kind), terms, impl="dense")
        found.append(torch.autograd.grad(out.sum(), values)[0])
    torch.testing.assert_close(found[0], found[1], rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("impl", FAST)
def test_sums_of_encodings(impl):
    encoding = make_encoding("t5") + make_encoding("shaw") + make_encoding("rotary")
    assert_within_budget(impl, *tensors(), encoding)


@pytest.mark.parametrize("impl", ["dense", *FAST])
def test_a_call_repeats_bit_for_bit(impl):
    q, k, v = (x.requires_grad_() for x in tensors(queries=300))
    encoding = make_encoding("huang4")

    def run():
        out = lagwise.attention(q, k, v, encoding, impl=impl)
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, *encoding.parameters()])]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", FAST)
def test_gradients_are_the_derivative(impl):
    q, k, v = (x.double().requires_grad_() for x in tensors(batch=1, heads=2, queries=7, head_dim=3))
    terms = make_terms("bias", "gain", "query", "key", "value", heads=2, head_dim=3, value_dim=3, max_lag=2).to(torch.float64)
    values = [table.values.requires_grad_() for table in terms.tables().values()]

    def function(q, k, v, *values):
        tables = {name: lagwise.LagTable(x, -2) for name, x in zip(terms.tables(), values, strict=True)}
        return lagwise.attention(q, k, v, lagwise.Terms(**tables), return_lse=True, impl=impl)

    torch.autograd.gradcheck(function, (q, k, v, *values))


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("name", ["t5", "xl"])
def test_autocast(name, impl):
    q, k, v = tensors()
    encoding = make_encoding(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lagwise.attention(q, k, v, encoding, impl=impl)
    assert out.dtype == torch.bfloat16
    expected = lagwise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), encoding, impl=impl)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("impl", FAST)
def test_memory_grows_with_the_length_and_not_with_its_square(impl):
    """No tensor that is allocated holds two time axes, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor) and x._is_view() is False:
                    self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
            return result

    def largest(time):
        q, k, v = (x.requires_grad_() for x in tensors(batch=1, heads=2, queries=time))
        with Largest() as mode:
            lagwise.attention(q, k, v, make_encoding("huang4", heads=2), impl=impl).sum().backward()
        return mode.numbers

    assert largest(4096) <= 2.2 * largest(2048)
    assert largest(4096) < 4096 * 4096 / 2


@given(queries=st.integers(1, 12), keys=st.integers(1, 12), limit=st.integers(-15, 15))
def test_pieces_of_a_far_field_hold_each_pair_once(queries, keys, limit):
    rows, seen = merge.extent(queries, keys, limit)
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for piece in merge.pieces(queries, keys, limit):
        height, width = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
        assert height > 0 and width > 0 and (not piece.causal or height == width)
        inside = torch.ones(height, width, dtype=torch.int64)
        count[piece.rows, piece.keys] += inside.tril() if piece.causal else inside
        assert piece.rows.start >= queries - rows and piece.keys.stop <= seen
    lag = torch.arange(keys) - torch.arange(queries)[:, None]
    assert torch.equal(count, (lag <= limit).long())
    # A square band's far field is one triangle: one call of the vendor's kernel.
    if queries == keys and limit <= 0:
        assert len(list(merge.pieces(rows, seen, limit + queries - rows))) <= 1


def test_auto_says_what_it_takes_and_why():
    q, k, v = tensors(batch=1, queries=1000)
    why = "1000 keys are at least 9, from which on the far field of these tables pays"
    assert lagwise.which_impl(q, k, v, make_encoding("t5")) == ("split", why)
    few = [x[:, :, :100] for x in (q, k, v)]
    assert lagwise.which_impl(*few, make_encoding("t5")).impl == "dense"
    assert lagwise.which_impl(*few, make_encoding("shaw")).impl == "split"
    assert lagwise.which_impl(*(x.bfloat16() for x in few), make_encoding("t5")).impl == "split"
    assert lagwise.which_impl(q, k, v).impl == "split"
    assert lagwise.which_impl(q, k, v, make_encoding("kerple")).impl == "blockwise"
    assert "sloped" in lagwise.which_impl(q, k, v, make_encoding("alibi")).why
    assert lagwise.which_impl(q, k, v, dropout=0.1).impl == "blockwise"
    assert lagwise.which_impl(q, k, v, impl="dense") == ("dense", "it was named")
    assert lagwise.which_impl(q, k, v, make_encoding("t5"), window=(9, 9)).impl == "blockwise"


def test_what_is_kept_of_calls_is_bounded():
    from lagwise.call import MOST_KEPT, keep

    kept = {}
    sizes = [len(kept) for number in range(3 * MOST_KEPT) if keep(kept, number, number) is None]
    assert max(sizes) == MOST_KEPT and kept[3 * MOST_KEPT - 1] == 3 * MOST_KEPT - 1
