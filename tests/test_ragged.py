"""Padded and packed batches keep the far field: `split` with `lengths`, with a `key_mask` like them, and with `cu_seqlens`."""

from itertools import pairwise

import pytest
import torch
from oracle import INTERPRETED, assert_within_budget, make_encoding, make_terms
from torch._subclasses.fake_tensor import FakeTensorMode

import lagwise
from lagwise import softmax
from lagwise.call import Call
from lagwise.ops import support, vendor
from lagwise.ops.dispatch import MANY_PAIRS, SPLIT_PAYS_FROM, Shape, fastest

EVERY_TABLE = ("bias", "gain", "query", "key", "value")
CHANNELS = ("bias", "channel gain", "query", "key", "value")
# Empty, of one token, shorter than a band of 11 lags, as long, longer.
LENGTHS = [[37, 37, 37], [0, 1, 37], [5, 6, 0], [11, 12, 36]]
ENDS = [[0, 37], [0, 1, 5, 37], [0, 12, 12, 37], [0, 0, 6, 17, 37], [0, 9, 18, 27, 36, 37]]


def tensors(batch=3, heads=4, queries=37, keys=None, head_dim=8, value_dim=None, kv_heads=None, dtype=torch.float32):
    keys, kv_heads = keys or queries, kv_heads or heads
    return (
        torch.randn(batch, heads, queries, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, head_dim).to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or head_dim).to(dtype),
    )


def skip_slopes(name: str) -> None:
    if name == "alibi" and support.refusal("split", {"slopes"}):
        pytest.skip("sloped tails: the support table says no")


@pytest.mark.parametrize("causal", [False, True])
def test_every_encoding_padded(relative_name, causal, poisoned):
    skip_slopes(relative_name)
    lengths = torch.tensor([37, 3, 20])
    assert_within_budget("split", *tensors(), make_encoding(relative_name), lengths=lengths, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_every_encoding_packed(relative_name, causal, poisoned):
    skip_slopes(relative_name)
    ends = torch.tensor([0, 3, 3, 20, 37])
    assert_within_budget("split", *tensors(batch=1), make_encoding(relative_name), cu_seqlens=ends, causal=causal)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("tables", [(), EVERY_TABLE, CHANNELS], ids=len)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, tables, causal, poisoned):
    assert_within_budget("split", *tensors(), make_terms(*tables), lengths=torch.tensor(lengths), causal=causal)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("tables", [(), EVERY_TABLE, CHANNELS], ids=len)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(ends, tables, causal, poisoned):
    assert_within_budget("split", *tensors(batch=1), make_terms(*tables), cu_seqlens=torch.tensor(ends), causal=causal)


@pytest.mark.parametrize("options", [{"lengths": torch.tensor([30, 9, 0])}, {"cu_seqlens": torch.tensor([0, 30, 37])}], ids=list)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_lag", [0, 2, 60])
def test_every_dtype_and_width_of_the_band(options, dtype, max_lag, poisoned):
    shape = {"batch": 3 if "lengths" in options else 1, "kv_heads": 2, "value_dim": 12, "dtype": dtype}
    assert_within_budget("split", *tensors(**shape), make_terms(*EVERY_TABLE, value_dim=12, max_lag=max_lag), **options)


@pytest.mark.parametrize(("queries", "keys"), [(13, 40), (40, 13)])
@pytest.mark.parametrize("start", [-9, 0, 27])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_keys_that_are_not_the_queries(queries, keys, start, causal, poisoned):
    options = {"lengths": torch.tensor([0, 7, keys]), "query_start": start, "causal": causal}
    assert_within_budget("split", *tensors(queries=queries, keys=keys), make_terms(*EVERY_TABLE), **options)


@pytest.mark.parametrize("options", [{"lengths": torch.tensor([20, 3, 37])}, {"cu_seqlens": torch.tensor([0, 9, 37])}], ids=list)
@pytest.mark.parametrize("first", [-9, 2, 6])
def test_tables_that_lie_to_one_side(options, first):
    batch = 3 if "lengths" in options else 1
    terms = lagwise.Terms(bias=lagwise.LagTable(torch.randn(4, 3), first))
    assert_within_budget("split", *tensors(batch=batch), terms, **options)


def test_a_window_with_lengths(poisoned):
    assert_within_budget("split", *tensors(), make_terms("query"), window=(9, 4), lengths=torch.tensor([37, 2, 20]))


def test_what_lengths_hide_may_hold_anything():
    hidden_keys_do_not_matter()


def hidden_keys_do_not_matter():
    """Requires the same bits, outputs and gradients, whatever is there: numbers, or NaN."""
    q, k, v = tensors()
    lengths = torch.tensor([37, 5, 0])
    hidden = torch.arange(37) >= lengths[:, None]
    terms = make_terms(*EVERY_TABLE)
    found = []
    for fill in (0.0, torch.nan):
        inputs = [x.requires_grad_() for x in (q.clone(), *(x.masked_fill(hidden[:, None, :, None], fill) for x in (k, v)))]
        out = lagwise.attention(*inputs, terms, lengths=lengths, impl="split")
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("given", [{}, {"lengths": torch.tensor([37, 20, 30])}], ids=list)
def test_a_key_mask_that_pads_on_the_right_is_lengths(given, poisoned):
    mask = torch.arange(37) < torch.tensor([[37], [25], [0]])
    assert_within_budget("split", *tensors(), make_terms(*EVERY_TABLE), key_mask=mask, **given)
    assert lagwise.which_impl(*tensors(queries=1000), make_encoding("t5"), key_mask=torch.ones(3, 1000).bool()).impl == "split"


@pytest.mark.parametrize("hidden", [0, 18])
def test_a_key_mask_with_holes_is_refused_in_words(hidden):
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, hidden] = False
    q, k, v = tensors(queries=200)
    with pytest.raises(ValueError, match="give lengths instead if all padding is on the right"):
        lagwise.attention(q, k, v, make_terms("bias"), key_mask=mask, impl="split")
    choice = lagwise.which_impl(q, k, v, make_terms("bias"), key_mask=mask)
    assert choice.impl == "blockwise" and "key_mask hides others" in choice.why


def test_a_batch_of_one_length_is_one_part():
    """Neighbours of one length go together, so that a batch without padding costs what it costs without lengths."""
    q, k, v = tensors()
    terms = make_terms(*EVERY_TABLE)
    lengths = torch.tensor([37, 37, 37])
    assert torch.equal(
        lagwise.attention(q, k, v, terms, lengths=lengths, impl="split"), lagwise.attention(q, k, v, terms, impl="split")
    )


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_the_derivative(packed):
    batch = 1 if packed else 2
    q, k, v = (x.double().requires_grad_() for x in tensors(batch=batch, heads=2, queries=9, head_dim=3))
    options = {"cu_seqlens": torch.tensor([0, 2, 9])} if packed else {"lengths": torch.tensor([3, 9])}
    names = {"heads": 2, "head_dim": 3, "value_dim": 3, "max_lag": 1}
    terms = make_terms(*EVERY_TABLE, **names).to(torch.float64)
    values = [table.values.requires_grad_() for table in terms.tables().values()]

    def function(q, k, v, *values):
        tables = {name: lagwise.LagTable(x, -1) for name, x in zip(terms.tables(), values, strict=True)}
        return lagwise.attention(q, k, v, lagwise.Terms(**tables), return_lse=True, impl="split", **options)

    torch.autograd.gradcheck(function, (q, k, v, *values))


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_for_any_lengths(packed):
    """What sequences there are is read when the program runs."""
    torch._dynamo.reset()
    encoding = make_encoding("huang4")

    def call(x, option):
        options = {"cu_seqlens": option} if packed else {"lengths": option}
        return lagwise.attention(x, x, x, encoding, impl="split", **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = tensors(batch=1 if packed else 2)[0]
    for option in ([0, 20, 37], [0, 3, 37]) if packed else ([20, 37], [3, 0]):
        torch.testing.assert_close(compiled(x, torch.tensor(option)), call(x, torch.tensor(option)))


def test_a_compiled_key_mask_is_not_looked_at():
    torch._dynamo.reset()
    x, mask = tensors(queries=200)[0], torch.arange(200) < torch.tensor([[200], [100], [3]])
    terms = make_terms("query")
    compiled = torch.compile(lambda x: lagwise.attention(x, x, x, terms, key_mask=mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), lagwise.attention(x, x, x, terms, key_mask=mask))


def test_auto_goes_by_the_mean_length_of_packed_sequences():
    q, k, v = tensors(batch=1, queries=1000)
    encoding = make_encoding("shaw", max_lag=60)

    def taken(*ends):
        return lagwise.which_impl(q, k, v, encoding, cu_seqlens=torch.tensor(ends))

    assert taken(0, 1000).impl == taken(0, 10, 1000).impl == "split"
    pays = "from which on the far field of these tables pays"
    assert taken(*range(0, 1001, 100)) == ("blockwise", f"100 keys per packed sequence are fewer than 121, {pays}")
    assert lagwise.which_impl(q, k, v, cu_seqlens=torch.arange(0, 1001, 10)).impl == "split"


def on_a_gpu(asked, keys, *, pairs=256, sequence=None):
    """Returns what `auto` takes for half precision and tables of 11 lags on a GPU."""
    return fastest({"cuda", "bfloat16", *asked}, Shape(pairs, keys, keys, sequence or keys), (-5, 5))


RAGGED_KINDS = [("cuda, ragged", {"bias"}), ("cuda, ragged, vectors", {"query"})]


@pytest.mark.parametrize(("kind", "tables"), RAGGED_KINDS)
@pytest.mark.parametrize("option", ["lengths", "cu_seqlens"])
def test_auto_takes_split_on_a_gpu_where_the_far_field_of_other_lengths_pays(kind, tables, option):
    asked = {option, *tables}
    if kind not in SPLIT_PAYS_FROM:
        never = "where lengths differ, the far field of these tables does not pay on a GPU"
        assert on_a_gpu(asked, 10**6) == ("triton", never)
        return
    needed = 11 * SPLIT_PAYS_FROM[kind]
    heads = MANY_PAIRS // (needed - 1) ** 2 + 1
    keys = "keys" if option == "lengths" else "keys per packed sequence"
    pays = "from which on the far field of these tables pays"
    assert on_a_gpu(asked, needed, pairs=heads) == ("split", f"{needed} {keys} are at least {needed}, {pays}")
    assert on_a_gpu(asked, needed - 1, pairs=heads) == ("triton", f"{needed - 1} {keys} are fewer than {needed}, {pays}")


@pytest.mark.parametrize("kind", ["cuda, ragged", "cuda, ragged, vectors"])
def test_ragged_batches_on_a_gpu_have_factors_of_their_own(kind, monkeypatch):
    monkeypatch.setitem(SPLIT_PAYS_FROM, kind, 100)
    tables = dict(RAGGED_KINDS)[kind]
    assert on_a_gpu({"lengths", *tables}, 1099, pairs=2**12).impl == "triton"
    assert on_a_gpu({"lengths", *tables}, 1100, pairs=2**12).impl == "split"
    # Long sequences one after the other, then short ones of as many tokens.
    assert on_a_gpu({"cu_seqlens", *tables}, 10**5, pairs=16, sequence=5000).impl == "split"
    assert on_a_gpu({"cu_seqlens", *tables}, 10**5, pairs=16, sequence=500).impl == "triton"
    monkeypatch.delitem(SPLIT_PAYS_FROM, kind)
    assert on_a_gpu({"lengths", *tables}, 10**6).impl == "triton"


def test_a_mask_that_nobody_looked_at_and_few_vectors_stay_with_triton(monkeypatch):
    monkeypatch.delitem(SPLIT_PAYS_FROM, "cuda, ragged", raising=False)
    mask = on_a_gpu({"key_mask", "key_mask with holes", "query"}, 10**6)
    assert mask.impl == "triton" and "give lengths instead" in mask.why
    assert on_a_gpu({"lengths", "query"}, 4000, pairs=1).impl == "triton"
    assert on_a_gpu({"query"}, 4000, pairs=1).impl == "split"


def test_what_is_kept_of_choices_knows_how_many_sequences_there_are(monkeypatch):
    """On a GPU a choice is made once for calls of a kind, and it depends on the mean length of packed sequences."""
    monkeypatch.setitem(SPLIT_PAYS_FROM, "cuda, ragged", 10)
    monkeypatch.setattr(softmax, "KEPT_CHOICES", {})
    with FakeTensorMode():
        q = torch.empty(1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16)
        terms = lagwise.Terms(bias=lagwise.LagTable(torch.empty(4, 11, device="cuda"), -5))
        for count, impl in ((2, "split"), (200, "triton"), (2, "split")):
            call = Call(cu_seqlens=torch.empty(count + 1, dtype=torch.int32, device="cuda"))
            assert softmax.kept_choice(q, q, q, terms, call, "auto").impl == impl


def runs(segments, q, k):
    """Yields the slices of queries and keys of each segment; they must be what a variable-length kernel takes."""
    starts = list(zip(segments.queries.tolist(), segments.keys.tolist(), strict=True))
    assert segments.queries.dtype == segments.keys.dtype == torch.int32
    assert starts[0] == (0, 0) and starts[-1] == (q.shape[0] * q.shape[2], k.shape[0] * k.shape[2])
    for (query, key), (query_stop, key_stop) in pairwise(starts):
        assert 0 <= query_stop - query <= segments.longest and 0 <= key_stop - key <= segments.longest
        yield slice(query, query_stop), slice(key, key_stop)


def by_head(x, batch):
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def segments_one_by_one(q, k, v, segments, *, causal, scale):
    """What `vendor.flash_segments` is on a GPU, here with the kernel of a CPU."""
    batch, (q_tokens, k_tokens, v_tokens) = q.shape[0], (vendor.tokens(x) for x in (q, k, v))
    out, lse = torch.zeros_like(q_tokens), torch.full(q_tokens.shape[:2], -torch.inf)
    for rows, keys in runs(segments, q, k):
        if rows.start < rows.stop and keys.start < keys.stop:
            assert not causal or rows.stop - rows.start == keys.stop - keys.start
            here = (by_head(q_tokens[rows], 1), by_head(k_tokens[keys], 1), by_head(v_tokens[keys], 1))
            run_out, run_lse = vendor.attend(*here, causal=causal, scale=scale)
            out[rows], lse[rows] = vendor.tokens(run_out), run_lse[0].T.to(lse.dtype)
    return by_head(out, batch), lse.unflatten(0, (batch, -1)).transpose(1, 2)


def segments_one_by_one_backward(dout, q, k, v, out, lse, segments, *, causal, scale):
    """What `vendor.flash_segments_backward` is on a GPU, likewise."""
    batch, tokens = q.shape[0], {name: vendor.tokens(x) for name, x in zip("oqkvr", (dout, q, k, v, out), strict=True)}
    sums = lse.transpose(1, 2).flatten(0, 1)
    dq, dk, dv = (torch.zeros_like(tokens[name]) for name in "qkv")
    for rows, keys in runs(segments, q, k):
        if rows.start < rows.stop and keys.start < keys.stop:
            of = {name: by_head(x[keys if name in "kv" else rows], 1) for name, x in tokens.items()}
            given = (of["o"], of["q"], of["k"], of["v"], of["r"], sums[rows].T[None])
            found = vendor.attend_backward(*given, None, causal=causal, scale=scale)
            dq[rows], dk[keys], dv[keys] = (vendor.tokens(x) for x in found)
    return tuple(by_head(x, batch) for x in (dq, dk, dv))


@pytest.fixture
def fused(monkeypatch):
    """Lets `split` run as on a GPU: its band on the kernels, its far fields in segments, here one by one."""
    monkeypatch.setattr("lagwise.ops.split.is_fused", lambda call: True)
    monkeypatch.setattr(vendor, "flash_segments", segments_one_by_one)
    monkeypatch.setattr(vendor, "flash_segments_backward", segments_one_by_one_backward)


@INTERPRETED
@pytest.mark.parametrize("lengths", [[33, 33], [0, 20], [5, 1], [33, 12]], ids=str)
@pytest.mark.parametrize(("tables", "causal"), [((), False), ((), True), (CHANNELS, False), (EVERY_TABLE, True)])
def test_lengths_on_the_kernels(lengths, tables, causal, fused, poisoned):
    q, k, v = tensors(batch=2, heads=2, kv_heads=1, queries=33)
    terms = make_terms(*tables, heads=2, max_lag=3)
    assert_within_budget("split", q, k, v, terms, lengths=torch.tensor(lengths), causal=causal)


@INTERPRETED
@pytest.mark.parametrize("ends", [[0, 33], [0, 1, 5, 33], [0, 12, 12, 33], [0, 0, 6, 17, 33]], ids=str)
@pytest.mark.parametrize(("tables", "causal"), [((), False), ((), True), (EVERY_TABLE, False), (CHANNELS, True)])
def test_packed_sequences_on_the_kernels(ends, tables, causal, fused, poisoned):
    ends = torch.tensor(ends)
    options = {"cu_seqlens": ends, "max_seqlen": int(ends.diff().max()), "causal": causal}
    q, k, v = tensors(batch=1, heads=2, queries=33)
    assert_within_budget("split", q, k, v, make_terms(*tables, heads=2, max_lag=3), **options)


@INTERPRETED
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_lag", [0, 40])
def test_the_widest_and_the_narrowest_band_on_the_kernels(packed, max_lag, fused, poisoned):
    options = {"cu_seqlens": torch.tensor([0, 20, 33])} if packed else {"lengths": torch.tensor([20, 33])}
    shape = {"batch": 1 if packed else 2, "heads": 1, "queries": 33, "value_dim": 12, "dtype": torch.float16}
    terms = make_terms(*EVERY_TABLE, heads=1, value_dim=12, max_lag=max_lag)
    assert_within_budget("split", *tensors(**shape), terms, **options)


@INTERPRETED
def test_segments_of_many_sequences(fused):
    """More sequences than a program of the kernel that cuts them takes."""
    ends = torch.tensor([0, *range(0, 300, 3), 300, 310])
    q, k, v = tensors(batch=1, heads=1, queries=310)
    assert_within_budget("split", q, k, v, make_terms("bias", heads=1, max_lag=1), cu_seqlens=ends, max_seqlen=10)


@INTERPRETED
def test_what_lengths_hide_may_hold_anything_on_the_kernels(fused):
    hidden_keys_do_not_matter()
