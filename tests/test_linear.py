"""Linear attention against its equation, written out in loops; its forms against each other; decoding; feature maps."""

import copy
import math
import re
from itertools import pairwise

import pytest
import torch
from oracle import ROUNDINGS, compare, make_encoding

import lagwise
from lagwise import Favor, FeatureMap, FeatureTransform, LagTable, Terms, linear, linear_attention
from lagwise.call import Call
from lagwise.feature_maps import orthogonal_gaussian
from lagwise.ops import linear_implementations as impl

HEADS, DIM = 2, 4
FORMS = ["dense", "chunked", "recurrent", "fft"]
MAPS = ["favor", "relu", "elu"]
BIASES = ["t5", "t5-free", "at5", "at5-free", "alibi", "kerple", "sandwich"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Lets short sequences have many chunks."""
    monkeypatch.setattr(impl, "CHUNK", 8)
    monkeypatch.setattr(linear, "CHUNK", 8)
    monkeypatch.setattr(impl, "FEATURE_BLOCK", 3)


def tensors(batch=2, queries=33, keys=None, *, heads=HEADS, kv_heads=None, dim=DIM, value_dim=None, dtype=torch.float64):
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim or dim)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def make(name, heads=HEADS, head_dim=DIM, **options):
    return make_encoding(name, heads=heads, head_dim=head_dim, **options).double()


def small_favor(width=DIM, features=12):
    return Favor(width, features=features).double()


def map_of(name):
    return small_favor() if name == "favor" else name


def scalar_features(name, x, side, favor, scale):
    """The feature map's equation for one vector; favor with one common factor for all keys."""
    if name == "relu":
        return x.clamp(min=0) + 1e-3
    if name == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    x = math.sqrt(scale) * x
    exponents = torch.stack([w @ x - x @ x / 2 for w in favor.projection])
    if side == "q":
        return torch.exp(exponents - exponents.max()) + 1e-6
    return torch.exp(exponents)


def written_out(q, k, v, name, *, bias=lambda head, lag: 0.0, causal=False, visible=None, favor=None, features=lambda x, *_: x):
    """The equation in a double loop. `features(phi, position, head)` maps the features of both sides."""
    favor = favor or small_favor(q.shape[-1])
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    groups = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = [scalar_features(name, x, "k", favor, q.shape[-1] ** -0.5) for x in k[row, head // groups]]
            keys = [features(x, j, head) for j, x in enumerate(keys)]
            for i in range(q.shape[2]):
                query = features(scalar_features(name, q[row, head, i], "q", favor, q.shape[-1] ** -0.5), i, head)
                numerator, denominator = torch.zeros(v.shape[3], dtype=q.dtype), 0.0
                for j in range(k.shape[2]):
                    if (causal and j > i) or (visible is not None and not visible[row, j]):
                        continue
                    weight = math.exp(bias(head, j - i)) * (query @ keys[j])
                    numerator = numerator + weight * v[row, head // groups, j]
                    denominator = denominator + weight
                out[row, head, i] = numerator / denominator if denominator else 0.0
    return out


def forms(causal, encoding=None, feature_map="relu"):
    """The forms that can do a call; Fourier transforms take the scales of favor neither in causal attention nor beside slopes."""
    scaled = feature_map == "favor" or isinstance(feature_map, Favor)
    table = encoding.bias if isinstance(encoding, Terms) else None
    sloped = isinstance(encoding, lagwise.ALiBi) or (table is not None and table.slopes is not None)
    refused = {"recurrent": not causal, "fft": scaled and (causal or sloped)}
    return [form for form in FORMS if not refused.get(form)]


def assert_close(actual, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_forms(q, k, v, encoding=None, expected=None, **options):
    if expected is None:
        expected = linear_attention(q, k, v, encoding, impl="dense", **options)
    for form in forms(options.get("causal", False), encoding, options.get("feature_map", "favor")):
        # Fourier transforms round relative to the largest row.
        tolerance = {"rtol": 1e-6, "atol": 1e-8} if form == "fft" else {}
        assert_close(linear_attention(q, k, v, encoding, impl=form, **options), expected, **tolerance)


# The equation


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_all_forms_are_the_equation(name, causal):
    q, k, v = tensors(1, 19)
    assert_forms(q, k, v, None, written_out(q, k, v, name, causal=causal), feature_map=map_of(name), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_a_bias_table_multiplies_the_weights(name, causal):
    q, k, v = tensors(1, 19)
    values = torch.randn(HEADS, 7, dtype=torch.float64)
    expected = written_out(q, k, v, name, causal=causal, bias=lambda head, lag: values[head, min(max(lag, -3), 3) + 3])
    assert_forms(q, k, v, Terms(bias=LagTable(values, -3)), expected, feature_map=map_of(name), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_sloped_tails_are_a_decay(causal):
    q, k, v = tensors(1, 19)
    slope = lagwise.ALiBi(heads=HEADS).slope.double()
    expected = written_out(q, k, v, "relu", causal=causal, bias=lambda head, lag: -slope[head] * abs(lag))
    assert_forms(q, k, v, lagwise.ALiBi(heads=HEADS).double(), expected, feature_map="relu", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_masks_and_widths(causal):
    q, k, v = tensors(2, 13, heads=4, kv_heads=2, value_dim=3)
    visible = torch.rand(2, 13) > 0.4
    visible[1, :5] = False
    expected = written_out(q, k, v, "favor", causal=causal, visible=visible)
    assert_forms(q, k, v, None, expected, feature_map=small_favor(), causal=causal, key_mask=visible)
    if causal:
        assert not expected[1, :, :5].any()


def test_queries_and_keys_of_two_lengths():
    values = torch.randn(HEADS, 5, dtype=torch.float64)
    for queries, keys in ((5, 30), (30, 5), (1, 20), (20, 1), (17, 16)):
        q, k, v = tensors(1, queries, keys)
        expected = written_out(q, k, v, "relu", bias=lambda head, lag: values[head, min(max(lag, -1), 3) + 1])
        assert_forms(q, k, v, Terms(bias=LagTable(values, -1)), expected, feature_map="relu")


# The forms


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("time", [1, 2, 7, 8, 9, 16, 17, 40])
def test_lengths_around_the_chunk(time, causal):
    q, k, v = tensors(1, time)
    for name in ("none", "t5-free", "alibi"):
        assert_forms(q, k, v, make(name), feature_map=small_favor(), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first, lags", [(0, 1), (-1, 2), (-30, 61), (-100, 201), (-9, 3), (4, 3), (-17, 18), (0, 12)])
def test_tables_anywhere_beside_and_beyond_the_sequence(first, lags, causal):
    q, k, v = tensors(1)
    for slopes in (None, (torch.rand(HEADS).double() - 0.3, torch.rand(HEADS).double() - 0.6)):
        table = LagTable(torch.randn(HEADS, lags, dtype=torch.float64), first, slopes)
        assert_forms(q, k, v, Terms(bias=table), feature_map="relu", causal=causal)
        assert_forms(q, k, v, Terms(bias=LagTable(table.values[:1], first)), feature_map="elu", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*BIASES, "permute", "rotary", "sine-spe", "conv-spe"])
def test_all_forms_agree_for_every_encoding(name, causal):
    q, k, v = tensors()
    options = {"feature_map": "relu", "causal": causal, "lengths": torch.tensor([33, 11])}
    assert_forms(q, k, v, make(name), **options)
    assert_forms(q, k, v, (make(name) + make("t5-free")).eval(), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "t5", "alibi", "rotary", "permute"])
def test_gradients_of_all_forms_agree(name, causal):
    q, k, v = (x.requires_grad_() for x in tensors(1, 21))
    encoding = make(name)
    parameters = list(encoding.parameters())
    if name == "alibi":
        slopes = (
            torch.rand(HEADS, dtype=torch.float64).requires_grad_(),
            -torch.rand(HEADS, dtype=torch.float64).requires_grad_(),
        )
        encoding = Terms(bias=LagTable(torch.randn(HEADS, 3, dtype=torch.float64).requires_grad_(), -1, slopes))
        parameters = [encoding.bias.values, *slopes[: 1 if causal else 2]]
    for feature_map in (small_favor(), "elu"):
        found = {}
        for form in forms(causal, encoding, feature_map):
            out = linear_attention(q, k, v, encoding, feature_map=feature_map, causal=causal, impl=form)
            dout = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
            found[form] = torch.autograd.grad(out, [q, k, v, *parameters], dout)
        for form in list(found)[1:]:
            for actual, expected in zip(found[form], found["dense"], strict=True):
                assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("form, causal", [(form, causal) for causal in (False, True) for form in forms(causal)])
def test_gradients_are_the_derivative(form, causal):
    q, k, v = (x.requires_grad_() for x in tensors(1, 10, dim=3))
    table = torch.randn(HEADS, 3, dtype=torch.float64).requires_grad_()
    slope = torch.rand(HEADS, dtype=torch.float64).requires_grad_()
    feature_map = "elu" if form == "fft" else small_favor(3, 5)

    def call(q, k, v, table, slope):
        bias = LagTable(table, -1, (slope, -slope))
        return linear_attention(q, k, v, Terms(bias=bias), feature_map=feature_map, causal=causal, impl=form)

    torch.autograd.gradcheck(call, (q, k, v, table, slope))


@torch.no_grad()
def shares(q, k, v, encoding, *, feature_map, causal):
    """The sum of each row's weights, divided by the largest of its head."""
    last = q.shape[2] - 1
    terms, _ = linear.linear_terms(encoding, q, v, -last, last, Call())
    call = linear.prepare(q, k, v, terms, feature_map, Call(scale=q.shape[-1] ** -0.5, causal=causal))
    lags = torch.arange(last + 1) - torch.arange(last + 1)[:, None]
    logs = (call.bias.at(lags) + call.keys.weights()[:, :, None]).masked_fill(causal & (lags > 0), -torch.inf)
    weights = torch.exp(logs - logs.amax((-2, -1), keepdim=True)) * (call.denominator_q @ call.keys.denominator.mT)
    sums = weights.sum(-1)
    return (sums / sums.amax(-1, keepdim=True))[..., None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_within_the_budget(dtype, causal):
    q, k, v = tensors()
    for name in ("none", "t5", "alibi", "permute", "rotary", "sine-spe"):
        encoding = make_encoding(name, heads=HEADS, head_dim=DIM)
        for feature_map in ("favor", "relu"):
            low = [x.to(dtype) for x in (q, k, v)]
            options = {"feature_map": feature_map, "causal": causal}
            expected = linear_attention(*(x.double() for x in low), encoding, impl="dense", **options).detach()
            dense = linear_attention(*low, encoding, impl="dense", **options).detach()
            for form in forms(causal, encoding, feature_map):
                actual = linear_attention(*low, encoding, impl=form, **options).detach()
                assert actual.dtype == dtype
                # Fourier transforms round relative to the largest row of a head, in as many rounds as their length has halves.
                share, rounds = (shares(q, k, v, encoding, **options), math.log2(2 * q.shape[2])) if form == "fft" else (1.0, 1)
                unit = rounds * ROUNDINGS * torch.finfo(dtype).eps * float(v.abs().max())
                compare(f"{name}, {feature_map}, {form}", share * actual, share * expected, share * dense, unit, None)


@pytest.mark.parametrize("name", ["none", "t5", "sine-spe", "conv-spe"])
def test_autocast_takes_low_precision_inputs_and_full_sums(name):
    q, k, v = tensors(dtype=torch.float32)
    encoding, seed = make(name), torch.tensor(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = linear_attention(q, k, v, encoding, seed=seed)
    assert torch.equal(actual, linear_attention(*(x.bfloat16() for x in (q, k, v)), encoding, seed=seed))


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_are_shorter_sequences(causal):
    q, k, v = tensors()
    for name in ("none", "t5", "alibi", "sine-spe"):
        encoding = make(name)
        out = linear_attention(q, k, v, encoding, causal=causal, lengths=torch.tensor([20, 5]))
        for row, length in enumerate((20, 5)):
            alone = (x[row : row + 1, :, :length] for x in (q, k, v))
            assert_close(out[row : row + 1, :, :length], linear_attention(*alone, encoding, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "t5", "alibi", "permute", "rotary", "conv-spe"])
def test_packed_sequences_are_separate_calls(name, causal):
    q, k, v = tensors(1)
    encoding, ends = make(name), [0, 4, 4, 21, 33]
    for form in forms(causal):
        options = {"feature_map": "relu", "causal": causal, "impl": form}
        out = linear_attention(q, k, v, encoding, cu_seqlens=torch.tensor(ends, dtype=torch.int32), **options)
        for start, end in ((0, 4), (4, 21), (21, 33)):
            alone = (x[:, :, start:end] for x in (q, k, v))
            assert_close(out[:, :, start:end], linear_attention(*alone, encoding, **options))
        for longest in (17, 20, 99):
            packed = linear_attention(q, k, v, encoding, cu_seqlens=torch.tensor(ends), max_seqlen=longest, **options)
            assert_close(packed, out)


@pytest.mark.parametrize("feature_map", ["relu", "favor"])
def test_tables_as_wide_as_the_sequence_keep_no_pairs(feature_map):
    """What the backward pass finds stored grows with the length, not with its square."""

    def stored(time: int) -> int:
        kept: dict[int, int] = {}

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q, k, v = (torch.randn(1, 2, time, 16, requires_grad=True) for _ in range(3))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = linear_attention(q, k, v, lagwise.make("kerple", heads=2), feature_map=feature_map, impl="chunked")
        out.sum().backward()
        return sum(kept.values())

    assert stored(2048) < 2.2 * stored(1024)


def test_what_nobody_sees_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors())
    for form in forms(False):
        out = linear_attention(q, k, v, make("t5"), lengths=torch.tensor([10, 0]), impl=form)
        assert not out[1].any()
        for gradient in torch.autograd.grad(out.square().sum(), [k, v]):
            assert torch.isfinite(gradient).all() and not gradient[0, :, 10:].any() and not gradient[1].any()


def test_auto_takes_fourier_transforms_for_long_tables_alone():
    def chosen(name, time, causal=False, feature_map="relu"):
        first, last = 1 - time, 0 if causal else time - 1
        terms = lagwise.make(name, heads=2).linear_terms(first, last, scale=1.0)
        x = torch.zeros(1, 2, 1, DIM)
        options = Call(scale=0.5, causal=causal, key_mask=torch.ones(1, 1, dtype=torch.bool))
        call = linear.prepare(x, x, x, terms, feature_map, options)
        return linear.choose(call, "auto", first, last)

    assert chosen("kerple", 10000) == chosen("kerple", 10000, True) == "fft" and chosen("kerple", 100) == "chunked"
    assert chosen("t5", 10000) == chosen("alibi", 10000) == chosen("none", 10000, True) == "chunked"
    # Scales of keys are exact by Fourier transforms only where every row sees every key.
    assert chosen("kerple", 10000, False, "favor") == "fft" and chosen("kerple", 10000, True, "favor") == "chunked"


def test_scales_of_keys_are_refused_where_fourier_transforms_would_lose_rows():
    """Rows whose keys are small beside those that others see would come out as large as 700, where values are below 5."""
    q, k, v = tensors(1, 200, dtype=torch.float32, dim=16)
    k = k * torch.linspace(8.0, 0.1, 200)[:, None]
    kerple = lagwise.Kerple(heads=HEADS)
    sloped = Terms(bias=LagTable(torch.zeros(1, 1), 0, (torch.ones(1), -torch.ones(1))))
    for encoding, causal in ((None, True), (kerple, True), (sloped, False), (sloped, True)):
        with pytest.raises(ValueError, match=r"impl='fft' cannot do this.*scales without bounds.*impl='chunked'"):
            linear_attention(q, k, v, encoding, causal=causal, impl="fft")
    exact = linear_attention(*(x.double() for x in (q, k, v)), kerple, impl="dense")
    assert_close(linear_attention(q, k, v, kerple, impl="fft").double(), exact, rtol=1e-3, atol=1e-3)


def test_causal_attention_does_not_depend_on_the_scales_of_later_keys():
    """A later key whose features are far beyond the range of float32 relative to earlier ones leaves these alone."""
    q, k, v = tensors(1, 30, dtype=torch.float32)
    k = k * torch.linspace(40, 0.1, 30)[:, None]
    early = linear_attention(q[:, :, :12], k[:, :, :12], v[:, :, :12], causal=True)
    assert_close(linear_attention(q, k, v, causal=True)[:, :, :12], early, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["none", "alibi", "t5", "permute"])
@pytest.mark.parametrize("causal", [False, True])
def test_large_inputs_stay_finite(name, causal):
    q, k, v = tensors(dtype=torch.float32, dim=16)
    q, k = (30.0 * x.requires_grad_() for x in (q, k))
    encoding = make_encoding(name, heads=HEADS, head_dim=16)
    for form in (form for form in forms(causal) if form != "fft"):
        out = linear_attention(q, k, v, encoding, causal=causal, impl=form)
        assert torch.isfinite(out).all() and out.abs().max() <= 1.001 * v.abs().max()
        gradients = torch.autograd.grad(out.sum(), [q, k], retain_graph=True)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


# Encodings on features


def permutation_matrix(encoding, head, features):
    """Pi, from where it sends each unit vector at position 1."""
    identity = torch.eye(features, dtype=torch.float64)[None, None].expand(1, HEADS, -1, -1)
    one = torch.ones(features, dtype=torch.int64)
    moved, _ = encoding.linear_terms(-9, 0, scale=1.0).features.function(identity, identity, one, one)
    return moved[0, head].T


@pytest.mark.parametrize("causal", [False, True])
def test_permuteformer_is_its_equation(causal):
    encoding = lagwise.PermuteFormer(heads=HEADS).double()
    matrices = [permutation_matrix(encoding, head, DIM) for head in range(HEADS)]
    assert all(set(matrix.unique().tolist()) == {0.0, 1.0} and (matrix.sum(0) == 1).all() for matrix in matrices)
    rho = [1 / (1 + math.exp(-(2 + 3 * head / HEADS))) for head in range(HEADS)]
    assert_close(encoding.slope, -torch.tensor(rho, dtype=torch.float64).log(), rtol=1e-5)
    q, k, v = tensors(1, 19)
    expected = written_out(
        q, k, v, "relu", causal=causal, bias=lambda head, lag: encoding.slope[head] * lag if causal else 0.0,
        features=lambda x, position, head: torch.linalg.matrix_power(matrices[head], position) @ x,
    )  # fmt: skip
    assert_forms(q, k, v, encoding, expected, feature_map="relu", causal=causal)


def test_permuteformer_is_relative_and_exact_far_away():
    encoding = lagwise.PermuteFormer(heads=HEADS, seed=3)
    function = encoding.linear_terms(-9, 9, scale=1.0).features.function
    q, k = (torch.rand(1, HEADS, 5, 256) for _ in range(2))
    near, far = torch.arange(5), torch.arange(1_000_000, 1_000_005)
    products = [a @ b.mT for a, b in (function(q, k, near, near), function(q, k, far, far))]
    torch.testing.assert_close(*products, rtol=1e-6, atol=1e-6)
    moved = function(q, k, near, far)[1]
    assert torch.equal(moved.sort(-1).values, k.sort(-1).values) and not torch.equal(moved, k)
    rows = torch.stack([far, near])
    both = function(q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), rows, rows)[1]
    assert torch.equal(both[:1], moved) and torch.equal(both[1:], function(q, k, near, near)[1])


def test_permuteformer_options():
    q, k, v = tensors(1)
    outs = [
        linear_attention(q, k, v, lagwise.PermuteFormer(heads=HEADS, **options), causal=True)
        for options in ({}, {"seed": 1}, {"decay": False})
    ]
    assert not torch.allclose(outs[0], outs[1]) and not torch.allclose(outs[0], outs[2])


def test_rotary_turns_features_in_the_numerator():
    q, k, v = tensors(1, 11, dim=6)
    encoding = lagwise.Rotary(head_dim=6)

    def turned(x, position):
        out = x.clone()
        for c in range(3):
            angle = position / 10000 ** (2 * c / 6)
            even, odd = x[2 * c], x[2 * c + 1]
            out[2 * c] = even * math.cos(angle) - odd * math.sin(angle)
            out[2 * c + 1] = even * math.sin(angle) + odd * math.cos(angle)
        return out

    expected = torch.zeros_like(v)
    for head in range(HEADS):
        for i in range(11):
            a = torch.relu(q[0, head, i]) + 1e-3
            b = [torch.relu(x) + 1e-3 for x in k[0, head, : i + 1]]
            numerator = sum((turned(a, i) @ turned(x, j)) * v[0, head, j] for j, x in enumerate(b))
            expected[0, head, i] = numerator / sum(a @ x for x in b)
    assert_forms(q, k, v, encoding, expected, feature_map="relu", causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_turns_queries_and_keys_before_features_that_estimate_softmax(causal):
    q, k, v = tensors(1, 11, dim=6)
    encoding = lagwise.Rotary(head_dim=6)
    terms = encoding.terms(-10, 10, scale=1.0)
    places = torch.arange(11)
    turned = terms.transform(q, k, places, places)
    favor = Favor(6, features=8)
    wanted = linear_attention(*turned, v, feature_map=favor, causal=causal, impl="dense")
    assert_forms(q, k, v, encoding, wanted, feature_map=favor, causal=causal)
    # The mean over projections of the weights is what softmax attention has.
    many = Favor(6, features=60_000)
    q, k = 0.5 * q, 0.5 * k
    exact = lagwise.attention(q, k, v, encoding, causal=causal, impl="dense")
    assert_close(linear_attention(q, k, v, encoding, feature_map=many, causal=causal), exact, rtol=0.0, atol=0.03)
    plain = lagwise.attention(q, k, v, causal=causal, impl="dense")
    assert (plain - exact).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "feature_map"), [("rotary", "relu"), ("permute", "favor"), ("permute", "relu"), ("t5", "favor"), ("alibi", "favor")]
)
def test_linear_attention_depends_on_lags_alone(name, feature_map):
    q, k, v = tensors(1, 12)
    moved = [torch.cat([torch.randn(1, HEADS, 9, DIM, dtype=torch.float64), x], dim=2) for x in (q, k, v)]
    mask = torch.arange(21)[None] >= 9
    encoding = make(name)
    for causal in (False, True):
        options = {"feature_map": feature_map, "causal": causal}
        plain = linear_attention(q, k, v, encoding, **options)
        assert_close(linear_attention(*moved, encoding, key_mask=mask, **options)[:, :, 9:], plain)


def test_terms_add_beside_features():
    q, k, v = tensors(1)
    both = make("rotary") + make("t5")
    parts = [part.linear_terms(-32, 32, scale=0.5) for part in (both.left, both.right)]
    assert_close(linear_attention(q, k, v, both), linear_attention(q, k, v, parts[0] + parts[1]))
    assert (parts[1] + parts[0]).features is parts[0].features and (parts[1] + parts[0]).to(torch.float32).features
    with pytest.raises(ValueError, match="cannot be added"):
        parts[0] + parts[0]


# Decoding

DECODED = ["none", "t5", "t5-free", "at5", "alibi", "kerple", "permute", "rotary", "sine-spe", "conv-spe"]


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("name", DECODED)
def test_prefill_and_steps_are_one_pass(name, feature_map):
    q, k, v = tensors(2, 33, heads=4, kv_heads=2, value_dim=3)
    encoding = make(name, heads=4, max_lag=5)
    expected = linear_attention(q, k, v, encoding, feature_map=feature_map, causal=True, impl="dense")
    for ends in ((1, *range(2, 34)), (3, 4, 33), (20, 27, 28, 33)):
        out, state = linear.prefill(*(x[:, :, : ends[0]] for x in (q, k, v)), encoding, feature_map=feature_map)
        outs = [out]
        for start, end in pairwise(ends):
            out, state = linear.step(*(x[:, :, start:end] for x in (q, k, v)), state, encoding, feature_map=feature_map)
            outs.append(out)
        assert state.length == 33
        assert_close(torch.cat(outs, dim=2), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["rotary", "permute"])
def test_steps_with_a_sum_of_encodings(name):
    q, k, v = tensors(1)
    encoding = make(name) + make("t5-free") + make("alibi")
    out, state = linear.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], encoding)
    more, _ = linear.step(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state, encoding)
    assert_close(torch.cat([out, more], dim=2), linear_attention(q, k, v, encoding, causal=True, impl="dense"))


def bytes_of(state):
    tensors = [state.kv, state.mass, state.top, *(x for x in state.recent if x is not None)]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize("name", ["none", "t5-free", "at5", "alibi", "permute", "rotary"])
def test_the_state_has_one_size(name):
    q, k, v = tensors(1, 64)
    encoding = make(name, max_lag=5)
    sizes = set()
    for time in (20, 30, 50):
        _, state = linear.prefill(*(x[:, :, :time] for x in (q, k, v)), encoding)
        # The weights of recent keys are written out by the first step alone.
        _, state = linear.step(*(x[:, :, time : time + 1] for x in (q, k, v)), state, encoding)
        sizes.add(bytes_of(state))
        assert state.recent.features.shape[2] == (4 if name in ("t5-free", "at5") else 0)
    assert len(sizes) == 1


def test_a_state_selects_rows():
    q, k, v = tensors(3)
    encoding, rows = make("t5"), torch.tensor([2, 0, 0])
    _, state = linear.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], encoding)
    new = [x[:, :, 20:] for x in (q, k, v)]
    expected, _ = linear.step(*new, state, encoding)
    selected, _ = linear.step(*(x[rows] for x in new), state.select(rows), encoding)
    assert_close(selected, expected[rows])


def test_padding_on_the_left_of_a_prefill():
    q, k, v = tensors(2)
    mask = torch.arange(20) >= torch.tensor([[0], [6]])
    encoding = make("t5")
    _, state = linear.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], encoding, key_mask=mask)
    out, _ = linear.step(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state, encoding)
    for row, start in enumerate((0, 6)):
        alone = linear_attention(*(x[row : row + 1, :, start:] for x in (q, k, v)), encoding, causal=True)
        assert_close(out[row : row + 1], alone[:, :, 20 - start :])


def test_hidden_keys_of_a_step():
    q, k, v = tensors(2)
    mask = torch.rand(2, 33) > 0.4
    for name in ("none", "t5", "alibi"):
        encoding = make(name)
        out, state = linear.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], encoding, key_mask=mask[:, :20])
        more, _ = linear.step(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state, encoding, key_mask=mask[:, 20:])
        expected = linear_attention(q, k, v, encoding, causal=True, key_mask=mask, impl="dense")
        assert_close(torch.cat([out, more], dim=2), expected)


@pytest.mark.parametrize("feature_map", MAPS)
def test_a_summary_is_all_of_a_context(feature_map):
    q, k, v = tensors(2, 5, 33, heads=4, kv_heads=2, value_dim=3)
    mask = torch.rand(2, 33) > 0.4
    state, rows = linear.summary(k, v, feature_map=feature_map, key_mask=mask), torch.tensor([1, 1, 0])
    assert state.length == 33 and state.kv.shape[:2] == (2, 2)
    expected = linear_attention(q, k, v, feature_map=feature_map, key_mask=mask, impl="dense")
    assert_close(linear.recall(q, state, feature_map=feature_map), expected)
    assert_close(linear.recall(q[rows], state.select(rows), feature_map=feature_map), expected[rows])
    nothing = linear.summary(k, v, feature_map=feature_map, key_mask=torch.zeros_like(mask))
    assert not linear.recall(q, nothing, feature_map=feature_map).any()


def test_steps_keep_the_draw_of_a_training_prefill():
    q, k, v = tensors(1)
    encoding = make("sine-spe").train()
    out, state = linear.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], encoding)
    more, _ = linear.step(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state, encoding)
    assert_close(torch.cat([out, more], dim=2), linear_attention(q, k, v, encoding, causal=True, seed=state.seed))


def test_a_long_decay_stays_exact():
    """The decay of two thousand tokens leaves float32 many times over."""
    q, k, v = tensors(1, 2000, dtype=torch.float32)
    encoding = Terms(bias=LagTable(torch.zeros(HEADS, 1), 0, (torch.tensor([0.5, 1.0]), torch.zeros(HEADS))))
    _, state = linear.prefill(q, k, v, encoding)
    token = [x[:, :, :1] for x in (q, k, v)]
    out, state = linear.step(*token, state, encoding)
    last = [torch.cat([x[:, :, -200:], x[:, :, :1]], dim=2) for x in (q, k, v)]
    assert_close(out, linear_attention(*last, encoding, causal=True)[:, :, -1:], rtol=1e-4, atol=1e-4)
    assert torch.isfinite(state.top).all()


# Feature maps


def test_the_projection_is_orthogonal_gaussian():
    favor = Favor(16, features=40)
    assert favor.projection.shape == (40, 16) and favor.projection.dtype == torch.float32
    for rows in (favor.projection[:16], favor.projection[16:32], favor.projection[32:]):
        product = (rows @ rows.T).double()
        assert_close(product, product.diag().diag(), rtol=0, atol=1e-4)
    # The squared lengths have the mean and the variance of a chi-squared variable with 16 degrees of freedom.
    squares = orthogonal_gaussian(4096, 16, 1).square().sum(1)
    assert abs(squares.mean() - 16) < 5 * math.sqrt(32 / 4096) and abs(squares.var() / 32 - 1) < 0.2
    # Every direction is as likely: the mean of rows vanishes and their covariance is the unit matrix.
    rows = orthogonal_gaussian(8192, 4, 2)
    assert rows.mean(0).abs().max() < 5 / math.sqrt(8192)
    assert (rows.T @ rows / 8192 - torch.eye(4)).abs().max() < 0.1


def test_redraws_are_under_control():
    favor, again = Favor(8), Favor(8)
    first = favor.projection.clone()
    assert torch.equal(first, again.projection)
    favor.redraw()
    assert not torch.equal(favor.projection, first)
    favor.redraw(0)
    assert torch.equal(favor.projection, first)
    torch.manual_seed(5)
    favor.redraw()
    torch.manual_seed(5)
    again.redraw()
    assert torch.equal(favor.projection, again.projection)
    again.load_state_dict(Favor(8, seed=9).state_dict())
    assert torch.equal(again.projection, Favor(8, seed=9).projection)


def test_favor_is_an_unbiased_estimate_of_the_exponential():
    x, y = torch.randn(2, 6, 8, dtype=torch.float64) / 2
    exact = torch.exp(x @ y.T)
    estimates = []
    for seed in range(400):
        favor = Favor(8, features=16, seed=seed).double()
        features, log_scale = favor.keys(y[None, None])
        # The queries' factor cancels in attention: here it is put back.
        queries, query_scale = favor.keys(x[None, None])
        estimates.append(((queries * query_scale.exp()[..., None]) @ (features * log_scale.exp()[..., None]).mT)[0, 0])
    estimates = torch.stack(estimates)
    error = (estimates.mean(0) - exact) / (estimates.std(0) / math.sqrt(400))
    assert error.abs().max() < 5
    normed = favor.queries(x[None, None])
    ratio = (normed - 1e-6 / 4) / queries
    assert_close(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-3)


def test_favor_tends_to_softmax_attention():
    q, k, v = tensors(1, 24, dim=8)
    # Large inputs have heavy tails, and need many more features.
    q, k = 0.4 * q, 0.4 * k
    for encoding, causal in ((None, False), (make("t5", head_dim=8), True)):
        exact = lagwise.attention(q, k, v, encoding, causal=causal)
        errors = []
        for features in (64, 1024, 16384):
            favors = [Favor(8, features=features, seed=seed).double() for seed in range(4)]
            outs = torch.stack([linear_attention(q, k, v, encoding, feature_map=favor, causal=causal) for favor in favors])
            errors.append((outs - exact).square().mean().sqrt())
        # Sixteen times the features are a quarter of the error, give or take the luck of a draw.
        assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2 and errors[2] < 0.02


def test_stochastic_encodings_meet_the_feature_maps_as_published():
    """x is (R / D)^(1/4) q' for relu, and D^(-1/4) q' for favor, whose width is R."""
    q, k, v = tensors(1, 9)
    encoding, seed = make("sine-spe"), torch.tensor(4)
    a, b = encoding.terms(-8, 8, scale=0.5, seed=seed).transform(q, k, torch.arange(9), torch.arange(9))
    scaled = [(16 / DIM) ** 0.25 * x for x in (a, b)]
    expected = written_out(*scaled, v, "relu")
    assert_close(linear_attention(q, k, v, encoding, feature_map="relu", seed=seed), expected)
    favor = small_favor(16)
    # `written_out` multiplies by the width's own R^(-1/4).
    assert_close(linear_attention(q, k, v, encoding, feature_map=favor, seed=seed), written_out(*scaled, v, "favor", favor=favor))


def test_relu_features_of_codes_tend_to_a_function_of_the_angle():
    """|q'| |k'| (sin t + (pi - t) cos t), Cho and Saul (2009): at most pi times the weight of a right angle."""

    class Relu(FeatureMap):
        def queries(self, x):
            return x.relu()

    q, k, _ = tensors(1, 12)
    encoding = lagwise.make("sine-spe", heads=HEADS, head_dim=DIM, sines=6, realizations=2**16, gated=False).double()
    eye = torch.eye(12, dtype=torch.float64).expand(1, HEADS, -1, -1)
    found = linear_attention(q, k, eye, encoding, feature_map=Relu(), seed=torch.tensor(1))
    values, first = encoding.kernel(-11, 11)
    gain = values[:, torch.arange(12) - torch.arange(12)[:, None] - first]
    variance = (torch.nn.functional.softplus(encoding.gain) ** 2 / (2 * 6)).sum(-1)[:, None]
    lengths = [(variance * x.square()).sum(-1).sqrt() for x in (q, k)]
    products = lengths[0][..., :, None] * lengths[1][..., None, :]
    angle = torch.acos(torch.einsum("bhid,hijd,bhjd->bhij", q, gain, k) / products)
    weight = products * (angle.sin() + (math.pi - angle) * angle.cos())
    assert_close(found, weight / weight.sum(-1, keepdim=True), atol=4e-3, rtol=0.02)


def test_a_feature_map_of_ones_own():
    class Square(FeatureMap):
        def queries(self, x):
            return x.square() + 0.1

    q, k, v = tensors(1, 10)
    weights = (q.square() + 0.1) @ (k.square() + 0.1).mT
    assert_close(linear_attention(q, k, v, feature_map=Square()), weights @ v / weights.sum(-1, keepdim=True))


def test_the_default_projection_is_always_the_same():
    q, k, v = tensors(1)
    assert torch.equal(linear_attention(q, k, v), linear_attention(q, k, v, feature_map=Favor(DIM)))


# Errors


@pytest.mark.parametrize(
    "name, word", [("shaw", "query table"), ("huang3", "gain table"), ("huang4", "query table"), ("xl", "query")]
)
def test_tables_without_a_linear_form_are_refused(name, word):
    with pytest.raises(ValueError, match=f"{word}.*lagwise.attention"):
        linear_attention(*tensors(1, 5), make(name))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"encoding": "t5"}, r"lagwise.make\('t5'"),
        ({"encoding": lagwise.Sinusoidal(dim=4)}, "absolute"),
        ({"encoding": lagwise.XPos(head_dim=4)}, "XPos has no form for linear attention.*use Rotary"),
        ({"encoding": lagwise.T5(heads=3)}, "must have 2 heads"),
        ({"encoding": lagwise.PermuteFormer(heads=3)}, "made for heads=3"),
        ({"feature_map": "favour"}, "did you mean 'favor'"),
        ({"feature_map": Favor(8)}, "made for width 8, but the encoding makes queries of width 4"),
        ({"impl": "chunk"}, "did you mean 'chunked'"),
        ({"impl": "recurrent"}, "needs causal=True"),
        ({"scale": -1.0}, "scale must not be negative"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"lengths": torch.tensor([9])}, "lengths must be between 0 and 5"),
        ({"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "key_mask must be bool of shape"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must start with 0"),
        ({"seed": 3}, "seed must be a tensor"),
    ],
    ids=str,
)
def test_bad_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*tensors(1, 5), **options)


def test_bad_tensors_raise():
    q, k, v = tensors(1, 5)
    with pytest.raises(ValueError, match="causal=True needs as many queries as keys"):
        linear_attention(q[:, :, :3], k, v, causal=True)
    with pytest.raises(ValueError, match="k must have the width of q"):
        linear_attention(q, k[..., :2], v)
    with pytest.raises(ValueError, match="must be even"):
        linear_attention(q[..., :3], k[..., :3], v, lagwise.Rotary(head_dim=4), feature_map="relu")
    with pytest.raises(ValueError, match="width must be a whole number"):
        Favor(0)


def test_a_feature_map_with_two_widths_raises():
    class Odd(FeatureMap):
        def queries(self, x):
            return x.exp()

        def keys(self, x):
            return x[..., :2].exp(), None

    with pytest.raises(ValueError, match="as many features of keys as of queries"):
        linear_attention(*tensors(1, 5), feature_map=Odd())


OTHER_STEPS = {
    "feature map": (dict(feature_map="elu"), "feature_map must be that of the state, Relu, but is Elu"),
    "encoding": (dict(encoding=lagwise.T5(heads=HEADS)), "encoding must be that of the state, ALiBi, but is T5"),
    "no encoding": (dict(encoding=None), "encoding must be that of the state, which sets bias, but sets no terms"),
    "sum": (
        dict(encoding=lagwise.ALiBi(heads=HEADS) + lagwise.NoEncoding()),
        "encoding must be that of the state, ALiBi, but is ALiBi + NoEncoding",
    ),
    "scale": (dict(scale=3.0), "scale must be that of the state, 0.5, but is 3.0"),
    "state": (
        dict(state=None),
        "state must be a State, which lagwise.linear.prefill and lagwise.linear.summary return, but is None",
    ),
}


@pytest.mark.parametrize("changed", OTHER_STEPS)
def test_a_step_with_something_else_than_the_state_has_raises(changed):
    q, k, v = tensors(1, 9)
    own = dict(encoding=lagwise.ALiBi(heads=HEADS), feature_map="relu", scale=0.5)
    _, state = linear.prefill(q, k, v, **own)
    linear.step(q, k, v, state, **own)
    options, words = OTHER_STEPS[changed]
    with pytest.raises(ValueError, match=re.escape(words)):
        linear.step(q, k, v, **{"state": state, **own, **options})


def test_a_feature_map_with_other_numbers_than_the_state_has_raises():
    q, k, v = tensors(1, 9)
    width = q.shape[-1]
    own, same, other, wider = Favor(width), Favor(width), Favor(width, seed=1), Favor(width, features=8)
    _, state = linear.prefill(q, k, v, feature_map=own)
    linear.step(q, k, v, copy.deepcopy(state), feature_map=same)
    for feature_map in (other, wider):
        with pytest.raises(ValueError, match="this Favor has other numbers or another size"):
            linear.step(q, k, v, state, feature_map=feature_map)
    own.redraw()
    with pytest.raises(ValueError, match="this Favor has other numbers"):
        linear.step(q, k, v, state, feature_map=own)


def test_a_state_of_another_size_raises():
    q, k, v = tensors(1, 9)
    encoding, whole = make("t5-free"), dict(feature_map="relu")
    _, state = linear.prefill(q, k, v, encoding, **whole)
    with pytest.raises(ValueError, match="state must have kv"):
        linear.step(*tensors(2, 9), state, encoding, **whole)
    # The terms say no more than that they set a bias, but its table may be wider.
    narrow = Terms(bias=lagwise.LagTable(torch.zeros(1, 2), -1))
    _, state = linear.prefill(q, k, v, narrow, **whole)
    with pytest.raises(ValueError, match="state keeps the last 0 keys"):
        linear.step(q, k, v, state, encoding, **whole)
    summary = linear.summary(k, v, **whole)
    with pytest.raises(ValueError, match="feature_map must be that of the state, Relu, but is Favor"):
        linear.recall(q, summary, feature_map="favor")
    with pytest.raises(ValueError, match="use the feature map of its summary"):
        linear.recall(tensors(2, 9)[0], summary, **whole)


def test_softmax_attention_refuses_features():
    q, k, v = tensors(1, 5)
    for given in (lagwise.PermuteFormer(heads=HEADS), Terms(features=FeatureTransform(lambda q, k, i, j: (q, k)))):
        with pytest.raises(ValueError, match=r"call lagwise\.linear_attention"):
            lagwise.attention(q, k, v, given)
    with pytest.raises(TypeError, match="not called like a layer"):
        Favor(4)(q)
